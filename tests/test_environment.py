"""What chooses itself: workers, threads, hardware share and prefetch, from what this rank was granted."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torchvision.transforms import v2

from lightning_dali import ClipSampler, ImageDataModule, VideoDataModule, environment
from lightning_dali.sampling import Shard
from lightning_dali.testing import IndexedFiles, IndexedImages, make_photos, make_videos

CHOSEN: dict[str, Any] = {"num_workers": None, "num_threads": None, "prefetch": None}


@pytest.mark.parametrize(
    ("cores", "ranks", "num_workers", "with_gpu", "num_threads"),
    [
        (1, 1, 1, 1, 2),
        (2, 1, 2, 1, 2),
        (12, 1, 6, 9, 3),
        (16, 1, 8, 12, 4),
        (16, 4, 2, 3, 2),
        (16, 8, 2, 1, 2),
        (4, 8, 1, 1, 2),  # fewer cores than ranks
        (32, 1, 8, 12, 8),
        (128, 1, 8, 12, 8),  # more only take cores from the model
        (128, 8, 8, 12, 4),
    ],
)
@pytest.mark.parametrize("by", ["trainer", "launcher"])
def test_ranks_of_a_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, num_workers: int, with_gpu: int, num_threads: int, by: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks) if by == "launcher" else "3")
    trainer = SimpleNamespace(num_devices=ranks) if by == "trainer" else None
    assert environment.default_num_workers(trainer, gpu=False) == num_workers
    assert environment.default_num_workers(trainer, gpu=True) == with_gpu
    assert environment.default_num_workers(trainer, gpu=False, decoding=True) == max(1, min(8, cores // ranks))
    assert environment.default_num_threads(trainer) == num_threads


@pytest.mark.parametrize(
    ("cores", "ranks", "both"), [(2, 1, (1, 2)), (16, 1, (6, 12)), (16, 8, (1, 2)), (128, 2, (8, 24))]
)
def test_audio_gives_the_cores_to_the_threads_that_decode(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, both: tuple[int, int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert environment.default_decoding(SimpleNamespace(num_devices=ranks)) == both


@pytest.fixture
def one_core() -> Iterator[None]:
    """This thread, and so what `cores()` counts, is held to one core."""
    granted = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(granted)})
    yield
    os.sched_setaffinity(0, granted)


def images(folder: Path, **options: Any) -> ImageDataModule:
    transform = v2.Compose([v2.RandomResizedCrop(32), v2.ToImage()])
    dataset = IndexedImages(make_photos(folder, 4, sizes=((40, 50),)), transform)
    return ImageDataModule(train_dataset=dataset, batch_size=2, **options)


def test_images_take_what_is_chosen_and_explain_shows_it(tmp_path: Path, one_core: None) -> None:
    dm = images(tmp_path, device="cpu", hw_decoder_load=None, **CHOSEN)
    told = dm.explain()
    assert (told.num_workers, told.num_threads, told.cores, told.prefetch) == (1, 2, 1, 2)
    assert "1 worker(s), 2 DALI thread(s), 1 core(s); prefetch 2, depth 2\n" in str(
        told
    )  # no hardware share on the CPU
    (loader,) = dm.stage_loaders("train")
    device = loader.server.device
    assert (device.num_threads, device.hw_decoder_load, loader.server.queue) == (2, 1.0, 2)
    assert sum(len(labels) for _, labels in loader) == 4
    dm.close()


def test_what_is_given_is_taken(tmp_path: Path, one_core: None) -> None:
    told = images(tmp_path, device="cpu", num_workers=3, num_threads=5, prefetch=4).explain()
    assert (told.num_workers, told.num_threads, told.prefetch) == (3, 5, 4)


def test_videos_take_what_is_chosen_and_explain_shows_it(tmp_path: Path, one_core: None) -> None:
    clips = IndexedFiles(make_videos(tmp_path, 2))
    dm = VideoDataModule(train_dataset=clips, clip=ClipSampler(2), batch_size=2, device="cpu", **CHOSEN)
    told = dm.explain()
    assert told.problem is None
    assert "1 worker(s), 2 DALI thread(s), 1 core(s); prefetch 2, depth 3\n" in str(told)
    (loader,) = dm.stage_loaders("train")
    assert loader.fetcher.modality.num_workers == 1  # what the split between device and workers reckons with
    clip, _ = next(iter(loader))
    assert clip.shape[:2] == (2, 2)
    dm.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("given", "share"), [(None, 1.0), (0.0, 0.0), (0.65, 0.65)])
def test_the_hardware_decoder_gets_its_share(tmp_path: Path, given: float | None, share: float) -> None:
    dm = images(tmp_path, device="cuda", num_workers=0, hw_decoder_load=given)
    told = dm.explain()
    assert told.hw_decoder_load == share and f"hardware decoder share {share:g}" in str(told)
    assert dm.stage_loaders("train")[0].server.device.hw_decoder_load == share
    dm.close()


def test_ranks_that_share_a_samples_work_get_the_same_data() -> None:
    """Two groups of two tensor-parallel ranks: Lightning's strategy deals data to the groups, not to the ranks."""

    class Trainer:
        global_rank, world_size = 3, 4
        distributed_sampler_kwargs: ClassVar[dict[str, int]] = {"num_replicas": 2, "rank": 1}

    assert environment.shard_of(Trainer()) == Shard(1, 2)


def test_a_thread_limits_torch_for_itself_alone() -> None:
    before, seen = torch.get_num_threads(), {}
    torch.set_num_threads(3)
    try:

        def limited() -> None:
            environment.limit_torch_threads(1)
            torch.rand(300, 300) @ torch.rand(300, 300)
            seen["limited"] = torch.get_num_threads()
            later = threading.Thread(target=lambda: seen.update(later=torch.get_num_threads()))
            later.start()
            later.join()

        thread = threading.Thread(target=limited)
        thread.start()
        thread.join()
        assert seen == {"limited": 1, "later": 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
