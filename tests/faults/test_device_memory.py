"""Device memory comes back: case 15 and its variants, each in a process of its own, since CUDA's context is never given back.

"Before" is measured after CUDA's context exists and DALI has run once (its libraries load kernels and make handles that stay
for good: nvJPEG, NPP, cuFFT); what they cost is printed with the figures. The processes are forks of one that has imported
everything and has not touched CUDA.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dali.testing import make_photos
from tests.conftest import ScriptResult

pytestmark = [pytest.mark.faults, pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_PHOTOS = 256
BLOCK_MB = 64 * 2**20 / 1e6
"""What DALI's pool grows by."""

START = """
import gc, json, sys, time
from pathlib import Path
import torch
from torchvision.transforms import v2
from lightning_dali import ImageDataModule
from lightning_dali.memory import give_back
from lightning_dali.testing import IndexedImages

TRANSFORM = v2.Compose([v2.RandomResizedCrop(512), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
MB = 1e6

def free():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]

def settled():  # what is free once the passes that are open have made all that they may make ahead
    seen = [free()]
    while len(seen) < 5 or len(set(seen[-4:])) > 1:
        time.sleep(0.2)  # a batch takes a fifth of that
        seen.append(free())
    return seen[-1]

def module(paths, **options):
    dataset = IndexedImages(paths, TRANSFORM)
    plain = dict(batch_size=64, num_workers=2, device="cuda:0")
    return ImageDataModule(train_dataset=dataset, val_dataset=dataset, **{**plain, **options})

def epoch(loader):
    for images, labels in loader:
        images.sum()
    del images

def warm_up(paths):
    torch.zeros(1, device="cuda").sum().item()
    nothing = torch.cuda.mem_get_info(0)[0]
    dm = module(paths[:4], batch_size=2, num_workers=0)
    epoch(dm.train_dataloader())
    dm.close()
    dm.release()
    before = free()
    said["libraries_mb"] = (nothing - before) / MB
    return before

if __name__ == "__main__":
    said, start = {}, time.perf_counter()
    paths = sorted(Path(sys.argv[1]).iterdir())
    before = warm_up(paths)
    said["before_mb"], said["seconds_to_start"] = before / MB, time.perf_counter() - start
"""
END = """
    said["seconds"] = time.perf_counter() - start
    print(json.dumps(said))
"""

Measure = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder, NUM_PHOTOS)
    return folder


@pytest.fixture
def measured(run_warm: Callable[..., ScriptResult], photos: Path) -> Measure:
    """`measured(body)`: what a script says, with memory in MB."""

    def measure(body: str) -> dict[str, Any]:
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        rc, stdout, stderr = run_warm(START + indented + END, 240, args=[str(photos)])
        assert rc == 0, stderr
        said: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
        print(said)  # the figures, for the docs
        return said

    return measure


def test_case_15_memory_comes_back_five_times(measured: Measure) -> None:
    """DALI#4653, #1842, #2070, #5256, #5609, #5816; dali_backend#165."""
    said = measured(
        """
dm = module(paths)
said["used"], said["left"] = [], []
for _ in range(5):
    epoch(dm.train_dataloader())
    said["used"].append((before - torch.cuda.mem_get_info(0)[0]) / MB)
    dm.release()
    said["left"].append((before - torch.cuda.mem_get_info(0)[0]) / MB)
    large = torch.empty(int(0.9 * before), dtype=torch.uint8, device="cuda")  # fails if something is kept
    del large
    torch.cuda.empty_cache()
    epoch(dm.val_dataloader())
    dm.release()
dm.close()
""",
    )
    assert max(said["left"]) <= 0.1 * said["before_mb"]
    assert max(said["left"]) < 0.1 * min(said["used"]) + 64, "less came back than nine tenths of what was used"
    assert said["left"][-1] <= said["left"][0] + 32, "every round leaves something"


def test_case_15_a_stage_is_released_while_another_lives(measured: Measure) -> None:
    said = measured(
        """
dm = module(paths)
validation = iter(dm.val_dataloader())
next(validation)
with_validation = before - settled()
epoch(dm.train_dataloader())  # validation has nothing to do meanwhile, and a pass that is over has ended
with_both = before - free()
for loader in dm.stage_loaders("train"):
    loader.release()
give_back(0)
after = before - free()
rest = sum(len(labels) for _, labels in validation)
said.update(with_validation=with_validation / MB, with_both=with_both / MB, after=after / MB, rest=rest)
dm.close()
""",
    )
    assert said["rest"] == NUM_PHOTOS - 64
    assert said["after"] <= said["with_validation"] + 0.1 * (said["with_both"] - said["with_validation"]) + 64


def test_case_15_a_kept_batch_stays_and_costs_only_itself(measured: Measure) -> None:
    said = measured(
        """
dm = module(paths)
one = iter(dm.train_dataloader())
kept, labels = next(one)
digest = kept.double().sum().item()
del one
dm.release()
left = before - free()
large = torch.full((int(0.5 * free()),), 7, dtype=torch.uint8, device="cuda")
said.update(left=left / MB, kept=kept.numel() * kept.element_size() / MB, same=digest == kept.double().sum().item())
said["report"] = str(dm.memory_report())
dm.close()
""",
    )
    assert said["same"]
    assert said["left"] <= said["kept"] + 64
    assert "torch" in said["report"]


@pytest.mark.parametrize("release", ["never", "stage", "epoch"])
def test_memory_is_flat_from_epoch_3_to_8(release: str, measured: Measure) -> None:
    said = measured(
        f"""
dm = module(paths, release_memory={release!r})
said["used"] = []
for _ in range(8):
    epoch(dm.train_dataloader())
    torch.cuda.synchronize()
    said["used"].append((torch.cuda.mem_get_info(0)[1] - torch.cuda.mem_get_info(0)[0]) / MB)
dm.teardown("fit")
said["after"] = (before - torch.cuda.mem_get_info(0)[0]) / MB
dm.close()
""",
    )
    late = said["used"][2:]
    assert max(late) - min(late) <= max(0.02 * min(late), BLOCK_MB)
    if release != "never":
        assert said["after"] < 128
