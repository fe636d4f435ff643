"""Seeds: known values, no collisions where none may be, and the process's random states left as they were."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dali.seeding import _mix, batch_seed, epoch_seed, sample_seed, seeded

MANY = settings(deadline=None, max_examples=50)
INTS = st.integers(-(2**70), 2**70)
SEEDS = st.integers(0, 2**64 - 1)


def draw() -> tuple[float, ...]:
    """A draw from each of the three states; gauss and normal leave half of a pair behind in theirs."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), float(torch.randn(1))


def test_mix_is_splitmix64() -> None:
    # https://prng.di.unimi.it/splitmix64.c run from state 0 and from state 1234567.
    increment, mask = 0x9E37_79B9_7F4A_7C15, 2**64 - 1
    assert _mix(0) == 0xE220_A839_7B1D_CDAF
    assert [_mix((1234567 + i * increment) & mask) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_seeds_never_change() -> None:
    """A change here changes every run that is resumed from a checkpoint."""
    assert (sample_seed(1, 2, 3), batch_seed(1, 2, 3), epoch_seed(1, 2)) == (
        7725364555548041738,
        18283258009843326564,
        12751488248376797752,
    )


@MANY
@given(INTS, INTS, INTS)
def test_64_bits_for_any_integers(seed: int, epoch: int, index: int) -> None:
    seeds = {sample_seed(seed, epoch, index), batch_seed(seed, epoch, index), epoch_seed(seed, epoch)}
    assert len(seeds) == 3
    assert all(0 <= s < 2**64 for s in seeds)


@MANY
@given(SEEDS, SEEDS, SEEDS, st.integers(0, 63))
def test_each_argument_changes_about_half_of_the_bits(seed: int, epoch: int, index: int, bit: int) -> None:
    base = sample_seed(seed, epoch, index)
    flip = 1 << bit
    for other in ((seed ^ flip, epoch, index), (seed, epoch ^ flip, index), (seed, epoch, index ^ flip)):
        assert 8 <= (base ^ sample_seed(*other)).bit_count() <= 56


def test_arguments_do_not_commute() -> None:
    assert (
        len({sample_seed(*order) for order in ((1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1))}) == 6
    )


def test_no_collision_and_even_bits_over_a_grid() -> None:
    seeds = [f(s, e, i) for f in (sample_seed, batch_seed) for s in range(5) for e in range(5) for i in range(400)]
    assert len(set(seeds)) == len(seeds) == 20_000
    for half in ([s >> 32 for s in seeds], [s & 0xFFFF_FFFF for s in seeds]):
        assert len(seeds) - len(set(half)) <= 3  # expected: 20000**2 / 2**33 = 0.05
    for bit in range(64):
        assert abs(sum(s >> bit & 1 for s in seeds) / len(seeds) - 0.5) < 0.02
    assert max(Counter(s % 100 for s in seeds).values()) < 300  # 200 expected, deviation 14


@MANY
@given(SEEDS, st.booleans())
def test_same_seed_same_draws(seed: int, restore: bool) -> None:
    with seeded(seed, restore=True):
        first = draw()
    with seeded(seed, restore=restore):
        assert draw() == first


def test_every_bit_reaches_every_state() -> None:
    draws = []
    for seed in (0, 1, 2, 1 << 31, 1 << 32, 1 << 63):
        with seeded(seed, restore=True):
            draws.append((random.random(), np.random.rand(), float(torch.rand(1))))
    assert [len(set(column)) for column in zip(*draws, strict=True)] == [6, 6, 6]


def test_numpy_and_torch_do_not_draw_alike() -> None:
    """Both are the same Mersenne Twister; torch.rand takes the lower 24 bits of each word."""

    def alike() -> bool:
        words = np.random.randint(0, 2**32, 8, dtype=np.uint32)
        return bool((torch.rand(8).numpy() * 2**24 == (words & 0xFF_FFFF)).any())

    for seed in (0, 1, 7, sample_seed(0, 0, 0)):
        with seeded(seed, restore=True):
            assert not alike()
    with seeded(0, restore=True):  # the same bits for both: what is avoided, and proof that the check can fail
        np.random.seed(7)
        torch.default_generator.manual_seed(7)
        assert alike()


@pytest.mark.parametrize("fails", [False, True])
def test_restore_puts_the_states_back(fails: bool) -> None:
    with seeded(11, restore=True):
        draw()
        expected = [draw(), draw()]
    with seeded(11, restore=True):
        draw()  # leaves half a pair of normals behind, which must come back too
        try:
            with seeded(5, restore=True):
                draw()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert [draw(), draw()] == expected


def test_without_restore_the_states_stay_seeded() -> None:
    with seeded(3, restore=True):
        with seeded(5, restore=False):
            draw()
        after = draw()
        with seeded(5, restore=False):
            draw()
            assert draw() == after


def test_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(seed: int) -> None:
        raise AssertionError("torch.cuda was seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    for restore in (True, False):
        with seeded(1, restore=True), seeded(2, restore=restore):
            pass
    with pytest.raises(AssertionError, match="was seeded"):  # what the test watches is what torch.manual_seed does
        torch.manual_seed(0)
