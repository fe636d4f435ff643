"""Facts from encoded media, and pixels only when told. Runs in the worker: never DALI, never CUDA."""

from lightning_dali.media.audio import AudioHeader, cut_wav, probe_audio, read_audio_header
from lightning_dali.media.audio_decode import check_finite, check_samples, decode_audio, downmix, encode_wav
from lightning_dali.media.audio_wav import AudioError
from lightning_dali.media.errors import MediaError
from lightning_dali.media.image_headers import Encoded, ImageError, ImageHeader, read_image_header
from lightning_dali.media.images import MAX_PIXELS, check_complete, check_size, decode_image
from lightning_dali.media.pnm import encode_pnm, pnm_size, write_pnm_into

__all__ = [
    "MAX_PIXELS",
    "AudioError",
    "AudioHeader",
    "Encoded",
    "ImageError",
    "ImageHeader",
    "MediaError",
    "check_complete",
    "check_finite",
    "check_samples",
    "check_size",
    "cut_wav",
    "decode_audio",
    "decode_image",
    "downmix",
    "encode_pnm",
    "encode_wav",
    "pnm_size",
    "probe_audio",
    "read_audio_header",
    "read_image_header",
    "write_pnm_into",
]
