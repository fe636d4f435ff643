"""The `LightningDataModule`s; with `lightning_dali.monitor` the only importer of Lightning."""

from __future__ import annotations

from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.custom import DALIDataModule
from lightning_dali.datamodules.image import ImageDataModule

__all__ = ["BaseDataModule", "DALIDataModule", "ImageDataModule"]
