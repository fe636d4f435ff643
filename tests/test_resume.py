"""Going on where a checkpoint stopped, and Lightning's flags: docs/ranks-and-resume.md has a row for each test here.

One rank; tests/ddp has two. `whole` is the run without a stop that every other is compared with.
"""

# Over 300 lines: every test compares with the one uninterrupted run that `whole` makes.

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_dali.testing import IndexedImages
from tests.ddp.spy import SaveAt, Spy, datamodule, drawn, ids, load, photos, trainer, warnings_of_lightning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),  # Lightning 2.6 uses what torch deprecates
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),  # on purpose
]

N, STEPS, EPOCHS = 32, 8, 3
NO_VAL = "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop."


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedImages:
    return photos(tmp_path_factory.mktemp("photos"), N)


@pytest.fixture(scope="module")
def whole(dataset: IndexedImages, tmp_path_factory: pytest.TempPathFactory) -> Spy:
    return run(tmp_path_factory.mktemp("whole"), dataset)


def run(
    root: Path,
    dataset: Any,
    *callbacks: Any,
    path: Any = None,
    spy: Spy | None = None,
    data: Any = None,
    **options: Any,
) -> Spy:
    spy = spy or Spy()
    settings: dict[str, Any] = {"max_epochs": EPOCHS, **options}
    trainer(root, *callbacks, **settings).fit(spy, datamodule=datamodule(dataset, **(data or {})), ckpt_path=path)
    return spy


def stop(root: Path, dataset: Any, batches: int, **options: Any) -> Path:
    """Trains `batches` steps over all epochs, saves, and stops."""
    path = root / f"{batches}.ckpt"
    run(root, dataset, SaveAt(path, batches), **options)
    assert path.exists()
    return path


# -- resume ----------------------------------------------------------------------------------------------------------


def test_two_runs_are_bit_equal_and_epochs_differ(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    again = run(tmp_path, dataset, data={"num_workers": 2}, max_epochs=1)
    assert again.seen == whole.rows(epoch=0)
    assert len(set(drawn(whole.rows()).values())) == N * EPOCHS
    assert sorted(ids(whole.rows(epoch=1))) == list(range(N)) != ids(whole.rows(epoch=1)) != ids(whole.rows(epoch=2))
    other = run(tmp_path, dataset, data={"seed": 8}, max_epochs=1)
    assert not set(drawn(other.rows()).items()) & set(drawn(whole.rows()).items())


@pytest.mark.parametrize("batches", [1, 7, 8, 11, 16])
@pytest.mark.parametrize("one_cycle", [False, True])
def test_resume_is_exact(whole: Spy, dataset: IndexedImages, tmp_path: Path, batches: int, one_cycle: bool) -> None:
    path = stop(tmp_path, dataset, batches, spy=Spy(one_cycle=one_cycle))
    workers = {"num_workers": 1} if batches == 7 else None
    with warnings_of_lightning() as found:
        rest = run(tmp_path, dataset, path=path, spy=Spy(one_cycle=one_cycle), data=workers)
    assert rest.seen == whole.seen[batches:]
    assert found == [NO_VAL]


def test_resume_twice_in_one_epoch(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    first = stop(tmp_path, dataset, 10)
    run(tmp_path, dataset, SaveAt(tmp_path / "second.ckpt", 13), path=first)
    assert run(tmp_path, dataset, path=tmp_path / "second.ckpt").seen == whole.seen[13:]


@pytest.mark.parametrize(("old", "new"), [(4, 8), (4, 3), (8, 4)])
def test_another_batch_size(dataset: IndexedImages, tmp_path: Path, whole: Spy, old: int, new: int) -> None:
    path = stop(tmp_path, dataset, N // old + N // old // 2, data={"batch_size": old})  # half of epoch 1
    rest = run(tmp_path, dataset, path=path, data={"batch_size": new}, max_epochs=2)
    full, todo = N // new, (N // 2) // new
    assert [row.step for row in rest.seen] == list(range(full - todo, full))
    assert ids(rest.seen) == ids(whole.rows(epoch=1))[N // 2 :][: todo * new]


@pytest.mark.parametrize("batches", [8, 11])
def test_a_step_that_a_checkpoint_cut_short_comes_again(
    whole: Spy, dataset: IndexedImages, tmp_path: Path, batches: int
) -> None:
    def save(spy: Spy) -> None:
        if len(spy.seen) == batches:
            spy.trainer.save_checkpoint(tmp_path / "cut.ckpt")

    run(tmp_path, dataset, spy=Spy(on_step=save))
    assert run(tmp_path, dataset, path=tmp_path / "cut.ckpt").seen == whole.seen[batches - 1 :]


def test_what_cannot_be_continued_is_refused(dataset: IndexedImages, tmp_path: Path) -> None:
    path = stop(tmp_path, dataset, 11)
    shorter = IndexedImages(dataset.paths[:24], dataset.transform)
    for changed, options, message in (
        (shorter, {}, "a dataset of 32 samples, this one has 24"),
        (dataset, {"seed": 8}, "seed 7, this run has seed 8"),
        (dataset, {"shuffle": False}, "a permutation, this is that of the dataset"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path, changed, path=path, data=options)
    at_the_end = stop(tmp_path, dataset, 8)
    assert len(run(tmp_path, shorter, path=at_the_end).seen) == 12  # between epochs the data may change


def test_loader_state_without_lightning(dataset: IndexedImages, whole: Spy) -> None:
    loader = (one := datamodule(dataset)).train_dataloader()
    order = ids(whole.rows(epoch=0))
    assert loader.state_dict()["samples"] == 0
    for number, (_, index) in enumerate(loader):
        assert index.tolist() == order[4 * number : 4 * number + 4]
        if number == 2:
            break
    state = loader.state_dict()  # the pass is gone, what it delivered counts
    assert (state["epoch"], state["samples"]) == (0, 12)
    other = (two := datamodule(dataset, num_workers=1)).train_dataloader()
    other.load_state_dict(state)
    first = iter(other)
    assert len(other) == STEPS and len(first) == 5
    assert [index for _, batch in first for index in batch.tolist()] == order[12:]
    assert other.state_dict()["finished"]
    assert next(iter(other))[1].tolist() == ids(whole.rows(epoch=1))[:4]
    one.close()
    two.close()


SIGTERM = """
import os, signal, sys
from pathlib import Path
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_dali.testing import IndexedImages
from tests.ddp.spy import TRANSFORM, Spy, datamodule, trainer

root, how = Path(sys.argv[1]), sys.argv[2]
dataset = IndexedImages(sorted(Path(sys.argv[3]).iterdir()), TRANSFORM)

def on_step(spy):
    if len(spy.seen) == 11 and how in ("requeue", "term"):
        os.killpg(0, signal.SIGUSR1 if how == "requeue" else signal.SIGTERM)  # as a scheduler does: workers get it too

spy = Spy(on_step=on_step, dump_to=root / how)
callbacks = [] if how != "term" else [OnExceptionCheckpoint(root)]
dm = datamodule(dataset, num_workers=2)
try:
    path = next(iter(root.glob("*.ckpt"))) if how == "again" else None
    trainer(root, *callbacks, max_epochs=3).fit(spy, datamodule=dm, ckpt_path=path)
finally:
    print("seen", len(spy.seen), flush=True)
"""
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
}


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_slurm_requeue(whole: Spy, dataset: IndexedImages, tmp_path: Path, run_warm: Callable[..., Any]) -> None:
    """SIGUSR1 to the whole process group: Lightning saves and requeues the job, the workers go on."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    folder = str(Path(dataset.paths[0]).parent)
    env = {**SLURM, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    first = run_warm(SIGTERM, 240, args=[str(tmp_path), "requeue", folder], env=env)
    assert first.rc == 0, first.stderr[-4000:]
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "12"]
    assert load(tmp_path / "requeue.0.json") == whole.seen
    second = run_warm(SIGTERM, 240, args=[str(tmp_path), "rest", folder], env=env)
    assert second.rc == 0, second.stderr[-4000:]
    rest = load(tmp_path / "rest.0.json")
    assert rest == whole.seen[10:]  # saved in the middle of the eleventh step: that comes again


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_sigterm(whole: Spy, dataset: IndexedImages, tmp_path: Path, run_warm: Callable[..., Any]) -> None:
    """SIGTERM to the whole process group: Lightning ends after the step and saves; the next run goes on from there."""
    folder = str(Path(dataset.paths[0]).parent)
    first = run_warm(SIGTERM, 240, args=[str(tmp_path), "term", folder])
    assert first.rc == 0, first.stderr[-4000:]  # for Lightning 2.6 that is a proper end
    assert "seen 11" in first.stdout
    second = run_warm(SIGTERM, 240, args=[str(tmp_path), "again", folder])
    assert second.rc == 0, second.stderr[-4000:]
    assert load(tmp_path / "again.0.json") == whole.seen[11:]


# -- Lightning's flags -----------------------------------------------------------------------------------------------


def test_val_check_interval(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=None)
    val = {"val_dataset": dataset}
    spy = run(tmp_path, dataset, saver, data=val, val_check_interval=0.25, limit_val_batches=3, max_epochs=2)
    assert spy.rows() == whole.seen[: 2 * STEPS]
    assert [ids([row]) for row in spy.rows("val")] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 8
    paths = sorted(tmp_path.glob("step=1[024].ckpt"))
    assert paths
    for path in paths:
        rest = run(tmp_path, dataset, path=path, data=val, val_check_interval=0.25, limit_val_batches=3, max_epochs=2)
        step = int(path.stem.removeprefix("step="))
        assert rest.rows() == whole.seen[step : 2 * STEPS]
        assert len(rest.rows("val")) == 3 * (16 - step) // 2


def test_limit_train_batches(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    spy = run(tmp_path, dataset, SaveAt(tmp_path / "4.ckpt", 4, stop=False), limit_train_batches=3)
    expected = [row for row in whole.seen if row.step < 3]
    assert spy.seen == expected
    assert run(tmp_path, dataset, path=tmp_path / "4.ckpt", limit_train_batches=3).seen == expected[4:]
    end = ModelCheckpoint(tmp_path, filename="end", save_on_train_epoch_end=True, save_top_k=-1)
    run(tmp_path, dataset, end, limit_train_batches=3, max_epochs=1)
    assert run(tmp_path, dataset, path=tmp_path / "end.ckpt", limit_train_batches=3).seen == expected[3:]


def test_accumulate_grad_batches(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    path = stop(tmp_path, dataset, 11, accumulate_grad_batches=4)
    assert run(tmp_path, dataset, path=path, accumulate_grad_batches=4).seen == whole.seen[11:]


def test_reload_dataloaders_every_n_epochs(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    for one_cycle in (False, True):
        path = stop(tmp_path, dataset, 11, reload_dataloaders_every_n_epochs=1, spy=Spy(one_cycle=one_cycle))
        spy = Spy(one_cycle=one_cycle)
        rest = run(tmp_path, dataset, path=path, reload_dataloaders_every_n_epochs=1, spy=spy)
        assert rest.seen == whole.seen[11:]


def test_overfit_batches(dataset: IndexedImages, tmp_path: Path) -> None:
    with warnings_of_lightning() as found:
        spy = run(tmp_path, dataset, overfit_batches=2, data={"val_dataset": dataset}, num_sanity_val_steps=0)
    assert [row.ids for row in spy.rows()] == [[0, 1, 2, 3], [4, 5, 6, 7]] * EPOCHS
    assert [row.ids for row in spy.rows("val", 0)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not found


def test_fast_dev_run(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    spy = run(tmp_path, dataset, fast_dev_run=2, data={"val_dataset": dataset})
    assert spy.rows() == whole.seen[:2]
    assert ids(spy.rows("val")) == list(range(8))


def test_max_time(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    path = tmp_path / "time.ckpt"
    spy = Spy()
    one = trainer(tmp_path, max_epochs=EPOCHS, max_time=timedelta(microseconds=1))
    one.fit(spy, datamodule=datamodule(dataset))
    assert 1 <= len(spy.seen) < EPOCHS * STEPS
    one.save_checkpoint(path)
    assert run(tmp_path, dataset, path=path).seen == whole.seen[STEPS:]  # for Lightning the epoch has ended


def test_max_steps_and_another_trainer(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    dm = datamodule(dataset, num_workers=1)
    for _ in range(2):  # the second fit begins at the beginning, as it says
        spy = Spy()
        trainer(tmp_path, max_steps=5, max_epochs=-1).fit(spy, datamodule=dm)
        assert spy.seen == whole.seen[:5]
    spy = Spy()
    trainer(tmp_path, max_epochs=1).fit(spy, datamodule=dm)
    assert spy.seen == whole.rows(epoch=0)


def test_sanity_check_leaves_no_trace(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    spy = run(tmp_path, dataset, data={"val_dataset": dataset}, num_sanity_val_steps=2, max_epochs=1)
    assert ids(spy.rows("sanity")) == list(range(8))
    assert ids(spy.rows("val")) == list(range(N))
    assert spy.rows() == whole.rows(epoch=0)


def test_learning_rate_finder(whole: Spy, dataset: IndexedImages, tmp_path: Path) -> None:
    class Rate(Spy):
        lr = 0.01

    spy, dm, one = Rate(), datamodule(dataset), trainer(tmp_path, max_epochs=1)
    Tuner(one).lr_find(spy, datamodule=dm, num_training=5, early_stop_threshold=None, update_attr=False)
    assert len(spy.seen) >= 5
    spy.seen.clear()
    one.fit(spy, datamodule=dm)
    assert spy.seen == whole.rows(epoch=0)


def test_batch_size_finder(dataset: IndexedImages, tmp_path: Path, whole: Spy) -> None:
    spy, dm, one = Spy(), datamodule(dataset, batch_size=2), trainer(tmp_path, max_epochs=1)
    Tuner(one).scale_batch_size(spy, datamodule=dm, max_trials=3, steps_per_trial=1)
    assert dm.batch_size == 8
    spy.seen.clear()
    one.fit(spy, datamodule=dm)
    assert [len(row.ids) for row in spy.seen] == [8] * 4
    assert drawn(spy.seen) == drawn(whole.rows(epoch=0))


def test_validation_that_a_checkpoint_cut_short_runs_again(dataset: IndexedImages, tmp_path: Path) -> None:
    class Cut(Spy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            if batch_idx == 2:  # where a signal's handler would
                self.trainer.save_checkpoint(tmp_path / "cut.ckpt")

    val = {"val_dataset": dataset}
    run(tmp_path, dataset, spy=Cut(), data=val, num_sanity_val_steps=0, max_epochs=1)
    spy = run(tmp_path, dataset, path=tmp_path / "cut.ckpt", data=val, max_epochs=1)
    assert ids(spy.rows("val")) == list(range(N))
    assert not spy.rows()


def test_state_is_plain(dataset: IndexedImages, tmp_path: Path) -> None:
    """Checkpoints stay loadable with `weights_only=True`."""
    saved = torch.load(stop(tmp_path, dataset, 11), weights_only=True)
    (state,) = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state == saved["ImageDataModule"]["train"]
    assert (state["epoch"], state["samples"], state["world_size"], state["batch_size"]) == (1, 12, 1, 4)
