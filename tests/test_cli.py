"""The command: what each subcommand prints, writes and returns, and one line for everything that is wrong."""

# Over 300 lines: a few tests for each of the command's six words.

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from typer.testing import CliRunner, Result

from lightning_dali import ImageDataModule, Padded
from lightning_dali.cli import app, draw
from lightning_dali.cli.bench import bench
from lightning_dali.cli.preview import preview
from lightning_dali.cli.scan import scan
from lightning_dali.media import IndexCache
from lightning_dali.testing import IndexedImages, make_images
from tests import cli_sources
from tests.media.video_files import make_video

SOURCE = "tests.cli_sources:photos"


def run(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(one) for one in args], env={"COLUMNS": "160"})


def words(result: Result) -> str:
    return " ".join(result.output.split())


def images(folder: Path, n: int = 8, kind: type = IndexedImages, **options: Any) -> ImageDataModule:
    dataset = kind(make_images(folder, n), transform=options.pop("transform", v2.ToImage()))
    options = {"batch_size": 4, "num_workers": 0, "device": "cpu", **options}
    return ImageDataModule(train_dataset=dataset, **options)


# -- explain, doctor -------------------------------------------------------------------------------------------------


def test_explain_takes_a_function_with_arguments(tmp_path: Path) -> None:
    result = run("explain", SOURCE, f"folder={tmp_path}", "batch_size=2")
    assert result.exit_code == 0, result.output
    assert "resize (bilinear, antialias)" in words(result) and "2 x 3 x 32 x 32" in words(result)


def test_explain_takes_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tests.cli_sources import photos as make\n")
    result = run("explain", f"{tmp_path / 'mine.py'}:make", f"folder={tmp_path}")
    assert result.exit_code == 0 and "what runs where" in result.output


def test_doctor_names_versions_limits_and_what_to_do(run_script: Callable[..., Any]) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 8192))
from lightning_dali.cli.doctor import examine
for one in examine():
    print(one.name, "|", one.found, "|", one.advice)
"""
    rc, stdout, stderr = run_script(code)
    assert rc == 0, stderr
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in stdout.splitlines()}
    assert lines["open files"] == ["256 (at most 8192)", "ulimit -n 8192"]
    assert (
        f"torch {torch.__version__.split('+')[0]}" in lines["versions"][0]
        and "h264" in lines["codecs on the CPU (PyAV)"][0]
    )
    assert {"system", "cores", "/dev/shm", "start method"} <= set(lines)
    assert not any("could not be looked at" in line for line in stdout.splitlines())
    result = run("doctor")
    assert result.exit_code == 0 and "start method" in result.output


# -- preview ---------------------------------------------------------------------------------------------------------


def test_preview_shows_the_batch_denormalised(tmp_path: Path) -> None:
    """Solid colours come back, in their places, after Normalize."""
    normalise = v2.Compose(
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])]
    )
    dm = images(tmp_path, 4, transform=normalise, shuffle=False)
    sheet = np.asarray(preview(dm.stage_loaders()[0], count=4).image)
    for number in range(4):
        assert sheet[100, 100 + number * (draw.TILE + 8)] == pytest.approx((4 * number, 0, 0), abs=2)


def test_preview_command_compares_with_torchvision(tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    result = run("preview", SOURCE, f"folder={tmp_path / 'photos'}", "--out", out, "-n", 3, "--compare")
    assert result.exit_code == 0, result.output
    away = float(words(result).split("result is ")[1].split(" levels")[0])
    assert 0 <= away < 1
    with Image.open(out) as sheet:
        assert sheet.width >= 3 * draw.TILE


def test_compare_would_notice_another_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dm = cli_sources.photos(str(tmp_path))
    loader = dm.stage_loaders()[0]
    monkeypatch.setattr("lightning_dali.cli.reference.sample_seed", lambda seed, epoch, index: 1)
    (note,) = preview(loader, count=4, compare=True).notes
    assert float(note.split("result is ")[1].split(" levels")[0]) > 5


def test_compare_shows_torchvisions_picture_of_every_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dm = cli_sources.two_views(str(tmp_path))
    beside: list[str] = []
    tile = draw.Tile
    monkeypatch.setattr(draw, "Tile", lambda pixels, words: beside.append(words) or tile(pixels, words))
    (note,) = preview(dm.stage_loaders()[0], count=2, compare=True).notes
    assert [words for words in beside if words.startswith("torchvision")] == ["torchvision", "torchvision, 1"] * 2
    assert sum(words.startswith("difference") for words in beside) == 4
    assert 0 <= float(note.split("result is ")[1].split(" levels")[0]) < 1


def test_preview_draws_boxes_masks_and_labels(tmp_path: Path) -> None:
    dm = cli_sources.detection(tmp_path)
    sheet = np.asarray(preview(dm.stage_loaders()[0], count=1).image).astype(int)
    red = np.array(draw._COLOURS[0])
    scale = draw.TILE / 48  # 48 pixels wide and flipped: the box lies at x from 24 to 40, y from 10 to 30
    box = [sheet[4 + int((y + 0.5) * scale), 4 + int((x + 0.5) * scale)] for x, y in ((24, 20), (39, 20), (32, 29))]
    assert all(np.abs(pixel - red).max() < 12 for pixel in box)
    inside, outside = (sheet[4 + int(20.5 * scale), 4 + int((x + 0.5) * scale)] for x in (36, 10))
    assert np.abs(inside - red / 2).max() < 12 and outside.max() < 12


def test_preview_draws_clips_waves_and_spectrograms() -> None:
    clip = torch.stack([torch.full((3, 20, 30), value, dtype=torch.uint8) for value in (0, 100, 200)])
    strip = draw.film(clip, None)
    assert strip.shape[1] == 3 * 112 and [int(strip[10, x, 0]) for x in (50, 160, 280)] == [0, 100, 200]
    rising = draw.spectrogram(torch.arange(12.0).reshape(4, 3))
    assert rising.shape == (4, 3, 3) and rising[0].sum() > rising[-1].sum()  # high bins above
    line = draw.wave(torch.cat([torch.zeros(500), torch.ones(500)]))
    assert (line[5, :200] == 255).all() and (line[0, -100:] != 255).any()
    from lightning_dali.cli.preview import _kind

    assert _kind(Padded(torch.zeros(2, 80, 5), torch.tensor([5, 4]))) == "spectrogram"
    assert _kind(Padded(torch.zeros(2, 1, 5000), torch.tensor([5, 4]))) == "wave"
    assert _kind(torch.zeros(2, 4, 3, 8, 8)) == "film" and _kind([torch.zeros(3, 8, 8)] * 2) == "image"


def test_preview_shows_mixed_labels_and_refuses_numbers(tmp_path: Path) -> None:
    as_float = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    dm = images(tmp_path, 4, batch_transform=v2.MixUp(num_classes=4), transform=as_float)
    loader = dm.stage_loaders()[0]
    batch, _ = loader.look()
    assert batch[1].shape == (4, 4)
    assert preview(loader, count=2).image.height > draw.TILE
    loader = images(tmp_path, 4, collate_fn=_only_labels).stage_loaders()[0]
    with pytest.raises(ValueError, match="nothing that can be drawn: 1: numbers"):
        preview(loader)


def _only_labels(samples: list[Any]) -> Any:
    return [0, torch.tensor([label for _, label in samples])]


# -- bench -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_seconds", "num_workers", "limit"), [(0.1, 1, "The model is the limit"), (0.0, 0, "set num_workers")]
)
def test_bench_says_what_limits(tmp_path: Path, model_seconds: float, num_workers: int, limit: str) -> None:
    dm = images(tmp_path, 32, num_workers=num_workers)
    made = bench(dm.stage_loaders()[0], model=cli_sources.Slow(model_seconds), seconds=0.4, plain=False)
    dm.close()
    assert made.cached is not None and made.live is not None and made.of_ideal is not None
    assert limit in made.advice
    if model_seconds:
        assert made.cached.samples_per_second == pytest.approx(4 / 0.1, rel=0.2) and made.of_ideal > 0.6
    else:
        assert made.live.wait_share > 0.3 and made.of_ideal < 0.8
    assert made.loader.samples_per_second > made.live.samples_per_second * 0.5


def test_bench_command_measures_torch_too(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
data: {{_target_: tests.cli_sources.photos, folder: {tmp_path / "photos"}}}
model: {{_target_: tests.cli_sources.Slow, seconds: 0.01}}
"""
    )
    result = run("bench", config, "--seconds", "0.3")
    assert result.exit_code == 0, result.output
    for word in ("loader alone", "torch's DataLoader", "model, cached batches", "of the ideal", "num_workers"):
        assert word in words(result)


def test_bench_says_why_torch_could_not_run(tmp_path: Path) -> None:
    made = bench(images(tmp_path, 2).stage_loaders()[0], seconds=0.1)
    assert made.plain is None and "the loader gives no batch" in made.notes[0]


# -- scan, index -----------------------------------------------------------------------------------------------------


def test_scan_finds_bad_files_and_writes_json(tmp_path: Path) -> None:
    paths = make_images(tmp_path / "images", 8, format="jpeg", size=200)
    paths[3].write_bytes(b"")
    paths[6].unlink()
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
_target_: lightning_dali.ImageDataModule
train_dataset:
  _target_: lightning_dali.testing.IndexedImages
  paths: {json.dumps([str(path) for path in paths])}
"""
    )
    result = run("scan", config, "--report", tmp_path / "report.json", "-j", 2)
    assert result.exit_code == 1, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(one["dataset_index"], one["path"]) for one in report["bad"]] == [(3, str(paths[3])), (6, str(paths[6]))]
    assert "empty file" in report["bad"][0]["reason"] and report["total"] == 8
    assert "8 looked at" in words(result) and "2 bad" in words(result)
    assert run("scan", SOURCE, f"folder={tmp_path / 'good'}").exit_code == 0


def test_scan_decodes_when_told(tmp_path: Path) -> None:
    """Zeros in the middle of a PNG's data: header and end are fine."""
    dm = images(tmp_path, 4)
    dataset = dm.stage_loaders()[0].dataset
    dataset.paths = list(make_noise(tmp_path / "noise", 3))
    data = bytearray(dataset.paths[1].read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    dataset.paths[1].write_bytes(data)
    loader = dm.stage_loaders()[0]
    assert not scan(loader, num_workers=1).bad
    (bad,) = scan(loader, num_workers=1, decode=True).bad
    assert bad.dataset_index == 1 and bad.path == str(dataset.paths[1])


def make_noise(folder: Path, n: int) -> list[Path]:
    folder.mkdir()
    for number in range(n):
        noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


def test_scan_survives_a_sample_that_ends_its_process(tmp_path: Path) -> None:
    dm = images(tmp_path, 8, kind=IndexedImages)
    loader = dm.stage_loaders()[0]
    loader.fetcher.dataset = cli_sources.Fatal(loader.dataset.paths)
    (bad,) = scan(loader, num_workers=2).bad
    assert bad.dataset_index == 5 and "exit code 7" in bad.reason


def test_index_fills_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    (folder / "below").mkdir(parents=True)
    good = [make_video(folder / "a.mp4", num_frames=8), make_video(folder / "below" / "b.mp4", num_frames=8)]
    broken = folder / "c.mp4"
    broken.write_bytes(b"no video")
    (folder / "notes.txt").write_text("not looked at")
    cache = tmp_path / "cache.sqlite3"
    result = run("index", folder, "--cache", cache, "-j", 1, "--report", tmp_path / "report.json")
    assert result.exit_code == 1 and "3 looked at" in words(result), result.output
    (bad,) = json.loads((tmp_path / "report.json").read_text())["bad"]
    assert bad["path"] == str(broken)
    kept = IndexCache(cache)
    assert all(kept.load(folder / name) is not None for name in ("a.mp4", "below/b.mp4")) and len(good) == 2
    kept.close()
    assert run("index", tmp_path / "missing").exit_code == 2


# -- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", "missing.yaml"], "missing.yaml: no such file."),
        (["explain", "nonsense"], "'nonsense': expected file.yaml, module:function or file.py:function."),
        (["explain", "tests.cli_sources:photo"], "tests.cli_sources has no 'photo'."),
        (["explain", "tests.cli_source:photos"], "No module named 'tests.cli_source'."),
        (["explain", "tests.cli_sources:nothing"], "makes a int: expected a datamodule of lightning_dali"),
        (["explain", SOURCE, "foldr=x"], "takes no argument 'foldr'. Did you mean 'folder'?"),
        (["explain", SOURCE, "folder={tmp}", "--stage", "val"], "the datamodule has a dataset for 'train'"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, args: list[str], said: str) -> None:
    result = run(*(one.replace("{tmp}", str(tmp_path)) for one in args))
    assert result.exit_code == 2
    assert said in result.output and result.output.count("\n") == 1, result.output


def test_the_command_is_installed_and_imports_nothing_heavy(run_script: Callable[..., Any]) -> None:
    import tomllib

    root = Path(__file__).parents[1]
    script = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]["lightning-dali"]
    assert script == "lightning_dali.cli:app"
    code = "import sys; from lightning_dali.cli import app; print({'torch', 'nvidia'} & set(sys.modules))"
    assert run_script(code).stdout == "set()\n"
    assert os.path.exists(root / "lightning_dali" / "cli" / "__init__.py")


def test_preview_takes_a_batch_that_was_only_zipped(tmp_path: Path) -> None:
    """Detection users collate with `tuple(zip(*batch))`: a tuple of images, and one of dicts."""
    from lightning_dali.cli.preview import _fields

    images = tuple(torch.zeros(3, 8, 9) for _ in range(3))
    targets = tuple({"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 2, 3))
    fields = dict(_fields((images, targets), 3))
    assert list(fields) == ["0", "1/boxes", "1/labels"]
    assert [len(one) for one in fields["1/boxes"]] == [1, 2, 3]
