"""Samples from other libraries' streams are those that the same dataset gives when it is used plainly, decoded by PIL.

`pip install 'lightning-dali[sources,datasets]'` brings them; what is missing is skipped.
"""

# Over 300 lines: four libraries' datasets, each with its files.

from __future__ import annotations

import io
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset
from torchvision.transforms import v2

from lightning_dali import ImageDataModule
from lightning_dali.media import RemoteReader, TarSamples
from lightning_dali.testing import make_photos
from tests.streams.datasets import my_share

N, FILES = 13, 3
TRANSFORM = v2.Compose([v2.Resize((32, 40)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
EXTRA = "pip install 'lightning-dali[sources]'"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), N, sizes=((61, 83), (83, 61)))


@pytest.fixture(scope="module")
def expected(photos: list[Path]) -> torch.Tensor:
    return torch.stack([TRANSFORM(Image.open(path).convert("RGB")) for path in photos])


def image_and_label(batch: Any) -> tuple[torch.Tensor, list[int]]:
    """Of a pair, or of a row with fields, where an image that was not decoded is a pair of bytes and path."""
    image, label = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
    return (image["bytes"] if isinstance(image, dict) else image), label.tolist()


def module(dataset: Any, workers: int = 0, **options: Any) -> ImageDataModule:
    settings = {"batch_size": 2, "num_threads": 1, "drop_last": False, "device": "cpu", **options}
    return ImageDataModule(train_dataset=dataset, num_workers=workers, **settings)


def a_pass(dm: ImageDataModule) -> list[tuple[list[int], torch.Tensor]]:
    return [(label, image) for image, label in map(image_and_label, dm.train_dataloader())]


def check(make: Callable[[], Any], expected: torch.Tensor, *, epochs_differ: bool = False, **options: Any) -> None:
    """Every sample once, as PIL and torchvision make it, in this process and from two workers, epoch after epoch."""
    for workers in (0, 2):
        dm = module(make(), workers, **{"train_transform": TRANSFORM, **options})
        orders = []
        for _ in range(2):
            found = a_pass(dm)
            labels = [label for row, _ in found for label in row]
            assert sorted(labels) == list(range(N))
            difference = torch.cat([image for _, image in found]) - expected[labels]
            assert 0 < difference.abs().mean() < 0.5 / 255 and difference.abs().max() < 0.1
            orders.append(labels)
        assert (orders[0] != orders[1]) == epochs_differ
        assert not dm.explain().materialised, "encoded bytes, decoded on the device"
        dm.close()


def check_resume(make: Callable[[], Any]) -> None:
    """What comes after a stop is what came without one, and so is the epoch after it."""
    for workers in (0, 2):
        dm = module(make(), workers, train_transform=TRANSFORM)
        whole = [[labels for labels, _ in a_pass(dm)] for _ in range(2)]
        dm.close()
        for stop in (1, 4, 6):
            dm = module(make(), workers, train_transform=TRANSFORM)
            loader = dm.train_dataloader()
            one = iter(loader)
            for _ in range(stop):
                next(one)
            state = loader.state_dict()
            dm.close()
            dm = module(make(), workers, train_transform=TRANSFORM)
            dm.train_dataloader().load_state_dict(state)
            found = [[labels for labels, _ in a_pass(dm)] for _ in range(2)]
            assert found == [whole[0][stop:], whole[1]]
            dm.close()


def shards(items: Any) -> Iterator[list[int]]:
    """Sample numbers by file."""
    return (list(range(N))[number::FILES] for number in range(items))


# -- Hugging Face ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_DATASETS_OFFLINE", "1")
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
    found = pytest.importorskip("datasets", reason="pip install 'lightning-dali[datasets]'")
    # `datasets` 5 waits 5 s at the end of every shuffled pass, for threads of Arrow's
    patch.setattr(found.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.05, raising=False)
    yield found
    patch.undo()


@pytest.fixture(scope="module")
def parquet(hub: Any, photos: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, files = tmp_path_factory.mktemp("parquet"), []
    features = hub.Features({"image": hub.Image(), "label": hub.Value("int64")})
    for numbers in shards(FILES):
        files.append(str(folder / f"{len(files)}.parquet"))
        images = [{"bytes": photos[number].read_bytes(), "path": None} for number in numbers]
        hub.Dataset.from_dict({"image": images, "label": numbers}, features=features).to_parquet(files[-1])
    return files


@pytest.mark.parametrize("decode", [True, False])
def test_hugging_face_parquet(
    decode: bool, hub: Any, parquet: list[str], expected: torch.Tensor, tmp_path: Path
) -> None:
    def make() -> Any:
        stream = hub.load_dataset("parquet", data_files=parquet, split="train", streaming=True, cache_dir=tmp_path)
        return stream.cast_column("image", hub.Image(decode=decode))

    plain = [row["image"] if decode else Image.open(io.BytesIO(row["image"]["bytes"])) for row in make()]
    order = [number for numbers in shards(FILES) for number in numbers]
    assert torch.equal(torch.stack([TRANSFORM(image.convert("RGB")) for image in plain]), expected[order])
    check(make, expected)
    if not decode:
        check(lambda: make().shuffle(seed=3, buffer_size=8), expected, epochs_differ=True)
        check_resume(make)


def test_hugging_face_image_folder(hub: Any, photos: list[Path], expected: torch.Tensor, tmp_path: Path) -> None:
    for number, path in enumerate(photos):
        (tmp_path / "data" / f"{number:02d}").mkdir(parents=True)
        (tmp_path / "data" / f"{number:02d}" / path.name).write_bytes(path.read_bytes())
    for decode in (True, False):

        def make(decode: bool = decode) -> Any:
            stream = hub.load_dataset(
                "imagefolder",
                data_dir=str(tmp_path / "data"),
                split="train",
                streaming=True,
                cache_dir=tmp_path / "cache",
            )
            return stream.cast_column("image", hub.Image(decode=decode))

        if decode:
            check(make, expected)
        else:
            check(lambda: make().map(read, remove_columns=["image"]).rename_column("file", "image"), expected)


def read(row: dict[str, Any]) -> dict[str, Any]:
    """A picture's bytes, wherever they are."""
    image = row["image"]
    return {"file": image["bytes"] or Path(image["path"]).read_bytes()}


def test_hugging_face_split_by_node(hub: Any, parquet: list[str], tmp_path: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    found = []
    for rank in (0, 1):
        stream = hub.load_dataset("parquet", data_files=parquet, split="train", streaming=True, cache_dir=tmp_path)
        dm = module(split_dataset_by_node(stream, rank=rank, world_size=2), 1, train_transform=TRANSFORM)
        found += [label for labels, _ in a_pass(dm) for label in labels]
        dm.close()
    assert sorted(found) == list(range(N))


# -- litdata -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litdata() -> Any:
    return pytest.importorskip("litdata", reason=EXTRA)


@pytest.mark.leaks_allowed("litdata keeps threads that prepare chunks")
@pytest.mark.parametrize("stored", ["bytes", "jpeg"])
def test_litdata_streaming(
    stored: str, litdata: Any, photos: list[Path], expected: torch.Tensor, tmp_path: Path
) -> None:
    from litdata.streaming import Cache

    writer = Cache(str(tmp_path / "chunks"), chunk_size=2)  # what `litdata.optimize` writes with, without its processes
    for number, path in enumerate(photos):
        writer[number] = {"image": path.read_bytes() if stored == "bytes" else Image.open(path), "label": number}
    writer.done()
    writer.merge()

    def make(shuffle: bool = False) -> Any:
        return litdata.StreamingDataset(str(tmp_path / "chunks"), shuffle=shuffle, drop_last=False)

    plain = [make()[number]["image"] for number in range(N)]
    for image, wanted in zip(plain, expected, strict=True):
        image = Image.open(io.BytesIO(image)) if stored == "bytes" else v2.functional.to_pil_image(image)
        assert (TRANSFORM(image) - wanted).abs().mean() < 0.5 / 255
    check(make, expected)
    dm = module(make(), 2, train_transform=TRANSFORM)
    assert len(dm.train_dataloader()) == 7
    dm.close()
    if stored == "bytes":
        check(lambda: make(shuffle=True), expected, epochs_differ=True)
        check_resume(lambda: make(shuffle=True))


@pytest.mark.leaks_allowed("litdata keeps the thread of its downloads")
def test_litdata_raw(litdata: Any, photos: list[Path], expected: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("zstd", reason=EXTRA)
    raw = pytest.importorskip("litdata.raw", reason=EXTRA)

    class Labelled(raw.StreamingRawDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index), int(Path(self.items[index].path).stem)

    folder = shutil.copytree(photos[0].parent, tmp_path / "files")  # it writes an index beside them

    def make() -> Any:
        return Labelled(input_dir=str(folder), cache_dir=str(tmp_path / "cache"))

    assert {number: data for data, number in map(make().__getitem__, range(N))} == {
        number: path.read_bytes() for number, path in enumerate(photos)
    }
    check(make, expected, shuffle=False)


# -- WebDataset --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tars(photos: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, files = tmp_path_factory.mktemp("tars"), []
    for numbers in shards(FILES):
        files.append(str(folder / f"{len(files)}.tar"))
        with tarfile.open(files[-1], "w") as tar:
            for number in numbers:
                for ending, data in (("jpg", photos[number].read_bytes()), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:03d}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return files


def test_webdataset(tars: list[str], expected: torch.Tensor) -> None:
    wds = pytest.importorskip("webdataset", reason=EXTRA)

    def make() -> Any:
        return wds.WebDataset(tars, shardshuffle=False).to_tuple("jpg", "cls").map_tuple(bytes, int)

    def decoded() -> Any:
        return wds.WebDataset(tars, shardshuffle=False).decode("pil").to_tuple("jpg", "cls").map_tuple(TRANSFORM, int)

    order = [number for numbers in shards(FILES) for number in numbers]
    assert torch.equal(torch.stack([image for image, _ in decoded()]), expected[order])
    check(make, expected)
    check(decoded, expected, train_transform=None)
    check(lambda: make().shuffle(8, rng=random), expected, epochs_differ=True)
    check_resume(lambda: make().shuffle(8, rng=random))
    dm = module(make().with_length(N), 2, train_transform=TRANSFORM)
    assert len(dm.train_dataloader()) == 7
    dm.close()


def test_tars_by_index(tars: list[str], expected: torch.Tensor) -> None:
    check(lambda: TarSamples(tars, lambda files: (files["jpg"], int(files["cls"]))), expected, shuffle=False)


# -- S3 ----------------------------------------------------------------------------------------------------------------

BUCKET = """
import io, os, sys
from pathlib import Path
import fsspec, torch
from moto.server import ThreadedMotoServer
from tests.streams.test_sources import Urls, check, check_resume, expected_of
from lightning_dali.media import RemoteReader

photos = [Path(path) for path in sys.argv[1:]]
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
options = {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
bucket = fsspec.filesystem("s3", **options)
bucket.call_s3("create_bucket", Bucket="photos")
for path in photos:
    bucket.pipe(f"photos/{path.name}", path.read_bytes())
urls = [f"s3://{name}" for name in sorted(bucket.ls("photos"))]
for cache in (None, Path("cache")):
    check(lambda: Urls(urls, RemoteReader(cache, options=options)), expected_of(photos))
assert len(list(Path("cache").iterdir())) == len(photos)
server.stop()
check(lambda: Urls(urls, RemoteReader("cache", options=options)), expected_of(photos))  # from the cache alone
print("done", flush=True)
os._exit(0)  # s3fs keeps a thread
"""


def expected_of(photos: list[Path]) -> torch.Tensor:
    return torch.stack([TRANSFORM(Image.open(path).convert("RGB")) for path in photos])


class Urls(IterableDataset[Any]):
    """Files behind URLs, dealt in turn."""

    def __init__(self, urls: list[str], reader: RemoteReader) -> None:
        self.urls, self.reader = urls, reader

    def __iter__(self) -> Iterator[Any]:
        number, of = my_share()
        for index in range(number, len(self.urls), of):
            yield self.reader(self.urls[index]), index


@pytest.mark.slow
def test_s3(photos: list[Path], run_script: Callable[..., Any]) -> None:
    pytest.importorskip("s3fs", reason=EXTRA)
    pytest.importorskip("moto", reason=EXTRA)
    rc, stdout, stderr = run_script(BUCKET, 110, args=[str(path) for path in photos])
    assert rc == 0 and "done" in stdout, stderr[-4000:]
