"""The class that Lightning knows a datamodule by, under both of Lightning's import names. Runs in the rank."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning_utilities.core import rank_zero

__all__ = ["Host", "NoData"]

if TYPE_CHECKING:
    from lightning import LightningDataModule as Host
else:

    def _host() -> type:
        """`lightning`'s class, and `pytorch_lightning`'s too where it is installed in the same version.

        The two packages are one library twice, and the Trainer of each knows its own class only.
        """
        try:
            if version("pytorch-lightning") != version("lightning"):
                return L.LightningDataModule
            log = rank_zero.log
            other = importlib.import_module("pytorch_lightning")
            rank_zero.log = log  # which it replaces by its own, so that what users set for "lightning.pytorch" is lost
        except (PackageNotFoundError, ImportError):
            return L.LightningDataModule
        return type("Host", (L.LightningDataModule, other.LightningDataModule), {"__module__": __name__})

    Host = _host()


class NoData:
    """A `*_dataloader` of a datamodule without that data: no loaders, and not overridden in Lightning's eyes.

    So that Lightning says what is missing in its own words, where a hook that returns nothing makes it warn of lengths.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def __code__(self) -> Any:
        """What Lightning compares."""
        return getattr(L.LightningDataModule, self._name).__code__

    def __call__(self) -> list[Any]:
        return []
