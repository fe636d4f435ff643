"""What all datamodules share: the user's samplers, rank variables, prediction, printing, and both names of Lightning."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_dali import environment
from lightning_dali.sampling import Shard
from lightning_dali.testing import IndexedImages, make_images, recover_ids
from tests.ddp.spy import PLAIN, Spy, datamodule, ids, trainer, warnings_of_lightning

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # Lightning 2.6 uses what torch deprecates
N = 13


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedImages:
    return IndexedImages(make_images(tmp_path_factory.mktemp("images"), N), PLAIN)


def order(dataset: Any, **options: Any) -> list[list[int]]:
    """Dataset indices of one pass; asserts that each image is that of its label."""
    dm = datamodule(dataset, **options)
    found = []
    for images, labels in dm.train_dataloader():
        assert recover_ids(images) == labels.tolist()
        found.append(labels.tolist())
    dm.close()
    return found


# -- samplers --------------------------------------------------------------------------------------------------------


def test_samplers_are_honoured(dataset: IndexedImages) -> None:
    assert order(dataset, sampler=[3, 1, 4, 1, 5, 9, 2, 6]) == [[3, 1, 4, 1], [5, 9, 2, 6]]
    assert order(dataset, sampler=SequentialSampler(dataset), drop_last=False)[-1] == [12]
    weights = WeightedRandomSampler([1.0] * 3 + [0.0] * 10, 8)
    assert {index for row in order(dataset, sampler=weights) for index in row} <= {0, 1, 2}
    made = order(dataset, sampler=RandomSampler)  # a class is a function of the dataset
    assert (
        made
        == order(dataset, sampler=lambda data: RandomSampler(data))
        != order(dataset, sampler=RandomSampler, seed=1)
    )
    assert order(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 5, drop_last=True)) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert order(dataset, batch_sampler=[[1], [2, 3, 4, 5, 6, 7, 8], [9, 9]]) == [[1], [2, 3, 4, 5, 6, 7, 8], [9, 9]]
    assert order(dataset, sampler=DistributedSampler(dataset, 1, 0, shuffle=False)) == [  # type: ignore[arg-type]
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_samplers_that_cannot_be_honoured(dataset: IndexedImages) -> None:
    class NoLength:
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    for error, message, options in (
        (ValueError, "sampler and batch_sampler are both given", {"sampler": [1], "batch_sampler": [[1]]}),
        (TypeError, "sampler is 5: expected an iterable of dataset indices", {"sampler": 5}),
        (TypeError, "NoLength has no length", {"sampler": NoLength()}),
        (IndexError, "gave index 13: the dataset has 13 samples", {"sampler": [13]}),
        (TypeError, "must yield dataset indices: integers", {"sampler": [[1], [2]]}),
        (ValueError, "made for rank 1 of 2, this is rank 0 of 1", {"sampler": DistributedSampler(dataset, 2, 1)}),  # type: ignore[arg-type]
        (ValueError, "gave an empty batch", {"batch_sampler": [[1], []]}),
    ):
        with pytest.raises(error, match=message):
            order(dataset, **options)


# -- evaluation ------------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        self.batches.append((list(batch_indices), prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = [index for loader in batch_indices for batch in loader for index in batch]


def test_predictions_come_in_dataset_order(dataset: IndexedImages, tmp_path: Path) -> None:
    writer, dm = Writer(), datamodule(None, predict_dataset=dataset, num_workers=1)
    with warnings_of_lightning() as found:
        predictions = trainer(tmp_path, writer).predict(Spy(), datamodule=dm)
    assert predictions is not None
    assert [index for batch in predictions for index in batch] == list(range(N)) == writer.epoch
    assert all(indices == prediction for indices, prediction in writer.batches) and len(writer.batches) == 4
    assert not found


def test_several_loaders_and_a_missing_stage(dataset: IndexedImages, tmp_path: Path) -> None:
    spy, few = Spy(), IndexedImages(dataset.paths[:5], PLAIN)
    with warnings_of_lightning() as found:
        trainer(tmp_path).validate(
            spy, datamodule=datamodule(None, val_dataset={"a": dataset, "b": few}), verbose=False
        )
        trainer(tmp_path).test(spy, datamodule=datamodule(None, test_dataset=[few, dataset]), verbose=False)
    assert [ids(row for row in spy.rows("val") if row.loader == n) for n in (0, 1)] == [list(range(N)), list(range(5))]
    assert [ids(row for row in spy.rows("test") if row.loader == n) for n in (0, 1)] == [list(range(5)), list(range(N))]
    assert not found
    with pytest.raises(ValueError, match=r"has no test_dataset \(it has: train\)"):
        trainer(tmp_path).test(spy, datamodule=datamodule(dataset))


def test_with_index(dataset: IndexedImages) -> None:
    dm = datamodule(dataset, with_index=True)
    for images, labels, index in dm.train_dataloader():
        assert index.tolist() == labels.tolist() == recover_ids(images)


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Any:
    for pair in environment.RANKS:
        for name in pair:
            monkeypatch.delenv(name, raising=False)
    environment._warn_of_lone_ranks.cache_clear()

    def put(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_ranks_without_a_trainer(variables: Any) -> None:
    assert environment.shard_of(None) == Shard()
    variables(WORLD_SIZE="4")  # Lightning's own launcher leaves it
    assert environment.shard_of(None) == Shard()
    variables(RANK="3")
    assert environment.shard_of(None) == Shard(3, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK must be in \[0, WORLD_SIZE\).*RANK=2, WORLD_SIZE=2"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "SLURM_PROCID and SLURM_NTASKS must be integers.*SLURM_PROCID=x"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, r"LOCAL_RANK must be in \[0, LOCAL_WORLD_SIZE\)"),
    ],
)
def test_ranks_that_contradict_each_other(variables: Any, values: dict[str, str], message: str) -> None:
    variables(**values)
    with pytest.raises(RuntimeError, match=message):
        environment.shard_of(None)
    with pytest.raises(RuntimeError, match=message):
        environment.shard_of(SimpleNamespace(global_rank=0, world_size=1))


def test_trainer_that_contradicts(variables: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="global_rank=2 and world_size=2.*none of them"):
        environment.shard_of(SimpleNamespace(global_rank=2, world_size=2))
    variables(RANK="1", WORLD_SIZE="2")
    for _ in range(2):
        assert environment.shard_of(SimpleNamespace(global_rank=0, world_size=1)) == Shard()
    assert caplog.text.count("the launcher started 2 processes, but the trainer has world_size=1") == 1


def test_ranks_with_nothing_of_their_own_are_named(dataset: IndexedImages, caplog: pytest.LogCaptureFixture) -> None:
    few = IndexedImages(dataset.paths[:3], PLAIN)
    dm = datamodule(few, val_dataset=few, batch_size=1)
    dm.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=0, world_size=2, num_devices=2, state=SimpleNamespace(fn="fit"), global_step=0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        assert len(dm.val_dataloader()) == 2
    assert "3 samples, 2 rank(s) with 1 a step each: in the last of 2 step(s) 1 rank(s) have none" in caplog.text


# -- the object ------------------------------------------------------------------------------------------------------


def test_printing_starts_nothing(dataset: IndexedImages) -> None:
    dm = datamodule(dataset, val_dataset={"a": dataset, "b": lambda: dataset}, num_workers=1)
    assert str(dm).splitlines() == [
        "ImageDataModule",
        "  train: 13 samples",
        "  val: a 13 samples, b made at setup",
        "  test: none",
        "  predict: none",
    ]
    assert not dm._loaders


def test_copies_make_their_own_loaders(dataset: IndexedImages) -> None:
    dm = datamodule(dataset, num_workers=1)
    first = next(iter(dm.train_dataloader()))[1].tolist()
    for other in (copy.deepcopy(dm), pickle.loads(pickle.dumps(dm))):
        assert other.train_dataloader() is not dm.train_dataloader()
        assert next(iter(other.train_dataloader()))[1].tolist() == first
        other.close()
    dm.close()


def test_a_dataset_that_grew_is_seen(dataset: IndexedImages) -> None:
    growing = IndexedImages(list(dataset.paths[:4]), PLAIN)
    dm = datamodule(growing)
    assert len(dm.train_dataloader()) == 1
    growing.paths = dataset.paths
    assert len(dm.train_dataloader()) == 3


PYTORCH_LIGHTNING = """
import logging, sys
from pathlib import Path
from lightning_dali import ImageDataModule  # isort puts it first
import pytorch_lightning as pl, torch
from lightning_dali.testing import IndexedImages
from tests.ddp.spy import PLAIN, datamodule

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch, batch_idx):
        self.seen += batch[1].tolist()
        return self.layer(batch[0].mean((1, 2, 3))[:, None]).mean()
    def validation_step(self, batch, batch_idx):
        self.seen += batch[1].tolist()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

dataset = IndexedImages(sorted(Path(sys.argv[1]).iterdir()), PLAIN)
model = Model()
pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0).fit(
    model, datamodule(dataset, val_dataset=dataset, batch_size=13))
assert sorted(model.seen) == sorted(2 * list(range(13))), model.seen
"""


@pytest.mark.timeout(240)  # a whole import of Lightning under its other name, on a busy machine
def test_pytorch_lightning(dataset: IndexedImages, run_warm: Any) -> None:
    pytest.importorskip("pytorch_lightning", reason="the same library under its other name is not installed")
    run = run_warm(PYTORCH_LIGHTNING, 200, args=[str(Path(dataset.paths[0]).parent)])
    assert run.rc == 0, run.stderr[-3000:]
