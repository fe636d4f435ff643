"""YAML files into one config: defaults lists, groups and overrides as Hydra reads them, for the parts of Hydra used here.

Understood: `defaults` with `_self_`, `file`, `group: option`, `group@package: option`, `optional group: option`,
`override /group: option`, absolute groups (`/group`), `# @package _global_`, and overrides `group=option`,
`group@package=option`, `key=value`, `+key=value`, `~key`. The package must work without Hydra, and a command should read what a run reads;
tests/test_configs.py compares the two on every config of this repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_dali.cli.errors import ConfigError, meant

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
PRIMARY = "config.yaml"
"""Its folder is the root of groups."""


def compose(file: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Reads a YAML with everything its defaults name.

    Args:
        file: A primary config, or a file of a group, which then stands alone. Groups are looked for from the nearest
            folder above it that has a `config.yaml`, else from its own.
        overrides: As on Hydra's command line.

    Raises:
        ConfigError: A file, group or key is not there; says which there are.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file.{_nearby(file)}")
    root = next((folder for folder in file.resolve().parents if (folder / PRIMARY).is_file()), file.resolve().parent)
    reader = _Reader(root)
    groups, values = _split(overrides, root)
    chosen: dict[str, str | None] = {}
    for _ in range(10):  # an experiment may override a group whose option overrides another
        reader.found = {}
        parts = list(reader.read(file.resolve(), "", {**chosen, **groups}))
        if reader.found.items() <= chosen.items():
            break
        chosen |= reader.found
    unused = groups.keys() - reader.groups
    for one in sorted(unused):
        group, _, place = one.partition("@")
        parts += reader.option(group, groups[one], place or group.replace("/", "."), groups)
    try:
        config = OmegaConf.merge(OmegaConf.create({}), *parts)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    assert isinstance(config, DictConfig)
    config.pop("hydra", None)
    for value in values:
        _apply(config, value, file)
    return config


@dataclass
class _Reader:
    root: Path
    found: dict[str, str | None] = field(default_factory=dict)
    """What `override` entries chose."""
    groups: set[str] = field(default_factory=set)
    """Groups that some defaults list has."""

    def read(self, file: Path, package: str, chosen: Mapping[str, str | None]) -> Iterator[Any]:
        """Yields the parts of a file, in the order of merging."""
        text = file.read_text()
        try:
            content: Any = OmegaConf.create(text) if text.strip() else OmegaConf.create({})
        except Exception as error:  # yaml's own errors, which say line and column
            raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, DictConfig):
            raise ConfigError(f"{file}: expected keys and values at the top, got a {type(content).__name__}.")
        header = _PACKAGE.search(text)
        if header is not None:
            package = "" if header[1] == "_global_" else header[1]
        entries = OmegaConf.to_container(content.pop("defaults", OmegaConf.create([])))
        assert isinstance(entries, list)
        if "_self_" not in entries:
            entries.append("_self_")
        for entry in entries:
            if entry == "_self_":
                yield _under(package, content)
            else:
                yield from self._entry(entry, file, package, chosen)

    def _entry(self, entry: Any, file: Path, package: str, chosen: Mapping[str, str | None]) -> Iterator[Any]:
        if isinstance(entry, str):
            yield from self.read(self._file(file.parent, entry, file), package, chosen)
            return
        ((key, option),) = entry.items()
        override, optional = key.startswith("override "), key.startswith("optional ")
        key = key.removeprefix("override ").removeprefix("optional ").strip()
        name, _, at = key.partition("@")
        here = "" if file.parent == self.root else f"{file.parent.relative_to(self.root)}/"
        group = name[1:] if name.startswith("/") else f"{here}{name}"
        place = at or (group if name.startswith("/") else name).replace("/", ".")
        if at.startswith("_global_"):
            place = place.removeprefix("_global_").lstrip(".")
        else:
            place = ".".join(filter(None, [package, place]))
        choice = f"{group}@{place}" if at else group
        if override:
            self.found[choice] = option
            return
        self.groups.add(choice)
        option = chosen.get(choice, option)
        if optional and option is not None and not (self.root / group / f"{option}.yaml").is_file():
            return
        yield from self.option(group, option, place, chosen)

    def option(self, group: str, option: str | None, place: str, chosen: Mapping[str, str | None]) -> Iterator[Any]:
        """Yields the parts of a group's option."""
        if option is not None:
            yield from self.read(self._file(self.root / group, str(option), None), place, chosen)

    def _file(self, folder: Path, name: str, asked_by: Path | None) -> Path:
        file = folder / f"{name.removesuffix('.yaml')}.yaml"
        if file.is_file():
            return file
        by = f" (in the defaults of {asked_by})" if asked_by else ""
        if not folder.is_dir():
            groups = sorted(one.name for one in self.root.iterdir() if one.is_dir())
            raise ConfigError(f"no group {folder.name!r} in {self.root}{by}; it has {', '.join(groups)}.")
        options = sorted(one.stem for one in folder.glob("*.yaml"))
        raise ConfigError(
            f"group {folder.name!r} has no {name!r}{by}; it has {', '.join(options)}.{meant(name, options)}"
        )


def _under(package: str, content: DictConfig) -> Any:
    """The content below its package."""
    value: Any = content
    for key in reversed(package.split(".")) if package else ():
        value = {key: value}
    return value


def _split(overrides: Sequence[str], root: Path) -> tuple[dict[str, str | None], list[str]]:
    """Overrides of groups, and of values."""
    groups: dict[str, str | None] = {}
    values = []
    for one in overrides:
        key, equals, value = one.lstrip("+").partition("=")
        if equals and key and (root / key.partition("@")[0]).is_dir():
            groups[key] = None if value in ("null", "") else value
        else:
            values.append(one)
    return groups, values


def _apply(config: DictConfig, override: str, file: Path) -> None:
    key, equals, value = override.lstrip("+~").partition("=")
    if override.startswith("~"):
        OmegaConf.update(config, key, None)
        return
    if not equals:
        raise ConfigError(f"override {override!r}: expected key=value.")
    if not override.startswith("+"):
        _check_key(config, key, file)
    OmegaConf.update(config, key, _value(value), force_add=True)


def _value(text: str) -> Any:
    """As YAML reads it."""
    parsed: Any = OmegaConf.create(f"value: {text}")
    return parsed.value


def _check_key(config: DictConfig, key: str, file: Path) -> None:
    node: Any = config
    for part in key.split("."):
        if isinstance(node, DictConfig) and part not in node:
            words = ", ".join(map(str, node)) or "no keys"
            raise ConfigError(
                f"override {key!r}: {file.name} has no key {part!r} there; it has {words}.{meant(part, list(map(str, node)))} "
                f"Write +{key}=... to add it."
            )
        node = node[int(part)] if part.isdigit() and not isinstance(node, DictConfig) else node[part]


def _nearby(file: Path) -> str:
    there = sorted(one.name for one in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
    return f" The folder has {', '.join(there)}." if there else ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
