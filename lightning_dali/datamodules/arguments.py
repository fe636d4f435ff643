"""A datamodule's arguments, sorted into those of `Options`, those of `BaseDataModule` and its own. Runs in the rank.

Every leaf spells out its keywords, for editors, Hydra and LightningCLI; what becomes of them is said here, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.options import Options

_OPTIONS = {field.name for field in fields(Options)}
_BASE = set(inspect.signature(BaseDataModule.__init__).parameters) - {"self", "modality", "options"}


def sort_arguments(given: Mapping[str, Any], *, own: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `BaseDataModule.__init__` takes beside the modality: the options, checked, and the arguments it shares with a leaf.

    Args:
        given: The `locals()` of the leaf's `__init__`, before it binds anything else.
        own: The arguments that the leaf uses itself.

    Raises:
        TypeError: An argument is neither, which would be accepted and ignored; or an option has the wrong type.
        ValueError: An option has a value that is not allowed.
    """
    names = set(given) - {"self", "__class__"}
    if unknown := names - _OPTIONS - _BASE - set(own):
        raise TypeError(
            f"{type(given['self']).__name__} has arguments that nothing reads: {', '.join(sorted(unknown))}. Allowed are "
            "the fields of Options, the arguments of BaseDataModule and what `own` names."
        )
    options = Options(**{name: given[name] for name in names & _OPTIONS})
    return {"options": options, **{name: given[name] for name in names & _BASE}}
