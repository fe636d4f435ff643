"""Decode a clip's frames with PyAV, on one thread. Runs in the worker process."""

import numpy as np
import numpy.typing as npt

from lightning_dali.media.video_index import VideoError, VideoIndex
from lightning_dali.media.video_open import Source, new_packet
from lightning_dali.media.video_packets import open_packets
from lightning_dali.media.video_pictures import Pixels, RGBConverter, pictures
from lightning_dali.media.video_plan import check_frames, needed, plan


def decode_frames(
    source: Source, index: VideoIndex, frames: npt.ArrayLike, *, size: tuple[int, int] | None = None
) -> Pixels:
    """The RGB pixels of some frames, (T, H, W, 3) uint8, upright; seeks, so the video's length does not matter.

    Args:
        source: a path or a whole file, the one that `index` was made from.
        index: from `build_index` or `IndexCache`.
        frames: frame numbers in any order, also repeated; -1 gives a black frame.
        size: (H, W) to resize to, after the video's rotation, with swscale's bilinear filter, which covers all pixels
            when it makes smaller (like torchvision's `antialias=True`, to within a few levels). None keeps the frame's.

    Raises:
        ValueError: no frames, or a frame that the video has not.
        VideoError: a wanted frame does not decode, the size changes on the way, the file has changed or is truncated.
        OSError: the file cannot be opened.
    """
    wanted = check_frames(index, frames)
    height, width = size or index.size
    pixels = np.zeros((len(wanted), height, width, 3), dtype=np.uint8)
    slots: dict[int, list[int]] = {}
    for slot, packet in enumerate(index.frame_packets[wanted].tolist()):
        if wanted[slot] >= 0:
            slots.setdefault(packet, []).append(slot)
    convert = RGBConverter(index.rotation, size)
    with open_packets(source, index) as packets:
        context = packets.template.codec_context
        for segment in plan(index, wanted):
            data = packets.read(segment)
            numbers = needed(index, segment, data, packets.length_bytes, set(slots))
            left = len(slots.keys() & set(numbers))
            for number, frame in pictures(context, ((n, new_packet(data[n - segment.first])) for n in numbers)):
                if (frame.width, frame.height) != (index.width, index.height):
                    was = f"{index.width}x{index.height}"
                    raise VideoError(f"changes size on the way: {was}, then {frame.width}x{frame.height}")
                if number in slots:
                    pixels[slots.pop(number)] = convert(frame)
                    left -= 1
                if not left:
                    break
            context.flush_buffers()
    if slots:
        missing = sorted(int(wanted[slot]) for group in slots.values() for slot in group)
        raise VideoError(f"frames {missing} of {index.num_frames} do not decode: damaged or truncated")
    return pixels
