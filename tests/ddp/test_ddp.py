"""Two ranks with gloo on the CPU: who gets what, exact evaluation, resumption on other numbers of ranks, and ends.

A start of two fresh ranks takes about 10 s on two cores: what does not look at how ranks are started forks them from the
nursery, and one script (`run.py several`) does as much as it can.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ddp.spy import SaveAt, Seen, Spy, datamodule, drawn, ids, load, photos, trainer
from tests.nursery import Nursery, free_port, python_path

pytestmark = [pytest.mark.ddp, pytest.mark.timeout(400)]  # imports alone take minutes on a busy machine

RUN = Path(__file__).with_name("run.py")
N, BATCH = 61, 4


def seen(root: Path, name: str, stage: str = "train", epoch: int | None = None) -> list[list[Seen]]:
    """What each of two ranks saw; asserts that they took the same steps, in the same epochs."""
    both = [
        [row for row in load(root / f"{name}.{rank}.json") if row.stage == stage and epoch in (None, row.epoch)]
        for rank in (0, 1)
    ]
    steps = [[(row.epoch, row.loader, row.step) for row in rows] for rows in both]
    assert steps[0] == steps[1] and steps[0]
    assert [row.rank for row in both[1]] == [1] * len(both[1])
    return both


def in_order(both: list[list[Seen]]) -> list[int]:
    """Dataset indices over (step, rank)."""
    return [index for step in zip(*both, strict=True) for row in step for index in row.ids]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def alone(root: Path) -> Spy:
    """Three epochs on one rank without a stop."""
    dataset = photos(root / "photos", N)
    spy = Spy()
    trainer(root, SaveAt(root / "one.ckpt", 18, stop=False), max_epochs=3).fit(spy, datamodule=datamodule(dataset))
    return spy


@pytest.fixture(scope="module")
def several(root: Path, alone: Spy, nursery: Nursery) -> Path:
    """Runs the script; the tests below read what its ranks saw."""
    nursery.ranks(RUN, str(root), "several", log=root / "several.log")
    return root


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **more}


def test_training_deals_the_permutation_of_one_rank(several: Path, alone: Spy) -> None:
    both = seen(several, "several.fit")
    assert [len(row.ids) for row in both[0]] == [BATCH] * 14  # 7 steps of 8 an epoch; 5 samples left out
    for epoch in (0, 1):
        rows = [[row for row in rank if row.epoch == epoch] for rank in both]
        assert in_order(rows) == ids(alone.rows(epoch=epoch))[:56]


def test_augmentation_does_not_depend_on_ranks_or_workers(several: Path, alone: Spy) -> None:
    here, there = drawn(alone.rows()), drawn(seen(several, "several.fit")[0] + seen(several, "several.fit")[1])
    assert len(there) == 2 * 56
    assert there == {key: here[key] for key in there}
    assert here[0, ids(alone.rows(epoch=0))[0]] != here[1, ids(alone.rows(epoch=0))[0]]


def test_validation_is_exact_with_several_loaders(several: Path) -> None:
    for epoch in (0, 1):
        both = seen(several, "several.fit", "val", epoch)
        rows = [[row for row in rank if row.loader == 0] for rank in both]
        assert in_order(rows) == list(range(N))
        three = [[row for row in rank if row.loader == 1] for rank in both]
        assert in_order(three) == [0, 1, 2]
    for stage, sizes in (("val", [N]), ("test", [N, 5]), ("predict", [N])):
        both = seen(several, "several.evaluated", stage)
        for loader, size in enumerate(sizes):
            rows = [[row for row in rank if row.loader == loader] for rank in both]
            assert in_order(rows) == list(range(size)), stage


def test_three_samples_one_a_step(several: Path) -> None:
    both = seen(several, "several.three", "val", 0)
    assert Counter(in_order(both)) == {0: 1, 1: 1, 2: 2}  # the surplus slot repeats one, and the log says so
    assert [len(row.ids) for row in both[0]] == [1, 1]
    assert "3 samples, 2 rank(s) with 1 a step each" in (several / "several.log.0").read_text()
    assert [len(rows) for rows in seen(several, "several.three")] == [2, 2]  # drop_last: 1 step in each of 2 epochs


def test_from_one_rank_to_two_and_back(several: Path, alone: Spy, root: Path) -> None:
    order = ids(alone.rows(epoch=1))
    both = seen(several, "several.resumed", epoch=1)
    assert [row.step for row in both[0]] == [1, 2, 3]  # 12 of 61 samples are done: 1 of 7 steps, 6 to go
    assert in_order(both) == order[12:36]
    spy = Spy()
    dm = datamodule(photos(root / "photos", N))
    trainer(root, max_epochs=3).fit(spy, datamodule=dm, ckpt_path=root / "again.ckpt")
    rows = spy.rows(epoch=1)
    assert [row.step for row in rows] == list(range(9, 15))
    assert ids(rows) == order[36:60]
    here = drawn(alone.rows())
    assert all(here[key] == what for key, what in drawn(rows + both[0] + both[1]).items())
    assert spy.rows(epoch=2) == alone.rows(epoch=2)


def test_from_two_ranks_to_one(several: Path, alone: Spy, root: Path) -> None:
    stopped = seen(several, "several.stopped", epoch=1)
    assert len(stopped[0]) == 3
    spy = Spy()
    dm = datamodule(photos(root / "photos", N), val_dataset=photos(root / "few", 3), num_workers=1)
    trainer(root, max_epochs=2).fit(spy, datamodule=dm, ckpt_path=root / "two.ckpt")
    assert in_order(stopped) + ids(spy.rows()) == ids(alone.rows(epoch=1))
    assert [row.step for row in spy.rows()] == list(range(6, 15))  # 3 of 7 steps on two ranks are 6 of 15 on one
    assert ids(spy.rows("val")) == [0, 1, 2]  # the epoch has a proper end


def test_samplers_of_the_user(several: Path) -> None:
    from torch.utils.data import DistributedSampler

    weighted = in_order(seen(several, "several.weighted", epoch=0))
    assert len(weighted) == 40 and max(weighted) < 30  # dealt: 40 draws over both ranks, the weights honoured
    assert in_order(seen(several, "several.weighted", epoch=1)) != weighted
    for rank, rows in enumerate(seen(several, "several.distributed")):
        for epoch in (0, 1):
            sampler = DistributedSampler(range(N), num_replicas=2, rank=rank, seed=3)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            assert ids(row for row in rows if row.epoch == epoch) == list(sampler)[:28]
    for rank, rows in enumerate(seen(several, "several.own", epoch=0)):
        assert ids(rows) == list(range(rank, N, 2))[:28]  # use_distributed_sampler=False: the rank's own, as it is


# -- other ways to start ranks ---------------------------------------------------------------------------------------


def check_once(root: Path, mode: str, alone: Spy) -> None:
    both = seen(root, mode)
    assert in_order(both) == ids(alone.rows(epoch=0))[:56]
    assert in_order(seen(root, mode, "val")) == list(range(N))


def test_spawn(root: Path, alone: Spy, run_warm: Callable[..., Any]) -> None:
    run = run_warm(RUN.read_text(), 360, args=[str(root), "spawn"], env=environment())
    assert run.rc == 0, run.stderr[-4000:]
    check_once(root, "spawn", alone)


def test_fsdp(root: Path, alone: Spy, nursery: Nursery) -> None:
    """FSDP2: Lightning's `FSDPStrategy` (FSDP1) refuses the CPU."""
    nursery.ranks(RUN, str(root), "fsdp", log=root / "fsdp.log")
    check_once(root, "fsdp", alone)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: no wheel beyond Python 3.14")
def test_ray(root: Path, alone: Spy, run_warm: Callable[..., Any]) -> None:
    (root / "home").mkdir()
    env = environment(
        HOME=str(root / "home"),  # Ray writes the token of the cluster there
        PYTHONUSERBASE=site.getuserbase(),  # which would follow HOME
        RAY_USAGE_STATS_ENABLED="0",
    )
    run = run_warm(RUN.read_text(), 360, args=[str(root), "ray"], env=env)
    assert run.rc == 0, run.stderr[-4000:]
    check_once(root, "ray", alone)


def test_torchrun_with_two_nodes(root: Path, alone: Spy) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    torchrun += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    logs = [root / f"nodes.{node}.log" for node in (0, 1)]
    nodes = []
    for node, log in enumerate(logs):
        command = [*torchrun, f"--node_rank={node}", str(RUN), str(root), "nodes"]
        with log.open("wb") as file:
            nodes.append(subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(360) for process in nodes]
    finally:
        for process in nodes:
            process.kill()
            process.wait()
    assert codes == [0, 0], [log.read_text()[-3000:] for log in logs]
    check_once(root, "nodes", alone)


def test_slurm_variables(root: Path, alone: Spy, nursery: Nursery) -> None:
    both = {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    env = [{**both, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    nursery.ranks(RUN, str(root), "slurm", log=root / "slurm.log", env=env)
    check_once(root, "slurm", alone)


@pytest.mark.faults
def test_exception_on_one_rank_ends_both(root: Path, alone: Spy, nursery: Nursery) -> None:
    """Without Lightning's launcher, which would end the other one (tests/faults/test_ends.py)."""
    nursery.ranks(RUN, str(root), "crash", log=root / "crash.log", status=1)
    assert "rank 1 has had enough" in (root / "crash.log.1").read_text()


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize(("which", "visible"), [("both", "0,1"), ("both", "1,0"), ("second", "0,1")])
def test_each_rank_touches_its_own_gpu_only(
    root: Path, alone: Spy, run_script: Callable[..., Any], which: str, visible: str
) -> None:
    env = environment(CUDA_VISIBLE_DEVICES=visible)
    run = run_script(RUN.read_text(), 360, args=[str(root), "gpus", which], env=env)
    assert run.rc == 0, run.stderr[-4000:]
    for rank, device in ((0, 0), (1, 1)) if which == "both" else ((0, 1),):
        assert f"rank {rank} batch cuda:{device} module cuda:{device} contexts [{device}]" in run.stdout


@pytest.mark.soak
def test_starts_and_stops_without_a_hang(root: Path, alone: Spy, nursery: Nursery, soak: Callable[[int], int]) -> None:
    nursery.ranks(RUN, str(root), "soak", str(soak(300)), log=root / "soak.log")
    for rank in (0, 1):
        assert f"rounds {soak(300)}" in (root / f"soak.log.{rank}").read_text()


def test_lightning_has_fsdp_on_gpus_only(tmp_path: Path) -> None:
    """When this fails, `test_fsdp` can run `strategy="fsdp"` too."""
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        trainer(tmp_path, strategy="fsdp")
