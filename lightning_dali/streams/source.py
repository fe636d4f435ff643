"""Where a pass over a stream gets its requests: around any other source, it leaves out what is not to be delivered.

Runs in the rank: in the server's thread, or with `num_workers=0` in the consumer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_dali.streams.peers import FirstSamples
from lightning_dali.streams.turns import Turns
from lightning_dali.wire import KnownBad
from lightning_dali.workers import Packed

if TYPE_CHECKING:
    from lightning_dali.server import Source


class StreamSource:
    """The requests of one pass over a stream.

    Args:
        source: Makes what `turns` asks for, in order.
        turns: What is asked for.
        on_close: Called once it is closed.
    """

    def __init__(self, source: Source, turns: Turns, *, on_close: Callable[[], None] = lambda: None) -> None:
        self._source, self._turns, self._on_close = source, turns, on_close
        self._firsts = FirstSamples(turns.name, turns.epoch, turns.plan.shard)

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        """The next request; None at the end, or when `stop()` turned true meanwhile."""
        while not self._turns.is_over:
            packed = self._source.next(stop=stop, timeout=timeout)
            if packed is None:
                if not stop():
                    self._turns.report()
                return None
            if self._turns.take(packed.value):
                self._firsts.compare(self._turns.firsts)
                return packed
            packed.free()
        return None

    def redo(self, task: KnownBad, *, stop: Callable[[], bool]) -> Packed | None:
        """Makes one batch again."""
        return self._source.redo(task, stop=stop)

    def wake(self) -> None:
        """Ends a wait in `next`."""
        self._source.wake()

    def state(self) -> str:
        """What is being waited for, in words."""
        return self._source.state()

    def close(self) -> None:
        """Gives back what was not used."""
        self._source.close()
        self._on_close()
