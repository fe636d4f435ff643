"""`DALIDataModule` on the CPU, closed at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dali import DALIDataModule


@contextmanager
def module(dataset: Any, pipeline: Any, **options: Any) -> Iterator[DALIDataModule]:
    options = {"batch_size": 4, "num_workers": 0, "num_threads": 1, "device": "cpu", "seed": 5, **options}
    datamodule = DALIDataModule(train_dataset=dataset, train_pipeline=pipeline, **options)
    try:
        datamodule.setup("fit")
        yield datamodule
    finally:
        datamodule.close()


def batches(datamodule: DALIDataModule) -> list[Any]:
    return list(datamodule.train_dataloader())
