"""Where a clip's windows lie when more is decoded than is shown. Runs in the worker."""

from __future__ import annotations

from dataclasses import replace

from lightning_dali.graph.plan import Head, Window
from lightning_dali.proxies.sizes import Size


def sticks_out(head: Head) -> bool:
    """Whether its first window does not lie within the picture: beyond the edge is then the fill, nothing else."""
    if head.first is None:
        return False
    top, left, height, width = head.first
    return top < 0 or left < 0 or top + height > head.size[0] or left + width > head.size[1]


def within(head: Head, size: Size, shown: Window) -> Head:
    """The same, where what is decoded is larger than the picture; not for a head that `sticks_out`.

    Args:
        head: Planned for the picture.
        size: (H, W) of what is decoded.
        shown: Where the picture is in it.
    """
    top, left, height, width = head.first or (0, 0, *head.size)
    return replace(head, size=size, first=(shown[0] + top, shown[1] + left, height, width))
