"""What bytes are, by how they begin: files that real encoders wrote. 1 s."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest
import soundfile

from lightning_dali.media.kinds import KINDS, kind_of_bytes
from tests.media.video_files import make_video

PICTURES = ["JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "AVIF"]
SOUNDS = ["WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "MP3", "RF64", "W64"]
ENCODED = {"adts": "aac", "mp3": "mp3", "ipod": "aac", "mp4": "aac", "webm": "libopus"}


def encoded_sound(container: str) -> bytes:
    """Half a second of silence, by FFmpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(ENCODED[container], rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 24_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48_000
        out.mux([*stream.encode(frame), *stream.encode()])
    return file.getvalue()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 16)).save(file, name)
    assert kind_of_bytes(file.getvalue(), KINDS) == "image"
    assert kind_of_bytes(file.getvalue(), ["video", "audio"]) is None


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds(name: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4800), 48_000, format=name)
    assert kind_of_bytes(file.getvalue(), KINDS) == "audio"
    assert kind_of_bytes(file.getvalue(), ["image"]) is None


@pytest.mark.parametrize("container", ENCODED)
def test_containers_that_may_hold_both_are_videos_where_there_are_videos(container: str) -> None:
    data = encoded_sound(container)
    both = container in ("mp4", "webm")
    assert kind_of_bytes(data, KINDS) == ("video" if both else "audio")
    assert kind_of_bytes(data, ["image", "audio"]) == "audio"


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "h264"), ("mkv", "h264"), ("webm", "vp8"), ("avi", "mpeg4"), ("ts", "h264")]
)
def test_videos(suffix: str, codec: str, tmp_path: Path) -> None:
    data = make_video(tmp_path / f"a.{suffix}", codec, num_frames=3).read_bytes()
    assert kind_of_bytes(data, KINDS) == "video"


def test_what_may_be_several_and_what_nobody_knows() -> None:
    file = io.BytesIO()
    PIL.Image.new("P", (16, 16)).save(file, "GIF")
    assert (
        kind_of_bytes(file.getvalue(), KINDS) == "video"
        and kind_of_bytes(file.getvalue(), ["image", "audio"]) == "image"
    )
    assert kind_of_bytes(b"\0" * 64, KINDS) == "video" and kind_of_bytes(b"", ["image", "audio"]) == "image"
