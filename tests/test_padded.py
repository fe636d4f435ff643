"""`Padded`: checks, and survival of everything that walks over a batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_dali.padded import Padded


def make() -> Padded:
    return Padded.stack([torch.ones(2, 3), torch.ones(2, 5), torch.ones(2, 0)])


def test_stack_and_unpad():
    batch = make()
    assert batch.shape == (3, 2, 5) and batch.lengths.tolist() == [3, 5, 0]
    assert [tuple(row.shape) for row in batch.unpad()] == [(2, 3), (2, 5), (2, 0)]
    assert batch.data.sum() == 16 and batch.mask().sum() == 8
    data, lengths = batch
    assert data is batch.data and lengths is batch.lengths


def test_fill_changes_only_what_lies_beyond():
    filled = make().fill(-7.0)
    assert filled.data[0, :, 3:].eq(-7).all() and filled.data[2].eq(-7).all() and filled.data[1].eq(1).all()


@pytest.mark.parametrize(
    ("data", "lengths", "text"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"data \(B, ..., T\) and lengths \(B,\), got \(3,\)"),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.long), r"got \(3, 4\) and \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(data, lengths, text):
    with pytest.raises(ValueError, match=text):
        Padded(data, lengths)


def test_rows_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"last dimension only, got \(2, 3\), \(3, 3\)"):
        Padded.stack([torch.ones(2, 3), torch.ones(3, 3)])
    with pytest.raises(ValueError, match="at least one row"):
        Padded.stack([])


def test_everything_that_walks_over_a_batch_keeps_the_type():
    apply_to_collection = pytest.importorskip("lightning_utilities.core.apply_func").apply_to_collection
    batch = {"x": make(), "y": torch.zeros(3)}
    for walked in (
        tree_map(lambda t: t + 1, batch),
        apply_to_collection(batch, torch.Tensor, lambda t: t + 1),
    ):
        assert type(walked["x"]) is Padded and walked["x"].data.sum() == 16 + 30
    assert type(tree_map(lambda t: object(), make())) is Padded
    for twin in (pickle.loads(pickle.dumps(make())), copy.deepcopy(make()), make()._replace(data=make().data)):
        assert type(twin) is Padded and torch.equal(twin.data, make().data)


def test_moves():
    batch = make().to(torch.float16)
    assert batch.data.dtype == torch.float16 and batch.lengths.dtype == torch.int64
    assert type(make().to(torch.device("cpu"), non_blocking=True)) is Padded
    assert make().to("meta").lengths.device.type == "meta"
    if torch.cuda.is_available():
        assert type(pin_memory(make())) is Padded and make().pin_memory().data.is_pinned()
        assert make().to("cuda").lengths.device.type == "cuda"
