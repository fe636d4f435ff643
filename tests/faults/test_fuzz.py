"""Damaged files: no crash, no hang, and each is either decoded or reported."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SOAK

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500 if SOAK else 120)]

KINDS = ("jpeg", "png", "wav", "flac", "mp4")
SCRIPT = Path(__file__).with_name("fuzz.py").read_text()


def check(kinds: str, count: int, run_warm: Callable[..., Any], timeout: float) -> None:
    rc, stdout, stderr = run_warm(SCRIPT, timeout, args=[kinds, str(count), "0"])
    assert rc == 0, stderr[-4000:]
    for kind in kinds.split(","):
        decoded, reported = map(int, re.findall(rf"^{kind} decoded (\d+) reported (\d+)$", stdout, re.MULTILINE)[0])
        assert decoded + reported == count
        assert decoded and reported, "mutations too mild or too wild to show anything"


def test_a_few_of_each_kind(run_warm: Any) -> None:
    check(",".join(KINDS), 60, run_warm, 110)


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="10,000 files take a quarter of an hour: LIGHTNING_DALI_SOAK=1")
@pytest.mark.parametrize("kind", KINDS)
def test_many_of_one_kind(kind: str, run_warm: Any) -> None:
    check(kind, 2000, run_warm, 1400)
