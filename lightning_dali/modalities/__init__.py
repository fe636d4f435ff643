"""How each kind of media goes through the engine: worker-side values that turn proxies into lanes."""

from __future__ import annotations

from lightning_dali.modalities.custom import CustomModality
from lightning_dali.modalities.image import ImageModality

__all__ = ["CustomModality", "ImageModality"]
