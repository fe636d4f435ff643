"""Loaders: right pictures for their labels, whatever happened to the passes before; nothing is left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dali.testing import no_leaks
from tests.pairs import all_ids, each_once, ids, module

Script = Callable[..., tuple[int, str, str]]

# -- pairing ---------------------------------------------------------------------------------------------------------

SOAK = """
import multiprocessing, os, random, sys, threading
from multiprocessing import forkserver
from pathlib import Path

def flat():
    fds = len(os.listdir("/proc/self/fd"))
    maps = sum("memfd:lightning_dali" in line for line in open("/proc/self/maps"))
    return threading.active_count(), len(multiprocessing.active_children()), fds, maps

def main():
    from tests.pairs import ids, module  # here: workers that are not forked import this file

    context, persistent, passes = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
    dm = module(Path("images"), 400, num_workers=2, multiprocessing_context=context, persistent_workers=persistent, seed=3)
    loader, draw, batches, orders, seen = dm.train_dataloader(), random.Random(7), 0, set(), []
    for number in range(passes):
        ends, order = draw.randrange(len(loader) + 1), []
        one = iter(loader)
        for batch in one if ends else ():
            order += ids(batch)
            batches += 1
            if len(order) >= 4 * ends:
                break
        assert len(set(order)) == len(order), "an id came twice in one pass"
        if len(order) > 40:
            assert tuple(order[:40]) not in orders, "a pass had the order of an earlier one"
            orders.add(tuple(order[:40]))
        if number % 3:
            one.close()
        del one
        seen.append(flat())
    early, late = seen[4], seen[-1]
    assert len({now[:2] for now in seen[2:]}) == 1, seen
    assert abs(late[2] - early[2]) <= 8 and late[3] <= early[3] + 4, seen
    dm.close()
    assert flat()[:2] == (1, 0), flat()
    print("batches", batches)
    forkserver._forkserver._stop()  # waits for it: with torch in it, its way out can take seconds on a busy machine

if __name__ == "__main__":
    main()
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("context", "persistent"), [("fork", True), ("forkserver", True), ("fork", False)], ids=lambda value: str(value)
)
def test_no_wrong_pair_and_no_hang_over_abandoned_passes(
    context: str, persistent: bool, soak: Callable[[int], int], run_warm: Script
) -> None:
    passes = soak(200 if persistent else 100)
    rc, stdout, stderr = run_warm(SOAK, 90 + 2 * passes, args=[context, str(persistent), str(passes)])
    assert rc == 0, stderr
    assert int(stdout.split()[1]) > 30 * passes


STARTS = """
import sys
from multiprocessing import forkserver
from pathlib import Path

def main():
    from tests.pairs import all_ids, each_once, module  # here: workers that are not forked import this file

    for persistent in (True, False) if sys.argv[1] == "forkserver" else (True,):
        dm = module(Path("images"), 32, num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=persistent)
        loader = dm.train_dataloader()
        for _ in range(2):
            each_once(all_ids(loader), 32)
        assert len(loader.worker_pids) == 2 * persistent
        for batch in loader:
            break
        each_once(all_ids(loader), 32)
        dm.close()
    forkserver._forkserver._stop()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_every_start_method(context: str, run_warm: Script) -> None:
    rc, _, stderr = run_warm(STARTS, 110, args=[context])
    assert rc == 0, stderr


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [True, False])
def test_passes_that_end_early_leave_no_trace_in_later_ones(workers: int, persistent: bool, tmp_path: Path) -> None:
    dm = module(tmp_path, 64, num_workers=workers, persistent_workers=persistent)
    loader, orders = dm.train_dataloader(), []
    for leave in (2, 0, 1, 16, None, 5, None, None):
        order: list[int] = []
        for number, batch in enumerate(loader):
            if number == leave:
                break
            order += ids(batch)
        if leave is None:
            each_once(order, 64)
            orders.append(order)
    assert len({tuple(order) for order in orders}) == 3
    dm.close()


def test_two_passes_over_one_loader_at_once(tmp_path: Path) -> None:
    for workers in (0, 2):
        dm = module(tmp_path / str(workers), 32, num_workers=workers)
        loader = dm.train_dataloader()
        left, right = [], []
        for one, other in zip(loader, loader, strict=True):
            left += ids(one)
            right += ids(other)
        each_once(left, 32)
        each_once(right, 32)
        assert left != right
        first = iter(loader)
        head = ids(next(first))
        each_once(all_ids(loader), 32)  # a whole pass while another one is open
        each_once(head + all_ids(first), 32)
        dm.close()


def test_several_loaders_at_once(tmp_path: Path) -> None:
    modules = [module(tmp_path / str(number), 32, num_workers=number) for number in range(3)]
    loaders = [one.train_dataloader() for one in modules]
    found: list[list[int]] = [[], [], []]
    for batches in zip(*loaders, strict=True):
        for ours, batch in zip(found, batches, strict=True):
            ours += ids(batch)
    for ours, one in zip(found, modules, strict=True):
        each_once(ours, 32)
        one.close()


# -- the end of passes and loaders -----------------------------------------------------------------------------------


def fail_in_a_loop(loader: Any) -> None:
    for _ in loader:
        raise ZeroDivisionError


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_pass_takes_everything_with_it(workers: int, tmp_path: Path) -> None:
    list(module(tmp_path, 8, num_workers=workers).train_dataloader())  # what is loaded once
    with no_leaks(grace_seconds=2):
        dm = module(tmp_path, 32, num_workers=workers, persistent_workers=False)
        loader = dm.train_dataloader()
        one = iter(loader)
        next(one)
        del one  # dropped
        two = iter(loader)
        next(two)
        two.close()  # closed, twice
        two.close()
        assert list(two) == []
        with pytest.raises(ZeroDivisionError):
            fail_in_a_loop(loader)
        three = iter(loader)
        assert next(three) is not None
        three.close()
        with pytest.raises(StopIteration):
            next(three)
        del dm, loader, two, three


def test_closing_ends_passes_and_workers_and_can_be_undone(tmp_path: Path) -> None:
    dm = module(tmp_path, 32, num_workers=2)
    loader = dm.train_dataloader()
    one = iter(loader)
    ids(next(one))
    pids = loader.worker_pids
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    dm.close()
    dm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(one) == []
    each_once(all_ids(loader), 32)
    dm.close()


def test_a_pass_that_nobody_started_costs_nothing(tmp_path: Path) -> None:
    dm = module(tmp_path, 32, num_workers=2)
    loader = dm.train_dataloader()
    with no_leaks():
        one = iter(loader)
        assert len(one) == len(loader) == 8
        assert loader.worker_pids == []
    del one


def test_batches_stay_as_they_were(tmp_path: Path) -> None:
    dm = module(tmp_path, 64, num_workers=2, batch_size=2)
    for _ in range(2):
        each_once(all_ids(list(dm.train_dataloader())), 64)  # all kept while the slabs are used again
    dm.close()


# -- when DALI cannot decode what looked whole -----------------------------------------------------------------------


def break_png(path: Path) -> None:
    """Damages the pixels of a PNG, where no look at its header or its end can see it."""
    data = bytearray(path.read_bytes())
    start = data.find(b"IDAT") + 8
    data[start : start + 6] = b"\xff" * 6
    path.write_bytes(data)


@pytest.mark.faults
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_batches_around_a_failed_one_keep_their_labels(workers: int, depth: int, tmp_path: Path) -> None:
    dm = module(tmp_path, 40, num_workers=workers, depth=depth, shuffle=False, on_bad_sample="replace")
    for bad in (9, 22, 24):
        break_png(dm.train_dataloader().dataset.paths[bad])
    for _ in range(2):
        found = [ids(batch) for batch in dm.train_dataloader()]
        assert [len(batch) for batch in found] == [4] * 10
        assert {one for batch in found for one in batch} == set(range(40)) - {9, 22, 24}
    assert [bad.dataset_index for bad in dm.bad_samples] == [9, 22, 24] * 2
    dm.close()


def raised(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


@pytest.mark.faults
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_the_dataset_keeps_its_type_and_says_where(workers: int, tmp_path: Path) -> None:
    dm = module(tmp_path, 16, num_workers=workers, shuffle=False)
    loader = dm.train_dataloader()

    def broken(image: Any) -> Any:
        raise KeyError("no such annotation")

    loader.dataset.transform = broken
    error = raised(lambda: list(loader))
    assert type(error) is KeyError
    assert any("dataset index 0, rank 0, epoch 0" in note for note in getattr(error, "__notes__", []))
    dm.close()
