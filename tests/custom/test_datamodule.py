"""`DALIDataModule`: right pictures beside right labels whatever the dataset does with its proxy."""

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_dali import DALIDataModule
from lightning_dali.testing import recover_ids
from tests.custom import pipelines
from tests.custom.pipelines import Files, Numbers
from tests.custom.run import batches, module

# -- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (2, "fork"), (1, "forkserver")])
def test_every_nesting_holds_the_right_pictures(paths: list[Path], num_workers: int, context: str | None) -> None:
    dataset = functools.partial(Files, paths, sample=pipelines.nested)
    with module(
        dataset, pipelines.decode_and_halve, num_workers=num_workers, multiprocessing_context=context
    ) as datamodule:
        seen = []
        for batch in batches(datamodule):
            ids = batch["index"].tolist()
            assert isinstance(batch["pair"], pipelines.Pair) and isinstance(batch["views"], pipelines.Views)
            assert recover_ids(batch["pair"].image) == recover_ids(batch["views"].second[0]) == ids
            assert torch.equal(batch["views"].first, (batch["pair"].image / 2).round().to(torch.uint8))
            seen += ids
        assert sorted(seen) == list(range(len(paths))) and seen != sorted(seen)


def test_an_abandoned_pass_leaves_nothing(paths: list[Path]) -> None:
    with module(functools.partial(Files, paths), pipelines.decode, num_workers=2) as datamodule:
        for taken in (1, 3, 0):
            for _, _ in zip(range(taken), datamodule.train_dataloader(), strict=False):
                pass
            for images, ids in datamodule.train_dataloader():
                assert recover_ids(images) == ids.tolist()


def stack(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]), torch.tensor([index for _, index in samples])


def transpose(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def reverse_and_drop(samples: list[Any]) -> Any:
    return default_collate(samples[::-1][:3])


@pytest.mark.parametrize("collate_fn", [stack, default_collate, transpose, reverse_and_drop])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_custom_collate_functions(paths: list[Path], collate_fn: Callable[..., Any], num_workers: int) -> None:
    with module(
        functools.partial(Files, paths), pipelines.decode, collate_fn=collate_fn, num_workers=num_workers
    ) as datamodule:
        for images, ids in batches(datamodule):
            assert isinstance(images, tuple if collate_fn is transpose else torch.Tensor)
            assert recover_ids(images) == list(map(int, ids))


def test_a_token_says_that_it_has_no_values(paths: list[Path]) -> None:
    def sample(files: Files, index: int) -> Any:
        return files.proxy(files.read(index)).float()

    with (
        module(functools.partial(Files, paths, sample=sample), pipelines.decode) as datamodule,
        pytest.raises(AttributeError, match="no 'float' in the worker: the pipeline runs later"),
    ):
        batches(datamodule)


def test_calls_may_outnumber_the_batch_size_and_vary(paths: list[Path]) -> None:
    def sample(files: Files, index: int) -> Any:
        return [files.proxy(files.read(index)) for _ in range(1 + index % 3)], index

    with module(
        functools.partial(Files, paths, sample=sample), pipelines.decode, collate_fn=list, num_workers=1
    ) as datamodule:
        for batch in batches(datamodule):
            for images, index in batch:
                assert recover_ids(images) == [index] * (1 + index % 3)


def test_several_pipelines(paths: list[Path]) -> None:
    class Both(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, proxies: Any) -> None:
            self.proxies = proxies

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return {
                "image": self.proxies.image(paths[index].read_bytes()),
                "sum": self.proxies["math"](a=np.float32(index), b=1.0)[0],
                "text": f"number {index}",
            }

    both = {"image": pipelines.decode, "math": pipelines.add_and_subtract}
    with module(Both, both, num_workers=1) as datamodule:
        for batch in batches(datamodule):
            ids = [int(text.split()[1]) for text in batch["text"]]
            assert recover_ids(batch["image"]) == ids
            assert batch["sum"].tolist() == [index + 1 for index in ids]


def test_unread_images_of_the_dataset_stay_images(paths: list[Path]) -> None:
    """What does not go through the proxy is left alone: PIL is not captured."""
    from PIL import Image
    from torchvision.transforms import v2

    def sample(files: Files, index: int) -> Any:
        return v2.functional.to_image(Image.open(files.paths[index])), files.proxy(files.read(index)), index

    with module(functools.partial(Files, paths, sample=sample), pipelines.decode) as datamodule:
        mine, theirs, ids = batches(datamodule)[0]
        assert torch.equal(mine, theirs) and recover_ids(mine) == ids.tolist()


def test_outputs_that_differ_in_size_are_a_list() -> None:
    def make(index: int) -> np.ndarray:
        return np.full(1 + index % 2, index, np.int64)

    dataset = functools.partial(Numbers, make=make)
    with module(dataset, pipelines.identity) as datamodule:
        for values, ids in batches(datamodule):
            assert [value.tolist() for value in values] == [make(int(index)).tolist() for index in ids]
    with (
        module(dataset, pipelines.identity, ragged="error", shuffle=False) as datamodule,
        pytest.raises(ValueError, match=r"dataset index 0 gives \(1,\), index 1 gives \(2,\).*ragged='list'"),
    ):
        batches(datamodule)


# -- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipeline_that_was_made_already_is_copied(paths: list[Path]) -> None:
    made = pipelines.decode(batch_size=2, num_threads=1, device_id=None)  # smaller than the batches
    with module(functools.partial(Files, paths), made, num_workers=1) as datamodule:
        loader = datamodule.train_dataloader()
        for (images, ids), (others, _) in zip(loader, loader, strict=True):  # two passes at once
            assert recover_ids(images) == ids.tolist()
            assert len(others) == len(images)


def test_a_pipeline_that_cannot_be_copied_is_used_itself(paths: list[Path]) -> None:
    made = pipelines.with_python(batch_size=4, num_threads=1, device_id=None, exec_dynamic=True)
    with module(functools.partial(Files, paths), made) as datamodule:
        images, _ = batches(datamodule)[0]
        assert images.shape[1:] == (3, 48, 48)
        loader = datamodule.train_dataloader()
        with pytest.raises(RuntimeError, match="another pass uses it. Pass the @pipeline_def function"):
            for _ in zip(loader, loader, strict=True):
                pass
    small = pipelines.with_python(batch_size=2, num_threads=1, device_id=None, exec_dynamic=True)
    with (
        module(functools.partial(Files, paths), small) as datamodule,
        pytest.raises(ValueError, match="takes 2 rows, a batch has up to 4"),
    ):
        batches(datamodule)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_python_function_between_operators(paths: list[Path], num_workers: int) -> None:
    """The pattern of docs/custom-pipelines.md, "GPU, CPU, GPU", on the CPU."""
    with module(functools.partial(Files, paths), pipelines.with_python, num_workers=num_workers) as datamodule:
        for images, ids in batches(datamodule):
            halved = (images.float() / 2).round().to(torch.uint8)  # red and green stay below 128 for these ids
            assert recover_ids(halved) == ids.tolist()


def test_evaluation_shares_the_validation_pipeline(paths: list[Path]) -> None:
    files = functools.partial(Files, paths)
    datamodule = DALIDataModule(
        val_dataset={"a": files, "b": files},
        val_pipeline=pipelines.decode,
        test_dataset=files,
        num_workers=0,
        device="cpu",
        batch_size=16,
    )
    datamodule.setup("validate")
    datamodule.setup("test")
    for loader in (*datamodule.val_dataloader().values(), datamodule.test_dataloader()):
        seen = [index for images, ids in loader for index in recover_ids(images) if len(ids)]
        assert seen == list(range(24))
    datamodule.close()


def test_it_can_be_copied(paths: list[Path]) -> None:
    datamodule = DALIDataModule(
        train_dataset=functools.partial(Files, paths), train_pipeline=pipelines.decode, device="cpu", num_workers=0
    )
    for copied in (copy.deepcopy(datamodule), pickle.loads(pickle.dumps(datamodule))):
        copied.setup("fit")
        assert recover_ids(copied.peek()[0]) == copied.peek()[1].tolist()
        assert not datamodule._loaders
        copied.close()


def test_explain_shows_every_output(paths: list[Path]) -> None:
    with module(functools.partial(Files, paths), pipelines.decode_and_halve) as datamodule:
        told = str(datamodule.explain("train"))
    assert "your pipeline 'train_pipeline'" in told and "(0.0 kB" not in told
    assert "batch '0/0': uint8 (4, 3, 48, 48)" in told and "batch '0/1': uint8 (4, 3, 48, 48)" in told


def test_output_device_cpu_leaves_batches_there() -> None:
    with module(Numbers, pipelines.identity, output_device="cpu") as datamodule:
        batch = batches(datamodule)[0]
        assert datamodule.transfer_batch_to_device(batch, torch.device("meta"), 0) is batch
        assert datamodule.train_dataloader().server.device.outputs_on_cpu
    with pytest.raises(ValueError, match="output_device is 'gpu': allowed are 'auto', 'cpu'"):
        DALIDataModule(output_device="gpu")


# -- random operators ------------------------------------------------------------------------------------------------


def draws(rank: int = 0, *, epochs: int = 2, **options: Any) -> list[list[float]]:
    from lightning_dali.graph.custom import PipelineEntry

    with module(Numbers, pipelines.noise, shuffle=False, **options) as datamodule:
        loader = datamodule.train_dataloader()
        entry = loader.server.device.pipelines["train_pipeline"]
        other = PipelineEntry(entry.definition, seed=entry.seed, rank=rank)
        loader.server.device.pipelines["train_pipeline"] = other
        return [
            [v - i for x, index in loader for v, i in zip(x.tolist(), index.tolist(), strict=True)]
            for _ in range(epochs)
        ]


def test_random_operators_are_seeded_by_run_rank_and_epoch() -> None:
    first, second = draws()
    assert len(set(first + second)) == 32 and all(0 <= draw <= 0.5 for draw in first)
    assert draws(num_workers=2) == [first, second]
    assert draws(rank=1)[0] != first
    assert draws(seed=6)[0] != first


def test_an_abandoned_pass_does_not_move_the_next_ones_draws() -> None:
    _, second = draws()
    with module(Numbers, pipelines.noise, shuffle=False) as datamodule:
        loader = datamodule.train_dataloader()
        next(iter(loader))
        again = [v - i for x, index in loader for v, i in zip(x.tolist(), index.tolist(), strict=True)]
    assert again == second
