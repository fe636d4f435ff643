"""For tests, yours and ours: media that say which sample they are, and a check that nothing is left behind.

Runs anywhere. Imports neither torch nor DALI.
"""

from lightning_dali.testing.leaks import no_leaks
from lightning_dali.testing.made_up import IndexedFiles, made_up, make_videos
from lightning_dali.testing.media import (
    IndexedImages,
    make_images,
    make_photos,
    make_wavs,
    recover_ids,
    recover_wav_ids,
)

__all__ = [
    "IndexedFiles",
    "IndexedImages",
    "made_up",
    "make_images",
    "make_photos",
    "make_videos",
    "make_wavs",
    "no_leaks",
    "recover_ids",
    "recover_wav_ids",
]
