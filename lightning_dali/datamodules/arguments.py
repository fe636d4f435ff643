"""A datamodule's arguments, sorted into those of `Options`, those of `BaseDataModule` and its own. Runs in the rank.

Every leaf spells out its keywords, for editors, Hydra and LightningCLI; what becomes of them is said here, once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

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


Kind = TypeVar("Kind", bound=type)


def explained_by(other: type) -> Callable[[Kind], Kind]:
    """Adds to a class's docstring what the other's says of the arguments that its own leaves out.

    They are written once, and LightningCLI's ``--help``, which reads docstrings, shows them for every datamodule.
    """

    def explain(kind: Kind) -> Kind:
        if kind.__doc__ and other.__doc__:  # python -OO has none
            own, known = _argument_texts(kind.__doc__), _argument_texts(other.__doc__)
            names = inspect.signature(kind).parameters
            missing = [known[name] for name in names if name in known and name not in own]
            before, raises, after = inspect.cleandoc(kind.__doc__).partition("\n\nRaises:")
            kind.__doc__ = "\n".join([before, *missing]) + raises + after
        return kind

    return explain


def _argument_texts(docstring: str) -> dict[str, str]:
    """The entries of a docstring's `Args` section, by name, as they stand there."""
    _, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    entries = re.split(r"^(?=    \w+: )", section.partition("\n\n")[0], flags=re.MULTILINE)
    return {entry.split(":")[0].strip(): entry.rstrip() for entry in entries if entry.strip()}
