"""The dispatcher: every functional is run or refused with a reason, samples are grouped, nothing is waited for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.functionals import bound_call, canonical_name, merge_family, per_sample_params
from lightning_dali.graph.plan import plan_tail
from lightning_dali.graph.run import run_tail
from lightning_dali.graph.tail import apply_call, apply_ragged
from lightning_dali.proxies.calls import Call

MATRIX = {"translate": [1, 0], "scale": 1.1, "shear": [2.0, 0.0]}
CORNERS = [[0, 0], [10, 0], [10, 8], [0, 8]]

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "adjust_brightness": [{"brightness_factor": 0.5}, {"brightness_factor": 1.5}],
    "adjust_contrast": [{"contrast_factor": 0.5}, {"contrast_factor": 1.5}],
    "adjust_gamma": [{"gamma": 0.5}, {"gamma": 1.5, "gain": 1.5}],
    "adjust_hue": [{"hue_factor": -0.2}, {"hue_factor": 0.5}],
    "adjust_saturation": [{"saturation_factor": 0.5}, {"saturation_factor": 1.5}],
    "adjust_sharpness": [{"sharpness_factor": 0.5}, {"sharpness_factor": 1.5}],
    "affine": [
        {"angle": 10.0, **MATRIX},
        {"angle": 3.0, **MATRIX, "fill": 1, "interpolation": InterpolationMode.BILINEAR},
    ],
    "autocontrast": [{}, {}],
    "center_crop": [{"output_size": [4, 5]}, {"output_size": (4, 5)}],
    "convert_image_dtype": [{"dtype": torch.float32}, {}],
    "crop": [{"top": 1, "left": 2, "height": 4, "width": 5}, {"top": 0, "left": -1, "height": 4, "width": 5}],
    "elastic": [{"displacement": torch.full((1, 9, 11, 2), 0.1)}, {"displacement": torch.zeros(1, 9, 11, 2)}],
    "equalize": [{}, {}],
    "erase": [{"i": i, "j": 2, "h": 3, "w": 4, "v": torch.tensor([[[i]]])} for i in range(2)],
    "gaussian_blur": [{"kernel_size": [3, 3]}, {"kernel_size": [5, 3], "sigma": [0.5, 0.7]}],
    "gaussian_noise": [{"seed": 1}, {"seed": 2, "sigma": 0.2}],
    "grayscale_to_rgb": [{}, {}],
    "horizontal_flip": [{}, {}],
    "invert": [{}, {}],
    "jpeg": [{"quality": 50}, {"quality": 90}],
    "normalize": [{"mean": [0.5], "std": [0.2]}, {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1]}],
    "pad": [{"padding": [1, 2]}, {"padding": [1, 2, 1, 2], "padding_mode": "edge"}],
    "permute_channels": [{"permutation": [2, 1, 0]}, {"permutation": [1, 2, 0]}],
    "perspective": [{"startpoints": CORNERS, "endpoints": [[1, 1], *CORNERS[1:]], "fill": fill} for fill in (None, 1)],
    "posterize": [{"bits": 2}, {"bits": 7}],
    "resize": [{"size": [4, 6]}, {"size": [4, 6], "interpolation": InterpolationMode.NEAREST}],
    "resized_crop": [{"top": i, "left": 1, "height": 5 + i, "width": 6, "size": [7, 5]} for i in range(2)],
    "rgb_to_grayscale": [{"num_output_channels": 3}, {"num_output_channels": 3}],
    "rotate": [{"angle": 20.0}, {"angle": 180}],
    "solarize": [{"threshold": 0.3}, {"threshold": 0.9}],
    "to_dtype": [{"dtype": torch.float32, "scale": True}, {"dtype": torch.float32, "scale": False}],
    "to_image": [{}, {}],
    "uniform_temporal_subsample": [{"num_samples": 2}, {"num_samples": 2}],
    "vertical_flip": [{}, {}],
}
"""Every functional that makes one image from one image, with arguments for two samples of 3 x 9 x 11."""

NO_IMAGE = {
    "five_crop", "ten_crop", "to_pil_image", "pil_to_tensor", "to_tensor", "is_pure_tensor", "register_kernel",
    "convert_bounding_box_format", "clamp_bounding_boxes", "clamp_keypoints", "sanitize_bounding_boxes",
    "sanitize_keypoints",
}  # fmt: skip
"""What does not make one image from one image; and whatever begins with get_ or works on boxes, masks or keypoints."""

FUNCTIONALS = sorted(name for name, value in vars(F).items() if inspect.isfunction(value) and not name.startswith("_"))


def batch(name: str) -> Tensor:
    """Two samples that `name` takes."""
    shape = (2, 4, 3, 9, 11) if name == "uniform_temporal_subsample" else (2, 3, 9, 11)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    return (x * 255).byte() if name in ("jpeg", "to_dtype", "convert_image_dtype", "equalize") else x


def alone(name: str, item: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """torchvision on one sample."""
    if "seed" in kwargs:
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(kwargs["seed"])
            return getattr(F, name)(item, **{key: value for key, value in kwargs.items() if key != "seed"})
    return getattr(F, name)(item, **kwargs)


def test_every_functional_is_run_or_refused_with_a_reason() -> None:
    for name in FUNCTIONALS:
        base = name.removesuffix("_image").removesuffix("_video")
        foreign = name.endswith(("_mask", "_bounding_boxes", "_keypoints")) or name.startswith("get_")
        if foreign or name in NO_IMAGE or base in NO_IMAGE:
            with pytest.raises(ValueError, match="cannot run on a batch of images: it (takes|gives|tells|registers) "):
                apply_call(name, torch.zeros(1, 3, 9, 11), [{}])
            continue
        own = canonical_name(name)
        assert own in ARGUMENTS, (
            f"torchvision's {name} is new: give it arguments above, or a reason in graph/functionals.py"
        )
        if name != own:  # an alias or a kernel: the same under another name
            one = ARGUMENTS[own][:1]
            torch.testing.assert_close(apply_call(name, batch(own)[:1], one), apply_call(own, batch(own)[:1], one))
        assert per_sample_params(name) <= set(inspect.signature(getattr(F, own)).parameters) | {"seed"}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_batch_is_what_torchvision_makes_of_each(name: str) -> None:
    x, kwargs = batch(name), ARGUMENTS[name]
    want = torch.stack([alone(name, item, one) for item, one in zip(x, kwargs, strict=True)]).as_subclass(Tensor)
    interleaved = x.movedim(-3, -1).contiguous().movedim(-1, -3)  # as DALI gives images
    part_of_more = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    for given in (x, interleaved, part_of_more):
        before = given.clone()
        got = apply_call(name, given, kwargs)
        assert type(got) is Tensor
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert torch.equal(given, before)
    for out, item in zip(apply_ragged(name, list(x), kwargs), want, strict=True):
        torch.testing.assert_close(out, item, atol=1e-5, rtol=1e-5)
    for one in kwargs:
        key = bound_call(name, one)[0]
        assert isinstance(key, tuple) and key[0] == name
        hash(key)


def test_items_of_different_sizes() -> None:
    xs = [torch.rand(3, 9, 11), torch.rand(3, 20, 8), torch.rand(2, 3, 5, 5)]
    out = apply_ragged("resize", xs, [{"size": [6]}])
    assert [tuple(item.shape) for item in out] == [(3, 6, 7), (3, 15, 6), (2, 3, 6, 6)]
    assert apply_ragged("resize", [], []) == []
    with pytest.raises(ValueError, match="each of 3 samples or one for all, got 2"):
        apply_ragged("resize", xs, [{"size": [6]}] * 2)


def test_groups_are_run_apart_and_put_back_in_order() -> None:
    x = torch.rand(7, 3, 12, 12)
    kwargs = [{"angle": 15.0 * i, "fill": [None, 0.5, [0.1, 0.2, 0.3]][i % 3]} for i in range(7)]
    assert len({bound_call("rotate", one)[0] for one in kwargs}) == 5  # three fills; 0 and 90 degrees
    want = torch.stack([F.rotate(item, **one) for item, one in zip(x, kwargs, strict=True)])
    torch.testing.assert_close(apply_call("rotate", x, kwargs), want)


def test_arguments_left_out_are_torchvisions_defaults() -> None:
    assert (
        bound_call("rotate", {"angle": 3.0})[0]
        == bound_call("rotate", {"angle": 4.0, "expand": False, "fill": None})[0]
    )
    assert (
        bound_call("hflip", {})[0] == bound_call("horizontal_flip", {})[0] == bound_call("horizontal_flip_video", {})[0]
    )
    assert bound_call("resize", {"size": [4, 6]})[0] == bound_call("resize", {"size": (4, 6), "antialias": True})[0]
    assert bound_call("resize", {"size": [4, 6]})[0] != bound_call("resize", {"size": [4, 7]})[0]
    assert bound_call("to_dtype", {"dtype": torch.uint8})[0] != bound_call("to_dtype", {})[0]
    assert bound_call("normalize", {"mean": [1.0], "std": [1.0]})[0] != bound_call("invert", {})[0]


def test_what_has_no_hash_is_equal_to_itself_only() -> None:
    mean, std = torch.zeros(3), {"a": [1, {2}]}
    key = bound_call("normalize", {"mean": mean, "std": std})[0]
    assert key == bound_call("normalize", {"mean": mean, "std": std})[0]
    assert key != bound_call("normalize", {"mean": mean.clone(), "std": std})[0]
    hash(key)


@pytest.mark.parametrize("name", ["adjust_hue", "affine", "erase", "gaussian_noise", "crop"])
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([batch(name)] * 3)
    kwargs = [
        (ARGUMENTS[name][i % 2] | {"fill": None}) if name == "affine" else ARGUMENTS[name][i % 2] for i in range(6)
    ]
    whole = apply_call(name, x, kwargs)
    monkeypatch.setattr("lightning_dali.graph.tail._CHUNK_VALUES", 4 * x[0].numel())
    assert torch.equal(apply_call(name, x, kwargs), whole)


def test_families() -> None:
    assert {merge_family(name) for name in ("affine", "rotate", "affine_video")} == {"warp"}
    assert merge_family("hflip") == "horizontal_flip"
    assert per_sample_params("hflip") == frozenset()
    assert per_sample_params("adjust_hue") == {"hue_factor"}


def test_a_result_does_not_overlap_itself() -> None:
    out = apply_call("rgb_to_grayscale", torch.rand(2, 3, 4, 4), [{"num_output_channels": 3}])
    out.mul_(2)  # torch refuses this where memory is shared between channels


def test_no_samples() -> None:
    x = torch.zeros(0, 3, 4, 4)
    assert apply_call("rotate", x, []) is x


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "message"),
    [
        ("augmix", {}, ValueError, "'augmix' is no functional of torchvision.transforms.v2.functional"),
        ("five_crop", {"size": 2}, ValueError, "'five_crop' cannot run on a batch of images: it gives five images"),
        ("get_size", {}, ValueError, "gives numbers, not an image"),
        ("affine_mask", {}, ValueError, "takes no image"),
        ("rotate", {}, TypeError, r"rotate\(\) lacks arguments \['angle'\]"),
        ("rotate", {"angle": 3, "angel": 4}, TypeError, r"does not take \['angel'\]; it takes \['angle', 'interp"),
        ("uniform_temporal_subsample", {"num_samples": 2}, ValueError, r"takes clips \(B, T, C, H, W\), got \(2, 3,"),
    ],
)
def test_errors_say_what_is_wrong(name: str, kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_call(name, torch.zeros(2, 3, 8, 8), [kwargs])


def test_one_mapping_or_one_for_each() -> None:
    with pytest.raises(ValueError, match="arguments for each of 5 samples or one for all, got 2"):
        apply_call("invert", torch.zeros(5, 3, 8, 8), [{}, {}])


def test_different_results_make_no_batch() -> None:
    with pytest.raises(ValueError, match=r"resize gives samples of \(3, 4, 4\).*\(3, 5, 4\).*use apply_ragged"):
        apply_call("resize", torch.rand(2, 3, 8, 8), [{"size": [4, 4]}, {"size": [5, 4]}])
    with pytest.raises(ValueError, match=r"float16.*use apply_ragged"):
        apply_call("to_dtype", torch.rand(2, 3, 8, 8), [{"dtype": torch.float64}, {"dtype": torch.float16}])


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"jpeg"}))
def test_the_host_never_waits_for_the_gpu(name: str) -> None:
    x, kwargs = batch(name), ARGUMENTS[name]
    there = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [apply_call(name, there, each) for each in (kwargs, kwargs[1:])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, each in zip(got, (kwargs, kwargs[1:]), strict=True):
        torch.testing.assert_close(out.cpu(), apply_call(name, x, each), atol=1e-4, rtol=1e-4)


CROP = ("crop", {"top": 1, "left": 1, "height": 8, "width": 8})


@pytest.mark.parametrize("last", [("horizontal_flip", {}), ("normalize", {"mean": [0.5], "std": [0.2]})])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_was_given_is_not_written_into(rows: int, last: tuple[str, dict[str, Any]]) -> None:
    """A crop is a view of it, and later steps write into what is theirs."""
    given = torch.rand(2, 3, 10, 10, generator=torch.Generator().manual_seed(1))
    before = given.clone()
    tails = [[Call(*CROP), Call(*last)] if row < rows else [Call(*CROP)] for row in range(2)]
    out = run_tail(given, plan_tail(tails))
    assert torch.equal(given, before)
    for item, source, tail in zip(out, given, tails, strict=True):
        for name, kwargs in tail:
            source = getattr(F, name)(source, **kwargs)
        torch.testing.assert_close(item, source)
