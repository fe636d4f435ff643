"""The `LightningDataModule`s; with `lightning_dali.monitor` the only importer of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.custom import DALIDataModule
from lightning_dali.datamodules.image import ImageDataModule

if TYPE_CHECKING:
    from lightning_dali.datamodules.multimodal import MultiModalDataModule
    from lightning_dali.datamodules.speech import SpeechDataModule
    from lightning_dali.datamodules.video import VideoDataModule

__all__ = [
    "BaseDataModule",
    "DALIDataModule",
    "ImageDataModule",
    "MultiModalDataModule",
    "SpeechDataModule",
    "VideoDataModule",
]


def __getattr__(name: str) -> Any:
    if name == "SpeechDataModule":  # torchaudio and its decoders are for those who use them
        from lightning_dali.datamodules.speech import SpeechDataModule

        return SpeechDataModule
    if name == "VideoDataModule":  # and so are torchvision's videos
        from lightning_dali.datamodules.video import VideoDataModule

        return VideoDataModule
    if name == "MultiModalDataModule":  # both of them
        from lightning_dali.datamodules.multimodal import MultiModalDataModule

        return MultiModalDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
