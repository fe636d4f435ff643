"""Headers, completeness and worker-side decoding of images, against PIL; and DALI's CPU decoder on the same bytes.

Longer than the house's 300 lines because everything here runs over the same two tables of made-up files.
"""

import io
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_dali.media import (
    MAX_PIXELS,
    ImageError,
    ImageHeader,
    check_complete,
    check_size,
    decode_image,
    encode_pnm,
    pnm_size,
    read_image_header,
    write_pnm_into,
)

REAL = Path(__file__).parents[3] / "shared" / "media" / "images"
SIZES = [(96, 120), (61, 83), (7, 3), (1, 1)]  # (H, W)
JPEG_TOLERANCE = 0.5  # mean difference in 255ths; measured 0 with one libjpeg-turbo on both sides


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth patches with noise on top, like a photograph."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray(np.clip(smooth + generator.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8))


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees
    return exif


def gray16(image: Image.Image) -> Image.Image:
    return Image.fromarray(1000 * np.asarray(image.convert("L")).astype(np.uint16) % 64000 + 5)


def with_alpha(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    image.putalpha(0)
    return image


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(image: Image.Image, *chunks: bytes) -> bytes:
    png = encode(image, "PNG")
    return png[:33] + b"".join(chunks) + png[33:]


def jpeg_with(image: Image.Image, segment: bytes) -> bytes:
    jpeg = encode(image, "JPEG")
    return jpeg[:20] + segment + jpeg[20:]  # after the JFIF segment


def top_down_bmp(image: Image.Image) -> bytes:
    bmp = bytearray(encode(image, "BMP"))
    struct.pack_into("<i", bmp, 22, -image.height)
    return bytes(bmp)


def without_jfif(image: Image.Image, identifiers: bytes) -> bytes:
    jpeg = bytearray(encode(image, "JPEG"))
    frame, scan = jpeg.index(b"\xff\xc0"), jpeg.index(b"\xff\xda")
    jpeg[frame + 10 : frame + 19 : 3] = jpeg[scan + 5 : scan + 11 : 2] = identifiers
    return bytes(jpeg[:2] + jpeg[20:])


def sixteen_bit_rgb_png(image: Image.Image) -> bytes:
    rows = np.pad(np.asarray(image).astype(">u2").reshape(image.height, -1).view(np.uint8), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", image.width, image.height, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
THUMBNAIL = encode(photo(24, 32), "JPEG")
APP1_THUMBNAIL = b"\xff\xe1" + struct.pack(">H", len(THUMBNAIL) + 8) + b"Exif\0\0" + THUMBNAIL
GAMMA = chunk(b"gAMA", struct.pack(">I", 30000)) + chunk(b"bKGD", struct.pack(">3H", 200, 1, 9))

# What DALI may decode: name -> (file, the modes in which it gives PIL's pixels).
RGB, GRAY = frozenset({"RGB"}), frozenset({"L", "RGB"})
EXACT: dict[str, tuple[Callable[[Image.Image], bytes], frozenset[str]]] = {
    "jpeg-444": (lambda im: encode(im, "JPEG", subsampling=0, quality=90), RGB),
    "jpeg-422": (lambda im: encode(im, "JPEG", subsampling=1), RGB),
    "jpeg-420": (lambda im: encode(im, "JPEG", subsampling=2), RGB),
    "jpeg-420-q30": (lambda im: encode(im, "JPEG", subsampling=2, quality=30), RGB),
    "jpeg-restarts": (lambda im: encode(im, "JPEG", restart_marker_rows=1), RGB),
    "jpeg-progressive": (lambda im: encode(im, "JPEG", progressive=True), RGB),
    "jpeg-exif": (lambda im: encode(im, "JPEG", exif=rotated(), icc_profile=bytes(70000)), RGB),
    "jpeg-thumbnail": (lambda im: jpeg_with(im, APP1_THUMBNAIL), RGB),
    "jpeg-no-jfif": (lambda im: without_jfif(im, b"\0\1\2"), RGB),
    "jpeg-padded": (lambda im: encode(im, "JPEG") + bytes(512), RGB),
    "jpeg-mpo": (lambda im: encode(im, "MPO", save_all=True, append_images=[photo(*im.size[::-1], 5)]), RGB),
    "jpeg-gray": (lambda im: encode(im.convert("L"), "JPEG"), GRAY),
    "jpeg-gray-progressive": (lambda im: encode(im.convert("L"), "JPEG", progressive=True), GRAY),
    "png-rgb": (lambda im: encode(im, "PNG"), RGB),
    "png-rgb-exif": (lambda im: encode(im, "PNG", exif=rotated()), RGB),
    "png-rgb-transparent": (lambda im: encode(im, "PNG", transparency=im.getpixel((0, 0))), RGB),
    "png-rgb-gamma": (lambda im: png_with(im, GAMMA), RGB),
    "png-animated": (lambda im: encode(im, "PNG", save_all=True, append_images=[photo(*im.size[::-1], 5)]), RGB),
    "png-gray": (lambda im: encode(im.convert("L"), "PNG"), GRAY),
    "png-gray-transparent": (lambda im: encode(im.convert("L"), "PNG", transparency=7), GRAY),
    "bmp-24": (lambda im: encode(im, "BMP"), RGB),
    "bmp-24-top-down": (top_down_bmp, RGB),
    "webp-lossy": (lambda im: encode(im, "WEBP"), RGB),
    "webp-lossless": (lambda im: encode(im, "WEBP", lossless=True), RGB),
    "pnm-rgb": (lambda im: encode(im, "PPM"), RGB),
    "pnm-gray": (lambda im: encode(im.convert("L"), "PPM"), GRAY),
}
# What PIL decodes in the worker, in every mode.
LEFT_TO_PIL: dict[str, Callable[[Image.Image], bytes]] = {
    "jpeg-cmyk": lambda im: encode(im.convert("CMYK"), "JPEG"),
    "jpeg-stored-rgb": lambda im: encode(im, "JPEG", keep_rgb=True),
    "jpeg-adobe-rgb": lambda im: jpeg_with(im, ADOBE_RGB),
    "jpeg-rgb-identifiers": lambda im: without_jfif(im, b"RGB"),
    "jpeg-extended": lambda im: encode(im, "JPEG").replace(b"\xff\xc0", b"\xff\xc1", 1),
    "jpeg-fill-bytes": lambda im: jpeg_with(im, b"\xff\xff"),
    "png-rgba": lambda im: encode(with_alpha(im), "PNG"),
    "png-gray-alpha": lambda im: encode(with_alpha(im).convert("LA"), "PNG"),
    "png-palette": lambda im: encode(im.quantize(64), "PNG"),
    "png-1bit": lambda im: encode(im.convert("1"), "PNG"),
    "png-gray16": lambda im: encode(gray16(im), "PNG"),
    "png-rgb16": sixteen_bit_rgb_png,
    "bmp-gray": lambda im: encode(im.convert("L"), "BMP"),
    "bmp-palette": lambda im: encode(im.quantize(64), "BMP"),
    "bmp-1bit": lambda im: encode(im.convert("1"), "BMP"),
    "bmp-32": lambda im: encode(with_alpha(im), "BMP"),
    "webp-exif": lambda im: encode(im, "WEBP", exif=rotated()),
    "webp-rgba": lambda im: encode(with_alpha(im), "WEBP", lossless=True),
    "webp-lossy-rgba": lambda im: encode(with_alpha(im), "WEBP"),
    "tiff-rgb": lambda im: encode(im, "TIFF"),
    "tiff-lzw": lambda im: encode(im, "TIFF", compression="tiff_lzw"),
    "tiff-exif": lambda im: encode(im, "TIFF", tiffinfo={0x0112: 6}),
    "tiff-float": lambda im: encode(im.convert("F"), "TIFF"),
    "tiff-int32": lambda im: encode(im.convert("L").convert("I"), "TIFF"),
    "tiff-gray16": lambda im: encode(gray16(im), "TIFF"),
    "gif": lambda im: encode(im, "GIF"),
    "jpeg2000": lambda im: encode(im, "JPEG2000", num_resolutions=1),
    "avif": lambda im: encode(im, "AVIF"),
    "pnm-1bit": lambda im: encode(im.convert("1"), "PPM"),
    "pnm-254": lambda im: encode(im, "PPM").replace(b"255", b"254", 1),
    "pnm-comment": lambda im: encode(im, "PPM").replace(b"\n", b"\n# hello\n", 1),
}
ALL = {**{name: make for name, (make, _) in EXACT.items()}, **LEFT_TO_PIL}


class DaliDecoder:
    """One CPU pipeline per output type; rebuilt after an error, as an errored pipeline is gone for good."""

    def __init__(self) -> None:
        self.pipelines: dict[str, Any] = {}

    def build(self, mode: str) -> Any:
        dali: Any = pytest.importorskip(
            "nvidia.dali"
        )  # untyped on purpose: DALI's own annotations refuse device_id=None
        pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            encoded = dali.fn.external_source(name="encoded", dtype=dali.types.UINT8, ndim=1)
            output_type = {"RGB": dali.types.RGB, "L": dali.types.GRAY}[mode]
            pixels = dali.fn.decoders.image(encoded, device="cpu", output_type=output_type, adjust_orientation=False)
            pipeline.set_outputs(pixels)
        return pipeline

    def __call__(self, data: bytes | np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
        if mode not in self.pipelines:
            self.pipelines[mode] = self.build(mode)
        pipeline = self.pipelines[mode]
        pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8)])
        try:
            pixels = np.array(pipeline.run()[0].at(0))
        except RuntimeError:
            del self.pipelines[mode]
            raise
        return pixels[..., 0] if mode == "L" else pixels


@pytest.fixture(scope="module")
def dali() -> DaliDecoder:
    pytest.importorskip("nvidia.dali")
    return DaliDecoder()


def pil(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def described(header: ImageHeader) -> tuple[str, int, int, str]:
    return header.format, header.width, header.height, header.mode


# ---- headers ----


@pytest.mark.parametrize("name", ALL)
def test_header_is_what_pil_reports(name: str, tmp_path: Path) -> None:
    for height, width in SIZES:
        path = tmp_path / name
        path.write_bytes(ALL[name](photo(height, width)))
        data = path.read_bytes()
        with Image.open(path) as image:
            expected = (image.format, image.width, image.height, image.mode)
        for view in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
            assert described(read_image_header(view)) == expected
        assert check_complete(data, read_image_header(data)) is None


@pytest.mark.parametrize("name", EXACT)
def test_exact_modes_are_listed(name: str) -> None:
    make, modes = EXACT[name]
    header = read_image_header(make(photo(24, 32)))
    assert header.exact == modes
    assert header.dali_decodes(header.mode)
    assert not header.dali_decodes("CMYK")


@pytest.mark.parametrize("name", LEFT_TO_PIL)
def test_everything_else_is_left_to_pil(name: str) -> None:
    header = read_image_header(LEFT_TO_PIL[name](photo(24, 32)))
    assert not any(header.dali_decodes(mode) for mode in ("RGB", "L", header.mode))


def test_header_does_not_use_a_patched_open(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(photo(24, 32), "TIFF")
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("called the patched PIL.Image.open"))
    assert described(read_image_header(data)) == ("TIFF", 32, 24, "RGB")
    assert decode_image(data).shape == (24, 32, 3)


def test_header_of_a_photo_takes_microseconds() -> None:
    data = encode(photo(375, 500), "JPEG", quality=95)
    assert len(data) > 80_000
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            read_image_header(data)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 50e-6  # 4 us on an idle core; the margin is for a busy one


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"^empty file$"),
        (b"<html><body>404 Not Found</body></html>", r"^not an image: starts with b'<html><body>404 ' \(39 bytes\)$"),
        (b"this is not an image at all.", r"^not an image: starts with b'this is not an i'"),
        (bytes(100), r"^not an image"),
        (THUMBNAIL[:100], r"^truncated or damaged"),
        (b"\xff\xd8\xff\xe0", r"^truncated or damaged"),
        (encode(photo(8, 8), "PNG")[:20], r"^truncated or damaged PNG header \(20 bytes\): "),
        (b"P6\n12", r"^truncated or damaged"),
        (b"BM12", r"^truncated or damaged"),
        (b"RIFF\0\0\0\0WEBPVP8L", r"^truncated or damaged"),
        (
            encode(photo(8, 8), "JPEG").replace(b"\x08\x00\x08\x00\x08", b"\x08\x00\x00\x00\x08", 1),
            r"damaged JPEG header",
        ),
    ],
)
def test_header_errors_name_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        read_image_header(data)


def test_misnamed_png_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(encode(photo(24, 32), "PNG"))
    assert read_image_header(path.read_bytes()).format == "PNG"


def test_narrowing_is_told() -> None:
    header = read_image_header(encode(gray16(photo(24, 32)), "PNG"))
    assert header.narrows("RGB") and header.narrows("L") and not header.narrows("I") and not header.narrows("I;16")
    assert ImageHeader("TIFF", 1, 1, "F").narrows("RGB")
    assert not ImageHeader("PNG", 1, 1, "P").narrows("RGB")


def test_header_refuses_an_image_without_pixels() -> None:
    with pytest.raises(ValueError, match="width=0, height=3"):
        ImageHeader("PNG", 0, 3, "RGB")


# ---- size and completeness ----


def test_size_limit_is_pillows() -> None:
    assert MAX_PIXELS == 2 * (1024 * 1024 * 1024 // 4 // 3)  # Image.MAX_IMAGE_PIXELS, which a process may have changed
    header = ImageHeader("PNG", 100_000, 100_000, "RGB")
    with pytest.raises(ImageError, match=r"100000 x 100000 = 10,000,000,000 pixels exceed max_pixels=178,956,970:"):
        check_size(header)
    check_size(header, None)
    check_size(ImageHeader("PNG", 10, 10, "RGB"), 100)
    with pytest.raises(ImageError, match="exceed max_pixels=99:"):
        check_size(ImageHeader("PNG", 10, 10, "RGB"), 99)


def test_pils_own_limit_is_an_image_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = encode(photo(24, 32), "TIFF")
    with pytest.raises(ImageError, match="768 pixels"):
        read_image_header(data)
    with pytest.raises(ImageError, match="768 pixels"):
        decode_image(data)


CHECKED = [name for name in EXACT if name not in ("jpeg-padded", "jpeg-mpo")]  # those end in what may be cut


@pytest.mark.parametrize("name", CHECKED)
def test_cut_files_are_suspicious(name: str) -> None:
    data = ALL[name](photo(61, 83))
    for cut in (len(data) // 2, 20, 5 if name.startswith("png") else 1):  # a PNG's last 4 bytes are a checksum
        header = read_image_header(data[:-cut]) if cut == 20 else read_image_header(data)
        assert "truncated" in str(check_complete(data[:-cut], header))


def test_cut_reasons() -> None:
    for format, reason in {
        "JPEG": "truncated JPEG: ends without an end-of-image marker",
        "PNG": "truncated PNG: ends without an IEND chunk",
        "BMP": r"truncated BMP: 2338 bytes where its header announces 2358",
        "PPM": "truncated PPM: 2297 bytes where its header announces 2317",
    }.items():
        data = encode(photo(24, 32), format)
        assert check_complete(memoryview(data)[:-20], read_image_header(data)) == reason


@pytest.mark.parametrize("tail", [b"\0", bytes(4096), b"\r\n", b"junk" * 100, THUMBNAIL, THUMBNAIL[:-20]])
def test_what_follows_the_end_is_allowed(tail: bytes) -> None:
    for format in ("JPEG", "PNG", "BMP", "WEBP", "PPM"):
        data = encode(photo(24, 32), format) + tail
        assert check_complete(data, read_image_header(data)) is None


def test_a_thumbnails_end_is_not_the_images_end() -> None:
    data = jpeg_with(photo(61, 83), APP1_THUMBNAIL)
    assert check_complete(data, read_image_header(data)) is None
    assert check_complete(data[:-200], read_image_header(data)) is not None


# ---- pixels ----


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mode", [None, "RGB", "L"])
def test_decode_is_pil(name: str, mode: str | None) -> None:
    data = ALL[name](photo(61, 83))
    expected = np.asarray(pil(data) if mode is None else pil(data).convert(mode))
    for view in (data, memoryview(data), np.frombuffer(data, np.uint8)):
        pixels = decode_image(view, mode)
        assert pixels.flags.writeable and pixels.dtype.isnative
        np.testing.assert_array_equal(pixels, expected)


def test_deep_pixels_keep_values_and_type() -> None:
    values = (1000 * np.arange(60) + 5).astype(np.uint16).reshape(6, 10)
    big_endian = encode(Image.fromarray(values), "TIFF", big_tiff=False)
    for data in (
        encode(Image.fromarray(values), "PNG"),
        encode(Image.fromarray(values), "JPEG2000", num_resolutions=1),
        big_endian,
    ):
        pixels = decode_image(data)
        assert pixels.dtype == np.uint16
        np.testing.assert_array_equal(pixels, values)
    for array in (values.astype(np.int32) * 1000, values.astype(np.float32) / 7):
        pixels = decode_image(encode(Image.fromarray(array), "TIFF"))
        assert pixels.dtype == array.dtype
        np.testing.assert_array_equal(pixels, array)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")  # PIL's words on a cut TIFF
@pytest.mark.parametrize("name", ALL)
def test_cut_files_do_not_decode_to_something_else(name: str) -> None:
    data = ALL[name](photo(61, 83))
    whole = decode_image(data, "RGB")
    for length in [*range(1, len(data), max(1, len(data) // 60)), len(data) - 20, len(data) - 2]:
        try:
            pixels = decode_image(data[:length], "RGB")
        except ImageError:
            continue
        np.testing.assert_array_equal(pixels, whole)


def test_decode_errors_name_the_reason() -> None:
    data = encode(photo(61, 83), "JPEG")
    with pytest.raises(ImageError, match=r"^cannot be decoded: image file is truncated"):
        decode_image(data[: len(data) // 2])
    with pytest.raises(ImageError, match=r"^cannot be decoded: cannot identify image file$"):
        decode_image(b"<html>")
    for empty in (b"", memoryview(b""), np.zeros(0, np.uint8)):
        for function in (decode_image, read_image_header):
            with pytest.raises(ImageError, match=r"^empty file$"):
                function(empty)


# ---- DALI ----


@pytest.mark.parametrize("name", EXACT)
def test_dali_gives_pils_pixels(name: str, dali: DaliDecoder) -> None:
    make, modes = EXACT[name]
    for height, width in SIZES:
        for image in (photo(height, width), noise(height, width)):
            data = make(image)
            for mode in modes:
                difference = np.abs(dali(data, mode).astype(int) - np.asarray(pil(data).convert(mode)).astype(int))
                if name.startswith("jpeg"):
                    assert difference.mean() < JPEG_TOLERANCE
                else:
                    assert difference.max() == 0


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real files at {REAL}")
def test_real_files(dali: DaliDecoder) -> None:
    paths = sorted(REAL.iterdir())
    assert len(paths) > 10
    for path in paths:
        data = path.read_bytes()
        header = read_image_header(data)
        with Image.open(path) as image:
            assert described(header) == (image.format, image.width, image.height, image.mode), path
            assert check_complete(data, header) is None, path
            for mode in ("RGB", "L"):
                if header.dali_decodes(mode):
                    difference = np.abs(dali(data, mode).astype(int) - np.asarray(image.convert(mode)).astype(int))
                    assert difference.mean() < JPEG_TOLERANCE, path
    assert sum(read_image_header(path.read_bytes()).dali_decodes("RGB") for path in paths) >= 13


def test_why_colour_to_gray_is_left_to_pil(dali: DaliDecoder) -> None:
    """DALI gives a JPEG's stored Y and rounds a PNG's gray down, or weighs it by its cHRM chunk."""
    primaries = struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
    for data, expected in (
        (encode(noise(96, 120), "JPEG"), 2),
        (encode(photo(96, 120), "PNG"), 1),
        (png_with(photo(96, 120), chunk(b"gAMA", struct.pack(">I", 30000)), chunk(b"cHRM", primaries)), 50),
    ):
        difference = np.abs(dali(data, "L").astype(int) - np.asarray(pil(data).convert("L")).astype(int))
        assert difference.max() >= expected


def test_why_odd_files_are_left_to_pil(dali: DaliDecoder) -> None:
    bmp16 = struct.pack("<2sIIIIiiHHIIIIII", b"BM", 62, 0, 54, 40, 2, 2, 1, 16, 0, 8, 0, 0, 0, 0) + bytes(8)
    assert read_image_header(bmp16).exact == frozenset() and decode_image(bmp16).shape == (2, 2, 3)
    # DALI's search for the orientation runs off the end of this one.
    webp = encode(photo(61, 83), "WEBP", lossless=True, exif=rotated())
    for data in (webp, bmp16, *(LEFT_TO_PIL[name](photo(61, 83)) for name in ("gif", "avif"))):
        with pytest.raises(RuntimeError):
            dali(data, "RGB")
    tiff = LEFT_TO_PIL["tiff-exif"](photo(61, 83))  # the one format that PIL turns by itself
    assert dali(tiff, "RGB").shape == (61, 83, 3) and decode_image(tiff).shape == (83, 61, 3)
    for name in ("png-gray16", "tiff-gray16", "tiff-float"):
        data = LEFT_TO_PIL[name](photo(61, 83))
        assert np.abs(dali(data, "L").astype(int) - np.asarray(pil(data).convert("L")).astype(int)).mean() > 50


def test_why_completeness_is_checked_here(dali: DaliDecoder) -> None:
    """A JPEG cut short is an error in DALI's CPU decoder; a BMP is decoded to other pixels without a word."""
    for cut in (2, 20, 1000):
        with pytest.raises(RuntimeError):
            dali(encode(photo(96, 120), "JPEG")[:-cut], "RGB")
    whole = encode(photo(61, 83), "BMP")
    assert (dali(whole[:-20], "RGB") != dali(whole, "RGB")).mean() > 0.5


# ---- PNM ----


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (700, 1), (5, 3), (61, 83), (1203, 1999)])
def test_pnm_passes_dali_unchanged(shape: tuple[int, int], dali: DaliDecoder) -> None:
    generator = np.random.default_rng(0)
    color, gray = (generator.integers(0, 256, size, dtype=np.uint8) for size in ((*shape, 3), shape))
    np.testing.assert_array_equal(dali(encode_pnm(color), "RGB"), color)
    np.testing.assert_array_equal(dali(encode_pnm(gray), "L"), gray)
    np.testing.assert_array_equal(dali(encode_pnm(gray[..., None]), "RGB"), np.stack([gray] * 3, -1))


def test_pnm_pixels_that_look_like_text(dali: DaliDecoder) -> None:
    for value in b" \t\n\r#019P":
        pixels = np.full((3, 5, 3), value, np.uint8)
        np.testing.assert_array_equal(dali(encode_pnm(pixels), "RGB"), pixels)
        np.testing.assert_array_equal(dali(encode_pnm(pixels[..., 0]), "L"), pixels[..., 0])


def test_pnm_reads_back_here() -> None:
    pixels = np.asarray(photo(61, 83))
    for view in (pixels, pixels[:, ::-1], pixels.transpose(1, 0, 2), pixels[..., 1]):
        encoded = encode_pnm(view)
        header = read_image_header(encoded)
        channels = 3 if view.ndim == 3 else 1
        assert described(header) == ("PPM", view.shape[1], view.shape[0], "RGB" if channels == 3 else "L")
        assert header.dali_decodes(header.mode) and check_complete(encoded, header) is None
        assert len(encoded) == pnm_size(view.shape[0], view.shape[1], channels)
        np.testing.assert_array_equal(decode_image(encoded), view)


def test_pnm_into_a_slab() -> None:
    pixels = np.asarray(photo(7, 5))
    slab = np.full(1000, 9, np.uint8)
    size = write_pnm_into(slab[100:], pixels)
    assert size == pnm_size(7, 5, 3) == write_pnm_into(memoryview(bytearray(size)), pixels)
    np.testing.assert_array_equal(slab[100 : 100 + size], encode_pnm(pixels))
    assert (slab[:100] == 9).all() and (slab[100 + size :] == 9).all()
    with pytest.raises(ValueError, match=r"shape \(7, 5, 3\) takes 116 bytes; the buffer has 115"):
        write_pnm_into(slab[:115], pixels)


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.zeros((4, 4), np.uint16), "holds uint8; got uint16"),
        (np.zeros((4, 4, 4), np.uint8), r"1 \(gray\) or 3 \(RGB\) channels; got 4"),
        (np.zeros(4, np.uint8), r"expected \(H, W\) or \(H, W, C\) pixels; got shape \(4,\)"),
        (np.zeros((0, 4), np.uint8), "at least one pixel; got height=0, width=4"),
    ],
)
def test_pnm_refuses(pixels: np.ndarray[Any, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        encode_pnm(pixels)


# ---- the worker's rules, and damage ----


def test_import_brings_no_dali() -> None:
    code = "import sys, lightning_dali.media.images; print([name for name in sys.modules if name.startswith('nvidia')])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["jpeg-420", "jpeg-progressive", "png-rgb", "webp-lossy", "bmp-24", "pnm-rgb"])
def test_damaged_files_decode_as_in_pil_or_fail(name: str, dali: DaliDecoder) -> None:
    data, draw = ALL[name](photo(61, 83)), random.Random(0)
    for _ in range(50):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 4))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            header = read_image_header(damaged)
            check_size(header, 10_000_000)
        except ImageError:
            continue
        if not header.dali_decodes("RGB") or check_complete(damaged, header):
            continue
        try:
            pixels = dali(bytes(damaged), "RGB")
        except RuntimeError:
            continue
        np.testing.assert_array_equal(pixels, decode_image(damaged, "RGB"))
