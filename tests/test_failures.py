"""`BadSample` and its error travel between processes whole; a wrong word is answered with the right ones."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import FrozenInstanceError
from enum import Enum
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dali.failures import BadSample, BadSampleError, OnBadSample, check_choice

SAMPLE = BadSample(dataset_index=9, path="/data/9.jpg", rank=1, epoch=3, reason="not an image")

samples = st.builds(
    BadSample,
    dataset_index=st.integers(min_value=0),
    path=st.none() | st.text(),
    rank=st.integers(min_value=0),
    epoch=st.integers(min_value=0),
    reason=st.text(),
)


@given(samples, st.integers(min_value=0, max_value=pickle.HIGHEST_PROTOCOL))
def test_sample_and_error_survive_pickling(sample: BadSample, protocol: int) -> None:
    assert pickle.loads(pickle.dumps(sample, protocol)) == sample
    error = BadSampleError(sample)
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(twin) is BadSampleError
        assert twin.sample == sample
        assert str(twin) == str(error)


def _raise_in_child(sample: BadSample) -> None:
    raise BadSampleError(sample)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_error_crosses_processes_both_ways(method: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        with pytest.raises(BadSampleError) as caught:
            pool.submit(_raise_in_child, SAMPLE).result(timeout=60)
        assert caught.value.sample == SAMPLE


def test_message_says_which_where_why_and_what_to_do() -> None:
    message = str(BadSampleError(SAMPLE))
    for part in ("sample 9", "/data/9.jpg", "rank 1", "epoch 3", "not an image"):
        assert part in message
    assert "on_bad_sample='replace'" in message
    assert "on_bad_sample='drop'" in message
    assert "None" not in str(BadSampleError(BadSample(9, None, 0, 0, "too short")))


def test_sample_is_a_value_of_plain_types() -> None:
    sample = BadSample(np.int64(9), Path("/data/9.jpg"), np.int32(1), 3, "not an image")  # type: ignore[arg-type]
    assert sample == SAMPLE
    assert {type(sample.dataset_index), type(sample.rank)} == {int}
    assert hash(sample) == hash(SAMPLE)
    assert BadSample(0, b"/data/\xff.jpg", 0, 0, "")  # type: ignore[arg-type]  # an undecodable name is still a name
    with pytest.raises(FrozenInstanceError):
        SAMPLE.rank = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        BadSample(1.5, None, 0, 0, "")  # type: ignore[arg-type]


class Elsewhere(Enum):
    REPLACE = 17
    SKIP = 18


@pytest.mark.parametrize(
    ("value", "word"), [("drop", "drop"), (OnBadSample.RAISE, "raise"), (Elsewhere.REPLACE, "replace")]
)
def test_check_choice_takes_words_and_enums(value: object, word: str) -> None:
    for allowed in (OnBadSample, ["raise", "replace", "drop"]):
        chosen = check_choice("on_bad_sample", value, allowed)
        assert chosen == word
        assert type(chosen) is str


@pytest.mark.parametrize(
    ("value", "shown", "meant"),
    [
        ("Replace", "'Replace'", "replace"),
        ("dropp", "'dropp'", "drop"),
        ("mask", "'mask'", "raise"),
        (None, "None", "raise"),
        (1, "1", "raise"),
        (["drop"], r"\['drop'\]", "drop"),
        (Elsewhere.SKIP, "'SKIP'", "raise"),
    ],
)
def test_check_choice_says_value_allowed_and_cure(value: object, shown: str, meant: str) -> None:
    pattern = rf"on_bad_sample: got {shown}; allowed: 'raise', 'replace', 'drop'; do: .*on_bad_sample='{meant}'"
    with pytest.raises(ValueError, match=pattern):
        check_choice("on_bad_sample", value, OnBadSample)
