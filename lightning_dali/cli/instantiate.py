"""Configs into objects: `_target_` as Hydra has it, `class_path` as LightningCLI has it. Runs in the rank.

Containers arrive as plain lists and dicts, as with Hydra's `_convert_: all`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_dali.cli.errors import ConfigError, meant

__all__ = ["instantiate", "locate"]

_WORDS = {"_target_", "_args_", "_partial_", "_convert_", "_recursive_"}


def instantiate(config: Any, where: str = "config") -> Any:
    """Makes what a config describes.

    Args:
        config: A container of OmegaConf's, or a plain one.
        where: Its place in the file, for messages.

    Raises:
        ConfigError: An unknown target, a misspelt or missing argument, or what the target itself raised; with the place.
    """
    if isinstance(config, (DictConfig, ListConfig)):
        try:
            config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    return _make(config, where)


def _make(node: Any, where: str, *, recursive: bool = True) -> Any:
    if isinstance(node, list):
        return [_make(item, f"{where}[{number}]") for number, item in enumerate(node)] if recursive else node
    if not isinstance(node, Mapping):
        return node
    if "class_path" in node:
        init = node.get("init_args") or {}
        node = {"_target_": node["class_path"], **init}
    if "_target_" not in node:
        return {key: _make(item, f"{where}.{key}") for key, item in node.items()} if recursive else dict(node)
    recursive = bool(node.get("_recursive_", True))
    arguments = {key: item for key, item in node.items() if key not in _WORDS}
    if recursive:
        arguments = {key: _make(item, f"{where}.{key}") for key, item in arguments.items()}
    positional = _make(list(node.get("_args_", ())), f"{where}._args_", recursive=recursive)
    target = node["_target_"]
    function = locate(target, where) if isinstance(target, str) else target
    if not callable(function):
        raise ConfigError(f"{where}: _target_ {target!r} is {function!r}, which cannot be called.")
    partial = bool(node.get("_partial_", False))
    _check(function, positional, arguments, f"{where}: {target}", partial=partial)
    if partial:
        return functools.partial(function, *positional, **arguments)
    try:
        return function(*positional, **arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {target}: {error}") from error


def locate(path: str, where: str = "config") -> Any:
    """The object with a dotted path.

    Raises:
        ConfigError: There is none; says which part is missing.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: {path!r} is no dotted path such as 'lightning_dali.ImageDataModule'.")
    found: Any = None
    for number, part in enumerate(parts):
        name = ".".join(parts[: number + 1])
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        if found is not None and not hasattr(found, "__path__"):
            raise ConfigError(
                f"{where}: {path!r}: {'.'.join(parts[:number])} has no {part!r}.{meant(part, dir(found))}"
            )
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name != name and not name.startswith(f"{error.name}."):
                raise ConfigError(
                    f"{where}: {path!r}: importing {name} needs {error.name!r}, which is not there."
                ) from error
            owner = f"{'.'.join(parts[:number])} has no {part!r}" if number else f"there is no module {part!r}"
            raise ConfigError(f"{where}: {path!r}: {owner}.{meant(part, dir(found)) if number else ''}") from error
    return found


def _check(
    function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any], where: str, *, partial: bool
) -> None:
    """Looks at the names before anything is made, so that a misspelt one is told with its neighbours."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without one
        return
    parameters = signature.parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        unknown = [name for name in kwargs if name not in parameters]
        if unknown:
            raise ConfigError(
                f"{where} takes no argument {unknown[0]!r}.{meant(unknown[0], parameters)} It takes {', '.join(parameters)}."
            )
    try:
        signature.bind_partial(*args, **kwargs) if partial else signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}.") from error
