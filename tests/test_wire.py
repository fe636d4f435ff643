"""Whatever is packed comes out the same, and lanes are not copied on the way."""

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import tv_tensors

from lightning_dali.sampling import BatchTask
from lightning_dali.wire import ALIGNMENT, Blobs, KnownBad, Lane, read, write, write_small


def there_and_back(value: Any) -> tuple[Any, bytes, bytearray]:
    memory = bytearray()

    def slab(size: int) -> memoryview:
        assert not memory, "asked twice for a slab"
        memory.extend(b"\xff" * (size + 100))
        return memoryview(memory)

    message = write(value, slab)
    return read(message, memoryview(memory) if memory else None), message, memory


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=5000), max_size=8))
def test_bytes_of_any_length(items: list[bytes]) -> None:
    blobs = Blobs(np.frombuffer(item, np.uint8) for item in items)
    (first, again), _, _ = there_and_back((blobs, Blobs(blobs)))
    assert [item.tobytes() for item in first] == items
    assert [item.tobytes() for item in again] == items
    assert type(first) is Blobs


def test_pixels_keep_their_shape_also_when_they_are_views() -> None:
    whole = np.arange(50 * 60 * 3, dtype=np.uint8).reshape(50, 60, 3)
    blobs = Blobs([whole, whole[::2, ::-1], whole[:, :, :1], whole[:0]])
    found, _, _ = there_and_back(blobs)
    assert all((one == other).all() and one.shape == other.shape for one, other in zip(found, blobs, strict=True))


def test_blobs_look_into_the_slab_and_tensors_do_not() -> None:
    data = Blobs([np.zeros(5000, np.uint8), np.zeros(70, np.uint8)])
    found, message, memory = there_and_back({"data": data, "tensor": torch.zeros(5000), "array": np.zeros(5000)})
    memory[: len(memory)] = b"\x01" * len(memory)
    assert all((item == 1).all() for item in found["data"])
    assert (found["tensor"] == 0).all()
    assert len(message) < 1000, "bytes travelled in the message"
    starts = [item.__array_interface__["data"][0] for item in found["data"]]
    assert (starts[1] - starts[0]) % ALIGNMENT == 0


@dataclass
class Target:
    boxes: Any
    name: str


@pytest.mark.parametrize("size", [3, 3000], ids=["inline", "slab"])
def test_what_users_return_comes_back_as_it_was(size: int) -> None:
    boxes = tv_tensors.BoundingBoxes(torch.rand(size, 4), format="XYXY", canvas_size=(32, 48))
    value = {
        "target": Target(boxes, "a"),
        "half": torch.rand(size).bfloat16(),
        "bool": torch.rand(size) > 0.5,
        "strided": torch.rand(size, 2).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "array": np.arange(size, dtype=np.int16),
        "words": ["x", ("y", None)],
    }
    found, _, _ = there_and_back(value)
    assert type(found["target"].boxes) is tv_tensors.BoundingBoxes
    assert found["target"].boxes.canvas_size == (32, 48)
    assert found["target"].boxes.format == boxes.format
    for name in ("half", "bool", "strided", "empty", "scalar"):
        assert found[name].dtype == value[name].dtype and torch.equal(found[name], value[name]), name
    assert torch.equal(found["target"].boxes.as_subclass(torch.Tensor), boxes.as_subclass(torch.Tensor))
    assert (found["array"] == value["array"]).all() and found["words"] == value["words"]


def test_small_messages_need_no_slab() -> None:
    value = (np.zeros(100_000), ValueError("x"))
    found = read(write_small(value), None)
    assert (found[0] == 0).all() and str(found[1]) == "x"


def test_a_lane_can_be_cut_to_some_rows() -> None:
    lane = Lane(
        field="0",
        spec=None,  # type: ignore[arg-type]
        data=Blobs(np.full(n, n, np.uint8) for n in range(5)),
        inputs={"size": np.arange(10).reshape(5, 2)},
        heads=[],
        tail=[],
        indices=list(range(100, 105)),
        paths=[f"{n}.png" for n in range(5)],
    )
    part = lane.select([3, 1])
    assert len(part) == 2 and part.indices == [103, 101] and part.paths == ["3.png", "1.png"]
    assert [item.tobytes() for item in part.data] == [b"\3\3\3", b"\1"]
    assert part.inputs["size"].tolist() == [[6, 7], [2, 3]]


def test_a_task_to_make_again_travels() -> None:
    task = KnownBad(BatchTask(1, 2, (3, 4)), ((3, "cut", "3.png"),))
    assert pickle.loads(pickle.dumps(task)) == task
    assert task.indices == (3, 4)
