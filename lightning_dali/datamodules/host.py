"""The class that Lightning knows a datamodule by, under both of Lightning's import names. Runs in the rank."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import TYPE_CHECKING, Any

import lightning as L

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
            other = importlib.import_module("pytorch_lightning")
        except (PackageNotFoundError, ImportError):
            return L.LightningDataModule
        return type("Host", (L.LightningDataModule, other.LightningDataModule), {"__module__": __name__})

    Host = _host()


def hide_hook(datamodule: Any, name: str) -> None:
    """Makes an instance look as if it did not define a `*_dataloader`: Lightning then says what is missing, in its words."""
    datamodule.__dict__[name] = MethodType(getattr(L.LightningDataModule, name), datamodule)
