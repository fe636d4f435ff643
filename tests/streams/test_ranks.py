"""Two ranks over streams: they take the same steps, nothing hangs, and what does not shard itself is told. About 12 s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ddp.spy import Seen, ids, load

pytestmark = [pytest.mark.ddp, pytest.mark.timeout(300)]  # imports alone take minutes on a busy machine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def seen(root: Path, phase: str, stage: str = "train", epoch: int | None = None) -> list[list[Seen]]:
    """What each rank saw, after checking that they took the same steps."""
    both = [
        [row for row in load(root / f"{phase}.{rank}.json") if row.stage == stage and epoch in (None, row.epoch)]
        for rank in (0, 1)
    ]
    steps = [[(row.epoch, row.step) for row in rows] for rows in both]
    assert steps[0] == steps[1] and steps[0]
    return both


def told(root: Path, phase: str) -> list[str]:
    return [(root / f"{phase}.{rank}.txt").read_text() for rank in (0, 1)]


def test_two_ranks(root: Path, run_warm: Callable[..., Any]) -> None:
    code = f"from pathlib import Path\nfrom tests.streams.ranks import main\nmain(Path({str(root)!r}))\n"
    rc, _, log = run_warm(code, 240)
    assert rc == 0, log[-6000:]

    for epoch in (0, 1):
        both = seen(root, "lengths", epoch=epoch)
        assert [len(row.ids) for row in both[0] + both[1]] == [4] * 8
        assert len(set(ids(both[0] + both[1]))) == 32, "no sample twice"
        both = seen(root, "lengths", "val", epoch)
        assert Counter(ids(both[0] + both[1])) == Counter({**dict.fromkeys(range(17), 1), 1: 2, 3: 2, 5: 2, 7: 2})
    assert (
        "the ranks' streams have [9, 8] samples, so [3, 2] batches; every rank takes 3. A rank with fewer begins" in log
    )
    assert "val: the stream of rank 1 ended after 2 batch(es) of the 3 that every rank takes" in log

    assert [len(rows) for rows in seen(root, "limit", epoch=1)] == [5, 5]
    assert all("is a stream without a length, and there are 2 ranks" in text for text in told(root, "neither"))
    assert all("the val dataset is a stream without a length" in text for text in told(root, "val"))
    assert "limit_val_batches=<a number of batches>" in told(root, "val")[1]

    whole, rest = seen(root, "whole"), seen(root, "resumed")
    assert [rows[7:] for rows in whole] == rest, "each rank goes on in its own share"
    assert told(root, "whole") == told(root, "resumed") == ["", ""]

    assert any(
        "got the same first samples: the dataset does not shard itself over ranks" in text
        for text in told(root, "same")
    )
