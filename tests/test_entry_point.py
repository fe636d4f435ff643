"""examples/train.py as a program, on several ranks and many times, and LightningCLI."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf

from lightning_dali import ImageDataModule
from lightning_dali.testing import make_images
from tests import cli_sources
from tests.test_configs import ROOT, examples_are_importable  # noqa: F401  # a fixture for all tests

TRAIN = f"""
import sys, threading, multiprocessing, pathlib
sys.path.insert(0, {str(ROOT / "examples")!r})
import train
train.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_multirun_leaves_nothing_behind(run_warm: Callable[..., Any], tmp_path: Path) -> None:
    code = TRAIN + (
        "print('left', [t.name for t in threading.enumerate() if 'lightning_dali' in t.name], "
        "multiprocessing.active_children())"
    )
    sweep = [
        "-m",
        "data.batch_size=2,4",
        "trainer=cpu",
        "+trainer.limit_train_batches=2",
        "+trainer.limit_val_batches=1",
    ]
    rc, stdout, stderr = run_warm(code, 200, args=[*sweep, "hydra.sweep.dir=sweep"], cwd=tmp_path)
    assert rc == 0 and "left [] []" in stdout, stderr[-3000:]
    sizes = [OmegaConf.load(tmp_path / "sweep" / str(job) / "rank-0.yaml").data.batch_size for job in (0, 1)]
    assert sizes == [2, 4]


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_run_the_same_config(run_warm: Callable[..., Any], tmp_path: Path) -> None:
    args = ["trainer=cpu", "trainer.devices=2", "+trainer.strategy=ddp", "+trainer.limit_train_batches=2"]
    more = ["+trainer.limit_val_batches=1", "data.batch_size=4", "hydra.run.dir=run", "trainer.max_epochs=1"]
    rc, _, stderr = run_warm(
        (ROOT / "examples" / "train.py").read_text().replace("__file__", repr(str(ROOT / "examples" / "train.py"))),
        360,
        args=[*args, *more],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},  # two ranks of two threads spin for each other's cores
    )
    assert rc == 0, stderr[-3000:]
    one, two = (OmegaConf.load(tmp_path / "run" / f"rank-{rank}.yaml") for rank in (0, 1))
    assert one == two and one.data.batch_size == 4


@pytest.fixture
def argv() -> Iterator[None]:
    before = sys.argv
    sys.argv = ["train.py"]
    yield
    sys.argv = before


def cli(*args: str, run: bool = False) -> LightningCLI:
    return LightningCLI(
        cli_sources.Slow, subclass_mode_data=True, args=list(args), run=run, seed_everything_default=1,
        save_config_callback=None,
    )  # fmt: skip


def test_lightning_cli_explains_every_datamodules_options(argv: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--data.help", "lightning_dali.VideoDataModule")
    told = " ".join(capsys.readouterr().out.split())
    assert "Finished batches that wait on the device for the model" in told  # said by ImageDataModule
    assert "Which frames make a clip in training" in told


def test_lightning_cli_prints_and_reads_its_own_config(
    argv: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--data ImageDataModule --print_config`, filled in, read, printed again: the same; and it fits."""
    with pytest.raises(SystemExit):
        cli("--data", "ImageDataModule", "--print_config")
    config = OmegaConf.create(capsys.readouterr().out)
    assert config.data.class_path == "lightning_dali.ImageDataModule" and config.data.init_args.batch_size == 64
    paths = [str(path) for path in make_images(tmp_path, 8)]
    transforms = [{"class_path": "torchvision.transforms.v2.RandomResizedCrop", "init_args": {"size": 16}}]
    transforms.append({"class_path": "torchvision.transforms.v2.ToImage"})
    filled: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 0,
        "train_dataset": {"class_path": "lightning_dali.testing.IndexedImages", "init_args": {"paths": paths}},
        "train_transform": {"class_path": "torchvision.transforms.v2.Compose", "init_args": {"transforms": transforms}},
    }
    config.data.init_args.update(filled)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    config.trainer.update({"accelerator": "cpu", "max_epochs": 1, "logger": False, **quiet})
    file = tmp_path / "run.yaml"
    OmegaConf.save(config, file)
    with pytest.raises(SystemExit):
        cli("--config", str(file), "--print_config")
    assert OmegaConf.create(capsys.readouterr().out).data.init_args.batch_size == 4
    made = cli("--config", str(file))
    assert isinstance(made.datamodule, ImageDataModule)
    made.trainer.fit(made.model, made.datamodule)
    assert made.trainer.global_step == 2


def test_lightning_cli_refuses_a_misspelt_key(argv: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--data", "ImageDataModule", "--data.batchsize", "4")
    assert "batchsize" in capsys.readouterr().err
