"""Runs over streams that are stopped and go on: the same samples and draws as without a stop, or a refusal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dali import ImageDataModule
from lightning_dali.testing import make_images
from tests.ddp.spy import TRANSFORM, SaveAt, Spy, datamodule, ids, trainer
from tests.streams.datasets import Pictures, Placed, Sized

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),  # Lightning 2.6 uses what torch deprecates
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),  # on purpose
]
N, STEPS, EPOCHS = 26, 6, 3
KINDS = {"no length": Pictures, "length": Sized, "own state": Placed}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_images(tmp_path_factory.mktemp("images"), N)


def run(root: Path, dataset: Any, *callbacks: Any, path: Any = None, spy: Spy | None = None, **options: Any) -> Spy:
    spy = spy or Spy()
    fitting = {name: options.pop(name) for name in ("max_epochs", "limit_train_batches") if name in options}
    with_epochs: dict[str, Any] = {"max_epochs": EPOCHS, **fitting}
    dm = datamodule(dataset, **options)
    trainer(root, *callbacks, **with_epochs).fit(spy, datamodule=dm, ckpt_path=path)
    return spy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_goes_on_where_it_stopped(kind: str, workers: int, paths: list[Path], tmp_path: Path) -> None:
    def make() -> Any:
        return KINDS[kind](paths, TRANSFORM, shuffle=True)

    whole = run(tmp_path, make(), num_workers=workers)
    assert [row.step for row in whole.seen] == list(range(STEPS)) * EPOCHS
    assert len(set(ids(whole.rows(epoch=1)))) == STEPS * 4 and ids(whole.rows(epoch=0)) != ids(whole.rows(epoch=1))
    for batches in (5, 6, 8) if workers else (1, 6, 9):
        dataset = make()
        run(tmp_path, dataset, SaveAt(tmp_path / "stop.ckpt", batches), num_workers=workers)
        dataset = make()
        rest = run(tmp_path, dataset, path=tmp_path / "stop.ckpt", num_workers=workers)
        expected = whole.seen[batches:]
        if kind == "no length" and batches % STEPS == 0:  # Lightning counts on, as with torch's loader
            rest.seen[:STEPS] = [row._replace(step=row.step - STEPS) for row in rest.seen[:STEPS]]
        assert rest.seen == expected, batches
        if kind == "own state" and not workers and batches % STEPS:
            assert dataset.opened <= N * EPOCHS - 4 * batches, "nothing that was consumed was opened again"


def test_a_stop_in_a_limited_epoch_and_in_the_middle_of_a_step(paths: list[Path], tmp_path: Path) -> None:
    whole = run(tmp_path, Pictures(paths, TRANSFORM, shuffle=True), num_workers=1, limit_train_batches=4)
    assert len(whole.seen) == 4 * EPOCHS
    run(tmp_path, Pictures(paths, TRANSFORM, shuffle=True), SaveAt(tmp_path / "a.ckpt", 6), limit_train_batches=4)
    dataset = Pictures(paths, TRANSFORM, shuffle=True)
    assert run(tmp_path, dataset, path=tmp_path / "a.ckpt", limit_train_batches=4).seen == whole.seen[6:]

    for kind in (Pictures, Sized):
        whole = run(tmp_path, kind(paths, TRANSFORM, shuffle=True))

        def save(spy: Spy) -> None:
            if len(spy.seen) == 9:
                spy.trainer.save_checkpoint(tmp_path / "cut.ckpt")

        run(tmp_path, kind(paths, TRANSFORM, shuffle=True), spy=Spy(on_step=save))
        assert run(tmp_path, kind(paths, TRANSFORM, shuffle=True), path=tmp_path / "cut.ckpt").seen == whole.seen[8:]


def loader_of(dataset: Any, **options: Any) -> tuple[ImageDataModule, Any]:
    dm = datamodule(dataset, **options)
    return dm, dm.train_dataloader()


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_trainer(workers: int, paths: list[Path]) -> None:
    options: dict[str, Any] = {"num_workers": workers, "drop_last": False, "with_index": True}
    dm, loader = loader_of(Sized(paths, TRANSFORM), **options)
    whole = [[(batch[0].sum().item(), batch[2].tolist()) for batch in loader] for _ in range(2)]
    finished = loader.state_dict()
    dm.close()
    assert finished["finished"] and finished["epoch"] == 1
    for stop in range(1, 7):  # up to the rests that workers left
        dm, loader = loader_of(Sized(paths, TRANSFORM), **options)
        one = iter(loader)
        for _ in range(stop):
            next(one)
        state = loader.state_dict()
        dm.close()
        dm, loader = loader_of(Sized(paths, TRANSFORM), **options)
        loader.load_state_dict(state)
        found = [[(batch[0].sum().item(), batch[2].tolist()) for batch in loader] for _ in range(2)]
        assert found == [whole[0][stop:], whole[1]]
        dm.close()
    dm, loader = loader_of(Sized(paths, TRANSFORM), **options)
    loader.load_state_dict(finished)
    assert len(list(loader)) == 7 and loader.at.epoch == 2
    dm.close()


def test_state_is_plain(paths: list[Path], tmp_path: Path) -> None:
    dm, loader = loader_of(Placed(paths, TRANSFORM))
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()
    dm.close()


class Unrepeatable(Pictures):
    """An order from nowhere, as WebDataset's `shuffle` has it without a seed."""

    generator = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        self.generator.shuffle(samples)
        return iter(samples)


def test_what_cannot_be_continued_is_refused(paths: list[Path]) -> None:
    dm, loader = loader_of(Sized(paths, TRANSFORM), num_workers=1)
    one = iter(loader)
    next(one), next(one)
    state = loader.state_dict()
    dm.close()
    for options, message in (
        (
            {"num_workers": 2},
            r"shares of a stream for 1 rank\(s\), 1 worker\(s\) each, batches of 4, this run has 1 rank.*2 w",
        ),
        ({"batch_size": 2}, "this run has .* batches of 2. Resume with the same devices, num_workers and batch_size"),
        ({"seed": 8}, "an order of seed 7, this run has seed 8"),
    ):
        dm, loader = loader_of(Sized(paths, TRANSFORM), **{"num_workers": 1, **options})
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)
        loader.load_state_dict({**state, "finished": True})
        assert loader.at.epoch == 1, "between epochs everything may change"
        dm.close()
    dm, loader = loader_of(Unrepeatable(paths, TRANSFORM))
    one = iter(loader)
    next(one), next(one)
    state = loader.state_dict()
    dm.close()
    dm, loader = loader_of(Unrepeatable(paths, TRANSFORM))
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="begins with other samples than in the run that is to be continued"):
        next(iter(loader))
    dm.close()
