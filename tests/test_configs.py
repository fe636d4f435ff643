"""configs/: every file composes (as Hydra does), makes objects, runs two steps, refuses a misspelt key; containers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf
from torchvision.transforms import v2

import lightning_dali
from lightning_dali import DALIDataModule, ImageDataModule, ThroughputMonitor
from lightning_dali.cli.compose import compose
from lightning_dali.cli.errors import ConfigError
from lightning_dali.cli.instantiate import instantiate
from lightning_dali.testing import IndexedImages, make_images

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
FILES = sorted(file.relative_to(CONFIGS).with_suffix("") for file in CONFIGS.rglob("*.yaml"))
READY = {"images", "speech", "pipeline"} | ({"video"} if "VideoDataModule" in lightning_dali.__all__ else set())
EXPERIMENTS = sorted({file.name for file in FILES if file.parent.name == "experiment"} & READY)


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def by_hydra(overrides: list[str], name: str = "config") -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra_compose(name, overrides)


def fit(config: DictConfig, make: Callable[[Any], Any], **options: Any) -> L.Trainer:
    OmegaConf.set_struct(config, False)
    datamodule, model = make(config.data), make(config.model)
    config.trainer.accelerator = "cpu"
    config.trainer.update({"enable_progress_bar": False, "enable_model_summary": False, **options})
    trainer = make(config.trainer)
    try:
        trainer.fit(model, datamodule)
    finally:
        datamodule.close()
    return trainer


def overrides_of(file: Path) -> list[str]:
    """How a run chooses that file."""
    group, name = file.parent.name, file.name
    if file.name == "config":
        return []
    if group == "transform":
        return [f"transform@data.train_dataset.transform={name}"]
    return [f"{group}={name}"]


# -- composing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_composes_as_hydra_composes_it(file: Path) -> None:
    overrides = [*overrides_of(file), "seed=3", "+note=x"]
    ours, theirs = compose(CONFIGS / "config.yaml", overrides), by_hydra(overrides)
    assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
    assert ours.seed == 3 and "_target_" in ours.data and "_target_" in ours.model


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name in ("data", "trainer")], ids=str)
def test_a_file_of_a_group_stands_alone(file: Path) -> None:
    alone = compose(CONFIGS / f"{file}.yaml")
    assert OmegaConf.to_container(alone) == OmegaConf.to_container(by_hydra(overrides_of(file)))[file.parent.name]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data=image"],
            "group 'data' has no 'image'; it has images, multimodal, pipeline, speech, video. Did you mean 'images'?",
        ),
        (["data.batchsize=3"], "has no key 'batchsize' there; it has .* Did you mean 'batch_size'"),
        (["nonsense"], "expected key=value"),
    ],
)
def test_wrong_overrides_are_told(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(CONFIGS / "config.yaml", overrides)


def test_wrong_defaults_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [{data: images}, _self_]\n")
    with pytest.raises(ConfigError, match="no group 'data' in"):
        compose(tmp_path / "config.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match=r"bad.yaml: not YAML: .* line 2"):
        compose(tmp_path / "bad.yaml")


# -- making and running ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_two_steps(name: str) -> None:
    config = by_hydra([f"experiment={name}"])
    trainer = fit(config, hydra_instantiate, limit_train_batches=2, limit_val_batches=1)
    assert trainer.global_step == 2
    (monitor,) = [one for one in trainer.callbacks if isinstance(one, ThroughputMonitor)]
    assert monitor.summaries[0].samples_per_second > 0


@pytest.mark.parametrize("name", [file.name for file in FILES if file.parent.name == "debug"])
def test_every_debug_config_runs(name: str) -> None:
    config = by_hydra([f"debug={name}", "data.num_workers=0"])
    options = {"max_epochs": 1, "callbacks": []} | ({} if name == "one_batch" else {"limit_train_batches": 2})
    assert fit(config, hydra_instantiate, **options).global_step in (1, 2)


def test_this_package_makes_what_hydra_makes() -> None:
    config = by_hydra(["experiment=images"])
    assert fit(config, instantiate, limit_train_batches=2, limit_val_batches=0).global_step == 2


@pytest.mark.parametrize("kind", sorted(READY))
def test_a_misspelt_key_is_refused(kind: str) -> None:
    config = by_hydra([f"data={kind}", "+data.batchsize=4"])
    with pytest.raises(
        ConfigError, match=r"data: lightning_dali.\w+ takes no argument 'batchsize'. Did you mean 'batch_size'"
    ):
        instantiate(config.data, "data")
    with pytest.raises(Exception, match="unexpected keyword argument 'batchsize'"):
        hydra_instantiate(config.data)


def test_a_gpu_trainer_on_a_cpu_machine_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"trainer: lightning.Trainer: .*(GPU|CUDA|gpu)"):
        instantiate(by_hydra(["trainer=gpu"]).trainer, "trainer")
    datamodule = instantiate(by_hydra(["+data.device='cuda:0'"]).data, "data")
    with pytest.raises(ValueError, match="device is 'cuda:0', but torch sees no CUDA device here; pass device='cpu'"):
        datamodule.setup("fit")


# -- instantiate -----------------------------------------------------------------------------------------------------


def test_targets_partials_arguments_and_class_paths() -> None:
    made = instantiate(
        {
            "a": {"_target_": "torch.nn.Linear", "_args_": [2, 3], "bias": False},
            "b": {"class_path": "torchvision.transforms.v2.Resize", "init_args": {"size": [8, 9]}},
            "c": {"_target_": "torch.nn.functional.pad", "_partial_": True, "pad": [1, 1]},
            "d": [{"x": {"_target_": "builtins.dict", "y": 1}}, "text"],
            "e": {"_target_": "builtins.dict", "_recursive_": False, "inner": {"_target_": "torch.nn.ReLU"}},
        }
    )
    assert made["a"].weight.shape == (3, 2) and made["a"].bias is None
    assert made["b"].size == [8, 9] and made["c"](torch.ones(1)).tolist() == [0, 1, 0]
    assert made["d"] == [{"x": {"y": 1}}, "text"] and made["e"]["inner"] == {"_target_": "torch.nn.ReLU"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"_target_": "torch.nn.Liner"}, "config: 'torch.nn.Liner': torch.nn has no 'Liner'. Did you mean 'Linear'?"),
        ({"_target_": "torchh.nn"}, "there is no module 'torchh'"),
        (
            {"x": [{"_target_": "torch.nn.Linear", "in_feature": 1}]},
            r"config.x\[0\]: torch.nn.Linear takes no argument",
        ),
        ({"_target_": "torch.nn.Linear", "in_features": 1}, "missing a required argument: 'out_features'"),
        ({"_target_": "torch.float32"}, "is torch.float32, which cannot be called"),
        ({"x": {"_target_": "torchvision.transforms.v2.Resize", "size": "big"}}, "config.x: torchvision.*Resize: "),
        ({"a": "???"}, "config: .*a"),
        ({"a": "${b}"}, "config: .*b"),
    ],
)
def test_what_cannot_be_made_is_told_with_its_place(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        instantiate(OmegaConf.create(config))


# -- containers of OmegaConf -----------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> IndexedImages:
    return IndexedImages(make_images(tmp_path, 4), transform=v2.ToImage())


def test_containers_are_taken_by_constructors(images: IndexedImages) -> None:
    """What Hydra hands over without `_convert_`: objects inside of its own containers."""
    held = OmegaConf.create({"a": images, "b": images}, flags={"allow_objects": True})
    listed = OmegaConf.create([v2.ToImage(), v2.Resize((8, 8))], flags={"allow_objects": True})
    numbers = OmegaConf.create([0.5, 0.5, 0.5])
    transform = v2.Compose([v2.Compose(listed), v2.ToDtype(torch.float32, scale=True), v2.Normalize(numbers, numbers)])
    dm = ImageDataModule(
        train_dataset=IndexedImages(images.paths, transform),
        val_dataset=held,
        batch_size=2,
        num_workers=0,
        device="cpu",
    )
    assert dm.peek()[0].shape == (2, 3, 8, 8)
    loaders = dm.val_dataloader()
    assert type(loaders) is dict and list(loaders) == ["a", "b"]
    dm = ImageDataModule(
        val_dataset=OmegaConf.create([images], flags={"allow_objects": True}), num_workers=0, device="cpu"
    )
    assert type(dm.val_dataloader()) is list


COMPOSE = {"_target_": "torchvision.transforms.v2.Compose", "transforms": []}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"train_transform": COMPOSE}, "train_transform is a config .* _target_ is '.*Compose'.*_convert_: all"),
        ({"train_transform": [{"_target_": "x.Y"}]}, r"train_transform\[0\] is a config"),
        ({"eval_transform": {"size": 3}}, "eval_transform is a dict, which cannot be called.* _target_ .*_convert_"),
        ({"batch_transform": [1]}, "batch_transform is a list, which cannot be called.*v2.Compose"),
        ({"val_dataset": {"a": {"_target_": "x.Y"}}}, r"val_dataset.a is a config"),
    ],
)
def test_a_config_that_was_not_made_is_told(images: IndexedImages, arguments: Any, said: str) -> None:
    for convert in (OmegaConf.create, lambda plain: plain):
        with pytest.raises(TypeError, match=said):
            ImageDataModule(train_dataset=images, **{key: convert(value) for key, value in arguments.items()})


def test_a_config_in_a_dataset_or_a_pipeline_is_told(images: IndexedImages) -> None:
    images.transform = OmegaConf.create(COMPOSE)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"train_dataset.transform is a config .*_convert_: all"):
        ImageDataModule(train_dataset=images)
    with pytest.raises(TypeError, match=r"train_pipeline is a config"):
        DALIDataModule(train_dataset=lambda proxy: [], train_pipeline=OmegaConf.create({"_target_": "x.y"}))
