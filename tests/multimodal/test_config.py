"""MultiModalDataModule from plain values: by Hydra, by this library's own command, by LightningCLI. 5 s."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.utils import instantiate as hydra_instantiate
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from torch.utils.data import StackDataset

from lightning_dali import ClipSampler, MultiModalDataModule, Padded
from lightning_dali.cli.compose import compose
from lightning_dali.cli.instantiate import instantiate
from lightning_dali.testing import make_photos, make_wavs

CONFIGS = Path(__file__).parents[2] / "configs"


def by_hydra() -> Any:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra_instantiate(hydra_compose("config", ["data=multimodal", "data.num_workers=0"]).data)


def by_command() -> Any:
    return instantiate(compose(CONFIGS / "data/multimodal.yaml", ["num_workers=0"]))


@pytest.mark.parametrize("make", [by_hydra, by_command])
def test_the_config_gives_batches(make: Callable[[], Any]) -> None:
    dm = make()
    batch = dm.peek()
    dm.close()
    assert batch["photo"].dim() == 4 and batch["photo"].shape[:2] == (8, 3)
    assert isinstance(batch["sound"], Padded) and batch["sound"].data.shape[:2] == (8, 1)
    pickle.dumps(dm)  # as `ddp_spawn` does


class Pairs(StackDataset[Any]):
    """What a user has."""

    def __init__(self, folder: str) -> None:
        super().__init__(photo=make_photos(Path(folder) / "p", 4), sound=make_wavs(Path(folder) / "s", 4))


def test_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    transform: dict[str, Any] = {
        "image": {"class_path": "torchvision.transforms.v2.RandomResizedCrop", "init_args": {"size": 16}},
        "audio": {"class_path": "torchaudio.transforms.Resample", "init_args": {"orig_freq": 16_000, "new_freq": 8000}},
    }
    clip = {"class_path": "lightning_dali.ClipSampler", "init_args": {"num_frames": 4, "stride": 2}}
    dataset = {"class_path": f"{__name__}.Pairs", "init_args": {"folder": str(tmp_path)}}
    options = {"kinds": ["image", "audio"], "train_dataset": dataset, "train_transform": transform, "batch_size": 2}
    config = {"data": {"class_path": "lightning_dali.MultiModalDataModule", "init_args": {**options, "num_workers": 0}}}
    file = tmp_path / "run.yaml"
    OmegaConf.save(config, file)

    def cli(*args: str) -> Any:
        more: dict[str, Any] = {"run": False, "save_config_callback": None, "subclass_mode_data": True}
        return LightningCLI(BoringModel, args=["--config", str(file), *args], **more).datamodule

    dm = cli("--trainer.accelerator", "cpu")
    batch = dm.peek()
    dm.close()
    assert batch["photo"].shape == (2, 3, 16, 16) and batch["sound"].data.shape[:2] == (2, 1)
    with pytest.raises(ValueError, match="kinds: got 'sound'; allowed: 'video', 'image', 'audio'"):
        cli("--data.kinds", "[image, sound]")
    config["data"]["init_args"].update({"kinds": ["video"], "train_transform": None, "with_audio": True, "clip": clip})
    OmegaConf.save(config, file)
    made = cli()
    assert isinstance(made, MultiModalDataModule) and made._clips["train"] == ClipSampler(4, stride=2)
