"""The command `lightning-dali`: look at a datamodule before a night of training is spent on it. Runs in the rank.

Each command takes a YAML (Hydra's `_target_`, with defaults and overrides, or LightningCLI's `class_path`) or a function
that returns a datamodule, `module:function`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console()

SourceArgument = Annotated[
    str, typer.Argument(help="file.yaml, module:function or file.py:function", metavar="SOURCE", show_default=False)
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...", metavar="[OVERRIDES]", show_default=False)]
Stage = Annotated[str, typer.Option(help="train, val, test or predict")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


@app.command("explain")
def explain_command(
    source: SourceArgument, overrides: Overrides = None, stage: Stage = "train", debug: Debug = False
) -> None:
    """What runs where: worker, DALI, device; what was materialised and why; sizes and memory in flight."""
    from lightning_dali.cli.show import explanation

    with _told(debug), _opened(source, overrides) as opened:
        console.print(explanation(opened.datamodule.explain(stage)))


@app.command("preview")
def preview_command(
    source: SourceArgument,
    overrides: Overrides = None,
    stage: Stage = "train",
    out: Annotated[Path, typer.Option("--out", "-o", help="the PNG to write")] = Path("preview.png"),
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="samples")] = 16,
    compare: Annotated[
        bool, typer.Option("--compare", help="torchvision's result and the difference beside it")
    ] = False,
    debug: Debug = False,
) -> None:
    """A batch as the model will see it, de-normalised, with labels, boxes and masks; film strips; spectrograms."""
    from lightning_dali.cli.preview import preview

    with _told(debug), _opened(source, overrides) as opened:
        opened.datamodule.batch_size = min(opened.datamodule.batch_size, count)
        made = preview(opened.loader(stage), count=count, compare=compare)
        made.image.save(out)
        for note in made.notes:
            console.print(escape(note))
        console.print(f"wrote {out} ({made.image.width} x {made.image.height})", soft_wrap=True)


@app.command("bench")
def bench_command(
    source: SourceArgument,
    overrides: Overrides = None,
    stage: Stage = "train",
    seconds: Annotated[float, typer.Option(min=0.1, help="of each measurement")] = 10.0,
    plain: Annotated[bool, typer.Option(help="measure torch's DataLoader on the same dataset too")] = True,
    debug: Debug = False,
) -> None:
    """The loader alone, a plain DataLoader, and the config's model on cached against live batches; advice."""
    from lightning_dali.cli.bench import bench
    from lightning_dali.cli.show import rates

    with _told(debug), _opened(source, overrides) as opened, console.status("measuring") as status:
        made = bench(
            opened.loader(stage),
            model=opened.model(),
            seconds=seconds,
            plain=plain,
            on_phase=lambda name: status.update(f"measuring {name}"),
        )
        console.print(rates(made))
        for note in made.notes:
            console.print(escape(note))
        console.print(escape(made.advice))


@app.command("scan")
def scan_command(
    source: SourceArgument,
    overrides: Overrides = None,
    stage: Stage = "train",
    num_workers: Annotated[int | None, typer.Option("--num-workers", "-j", min=1, help="default: all cores")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="decode everything, not only headers and ends")] = False,
    report: Annotated[Path | None, typer.Option(help="a JSON to write")] = None,
    debug: Debug = False,
) -> None:
    """Finds bad files before training. Exit status 1 if there are any."""
    from lightning_dali.cli.scan import num_samples, scan
    from lightning_dali.environment import cores

    with _told(debug), _opened(source, overrides) as opened:
        loader = opened.loader(stage)
        with _progress("samples", num_samples(loader)) as advance:
            made = scan(loader, num_workers=num_workers or cores(), decode=decode, on_progress=advance)
        _tell(made, report)


@app.command("index")
def index_command(
    paths: Annotated[list[Path], typer.Argument(help="videos, or folders of them", show_default=False)],
    cache: Annotated[Path | None, typer.Option(help="the cache file; default: in the user's cache folder")] = None,
    num_workers: Annotated[int | None, typer.Option("--num-workers", "-j", min=1, help="default: all cores")] = None,
    report: Annotated[Path | None, typer.Option(help="a JSON to write")] = None,
    debug: Debug = False,
) -> None:
    """Reads the index of every video into the cache, so that training demuxes none."""
    from lightning_dali.cli.scan import find_videos, index_videos
    from lightning_dali.environment import cores
    from lightning_dali.media import IndexCache

    with _told(debug):
        files = find_videos(paths)
        kept = IndexCache(cache)
        with _progress("videos", len(files)) as advance:
            made = index_videos(files, cache=kept, num_workers=num_workers or cores(), on_progress=advance)
        console.print(f"cache: {kept.path}", soft_wrap=True)
        _tell(made, report)


@app.command("doctor")
def doctor_command() -> None:
    """Driver, engines, codecs, memory, limits, versions; what to do about what is missing."""
    from lightning_dali.cli.doctor import examine
    from lightning_dali.cli.show import checks

    console.print(checks(examine()))


# -- plumbing --------------------------------------------------------------------------------------------------------


@contextmanager
def _told(debug: bool) -> Iterator[None]:
    """An error is one line and exit status 2."""
    try:
        yield
    except typer.Exit:  # an exit status, which is a RuntimeError to Python
        raise
    except Exception as error:
        if debug:
            raise
        words = str(error).strip() or type(error).__name__
        Console(stderr=True).print(f"[bold red]error:[/] {escape(words)}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


@contextmanager
def _opened(source: str, overrides: list[str] | None) -> Iterator[Any]:
    from lightning_dali.cli.source import load_source

    opened = load_source(source, overrides or [])
    try:
        opened.datamodule.prepare_data()
        yield opened
    finally:
        opened.datamodule.close()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def _tell(made: Any, report: Path | None) -> None:
    """Prints what a scan found; the exit status says whether all is well."""
    from lightning_dali.cli.show import bad_samples

    if made.bad:
        console.print(bad_samples(made.bad))
    for reason, tasks in sorted(made.materialised.items()):
        console.print(escape(f"materialised in {tasks} task(s): {reason}"))
    console.print(f"{made.total} looked at in {made.seconds:.1f} s, {len(made.bad)} bad")
    if report is not None:
        report.write_text(json.dumps(made.report(), indent=2) + "\n")
        console.print(f"wrote {report}", soft_wrap=True)
    if made.bad:
        raise typer.Exit(1)
