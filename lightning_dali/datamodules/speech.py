"""`SpeechDataModule`: any audio dataset with torchaudio's transforms, decoded by DALI, computed on the rank's device.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dali.datamodules.base import BaseDataModule, Datasets
from lightning_dali.datamodules.options import Options
from lightning_dali.modalities.audio import AudioModality


class SpeechDataModule(BaseDataModule):
    """."""

    def __init__(self, *, train_dataset: Datasets = None, train_transform: Callable[[Any], Any] | None = None, sample_rate: int|None=None, batch_size: int=64, num_workers=0, **kw) -> None:
        super().__init__(modality=AudioModality(sample_rate), options=Options(batch_size=batch_size, num_workers=num_workers, **kw), train_dataset=train_dataset, train_transform=train_transform)
