"""For tests, yours and ours: media that say which sample they are, and a check that nothing is left behind.

Runs anywhere. Imports neither torch nor DALI.
"""

from lightning_dali.testing.leaks import no_leaks
from lightning_dali.testing.media import (
    IndexedImages,
    make_images,
    make_photos,
    make_wavs,
    recover_ids,
    recover_wav_ids,
)

__all__ = [
    "IndexedImages",
    "make_images",
    "make_photos",
    "make_wavs",
    "no_leaks",
    "recover_ids",
    "recover_wav_ids",
]
