"""The tail's kernels, on the CPU and on a GPU: the numbers that torchvision gives, sample by sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import nvrtc, tail_kernels
from lightning_dali.graph import run as graph_run
from lightning_dali.graph.functionals import arguments, bound_call, merge_family, pillow_name
from lightning_dali.graph.plan import TailStep, plan_tail
from lightning_dali.graph.tail_kernels import TailKernels
from lightning_dali.proxies.calls import Call
from tests.graph.kernels_on_cpu import build
from tests.graph.test_geometry import WARPS, check_warp
from tests.graph.test_levels import DRAWN, drawn, pictures

NEAREST, BILINEAR = InterpolationMode.NEAREST, InterpolationMode.BILINEAR
Calls = Sequence[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> TailKernels:
    # gcc then finds what is read or written outside of an array, and what C leaves undefined
    options = ("-fsanitize=undefined", "-fno-sanitize-recover", "-D_GLIBCXX_ASSERTIONS")
    kernels = build(tmp_path_factory.mktemp("tail"), tail_kernels.source(), tail_kernels.KERNELS, *options, alone=True)
    return TailKernels(kernels)


Run = Callable[..., torch.Tensor]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a call for each sample on a copy of `x`, in one step, and gives the result on the CPU."""
    device = str(request.param)
    kernels = (
        tail_kernels.load_kernels(torch.device("cuda", 0)) if device == "cuda" else request.getfixturevalue("on_cpu")
    )
    assert kernels is not None

    def apply(x: torch.Tensor, calls: Calls, *, channels_last: bool = False) -> torch.Tensor:
        bound = [bound_call(merge_family(name), _in_family(name, row)) for name, row in calls]
        assert len({key for key, _ in bound}) == 1
        name = bound[0][0][0]
        order = sorted(range(len(bound)), key=lambda i: bound[i][1].get("_call", ""))
        step = TailStep(name, tuple(order), arguments(name, [bound[i][1] for i in order]))
        return apply_steps(x, [step], channels_last=channels_last)

    def apply_steps(x: torch.Tensor, steps: Sequence[TailStep], *, channels_last: bool = False) -> torch.Tensor:
        memory = x.to(device, copy=True)
        if channels_last:
            memory = memory.movedim(-3, -1).contiguous().movedim(-1, -3)
        assert kernels.num_leading(memory, steps) == len(steps)
        kernels.run(memory, steps)
        return memory.cpu()

    apply.steps = apply_steps  # type: ignore[attr-defined]
    return apply


def _in_family(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return row if merge_family(name) == name else {**row, "_call": name}


def pil(names_and_rows: Calls) -> Calls:
    return [(pillow_name(name), row) for name, row in names_and_rows]


def as_pillow(images: Sequence[Image.Image], calls: Calls) -> torch.Tensor:
    return torch.stack(
        [F.pil_to_tensor(getattr(F, name)(one, **row)) for one, (name, row) in zip(images, calls, strict=True)]
    )


def as_tensors(x: torch.Tensor, calls: Calls) -> torch.Tensor:
    return torch.stack([getattr(F, name)(one, **row) for one, (name, row) in zip(x, calls, strict=True)])


def batch_of(images: Sequence[Image.Image]) -> torch.Tensor:
    return torch.stack([F.pil_to_tensor(one) for one in images])


def equal(found: torch.Tensor, wanted: torch.Tensor, *, levels: int = 0) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=levels)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_levels_of_pil_images(run: Run, mode: str, channels_last: bool) -> None:
    calls, images = drawn(64), pictures(64, mode)
    equal(run(batch_of(images), pil(calls), channels_last=channels_last), as_pillow(images, calls))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_levels_of_tensors(run: Run, mode: str) -> None:
    calls, x = drawn(64), batch_of(pictures(64, mode))
    found, wanted = run(x, calls), as_tensors(x, calls)
    for i, (name, row) in enumerate(calls):
        # a mean is summed in another order than torch's
        equal(found[i], wanted[i], levels=int(name == "adjust_contrast"))
        assert row is not None


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_one_functional_of_the_levels_alone(run: Run, name: str) -> None:
    rng, images = random.Random(5), pictures(5, "RGB")
    calls = [(name, DRAWN[name](rng)) for _ in images]
    equal(run(batch_of(images), pil(calls)), as_pillow(images, calls))


def smooth_and_noise(number: int, mode: str, size: tuple[int, int] = (53, 37)) -> list[Image.Image]:
    rng = np.random.default_rng(number)
    made = []
    for i in range(number):
        pixels = Image.fromarray(rng.integers(0, 256, (5, 6, 3) if i % 2 else (*size[::-1], 3), dtype=np.uint8))
        made.append(pixels.resize(size).convert(mode))
    return made


COLOURS: dict[str, list[dict[str, Any]]] = {
    "adjust_saturation": [{"saturation_factor": f} for f in (0.0, 0.31, 1.0, 1.77, 0.999)],
    "adjust_hue": [{"hue_factor": f} for f in (-0.5, -0.083, 0.0, 0.27, 0.5)],
    "adjust_sharpness": [{"sharpness_factor": f} for f in (0.0, 0.31, 1.0, 1.77, 5.0)],
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", COLOURS)
def test_colours(run: Run, name: str, mode: str, channels_last: bool) -> None:
    calls: Calls = [(name, row) for row in COLOURS[name]]
    images = smooth_and_noise(len(calls), mode)
    x = batch_of(images)
    equal(run(x, pil(calls), channels_last=channels_last), as_pillow(images, calls))
    # torch's vectors and its last few values of a row round differently
    equal(run(x, calls, channels_last=channels_last), as_tensors(x, calls), levels=int(name == "adjust_hue"))


def test_all_colours(run: Run) -> None:
    """Every hue and saturation that a few levels make, exhaustively."""
    some = torch.tensor([0, 1, 2, 63, 64, 127, 128, 200, 254, 255], dtype=torch.uint8)
    x = torch.stack(torch.meshgrid(some, some, some, indexing="ij")).view(1, 3, 25, 40).expand(5, -1, -1, -1)
    images = [F.to_pil_image(one) for one in x]
    for name in ("adjust_hue", "adjust_saturation"):
        calls: Calls = [(name, row) for row in COLOURS[name]]
        equal(run(x, pil(calls)), as_pillow(images, calls))
        equal(run(x, calls), as_tensors(x, calls), levels=int(name == "adjust_hue"))


def test_images_that_are_too_small_to_sharpen(run: Run) -> None:
    x = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    equal(run(x, [("adjust_sharpness", {"sharpness_factor": 2.0})]), x)


def warps(rng: random.Random, number: int, **options: Any) -> Calls:
    names = ("affine", "rotate")
    return [(name := rng.choice(names), {**WARPS[name](rng, (37, 53)), **options}) for _ in range(number)]


@pytest.mark.parametrize("fill", [None, 7, [9], [1, 2, 3]])
@pytest.mark.parametrize("mode", [NEAREST, BILINEAR])
@pytest.mark.parametrize("channels_last", [False, True])
def test_warps_of_pil_images(run: Run, mode: InterpolationMode, fill: Any, channels_last: bool) -> None:
    calls = warps(random.Random(2), 24, interpolation=mode, fill=fill)
    images = smooth_and_noise(24, "RGB")
    equal(run(batch_of(images), pil(calls), channels_last=channels_last), as_pillow(images, calls))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    angle=st.one_of(st.sampled_from([0.0, 90.0, 180.0, -45.0]), st.floats(-360, 360)),
    scale=st.floats(0.1, 10),
    shear=st.floats(-60, 60),
    translate=st.tuples(st.integers(-50, 50), st.integers(-50, 50)),
    mode=st.sampled_from([NEAREST, BILINEAR]),
)
def test_any_warp_of_a_pil_image(
    run: Run, size: tuple[int, int], angle: float, scale: float, shear: float, translate: tuple[int, int],
    mode: InterpolationMode,
) -> None:  # fmt: skip
    images = smooth_and_noise(1, "RGB", size)
    row = {"angle": angle, "scale": scale, "shear": [shear, 0.0], "translate": list(translate), "interpolation": mode}
    equal(run(batch_of(images), pil([("affine", row)])), as_pillow(images, [("affine", row)]))


@pytest.mark.parametrize("fill", [None, 7.0, [9.0], [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("mode", [NEAREST, BILINEAR])
@pytest.mark.parametrize("channels_last", [False, True])
def test_warps_of_tensors(run: Run, mode: InterpolationMode, fill: Any, channels_last: bool) -> None:
    rng = random.Random(4)
    for name in ("affine", "rotate"):
        rows = [{**WARPS[name](rng, (37, 53)), "interpolation": mode, "fill": fill} for _ in range(16)]
        rows = [row for row in rows if name == "affine" or row["center"] is not None or row["angle"] % 90]
        x = batch_of(smooth_and_noise(len(rows), "RGB"))
        check_warp(run(x, [(name, row) for row in rows], channels_last=channels_last), name, x, rows)


DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.int16]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["horizontal_flip", "vertical_flip"])
@pytest.mark.parametrize("size", [(37, 53), (1, 1), (8, 6)])
def test_mirrored(run: Run, name: str, dtype: torch.dtype, size: tuple[int, int], channels_last: bool) -> None:
    x = values(dtype, 4, 3, *size)
    equal(run(x, [(name, {})] * 4, channels_last=channels_last), as_tensors(x, [(name, {})] * 4))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_erased(run: Run, dtype: torch.dtype, channels_last: bool) -> None:
    x = values(dtype, 5, 3, 37, 53)
    windows = [(0, 0, 37, 53), (3, 4, 5, 6), (36, 52, 1, 1), (30, 50, 90, 90), (0, 0, 0, 5)]
    colours = [[1.0, 2.0, 3.0], [0.0], [250.0, 0.0, 7.0], [5.0], [9.0]]
    calls: Calls = [
        ("erase", {**dict(zip("ijhw", window, strict=True)), "v": torch.tensor(colour).to(dtype).view(-1, 1, 1)})
        for window, colour in zip(windows, colours, strict=True)
    ]
    equal(run(x, calls, channels_last=channels_last), as_tensors(x, calls))


def test_frames_of_a_clip_get_the_same(run: Run) -> None:
    calls, images = drawn(32), pictures(96, "RGB")
    x = batch_of(images).unflatten(0, (32, 3))
    for channels_last in (False, True):
        found = run(x, pil(calls), channels_last=channels_last)
        each = [call for call in calls for _ in range(3)]
        equal(found.flatten(0, 1), as_pillow(images, each))


class Recorded:
    """What a transform does to PIL images: RandAugment's own code draws, torchvision's functionals are asked."""

    def __init__(self) -> None:
        self.images = smooth_and_noise(48, "RGB", (64, 48))
        rng = random.Random(6)
        names = [*DRAWN, *COLOURS, "affine", "rotate", "horizontal_flip"]
        self.calls = []
        for _ in self.images:
            chosen = [rng.choice(names) for _ in range(3)]
            self.calls.append([(name, self._row(name, rng)) for name in chosen])

    def _row(self, name: str, rng: random.Random) -> dict[str, Any]:
        if name in DRAWN:
            row: dict[str, Any] = DRAWN[name](rng)
            return row
        if name in COLOURS:
            return rng.choice(COLOURS[name])
        row = {**WARPS[name](rng, (48, 64))} if name in WARPS else {}
        return {**row, "interpolation": NEAREST} if name in WARPS else row

    def wanted(self) -> torch.Tensor:
        out = []
        for image, calls in zip(self.images, self.calls, strict=True):
            for name, row in calls:
                image = getattr(F, name)(image, **row)
            out.append(F.pil_to_tensor(image))
        return torch.stack(out)

    def steps(self) -> list[TailStep]:
        tails = [[Call(merge_family(name), _in_family(name, row)) for name, row in pil(calls)] for calls in self.calls]
        return plan_tail(tails)


def test_several_steps_in_one_go(run: Run) -> None:
    recorded = Recorded()
    steps = recorded.steps()
    assert len(steps) > 6
    equal(run.steps(batch_of(recorded.images), steps), recorded.wanted())  # type: ignore[attr-defined]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tail_is_run_by_the_kernels_where_there_are_some(
    device: str, channels_last: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, taken = Recorded(), []
    start = TailKernels._start
    monkeypatch.setattr(TailKernels, "_start", lambda *args: (taken.append(args[1].shape), start(*args))[1])
    if device == "cpu":  # elsewhere Pillow runs what met PIL images, and there are no kernels
        kernels = request.getfixturevalue("on_cpu")
        monkeypatch.setattr(graph_run, "pays_with_pillow", lambda rows: False)
        monkeypatch.setattr(graph_run, "load_kernels", lambda device: kernels)
    given = batch_of(recorded.images).to(device).contiguous(memory_format=torch.channels_last)  # as DALI gives images
    before = given.clone()
    window = {"i": 3, "j": 4, "h": 20, "w": 9, "v": [1.5]}
    middle = [
        Call("to_dtype", {"dtype": torch.float32, "scale": True}),
        Call("normalize", {"mean": [0.5], "std": [0.2]}),
    ]
    steps = [*recorded.steps(), *plan_tail([middle] * len(given)), *plan_tail([[], [Call("erase", window)]])]
    with no_waiting(device):
        found = graph_run.run_tail(given, steps, channels_last=channels_last)
    assert isinstance(found, torch.Tensor) and len(taken) == 2
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    wanted = F.normalize(F.to_dtype(recorded.wanted(), torch.float32, scale=True), [0.5], [0.2])
    wanted[1, :, 3:23, 4:13] = 1.5
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-6)
    assert torch.equal(given, before)


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """The host must not wait for a GPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_without_a_compiler_torch_does_it_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError("no libnvrtc.so")

    monkeypatch.setattr(tail_kernels, "compile_kernels", refuse)
    tail_kernels._load.cache_clear()
    with caplog.at_level("INFO", logger="lightning_dali"):
        assert tail_kernels.load_kernels(torch.device("cuda", 7)) is None
        assert tail_kernels.load_kernels(torch.device("cuda", 7)) is None
    tail_kernels._load.cache_clear()
    assert [record.message for record in caplog.records if "no libnvrtc.so" in record.message] == [
        "Augmentations run in torch, more slowly, since the kernels for the GPU cannot be used: no libnvrtc.so"
    ]


def test_what_the_kernels_do_not_do_is_left_to_torch(on_cpu: TailKernels) -> None:
    def takes(x: torch.Tensor, name: str, **row: Any) -> bool:
        key, bound = bound_call(merge_family(name), _in_family(name, row))
        return on_cpu.num_leading(x, [TailStep(key[0], None, arguments(key[0], [bound] * len(x)))]) == 1

    x = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    move: dict[str, Any] = {"angle": 3.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    assert takes(x, "affine", **move) and takes(x, "affine_pil", **move) and takes(x, "adjust_hue", hue_factor=0.1)
    assert takes(x, "rotate_pil", angle=3.0) and not takes(x, "rotate_pil", angle=3.0, expand=True)
    assert not takes(x.float(), "affine", **move) and not takes(x.float(), "adjust_hue", hue_factor=0.1)
    assert not takes(x[:, :2], "invert") and not takes(x.double(), "horizontal_flip")
    assert not takes(x, "affine", **move, fill=300.0) and not takes(x, "affine", **move, fill=[1.0, 2.0])
    assert not takes(x, "gaussian_blur", kernel_size=3) and not takes(x, "rotate", angle=90.0)
    window = {"i": 0, "j": 0, "h": 2, "w": 2}
    assert takes(x, "erase", **window, v=torch.zeros(3, 1, 1)) and not takes(
        x, "erase", **window, v=torch.rand(3, 2, 2)
    )


def test_arguments_out_of_range_are_refused(on_cpu: TailKernels) -> None:
    x = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    for name, row in (
        ("adjust_brightness_pil", {"brightness_factor": -1.0}),
        ("adjust_contrast", {"contrast_factor": -1.0}),
        ("adjust_saturation_pil", {"saturation_factor": -1.0}),
        ("adjust_hue", {"hue_factor": 0.6}),
        ("adjust_sharpness", {"sharpness_factor": -0.1}),
        ("affine_pil", {"angle": 0.0, "translate": [0, 0], "scale": 0.0, "shear": [0.0, 0.0]}),
    ):
        key, bound = bound_call(merge_family(name), _in_family(name, row))
        with pytest.raises(ValueError, match=r"factor|scale"):
            on_cpu.run(x, [TailStep(key[0], None, arguments(key[0], [bound]))])


def test_kernels_that_agree_with_torch_are_taken(on_cpu: TailKernels) -> None:
    tail_kernels.check(on_cpu, torch.device("cpu"))
    assert {name for name, _ in tail_kernels._CHECKED} >= {
        name for name in tail_kernels._CALLS if "equalize" not in name
    }


@pytest.mark.parametrize("name", tail_kernels.KERNELS)
def test_a_kernel_that_does_not_work_is_found_out(on_cpu: TailKernels, name: str) -> None:
    broken = TailKernels({**on_cpu._kernels, name: lambda grid, block, args: None})
    with pytest.raises(RuntimeError, match="does not give what it gives on the CPU"):
        tail_kernels.check(broken, torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_kernels_compile(architecture: str) -> None:
    try:
        binary = nvrtc.compile_binary(tail_kernels.source(), architecture=architecture)
    except OSError as error:
        pytest.skip(f"torch brings no NVRTC here: {error}")
    assert all(name.encode() in binary for name in tail_kernels.KERNELS)


def test_random_augment_needs_few_launches() -> None:
    """What the module exists for: `v2.RandAugment`'s operations are all among the steps."""
    names = {
        "ShearX": "affine", "Rotate": "rotate", "Brightness": "adjust_brightness", "Color": "adjust_saturation",
        "Contrast": "adjust_contrast", "Sharpness": "adjust_sharpness", "Posterize": "posterize",
        "Solarize": "solarize", "AutoContrast": "autocontrast", "Equalize": "equalize", "Invert": "invert",
    }  # fmt: skip
    known = {*v2.AutoAugment._AUGMENTATION_SPACE, *v2.RandAugment._AUGMENTATION_SPACE} - {"Identity"}
    others = {"ShearY": "affine", "TranslateX": "affine", "TranslateY": "affine"}
    assert known <= {*names, *others}
    for name in {*names.values(), *others.values()}:
        assert {merge_family(name), merge_family(pillow_name(name))} <= set(tail_kernels._STEPS)
