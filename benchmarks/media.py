"""Makes what the benchmarks are fed: `python benchmarks/media.py FOLDER [--images N] [--videos N] [--speech N]`.

FOLDER/images/<class>/*.jpg: 500x375 and 375x500, about 88 KB, in ten classes. FOLDER/videos/<codec>_<width>x<height>_*.mp4: N of
each kind, 240 frames at 30 a second. FOLDER/speech/*.flac: 2 to 16 s at 16 kHz. Bit rates are those of real pictures and films:
decoders are not to be flattered by flat colours.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

VIDEOS = (  # codec, width, height, frames from key frame to key frame
    ("h264", 320, 256, 250),
    ("h264", 340, 256, 250),
    ("h264", 640, 360, 60),
    ("h264", 1280, 720, 60),
    ("h264", 1920, 1080, 60),
    ("hevc", 1920, 1080, 60),
)
VIDEO_FRAMES = 240
SAMPLE_RATE = 16_000


def noise(random: np.random.Generator, height: int, width: int, cell: int) -> NDArray[np.int16]:
    """Smooth noise (H, W, 3) whose shapes are `cell` pixels wide, from 0 to 255."""
    small = random.integers(0, 255, (height // cell, width // cell, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC), np.int16)


def write_image(folder: Path, number: int) -> None:
    """One JPEG of large shapes with fine structure; every third stands upright."""
    random = np.random.default_rng(number)
    height, width = (375, 500) if number % 3 else (500, 375)
    pixels = noise(random, height, width, 25) + (noise(random, height, width, 2) - 128) // 3
    path = folder / "images" / f"class{number % 10}" / f"{number:06d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)


def write_video(folder: Path, number: int, codec: str, width: int, height: int, key_frames: int) -> None:
    """A view that pans over a textured scene, two pixels a frame, with the grain of a sensor."""
    import av

    random = np.random.default_rng(number)
    tall, wide = height + VIDEO_FRAMES, width + 2 * VIDEO_FRAMES
    scene = np.clip(noise(random, tall, wide, 12) + (noise(random, tall, wide, 3) - 128) // 4, 0, 255) // 2 + 60
    encoder, quiet = {"h264": ("libx264", "log-level=none"), "hevc": ("libx265", "log-level=none:pools=1")}[codec]
    options = {"preset": "veryfast", "g": str(key_frames), f"{encoder[3:]}-params": quiet}
    path = folder / "videos" / f"{codec}_{width}x{height}_{number:04d}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(os.fspath(path), "w") as file:
        stream = file.add_stream(encoder, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for k in range(VIDEO_FRAMES):
            grain = random.integers(0, 12, (height // 2, width // 2, 1)).repeat(2, axis=0).repeat(2, axis=1)
            pixels = (scene[k : k + height, 2 * k : 2 * k + width] + grain).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())


def write_speech(folder: Path, number: int) -> None:
    """A voice that wavers, with hiss."""
    import soundfile

    random = np.random.default_rng(number)
    seconds = np.arange(int(SAMPLE_RATE * random.uniform(2, 16))) / SAMPLE_RATE
    voice = np.sin(2 * np.pi * seconds * (200 + 50 * np.sin(6 * np.pi * seconds)))
    path = folder / "speech" / f"{number:05d}.flac"
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.3 * voice + 0.02 * random.standard_normal(seconds.size), SAMPLE_RATE)


def write_all(write: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Writes on every core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--videos", type=int, default=0, help="of each kind")
    parser.add_argument("--speech", type=int, default=0)
    options = parser.parse_args()
    write_all(partial(write_image, options.folder), range(options.images))
    write_all(partial(write_speech, options.folder), range(options.speech))
    for codec, width, height, key_frames in VIDEOS:
        one = partial(write_video, options.folder, codec=codec, width=width, height=height, key_frames=key_frames)
        write_all(one, range(options.videos))


if __name__ == "__main__":
    main()
