"""What stands in for pixels and samples in the worker, and how the calls made on it are recorded."""

from __future__ import annotations

from lightning_dali.proxies.calls import Call
from lightning_dali.proxies.capture import capture, captures_follow
from lightning_dali.proxies.image import ProxyImage, ProxyStack
from lightning_dali.proxies.kernels import register
from lightning_dali.proxies.notes import collect_notes
from lightning_dali.proxies.scope import no_capture
from lightning_dali.proxies.source import ImageSource
from lightning_dali.proxies.stand_in import replay

register(ProxyImage)

__all__ = [
    "Call",
    "ImageSource",
    "ProxyImage",
    "ProxyStack",
    "capture",
    "captures_follow",
    "collect_notes",
    "no_capture",
    "replay",
]
