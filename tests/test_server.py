"""The server: results follow their requests, every slab comes back, and a pass can end at any point.

The graphs here are a few lines of Python, so that they can fail when they are told to.
"""

# Over 300 lines: the graphs and the source in Python that all tests here share.

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import lightning_dali.passes as passes_module
import lightning_dali.server as server_module
from lightning_dali.delivery import Delivered
from lightning_dali.graph.image import ImageSpec
from lightning_dali.graph.spec import Device, Executor, LaneSpec
from lightning_dali.passes import Pass
from lightning_dali.sampling import BatchTask
from lightning_dali.server import MAX_EXECUTORS, Executors, Server
from lightning_dali.wire import Blobs, KnownBad, Lane, Request, SlotStack
from lightning_dali.worker import Failure
from lightning_dali.workers import Packed

DEVICE = Device(None, depth=3)
POISON = 200
"""A row that a graph cannot run."""


@dataclass(frozen=True)
class Doubled(LaneSpec):
    """A graph that doubles its rows, in the order in which they were fed."""

    kind: str = "a"
    stages: frozenset[str] = frozenset()

    def merge(self, other: LaneSpec) -> LaneSpec | None:
        if not isinstance(other, Doubled) or other.kind != self.kind:
            return None
        return Doubled(self.kind, self.stages | other.stages)

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        return DoublingExecutor(self, max_batch_size)

    def describe(self) -> list[tuple[str, str]]:
        return [("double", "here")]


@dataclass
class DoublingExecutor:
    spec: Doubled
    max_batch_size: int
    inside: deque[np.ndarray] = field(default_factory=deque)
    closed: bool = False

    def feed(self, lane: Lane) -> None:
        assert not self.closed and len(lane) <= self.max_batch_size and lane.spec.merge(self.spec) == self.spec
        if lane.field == "bad at once":
            raise RuntimeError("Failed to feed")
        self.inside.append(np.concatenate(lane.data))

    def collect(self, lane: Lane) -> Any:
        import torch

        assert not self.closed
        rows = self.inside.popleft()
        if POISON in rows:
            raise RuntimeError("Failed to decode")
        return torch.from_numpy(rows.astype(np.int64) * 2)

    def close(self) -> None:
        self.closed = True


def request(step: int, rows: list[int], spec: LaneSpec, name: str) -> Request:
    lane = Lane(
        field=name,
        spec=spec,
        data=Blobs(np.array([row], np.uint8) for row in rows),
        inputs={},
        heads=[],
        tail=[],
        indices=list(rows),
        paths=[None] * len(rows),
    )
    places = SlotStack((0,) * len(rows), tuple(range(len(rows))))
    return Request(BatchTask(0, step, tuple(rows)), [lane], (places, rows), tuple(rows))


@dataclass(frozen=True)
class Windowed(ImageSpec):
    """An image's spec, whose graph is none."""

    def merge(self, other: LaneSpec) -> Any:
        assert isinstance(other, Windowed)
        return super().merge(other)

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        return DoublingExecutor(self, max_batch_size)  # type: ignore[arg-type]  # only asked for its spec


class Batches:
    """A source that counts what it gave and what came back."""

    def __init__(self, batches: list[Any], *, spec: Callable[[int], LaneSpec] = lambda step: Doubled()) -> None:
        self.batches, self.spec = deque(enumerate(batches)), spec
        self.given = self.freed = self.closed = 0
        self.name = "0"

    def pack(self, value: Any) -> Packed:
        self.given += 1
        return Packed(value, self._free)

    def _free(self) -> None:
        self.freed += 1

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        if not self.batches:
            return None
        step, rows = self.batches.popleft()
        if isinstance(rows, Exception):
            return self.pack(Failure.here(rows))
        return self.pack(request(step, rows, self.spec(step), self.name))

    def redo(self, task: KnownBad, *, stop: Callable[[], bool]) -> Packed | None:
        assert [index for index, _, _ in task.reasons] == [POISON]
        rows = [row for row in task.indices if row != POISON]
        return self.pack(request(task.task.step, rows, self.spec(task.task.step), self.name))

    def wake(self) -> None: ...

    def state(self) -> str:
        return "test"

    def close(self) -> None:
        self.closed += 1


def rows_of(delivered: Delivered) -> list[int]:
    doubled, rows = delivered.batch
    assert doubled.tolist() == [2 * row for row in rows], "results of another batch"
    return list(rows)


def server_of(**options: Any) -> Server:
    return Server(DEVICE, **{"max_batch_size": 4, **options})


COUNT = 9
PLAIN = [[3 * step, 3 * step + 1] for step in range(COUNT)]


@pytest.fixture(params=[False, True], ids=["inline", "threaded"])
def threaded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("stop_after", [0, 1, 2, COUNT - 1, COUNT, None])
def test_every_slab_comes_back_wherever_a_pass_ends(stop_after: int | None, threaded: bool) -> None:
    server, source = server_of(), Batches(PLAIN)
    one = Pass(server, source, threaded=threaded)
    found = []
    while stop_after is None or len(found) < stop_after:
        delivered = next(one, None)
        if delivered is None:
            break
        found.append(rows_of(delivered))
    one.close()
    assert found == PLAIN[: len(found)] and len(found) == (COUNT if stop_after is None else stop_after)
    assert (source.freed, source.closed) == (source.given, 1)
    assert server.built or not found
    assert next(one, None) is None
    again = Pass(server, Batches(PLAIN), threaded=threaded)
    assert [rows_of(delivered) for delivered in again] == PLAIN  # nothing is left in the graph that it was lent


@pytest.mark.parametrize("poisoned", [0, 4, COUNT - 1])
def test_a_batch_that_fails_is_made_again_and_its_neighbours_keep_their_results(poisoned: int, threaded: bool) -> None:
    batches = [[*rows, POISON] if step in (poisoned, poisoned + 1) else rows for step, rows in enumerate(PLAIN)]
    source = Batches(batches)
    assert [rows_of(delivered) for delivered in Pass(server_of(), source, threaded=threaded)] == PLAIN
    assert source.freed == source.given > COUNT


def test_what_fails_to_be_fed_is_named_and_nothing_leaks(threaded: bool) -> None:
    source = Batches(PLAIN)
    source.name = "bad at once"
    with pytest.raises((RuntimeError, AssertionError)):
        list(Pass(server_of(), source, threaded=threaded))
    assert source.freed == source.given


def test_the_batches_before_a_failure_come_first(threaded: bool) -> None:
    source = Batches([*PLAIN[:4], KeyError("no such file"), *PLAIN[4:]])
    one = Pass(server_of(), source, threaded=threaded)
    assert [rows_of(next(one)) for _ in range(4)] == PLAIN[:4]
    with pytest.raises(KeyError, match="no such file"):
        next(one)
    assert next(one, None) is None
    assert one.closed and source.freed == source.given


def test_an_objection_to_a_bad_sample_ends_the_pass(threaded: bool) -> None:
    def object_to(sample: Any) -> None:
        raise RuntimeError(f"more than enough: {sample}")

    class Bad(Batches):
        def pack(self, value: Any) -> Packed:
            value.bad = ["sample 3"]
            return super().pack(value)

    source = Bad(PLAIN)
    with pytest.raises(RuntimeError, match="more than enough: sample 3"):
        next(Pass(server_of(on_bad=object_to), source, threaded=threaded))
    assert (source.freed, source.closed) == (source.given, 1)


def test_graphs_grow_when_a_batch_needs_more_and_wait_until_they_are_empty(threaded: bool) -> None:
    def spec(step: int) -> LaneSpec:
        return Doubled("ab"[step % 2], frozenset("xyz"[: step % 4]))

    batches = [rows if step < 6 else rows * 4 for step, rows in enumerate(PLAIN)]  # larger than max_batch_size at last
    server, source = server_of(), Batches(batches, spec=spec)
    assert [rows_of(delivered) for delivered in Pass(server, source, threaded=threaded)] == batches
    assert source.freed == source.given
    assert sorted((one.kind, len(one.stages)) for one in server.specs) == [("a", 2), ("b", 3)]  # type: ignore[attr-defined]


@pytest.mark.timeout(20)  # it once went round for ever
def test_lanes_that_several_graphs_serve_find_theirs() -> None:
    """A window that sticks out shows a fill, and graphs of two fills both serve one that does not stick out."""
    whole = Windowed(first=True)
    black, gray = (replace(whole, first_pads=True, fill=(fill,)) for fill in (0.0, 30.0))
    rng = random.Random(0)
    for expected in ([], [gray], [whole, black]):
        lent = Executors(Device(None, num_threads=1), 4, expected=expected)
        for _ in range(20):
            specs = [rng.choice([whole, black, gray]) for _ in range(rng.randint(1, 6))]
            lanes = [request(0, [1], spec, "image").lanes[0] for spec in specs]
            found = lent.get_all(lanes, busy=lambda one: False)
            assert found is not None
            for one, spec in zip(found, specs, strict=True):
                assert isinstance(one, DoublingExecutor)
                assert one.spec.merge(spec) == one.spec and not one.closed


def test_only_so_many_graphs_are_kept(threaded: bool) -> None:
    batches = [[step % 100] for step in range(3 * MAX_EXECUTORS)]
    source = Batches(batches, spec=lambda step: Doubled(str(step)))
    server = server_of()
    assert [rows_of(delivered) for delivered in Pass(server, source, threaded=threaded)] == batches
    lent = server.borrow()
    assert len(lent.specs) == MAX_EXECUTORS
    server.give_back(lent)
    server.release()
    assert not server.built


def test_two_passes_use_graphs_of_their_own(threaded: bool) -> None:
    server = server_of()
    one, two = (Pass(server, Batches(PLAIN), threaded=threaded) for _ in range(2))
    for left, right in zip(one, two, strict=True):
        assert rows_of(left) == rows_of(right)
    assert server.built


def test_a_dropped_pass_ends_its_thread() -> None:
    class Slow(Batches):
        def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
            while timeout is None and len(self.batches) < 5 and not stop():
                time.sleep(0.01)  # waits for ever, but listens
            return None if stop() else super().next(stop=stop, timeout=timeout)

    source = Slow(PLAIN)
    one = Pass(server_of(), source, threaded=True)
    rows_of(next(one))
    del one
    assert source.freed == source.given and source.closed == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "lightning_dali_server"]


def test_a_long_wait_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Batches):
        def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
            time.sleep(1.2)
            return super().next(stop=stop, timeout=timeout)

        def state(self) -> str:
            return "worker 3 has dataset indices [7]"

    one = Pass(server_of(), Late(PLAIN[:1]), threaded=True, watchdog_seconds=0.5)
    assert rows_of(next(one)) == PLAIN[0]
    assert "waiting for a batch" in caplog.text and "worker 3 has dataset indices [7]" in caplog.text
    one.close()


def test_the_consumer_is_never_far_behind() -> None:
    source = Batches(PLAIN * 5)
    one = Pass(server_of(queue=2), source, threaded=True)
    next(one)
    time.sleep(0.3)
    assert one.ready == 2
    assert source.given <= 1 + 2 + 1 + DEVICE.depth  # delivered, waiting, in the thread's hand, inside the graph
    one.close()


def test_every_pass_works_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch caches device memory by stream: a new one each pass made a run grow by two batches an epoch."""
    made: list[object] = []

    def side_stream(device: Device) -> None:
        made.append(device)
        return None

    class Streams(server_module.Executors):
        def stream(self) -> object:
            streams.append(id(self))
            return super().stream()

    streams: list[int] = []
    monkeypatch.setattr(server_module, "_side_stream", side_stream)
    monkeypatch.setattr(server_module, "Executors", Streams)
    server = Server(DEVICE, max_batch_size=4)
    for _ in range(3):
        server_module.Driver(server, Batches([]), lambda: False).close()
    assert len(streams) == 3 and len(set(streams)) == 1


def test_on_the_cpu_the_servers_thread_leaves_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    seen, collect = [], DoublingExecutor.collect

    def watched(self: DoublingExecutor, lane: Lane) -> Any:
        seen.append(torch.get_num_threads())
        return collect(self, lane)

    before = torch.get_num_threads()
    monkeypatch.setattr(DoublingExecutor, "collect", watched)
    monkeypatch.setattr(passes_module, "cores", lambda: 12)
    torch.set_num_threads(7)
    try:
        assert len(list(Pass(server_of(), Batches(PLAIN), threaded=True))) == len(PLAIN)
        assert set(seen) == {3} and torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
