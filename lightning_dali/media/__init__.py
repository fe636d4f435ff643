"""Facts from encoded media, and pixels only when told. Runs in the worker: never DALI, never CUDA."""

from lightning_dali.media.errors import MediaError
from lightning_dali.media.image_headers import Encoded, ImageError, ImageHeader, read_image_header
from lightning_dali.media.images import MAX_PIXELS, check_complete, check_size, decode_image
from lightning_dali.media.pnm import encode_pnm, pnm_size, write_pnm_into

__all__ = [
    "MAX_PIXELS",
    "Encoded",
    "ImageError",
    "ImageHeader",
    "MediaError",
    "check_complete",
    "check_size",
    "decode_image",
    "encode_pnm",
    "pnm_size",
    "read_image_header",
    "write_pnm_into",
]
