"""Warps and windows on a batch: each sample as torchvision's tensor kernel alone would have made it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as nnf
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import geometry
from lightning_dali.graph.functionals import arguments, bound_call, merge_family
from lightning_dali.graph.tail import apply_call

Size = tuple[int, int]
Draw = Callable[[random.Random, Size], dict[str, Any]]

SHAPES = [(5, 3, 37, 53), (5, 1, 16, 9), (5, 2, 3, 21, 17), (1, 3, 8, 8)]
DTYPES = [torch.uint8, torch.float32, torch.float64]
FILLS = [None, 0, [0.2], [0.9, 0.1, 0.5]]
MODES = [InterpolationMode.NEAREST, InterpolationMode.BILINEAR]


def corners(r: random.Random, size: Size) -> list[list[int]]:
    """Four corners, each moved inwards at random, as RandomPerspective does."""
    bottom, right = size[0] - 1, size[1] - 1
    moves = [(r.randint(0, right // 3), r.randint(0, bottom // 3)) for _ in range(4)]
    (a, b), (c, d), (e, f), (g, h) = moves
    return [[a, b], [right - c, d], [right - e, bottom - f], [g, bottom - h]]


WARPS: dict[str, Draw] = {
    "affine": lambda r, size: {
        "angle": r.uniform(-180, 180),
        "translate": [r.randint(-5, 5), r.uniform(-5, 5)],
        "scale": r.uniform(0.5, 2),
        "shear": r.choice([r.uniform(-30, 30), [r.uniform(-30, 30)], (r.uniform(-30, 30), r.uniform(-30, 30))]),
        "center": r.choice([None, [0, 0], [3.5, 4]]),
    },
    "rotate": lambda r, size: {
        "angle": r.choice([0, 90, 180, 270.0, -90, r.uniform(-400, 400), r.uniform(-400, 400)]),
        "center": r.choice([None, [0, 0], [3.5, 4]]),
    },
    "perspective": lambda r, size: {
        "startpoints": [[0, 0], [size[1] - 1, 0], [size[1] - 1, size[0] - 1], [0, size[0] - 1]],
        "endpoints": corners(r, size),
    },
    "elastic": lambda r, size: {
        "displacement": 0.1 * torch.randn((1, *size, 2), generator=torch.Generator().manual_seed(r.randint(0, 99)))
    },
}
WINDOWS: dict[str, Draw] = {
    "crop": lambda r, size: (
        {"top": r.randint(-4, size[0] - 2), "left": r.randint(-4, size[1] - 2)} | {"height": 7, "width": 6}
    ),
    "resized_crop": lambda r, size: (
        {"top": r.randint(0, 1), "left": r.randint(0, 2)} | {"height": 7, "width": 6, "size": [9, 5], "antialias": True}
    ),
    "erase": lambda r, size: {"i": r.randint(0, 4), "j": r.randint(0, 4), "h": r.randint(1, 9), "w": r.randint(1, 9)},
    "horizontal_flip": lambda r, size: {},
    "vertical_flip": lambda r, size: {},
}
WAYS: dict[str, tuple[Callable[[Tensor, list[dict[str, Any]]], Tensor], ...]] = {
    "crop": (geometry._crop_copies, geometry._crop_gather),
    "erase": (lambda x, rows: geometry._erase_colors(x, rows, [row["v"].flatten().tolist() for row in rows]),),
}
"""What only one kind of device uses, tested on all."""
GRID_ERROR = 2e-6
"""How far sampling points may lie from torchvision's, in half images: some float32 roundings. torchvision's own points
are as far apart on two machines, whose matrix products add in another order or without fused multiply-add."""


def pictures(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Noise, the worst case of interpolation, and a ramp."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if len(x) == 5:
        x[3] = torch.linspace(0, 1, shape[-1], dtype=torch.float64)
    return (x * 255).round().to(torch.uint8) if dtype == torch.uint8 else x.to(dtype)


def alone(name: str, x: Tensor, kwargs: list[dict[str, Any]]) -> Tensor:
    """What torchvision makes of each sample on its own."""
    return torch.stack([getattr(F, name)(item, **one) for item, one in zip(x, kwargs, strict=True)])


def check(got: Tensor, want: Tensor, *, levels: int = 0, atol: float = 1e-5) -> None:
    """uint8: equal, or `levels` off; floating point: `atol`."""
    assert got.shape == want.shape and got.dtype == want.dtype
    off = (got.cpu().double() - want.double()).abs()
    assert off.max() <= (atol if want.is_floating_point() else levels)


def check_warp(
    got: Tensor, name: str, x: Tensor, kwargs: list[dict[str, Any]], *, error: float = GRID_ERROR, atol: float = 1e-5
) -> None:
    """Each value is one that torchvision gives with sampling points no more than `error` half images away.

    Nearest: the pixel of one of these points, so a point on a border may fall on either side. Bilinear: between the least
    and the greatest of their values, one level more or `atol` for the arithmetic.
    """
    shifts = [(0.0, 0.0), *itertools.product((-error, error), repeat=2)]
    wants = torch.stack([shifted_alone(name, x, kwargs, shift) for shift in shifts]).double()
    assert got.shape == wants.shape[1:] and got.dtype == x.dtype
    values, slack = got.cpu().double(), atol if got.is_floating_point() else 1.0
    if kwargs[0]["interpolation"] == InterpolationMode.NEAREST:
        off = (values - wants).abs().amin(0)
        slack = atol if got.is_floating_point() else 0.0
    else:
        off = torch.maximum(values - wants.amax(0), wants.amin(0) - values)
    assert off.max() <= slack


def shifted_alone(name: str, x: Tensor, kwargs: list[dict[str, Any]], shift: tuple[float, float]) -> Tensor:
    """`alone` with each of torchvision's sampling points moved by (dx, dy) half images."""

    def moved(image: Tensor, grid: Tensor, **options: Any) -> Tensor:
        return nnf.grid_sample(image, grid + torch.tensor(shift, dtype=grid.dtype), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.transforms.v2.functional._geometry.grid_sample", moved)
        return alone(name, x, kwargs)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the batch lies, while matrix products may round to TF32. `test_tail.py` checks that nothing waits."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield str(request.param)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", sorted(WARPS))
def test_each_warped_sample_is_as_torchvision_alone(name: str, mode: InterpolationMode, device: str) -> None:
    rng = random.Random(f"{name}{mode}")
    for shape, dtype, fill in itertools.product(SHAPES, DTYPES, FILLS):
        if isinstance(fill, list):
            fill = [value * (255 if dtype == torch.uint8 else 1) for value in fill[: shape[-3]]]
        x = pictures(shape, dtype)
        kwargs = [WARPS[name](rng, (shape[-2], shape[-1])) | {"interpolation": mode, "fill": fill} for _ in x]
        for each in (kwargs, kwargs[:1] * len(x)):
            # bilinear: a grid point 1e-6 of the image away moves a value by 1e-4 of the step between two pixels
            atol = 1e-4 if device == "cuda" else 1e-5
            check_warp(apply_call(name, x.to(device), each), name, x, each, atol=atol)


@settings(max_examples=60, deadline=None)
@given(
    angle=st.floats(-720, 720),
    shear=st.tuples(st.floats(-60, 60), st.floats(-60, 60)),
    scale=st.floats(0.1, 8),
    translate=st.tuples(st.floats(-40, 40), st.floats(-40, 40)),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mode=st.sampled_from(MODES),
)
def test_affine_of_any_size_and_angle(
    angle: float, shear: Any, scale: float, translate: Any, size: Size, mode: InterpolationMode
) -> None:
    x = pictures((2, 3, *size), torch.uint8)
    one = {"angle": angle, "translate": translate, "scale": scale, "shear": shear, "interpolation": mode}
    kwargs = [one, one | {"angle": -angle}]
    check_warp(apply_call("affine", x, kwargs), "affine", x, kwargs, error=10 * GRID_ERROR)  # zoomed tenfold


@pytest.mark.parametrize("size", [(12, 12), (12, 17)], ids=str)
@pytest.mark.parametrize("angle", [0, 30.0, 90, 135, 180, 270, -450], ids=str)
def test_rotate_with_a_larger_canvas(angle: float, size: Size, device: str) -> None:
    x = pictures((5, 3, *size), torch.uint8)
    for mode, fill, center in ((MODES[0], None, None), (MODES[1], 7.0, None), (MODES[1], [1, 2, 3], [2.0, 3.0])):
        kwargs = {"angle": angle, "expand": True, "interpolation": mode, "fill": fill, "center": center}
        got = apply_call("rotate", x.to(device), [kwargs])
        check_warp(got, "rotate", x, [kwargs] * 5)


def test_canvases_of_different_sizes_make_no_batch() -> None:
    kwargs = [{"angle": 10.0, "expand": True}, {"angle": 40.0, "expand": True}]
    with pytest.raises(ValueError, match="which make no batch: use apply_ragged"):
        apply_call("rotate", torch.zeros(2, 3, 20, 20), kwargs)


def test_affine_and_rotate_share_a_warp(device: str) -> None:
    x = pictures((8, 3, 24, 24), torch.uint8)
    rng, calls = random.Random(3), []
    for i in range(8):
        name = "affine" if i % 2 else "rotate"
        calls.append((name, WARPS[name](rng, (24, 24)) | {"interpolation": MODES[1]}))
    calls[0] = ("rotate", {"angle": 90, "interpolation": MODES[1]})  # only moves pixels: as torchvision does it
    calls[2] = ("rotate", {"angle": 33.0, "interpolation": MODES[1]})
    assert {merge_family(name) for name, _ in calls} == {"warp"}
    mixed = [{**kwargs, "_call": name} for name, kwargs in calls]
    assert bound_call("warp", mixed[1])[0] == bound_call("warp", mixed[2])[0] != bound_call("warp", mixed[0])[0]
    want = torch.cat([alone(name, x[i : i + 1], [kwargs]) for i, (name, kwargs) in enumerate(calls)])
    check(apply_call("warp", x.to(device), mixed), want, levels=1)


def test_perspective_by_coefficients() -> None:
    x = pictures((5, 3, 20, 23), torch.float32)
    kwargs: list[dict[str, Any]] = [
        {
            "startpoints": None,
            "endpoints": None,
            "coefficients": [1.0, 0.1 * i, 2.0, -0.05 * i, 0.9, 1.0, 0.001 * i, 0.0],
        }
        for i in range(4)
    ]
    kwargs.append(WARPS["perspective"](random.Random(0), (20, 23)))
    check(apply_call("perspective", x, kwargs), alone("perspective", x, kwargs))
    with pytest.raises(ValueError, match="should have 8 float values"):
        apply_call("perspective", x, [kwargs[0] | {"coefficients": [1.0] * 7}])
    with pytest.raises(ValueError, match="startpoints and endpoints, or coefficients"):
        apply_call("perspective", x, [kwargs[0] | {"coefficients": None}])


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_each_window_is_as_torchvision_alone(name: str, device: str) -> None:
    rng = random.Random(name)
    exact = name != "resized_crop" or device == "cpu"  # torchvision interpolates uint8 as such on the CPU only
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x = pictures(shape, dtype)
        kwargs = [WINDOWS[name](rng, (shape[-2], shape[-1])) for _ in x]
        if name == "erase":
            for one in kwargs:
                one["v"] = torch.rand(shape[-3], 1, 1) * (255 if dtype == torch.uint8 else 1)
        for each in (kwargs, kwargs[:1] * len(x)):
            got = apply_call(name, x.to(device), each)
            check(got, alone(name, x, each), levels=0 if exact else 1, atol=0.0 if exact else 1e-5)
            for way in WAYS.get(name, ()):
                check(way(x.to(device), arguments(name, each)), alone(name, x, each), atol=0.0)


@pytest.mark.parametrize("kind", ["number", "scalar", "channels", "patch", "gray patch", "mixed"])
def test_erase_with_every_kind_of_value(kind: str, device: str) -> None:
    for shape in ((5, 3, 24, 20), (5, 2, 3, 24, 20)):
        x, kwargs = pictures(shape, torch.float32), []
        for i in range(5):
            h, w = 3 + i, 9 - i
            values: dict[str, Any] = {
                "number": 0.5 * i,
                "scalar": torch.tensor(0.1 * i),
                "channels": torch.rand(3, 1, 1),
                "patch": torch.randn(3, h, w),
                "gray patch": torch.randn(1, h, w),
            }
            values["mixed"] = values["patch" if i % 2 else "channels"]
            kwargs.append({"i": 2 * i, "j": i, "h": h, "w": w, "v": values[kind], "inplace": True})
        before = x.clone()
        assert torch.equal(apply_call("erase", x.to(device), kwargs).cpu(), alone("erase", x.clone(), kwargs))
        assert torch.equal(x, before)


@pytest.mark.parametrize("way", [geometry._crop_copies, geometry._crop_gather])
def test_a_crop_that_misses_the_image_is_black(way: Any) -> None:
    x = torch.ones(2, 3, 8, 8)
    for miss in (-4, -9, 8, 20):
        for row in ({"top": miss, "left": 0}, {"top": 0, "left": miss}):
            rows = [one | {"height": 4, "width": 4} for one in (row, {"top": 4, "left": 4})]
            out = way(x, arguments("crop", rows))
            assert out[0].count_nonzero() == 0 and out[1].min() == 1


def test_pad(device: str) -> None:
    paddings: list[Any] = [2, [1], [1, 2], [1, 2, 3, 4], (0, 0, 0, 5)]
    fills: list[Any] = [None, 3, [4.7], [250.7, 10.2, 30.9]]
    for padding, fill, dtype in itertools.product(paddings, fills, [torch.uint8, torch.float32]):
        x = pictures((5, 2, 3, 9, 7), dtype)
        kwargs = [{"padding": padding, "fill": fill}]
        assert torch.equal(apply_call("pad", x.to(device), kwargs).cpu(), alone("pad", x, kwargs * 5))


@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric"])
def test_pad_modes(mode: str, device: str) -> None:
    x = pictures((5, 3, 9, 7), torch.uint8)
    kwargs = [{"padding": [1, 2, 3, 4], "padding_mode": mode}]
    assert torch.equal(apply_call("pad", x.to(device), kwargs).cpu(), alone("pad", x, kwargs * 5))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("affine", {"scale": 0.0}, "scale should be positive, got 0.0"),
        (
            "affine",
            {"interpolation": InterpolationMode.BICUBIC},
            "must be nearest or bilinear for tensors, got 'bicubic'",
        ),
        ("affine", {"fill": [1.0, 2.0]}, "one value or one for each of 3 channels"),
        ("elastic", {"displacement": torch.zeros(1, 4, 4, 2)}, r"displacement must have shape \(1, 8, 8, 2\)"),
    ],
)
def test_what_torchvision_refuses_is_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_call(name, torch.zeros(2, 3, 8, 8), [WARPS[name](random.Random(0), (8, 8)) | kwargs])


def test_pillows_numbers_are_interpolations() -> None:
    x = pictures((2, 3, 9, 9), torch.float32)
    for number, mode in ((0, MODES[0]), (2, MODES[1])):
        one = {"angle": 20.0, "interpolation": number}
        assert torch.equal(apply_call("rotate", x, [one]), apply_call("rotate", x, [one | {"interpolation": mode}]))
