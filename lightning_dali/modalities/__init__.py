"""How each kind of media goes through the engine: worker-side values that turn proxies into lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_dali.modalities.custom import CustomModality
from lightning_dali.modalities.image import ImageModality

if TYPE_CHECKING:
    from lightning_dali.modalities.audio import AudioModality
    from lightning_dali.modalities.several import KindTransforms, SeveralModality
    from lightning_dali.modalities.video import VideoModality

__all__ = ["AudioModality", "CustomModality", "ImageModality", "KindTransforms", "SeveralModality", "VideoModality"]


def __getattr__(name: str) -> Any:
    if name == "AudioModality":  # torchaudio and its decoders are for those who use them
        from lightning_dali.modalities.audio import AudioModality

        return AudioModality
    if name == "VideoModality":
        from lightning_dali.modalities.video import VideoModality

        return VideoModality
    if name in ("KindTransforms", "SeveralModality"):
        from lightning_dali.modalities import several

        return getattr(several, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
