"""The one kind of error that means: this file, not this program. Runs in the worker."""

from __future__ import annotations

from typing import Any


class MediaError(ValueError):
    """A file that cannot be used; the message is the reason alone.

    Args:
        reason: Short, without path or index: whoever knows them adds them.
        path: The file, where known.
    """

    def __init__(self, reason: str, path: str | None = None) -> None:
        super().__init__(reason)
        self.path = path

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.path)
