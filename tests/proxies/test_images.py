"""`ProxyImage`: what is asked of it is true, what is written into it is kept, and nothing sees the stand-in's zeros."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.io
import torchvision.transforms.functional as F1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies import ImageSource, ProxyImage, capture, collect_notes, no_capture
from lightning_dali.proxies.kernels import register

PIXELS = np.random.default_rng(0).integers(1, 256, (13, 17, 3), dtype=np.uint8)
TENSOR = torch.from_numpy(PIXELS.copy()).permute(2, 0, 1).contiguous()


def _proxy(*, pil: bool = False) -> ProxyImage:
    proxy: ProxyImage = ProxyImage.make(ImageSource.from_pixels(PIXELS))
    return proxy if pil else proxy.record("to_image", {})


# -- nothing sees the stand-in -----------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x * 2 - 1,
    "comparison": lambda x: x > 100,
    "index": lambda x: x[0, 2:5],
    "iteration": lambda x: list(x)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "numpy": lambda x: x.numpy(),
    "np.asarray": lambda x: np.asarray(torch.as_tensor(x)),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0, 0].item(),
    "mean": lambda x: x.float().mean(),
    "permute": lambda x: x.permute(1, 2, 0),
    "to": lambda x: x.to(torch.float64),
    "data": lambda x: x.data,
    "stack with a tensor": lambda x: torch.stack([x, TENSOR]),
    "cat": lambda x: torch.cat([x, x]),
    "as_tensor": lambda x: torch.as_tensor(x),
    "as_tensor with a dtype": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "tensor": lambda x: torch.tensor(x),
    "tv_tensors.Image": lambda x: tv_tensors.Image(x),
    "tv_tensors.Mask": lambda x: tv_tensors.Mask(x),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "ToPureTensor": lambda x: v2.ToPureTensor()(tv_tensors.Image(x)),
    "from_dlpack": lambda x: torch.from_dlpack(x),
    "a kernel called directly": lambda x: F.horizontal_flip_image(x),
    "/ 255": lambda x: x / 255,
    "float() / 255": lambda x: x.float().div(255),
    "convert_image_dtype": lambda x: F.convert_image_dtype(x),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", ASKED)
def test_whatever_is_asked_of_pixels_is_answered_by_pixels(name: str) -> None:
    with capture():
        found = ASKED[name](_proxy())
    wanted = ASKED[name](TENSOR)
    assert type(found) is not torch.Tensor or found.untyped_storage().nbytes() > 1
    found = found.materialise_tensor("") if isinstance(found, ProxyImage) else found
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), check_dtype=True)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "setitem": lambda x: x.__setitem__((slice(None), slice(3, 6)), 0),
    "clamp_": lambda x: x.clamp_(50, 90),
    "copy_": lambda x: x.copy_(TENSOR.flip(-1)),
    "index_fill_": lambda x: x.index_fill_(1, torch.tensor([2, 3]), 9),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_into_it_stays(name: str) -> None:
    proxy, wanted = _proxy(), TENSOR.clone()
    with capture():
        WRITTEN[name](proxy)
        flipped = F.horizontal_flip(proxy)
    WRITTEN[name](wanted)
    assert torch.equal(proxy.materialise_tensor(""), wanted)
    assert torch.equal(flipped.materialise_tensor(""), wanted.flip(-1))


def test_metadata_costs_no_pixels() -> None:
    proxy = _proxy()
    assert proxy.shape == (3, 13, 17) and proxy.dtype == torch.uint8 and proxy.ndim == 3 and len(proxy) == 3
    assert proxy.size() == (3, 13, 17) and proxy.size(-1) == 17 and proxy.size == (17, 13)
    assert proxy.numel() == TENSOR.numel() and not proxy.is_floating_point() and torch.is_tensor(proxy)
    assert (proxy.width, proxy.height, proxy.mode, proxy.getbands()) == (17, 13, "RGB", ("R", "G", "B"))
    assert F.get_size(proxy) == [13, 17] and F.get_num_channels(proxy) == 3
    assert not proxy.source.materialised


def test_it_stays_in_its_worker() -> None:
    with pytest.raises(TypeError, match="stays in its worker"):
        pickle.dumps(_proxy())
    proxy = _proxy()
    assert copy.deepcopy(proxy) is proxy


def test_who_needed_pixels_is_told() -> None:
    reasons: set[str] = set()
    with collect_notes(reasons), capture():
        v2.Compose([v2.ToImage(), v2.Lambda(lambda image: image + 1)])(_proxy(pil=True))
        v2.AugMix()(_proxy(pil=True))
        tv_tensors.Mask(_proxy())
    assert reasons == {"Lambda", "AugMix"}


# -- a PIL face --------------------------------------------------------------------------------------------------------

FACE: dict[str, Callable[[Any], Any]] = {
    **{
        f"transpose {method.name}": (lambda image, method=method: image.transpose(method))
        for method in PIL.Image.Transpose
    },
    "crop": lambda image: image.crop((3, 2, 20, 9)),
    "resize": lambda image: image.resize((8, 9), PIL.Image.Resampling.BOX),
    "convert": lambda image: image.convert("L"),
    "convert with a matrix": lambda image: image.convert("RGB", (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0)),
    "quantize": lambda image: image.quantize(4).convert("RGB"),
    "split": lambda image: image.split()[1],
    "copy": lambda image: image.copy(),
}


def _pasted(image: Any) -> Any:
    image.paste((1, 2, 3), (0, 0, 5, 5))
    return image


def _small(image: Any) -> Any:
    image.thumbnail((6, 6))
    return image


FACE |= {"paste": _pasted, "thumbnail": _small}


@pytest.mark.parametrize("name", FACE)
def test_it_does_what_a_pil_image_does(name: str) -> None:
    found = FACE[name](_proxy(pil=True))
    wanted = FACE[name](PIL.Image.fromarray(PIXELS))
    assert found.size == wanted.size and found.mode == wanted.mode
    pixels = found.materialise_tensor("") if isinstance(found, ProxyImage) else F.pil_to_tensor(found)
    assert torch.equal(pixels, F.pil_to_tensor(wanted))


# -- capture -----------------------------------------------------------------------------------------------------------


def _patched() -> dict[str, Any]:
    owners = (PIL.Image, torchvision.io, F1, F, torch, tv_tensors)
    kept = {
        f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items() if callable(value)
    }
    return kept | {"ToImage": v2.ToImage._transformed_types, "ToDtype": v2.ToDtype.transform}


def test_everything_is_put_back() -> None:
    before = _patched()
    with capture():
        with contextlib.suppress(RuntimeError), capture():
            raise RuntimeError
        assert PIL.Image.open is not before["PIL.Image.open"]
    assert _patched() == before


def test_other_threads_notice_nothing() -> None:
    found: list[Any] = []
    with capture():
        assert isinstance(PIL.Image.fromarray(PIXELS), ProxyImage)
        thread = threading.Thread(target=lambda: found.append(PIL.Image.fromarray(PIXELS)))
        thread.start()
        thread.join()
        with no_capture():
            found.append(PIL.Image.fromarray(PIXELS))
        assert isinstance(PIL.Image.fromarray(PIXELS), ProxyImage)
    assert [type(image) for image in found] == [PIL.Image.Image] * 2


# -- kernels -----------------------------------------------------------------------------------------------------------

SIZED: list[tuple[str, dict[str, Any]]] = [
    *(("resize", {"size": size, "max_size": limit}) for size, limit in ((7, None), (7, 8), ([5], None), ([5, 9], None), (None, 11))),
    ("resized_crop", {"top": 1, "left": 2, "height": 5, "width": 6, "size": [7, 8]}),
    ("crop", {"top": -2, "left": 1, "height": 20, "width": 9}),
    *(("center_crop", {"output_size": size}) for size in (5, [6], [8, 30])),
    *(("pad", {"padding": padding}) for padding in (2, [1, 2], [1, 2, 3, 4])),
    *(("rotate", {"angle": angle, "expand": True}) for angle in (0, 13.3, 45, 90, 180)),
    ("rgb_to_grayscale", {"num_output_channels": 1}),
    ("horizontal_flip", {}),
]  # fmt: skip


@pytest.mark.parametrize("pil", [True, False], ids=["PIL", "tensor"])
@pytest.mark.parametrize(("name", "kwargs"), SIZED, ids=lambda value: value if isinstance(value, str) else "")
def test_recorded_sizes_are_torchvisions(name: str, kwargs: dict[str, Any], pil: bool) -> None:
    recorded = getattr(F, name)(_proxy(pil=pil), **kwargs)
    real = getattr(F, name)(PIL.Image.fromarray(PIXELS) if pil else TENSOR, **kwargs)
    assert isinstance(recorded, ProxyImage) and not recorded.source.materialised
    assert recorded.shape == (F.pil_to_tensor(real) if pil else real).shape


def test_a_functional_it_does_not_know_runs_on_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_dali.proxies import kernels

    class Other(ProxyImage):
        pass

    monkeypatch.setattr(kernels, "_SAME_SHAPE", tuple(name for name in kernels._SAME_SHAPE if name != "invert"))
    register(Other)
    other: Any = Other.make(ImageSource.from_pixels(PIXELS)).record("to_image", {})
    assert torch.equal(F.invert(other), 255 - TENSOR) and other.source.materialised == ["invert"]
