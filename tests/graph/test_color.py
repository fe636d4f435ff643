"""Colour, blur and noise on a batch: each sample as torchvision's tensor kernel alone would have made it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.tail import apply_call

Draw = Callable[[random.Random], dict[str, Any]]

SHAPES = [(5, 3, 37, 53), (5, 1, 16, 9), (5, 2, 3, 21, 17), (1, 3, 8, 8)]
DTYPES = [torch.uint8, torch.float32, torch.float64]

DRAWS: dict[str, Draw] = {
    "adjust_brightness": lambda r: {"brightness_factor": r.uniform(0, 2.5)},
    "adjust_contrast": lambda r: {"contrast_factor": r.uniform(0, 2.5)},
    "adjust_saturation": lambda r: {"saturation_factor": r.uniform(0, 2.5)},
    "adjust_sharpness": lambda r: {"sharpness_factor": r.uniform(0, 3)},
    "adjust_hue": lambda r: {"hue_factor": r.uniform(-0.5, 0.5)},
    "adjust_gamma": lambda r: {"gamma": r.choice([0.5, 1.0, 2.0, r.uniform(0, 3)]), "gain": 1.2},
    "posterize": lambda r: {"bits": r.randint(0, 8)},
    "solarize": lambda r: {"threshold": r.choice([0.0, 0.5, r.random()])},
    "gaussian_blur": lambda r: {"kernel_size": [5, 3], "sigma": [r.uniform(0.1, 2), r.uniform(0.1, 2)]},
    "invert": lambda r: {},
    "autocontrast": lambda r: {},
    "equalize": lambda r: {},
}
"""Arguments of one sample. All of one call share what cannot differ."""

ONE_LEVEL = {
    "adjust_contrast": 0.02,  # a mean over a batch is summed in another order
    "adjust_gamma": 0.002,  # pow with a tensor and with a number round differently; truncation shows it
    "gaussian_blur": 0.001,  # two passes instead of one with their product: ties
}
"""Where uint8 may be one level off, and for which share of the values. Everything else is equal bit for bit."""


def pictures(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Noise, a gray picture, a flat one, a ramp, saturated colours."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    if len(x) == 5:
        x[1] = x[1, ..., :1, :, :]
        x[2] = 0.5
        x[3] = torch.linspace(0, 1, shape[-1], dtype=torch.float64)
        x[4] = (x[4] > 0.5).double()
    return (x * 255).round().to(torch.uint8) if dtype == torch.uint8 else x.to(dtype)


def alone(name: str, x: Tensor, kwargs: list[dict[str, Any]]) -> Tensor:
    """What torchvision makes of each sample on its own."""
    return torch.stack([getattr(F, name)(item, **one) for item, one in zip(x, kwargs, strict=True)])


def check(got: Tensor, want: Tensor, share: float = 0.0) -> None:
    """uint8: equal, but for `share` of the values, which may be one level off. Floating point: 1e-5."""
    assert got.shape == want.shape and got.dtype == want.dtype
    if want.is_floating_point():
        torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-5)
        return
    off = (got.cpu().long() - want.long()).abs()
    assert off.max() <= (1 if share else 0)
    assert off.count_nonzero() <= share * off.numel()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the batch lies. `test_tail.py` checks that nothing waits for a GPU."""
    return str(request.param)


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_each_sample_is_as_torchvision_alone(name: str, device: str) -> None:
    rng = random.Random(name)
    # a GPU does not fuse the multiply-add of a blend: a gray pixel, whose result is a whole number, may lose a level
    share = ONE_LEVEL.get(name, 0.0) if device == "cpu" else 1.0
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x = pictures(shape, dtype)
        kwargs = [DRAWS[name](rng) for _ in x]
        if name == "solarize" and dtype == torch.uint8:
            kwargs = [{"threshold": 255 * one["threshold"]} for one in kwargs]
        before = x.clone()
        for each in (kwargs, kwargs[:1] * len(x)):
            check(apply_call(name, x.to(device), each), alone(name, x, each), share)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_sharpness"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_round_once_where_torchvision_rounds_each_step(name: str, dtype: torch.dtype) -> None:
    x = pictures((5, 3, 19, 23), torch.float32).to(dtype)
    kwargs = [DRAWS[name](random.Random(i)) for i in range(5)]
    got, want = apply_call(name, x, kwargs), alone(name, x.float(), kwargs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=2 * torch.finfo(dtype).eps, rtol=0)


def test_larger_integers() -> None:
    x = torch.randint(0, 2**15, (5, 3, 9, 7), dtype=torch.int16)
    for name, low, high in (("brightness", 0.0, 2.0), ("saturation", 0.0, 2.0)):
        kwargs = [{f"{name}_factor": low + i * (high - low) / 4} for i in range(5)]
        assert torch.equal(apply_call(f"adjust_{name}", x, kwargs), alone(f"adjust_{name}", x, kwargs))
    kwargs = [{"bits": bits} for bits in (0, 1, 4, 7, 8)]
    assert torch.equal(apply_call("posterize", x, kwargs), alone("posterize", x, kwargs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 13, 11), (5, 2, 3, 13, 11)], ids=str)
def test_permute_channels(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = pictures(shape, dtype)
    kwargs = [{"permutation": order} for order in ([2, 0, 1], [0, 1, 2], [1, 0, 2], (2, 1, 0), [1, 2, 0])]
    got = apply_call("permute_channels", x.to(device), kwargs).cpu()
    assert torch.equal(got, alone("permute_channels", x, kwargs))
    with pytest.raises(ValueError, match="permutation must order the 3 channels"):
        apply_call("permute_channels", x, [{"permutation": [0, 1, 1]}])


@pytest.mark.parametrize("channels", [1, 3])
def test_normalize_is_torchvisions(channels: int, device: str) -> None:
    x = pictures((5, channels, 13, 11), torch.float32)
    kwargs = {"mean": [0.485, 0.456, 0.406][:channels], "std": [0.229, 0.224, 0.225][:channels], "inplace": True}
    got = apply_call("normalize", x.to(device), [kwargs]).cpu()
    assert (torch.equal if device == "cpu" else torch.allclose)(got, F.normalize(x, kwargs["mean"], kwargs["std"]))
    with pytest.raises(ValueError, match="std evaluated to zero"):
        apply_call("normalize", x, [{"mean": [0.5], "std": [0.0]}])
    with pytest.raises(TypeError, match="should be a float tensor"):
        apply_call("normalize", x.byte(), [kwargs])


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64], ids=str)
def test_gaussian_noise_is_torchvisions_under_the_same_seed(dtype: torch.dtype, clip: bool, device: str) -> None:
    x = pictures((5, 3, 13, 11), dtype)
    kwargs = [{"mean": 0.01 * i, "sigma": 0.05 + 0.05 * i, "clip": clip, "seed": 2**61 + 7 * i} for i in range(5)]
    want = []
    for item, one in zip(x, kwargs, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(int(one["seed"]))
            want.append(F.gaussian_noise(item, **{key: value for key, value in one.items() if key != "seed"}))
    state = torch.random.get_rng_state()
    got = apply_call("gaussian_noise", x.to(device), kwargs)
    check(got, torch.stack(want), 0.001 if device == "cuda" and clip else 0.0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_gaussian_noise_needs_its_seed() -> None:
    with pytest.raises(TypeError, match=r"lacks arguments \['seed'\]"):
        apply_call("gaussian_noise", torch.zeros(1, 3, 4, 4), [{}])


def test_jpeg_goes_over_the_cpu() -> None:
    x = pictures((5, 3, 24, 16), torch.uint8)
    kwargs = [{"quality": quality} for quality in (1, 20, 50, 90, 100)]
    assert torch.equal(apply_call("jpeg", x, kwargs), alone("jpeg", x, kwargs))


@pytest.mark.parametrize("size", [3, 9, 23, [1, 7], [9]])
@pytest.mark.parametrize("sigma", [None, 1.5, [0.7], [0.3, 2.0]], ids=str)
def test_gaussian_blur_takes_every_form_of_its_arguments(size: Any, sigma: Any) -> None:
    x = pictures((5, 3, 29, 31), torch.float32)
    kwargs = {"kernel_size": size if size != [9] else [9, 9], "sigma": sigma}
    check(apply_call("gaussian_blur", x, [kwargs]), alone("gaussian_blur", x, [kwargs] * 5))


def test_one_gray_picture_is_blurred_like_many(device: str) -> None:
    x = pictures((1, 1, 29, 31), torch.float32)
    kwargs = [{"kernel_size": [9, 9], "sigma": [1.1, 1.1]}]
    check(apply_call("gaussian_blur", x.to(device), kwargs), alone("gaussian_blur", x, kwargs))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("adjust_brightness", {"brightness_factor": -0.1}, r"brightness_factor must be in \[0.0, inf\], got -0.1"),
        ("adjust_hue", {"hue_factor": 0.6}, r"hue_factor must be in \[-0.5, 0.5\], got 0.6"),
        ("posterize", {"bits": 9}, r"bits must be in \[0, 8\], got 9"),
        ("solarize", {"threshold": 256.0}, r"threshold must be in \[-inf, 255\], got 256"),
        ("gaussian_blur", {"kernel_size": [3, 3], "sigma": [0.0, 0.0]}, "sigma should have positive values"),
        ("gaussian_blur", {"kernel_size": [4, 4], "sigma": [1.0, 1.0]}, "kernel_size should have odd"),
    ],
)
def test_what_torchvision_refuses_is_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    x = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        apply_call(name, x, [kwargs, DRAWS[name](random.Random(0))])


def test_colours_need_one_or_three_channels() -> None:
    with pytest.raises(TypeError, match="channel values are 1 or 3, but found 4"):
        apply_call("adjust_contrast", torch.zeros(2, 4, 8, 8), [{"contrast_factor": 1.0}, {"contrast_factor": 0.5}])
