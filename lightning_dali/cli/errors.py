"""What is said when a config or an argument of the command is wrong: one line. Runs in the rank."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "meant"]


class ConfigError(ValueError):
    """A config cannot be read or made into objects; the message says where and what."""


def meant(word: str, words: Iterable[str]) -> str:
    """A sentence that names the closest of `words`, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
