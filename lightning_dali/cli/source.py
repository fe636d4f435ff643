"""What a command is about: a YAML, or a function that makes a datamodule. Runs in the rank."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_dali.cli.compose import compose
from lightning_dali.cli.errors import ConfigError
from lightning_dali.cli.instantiate import instantiate
from lightning_dali.loader import Loader

__all__ = ["Source", "load_source"]

DATA_KEYS = ("data", "datamodule", "dm")
"""Where a YAML keeps its datamodule, unless it is one itself."""
MODEL_KEYS = ("model", "module")


@dataclass(frozen=True)
class Source:
    """A datamodule, and the config that it came from."""

    datamodule: Any
    config: DictConfig | None = None

    def loader(self, stage: str) -> Loader:
        """The first loader of a stage."""
        found: Loader = self.datamodule.stage_loaders(stage)[0]
        return found

    def model(self) -> Any:
        """The config's model, or None."""
        key = _key_of(self.config, MODEL_KEYS)
        return None if key is None or self.config is None else instantiate(_child(self.config, key), key)


def load_source(given: str, overrides: Sequence[str] = ()) -> Source:
    """Reads a source.

    Args:
        given: `file.yaml`; `module:function` or `file.py:function`, a function that returns a datamodule, which gets
            overrides as keyword arguments.
        overrides: `key=value`.

    Raises:
        ConfigError: It cannot be read, or makes no datamodule of this package.
    """
    if os.getcwd() not in sys.path:  # as `python -m` has it: `_target_`s and functions of one's own project
        sys.path.insert(0, os.getcwd())
    config = None
    if given.endswith((".yaml", ".yml")):
        config = compose(Path(given), overrides)
        key = "" if "_target_" in config or "class_path" in config else _key_of(config, DATA_KEYS)
        if key is None:
            raise ConfigError(
                f"{given} has no datamodule: expected a _target_ at its top, or one of the keys {', '.join(DATA_KEYS)}; it "
                f"has {', '.join(map(str, config)) or 'nothing'}."
            )
        made = instantiate(_child(config, key) if key else config, key or Path(given).name)
    else:
        made = _call(given, overrides)
    if not hasattr(made, "stage_loaders"):
        raise ConfigError(
            f"{given} makes a {type(made).__name__}: expected a datamodule of lightning_dali (ImageDataModule, "
            "VideoDataModule, SpeechDataModule, DALIDataModule)."
        )
    return Source(made, config)


def _child(config: DictConfig, key: str) -> Any:
    return config[key]  # resolves against the whole config, where interpolations point


def _key_of(config: DictConfig | None, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if config is not None and config.get(key) is not None), None)


def _call(given: str, overrides: Sequence[str]) -> Any:
    module_name, colon, name = given.rpartition(":")
    if not colon or not module_name:
        raise ConfigError(f"{given!r}: expected file.yaml, module:function or file.py:function.")
    module = _module(module_name, given)
    if not hasattr(module, name):
        raise ConfigError(f"{given!r}: {module_name} has no {name!r}.")
    settings = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(settings, dict)
    return instantiate({"_target_": getattr(module, name), **settings}, given)


def _module(name: str, given: str) -> Any:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{given!r}: {error}.") from error
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{given!r}: no such file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # workers that are not forked import it by name
    spec.loader.exec_module(module)
    return module
