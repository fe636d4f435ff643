"""Containers of OmegaConf as plain ones, and a word where a config was not made into objects. Runs in the rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["check_dataset_transforms", "check_made", "check_transform", "plain"]

_MARKS = ("_target_", "class_path")


def plain(name: str, value: Any) -> Any:
    """An argument without OmegaConf's containers around what it holds.

    Args:
        name: The argument's, for the message.
        value: Whatever was passed; what is no container comes back as it is.

    Raises:
        TypeError: It is, or contains, a config that was not instantiated.
    """
    omegaconf = sys.modules.get("omegaconf")  # not imported: then nothing can be its container
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        value = omegaconf.OmegaConf.to_container(value, resolve=True)
    check_made(name, value)
    return value


def check_made(name: str, value: Any) -> None:
    """Refuses what still has a `_target_` in it.

    Raises:
        TypeError: With the place and what to write in the config.
    """
    if isinstance(value, Mapping):
        mark = next((mark for mark in _MARKS if mark in value), None)
        if mark is not None:
            raise TypeError(
                f"{name} is a config that was not made into an object: {mark} is {value[mark]!r}. Make the datamodule with "
                "hydra.utils.instantiate and leave _recursive_ at true; below a node that holds objects in a list or dict "
                "write _convert_: all."
            )
        for key, item in value.items():
            check_made(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_made(f"{name}[{number}]", item)


def check_transform(name: str, value: Any) -> Any:
    """A transform, if it can be called, or None.

    Raises:
        TypeError: With what it is instead, and what to do.
    """
    if value is None or callable(value):
        return value
    advice = "Pass None or something that can be called, such as v2.Compose([...])."
    if isinstance(value, (list, tuple)):
        advice = "Put the list into v2.Compose (in a config: _target_: torchvision.transforms.v2.Compose, transforms: [...])."
    elif isinstance(value, Mapping):
        advice = "A config needs a _target_ to become a transform, and _convert_: all where it holds objects."
    raise TypeError(f"{name} is a {type(value).__name__}, which cannot be called: {value!r:.80}. {advice}")


def check_dataset_transforms(name: str, dataset: Any) -> None:
    """Looks at what torchvision's datasets keep their transforms in.

    Raises:
        TypeError: One of them is a config.
    """
    for attribute in ("transform", "transforms", "target_transform"):
        held = getattr(dataset, attribute, None)
        if held is not None and not callable(held):
            check_transform(f"{name}.{attribute}", plain(f"{name}.{attribute}", held))
