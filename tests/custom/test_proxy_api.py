"""NVIDIA's documented proxy examples, with only the import changed; and where the stock proxy fails.

The three examples are those in the docstring of `nvidia.dali.plugin.pytorch.experimental.proxy.DALIServer` (DALI 2.4), on
the CPU. Example 2 there passes `device="cpu"` to a function without such a parameter, which DALI refuses: left out.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from nvidia.dali import fn, pipeline_def, types

import lightning_dali.proxy_api as dali_proxy
from lightning_dali.testing import make_images, recover_ids
from tests.custom import pipelines
from tests.custom.pipelines import read_filepath


@pipeline_def
def rn50_train_pipe() -> Any:
    rng = fn.random.coin_flip(probability=0.5)
    filepaths = fn.external_source(name="images", no_copy=True)
    jpegs = fn.io.file.read(filepaths)
    images = fn.decoders.image_random_crop(
        jpegs,
        device="cpu",
        output_type=types.RGB,
        random_aspect_ratio=[0.75, 4.0 / 3.0],
        random_area=[0.08, 1.0],
    )
    images = fn.resize(images, size=[224, 224], interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        crop=(224, 224),
        mean=[0.485 * 255, 0.456 * 255, 0.406 * 255],
        std=[0.229 * 255, 0.224 * 255, 0.225 * 255],
        mirror=rng,
    )


@pipeline_def
def read_and_decode() -> Any:
    jpegs = fn.io.file.read(fn.external_source(name="images", no_copy=True))
    return fn.transpose(fn.decoders.image(jpegs, device="cpu", output_type=types.RGB), perm=[2, 0, 1])


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def jpeg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jpeg")
    make_images(folder, 24, format="jpeg", classes=24)  # so that the label is the picture
    return folder


def test_example_1_full_integration(jpeg: Path) -> None:
    nworkers, batch_size = 2, 4
    pipe = rn50_train_pipe(batch_size=16, num_threads=1, device_id=None, prefetch_queue_depth=2 * nworkers)
    with dali_proxy.DALIServer(pipe) as dali_server:
        dataset = torchvision.datasets.ImageFolder(jpeg, transform=dali_server.proxy, loader=read_filepath)
        loader = dali_proxy.DataLoader(
            dali_server, dataset, batch_size=batch_size, num_workers=nworkers, drop_last=True, shuffle=True
        )
        assert len(loader) == 6
        seen = []
        for data, target in loader:
            assert data.shape == (4, 3, 224, 224) and data.dtype == torch.float32
            assert recover_ids(data, mean=MEAN, std=STD) == target.tolist()
            seen += target.tolist()
        assert sorted(seen) == list(range(24)) and seen != sorted(seen)


def test_example_2_manual_execution() -> None:
    batch_size = 4
    with dali_proxy.DALIServer(
        pipelines.add_and_subtract(batch_size=batch_size, num_threads=3, device_id=None)
    ) as dali_server:
        for _ in range(2):
            outs: Any = []
            for _ in range(batch_size):
                a = np.array(np.random.rand(3, 3), dtype=np.float32)
                b = np.array(np.random.rand(3, 3), dtype=np.float32)
                out0, out1 = dali_server.proxy(a=a, b=b)
                outs.append((a, b, out0, out1))

            outs = torch.utils.data.dataloader.default_collate(outs)

            a, b, a_plus_b, a_minus_b = dali_server.produce_data(outs)
            assert torch.equal(a_plus_b, a + b) and torch.equal(a_minus_b, a - b)


def test_example_3_plain_dataloader(jpeg: Path) -> None:
    pipe = read_and_decode(batch_size=16, num_threads=1, device_id=None, prefetch_queue_depth=4)
    with dali_proxy.DALIServer(pipe) as dali_server:
        dataset = torchvision.datasets.ImageFolder(jpeg, transform=dali_server.proxy, loader=read_filepath)
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1, drop_last=True, shuffle=True)
        for data, target in loader:
            data = dali_server.produce_data(data)
            assert recover_ids(data) == target.tolist()


def test_produce_data_in_objects_and_ragged() -> None:
    class Batch:
        pass

    with dali_proxy.DALIServer(pipelines.identity(batch_size=2, num_threads=1, device_id=None)) as server:
        batch = Batch()
        batch.x = {"y": [server.proxy(np.arange(n)) for n in range(3)]}  # more than the pipeline's batch size
        batch.itself = batch
        batch.stack = torch.stack([server.proxy(np.arange(n)) for n in (1, 2)])
        assert server.produce_data(batch) is batch
        assert [x.tolist() for x in batch.x["y"]] == [[], [0], [0, 1]]
        assert [x.tolist() for x in batch.stack] == [[0], [0, 1]]
        assert server.produce_data({"nothing": 1}) == {"nothing": 1}


def test_two_loaders_on_one_server_and_an_abandoned_pass(jpeg: Path) -> None:
    pipe = read_and_decode(batch_size=8, num_threads=1, device_id=None)
    with dali_proxy.DALIServer(pipe) as server:
        dataset = torchvision.datasets.ImageFolder(jpeg, transform=server.proxy, loader=read_filepath)
        train = dali_proxy.DataLoader(
            server, dataset, batch_size=5, shuffle=True, num_workers=1, persistent_workers=True
        )
        val = dali_proxy.DataLoader(server, dataset, batch_size=5, sampler=range(24))
        for _ in range(2):
            next(iter(train))
            for (data, target), (data2, target2) in zip(train, val, strict=True):
                assert recover_ids(data) == target.tolist() and recover_ids(data2) == target2.tolist()
        assert [index for _, target in val for index in target.tolist()] == list(range(24))


def test_loaders_take_turns_with_a_pipeline_that_cannot_be_copied(jpeg: Path) -> None:
    pipe = pipelines.with_python(batch_size=8, num_threads=1, device_id=None)
    with dali_proxy.DALIServer(pipe) as server:
        dataset = torchvision.datasets.ImageFolder(jpeg, server.proxy, loader=lambda path: Path(path).read_bytes())
        for _ in range(2):
            for _ in range(2):
                loader = dali_proxy.DataLoader(server, dataset, batch_size=8)
                assert [index for _, target in loader for index in target.tolist()] == list(range(24))


def test_what_has_no_counterpart_is_refused() -> None:
    server = dali_proxy.DALIServer(pipelines.identity(batch_size=2, num_threads=1, device_id=None))
    with pytest.raises(ValueError, match="DataLoader\\(timeout=3\\): not supported here"):
        dali_proxy.DataLoader(server, [1, 2], timeout=3)
    with pytest.raises(ValueError, match="exclude each other"):
        dali_proxy.DataLoader(server, [1, 2], shuffle=True, sampler=[0])
    with pytest.raises(TypeError, match=r"expected a nvidia\.dali\.Pipeline, got .*call the @pipeline_def function"):
        dali_proxy.DALIServer(pipelines.identity)
