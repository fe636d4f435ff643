"""Facts from encoded media, and pixels only when told. Runs in the worker: never DALI, never CUDA."""

from lightning_dali.media.audio import AudioHeader, cut_wav, probe_audio, read_audio_header
from lightning_dali.media.audio_decode import check_finite, check_samples, decode_audio, downmix, encode_wav
from lightning_dali.media.audio_flac import FlacInfo
from lightning_dali.media.audio_wav import AudioError
from lightning_dali.media.clips import Clip, ClipSampler
from lightning_dali.media.errors import MediaError
from lightning_dali.media.image_headers import Encoded, ImageError, ImageHeader, read_image_header
from lightning_dali.media.images import MAX_PIXELS, check_complete, check_size, decode_image
from lightning_dali.media.index_cache import IndexCache
from lightning_dali.media.pnm import encode_pnm, pnm_size, write_pnm_into
from lightning_dali.media.remote import RemoteReader
from lightning_dali.media.tars import TarSamples
from lightning_dali.media.video_annexb import PacketCut, cut_packets, decode_packets
from lightning_dali.media.video_cut import CutClip, cut
from lightning_dali.media.video_decode import decode_frames
from lightning_dali.media.video_index import VideoError, VideoIndex
from lightning_dali.media.video_scan import build_index
from lightning_dali.media.video_sound import clip_span, decode_sound

__all__ = [
    "MAX_PIXELS",
    "AudioError",
    "AudioHeader",
    "Clip",
    "ClipSampler",
    "CutClip",
    "Encoded",
    "FlacInfo",
    "ImageError",
    "ImageHeader",
    "IndexCache",
    "MediaError",
    "PacketCut",
    "RemoteReader",
    "TarSamples",
    "VideoError",
    "VideoIndex",
    "build_index",
    "check_complete",
    "check_finite",
    "check_samples",
    "check_size",
    "clip_span",
    "cut",
    "cut_packets",
    "cut_wav",
    "decode_audio",
    "decode_frames",
    "decode_image",
    "decode_packets",
    "decode_sound",
    "downmix",
    "encode_pnm",
    "encode_wav",
    "pnm_size",
    "probe_audio",
    "read_audio_header",
    "read_image_header",
    "write_pnm_into",
]
