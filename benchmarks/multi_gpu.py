"""Several GPUs of one host: `python benchmarks/multi_gpu.py [FOLDER]`, with Lightning's DDP over all visible GPUs (NCCL).

First checks: each rank is on its own GPU only, evaluation takes every sample once, training goes on exactly on half of the
ranks, and an exception on one rank ends all. Then images (FOLDER/images/<class>/*.jpg; made up without a FOLDER), speech
(FOLDER/speech/*.flac) and clips (FOLDER/videos/, see video.py) a second and GPU, from the loader alone and in the training
of a tiny network, on 1, 2, 4 and 8 ranks that have the same number of cores each. `--cpu-ranks N` runs the same on CPU ranks
(gloo). Exit status 1 if a check failed. NCCL's variables are used as they are found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from multi_gpu_rank import BATCH, BATCH_SIZES, EVALUATED, SEED, STOP, train_size

from lightning_dali.sampling import Shard, TrainPlan
from lightning_dali.testing import make_photos

RANK = Path(__file__).with_name("multi_gpu_rank.py")
CURVE = (1, 2, 4, 8)
END_SECONDS = 5.0
"""After an exception on one rank. Lightning looks every 5 s whether ranks above 0 live; NCCL alone would wait for minutes.

Met in one of three runs on two busy cores (3.6 to 7.0 s). A failed rank took 2.8 to 3.0 s to leave the interpreter, mostly after its
last Python frame; perhaps its peers notice only then, so that the exits of two ranks add up."""
MADE_UP = 64
"""Pictures that are made up without a FOLDER."""
PATTERNS = {"images": "images/*/*.jpg", "speech": "speech/*.flac", "video": "videos/*.mp4"}

# -- starting ranks --------------------------------------------------------------------------------------------------


def start(phase: str, ranks: int, root: Path, *more: str, cores: set[int], limit_seconds: float) -> tuple[int, str]:
    """Runs a phase; returns its exit status and the end of its log. Nothing of it outlives the limit."""
    command = [sys.executable, str(RANK), phase, str(ranks), str(root), *more]
    log = root / f"{phase}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, sorted(cores))), *command],
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = 124
    return code, log.read_text(errors="replace")[-3000:]


def results(root: Path, phase: str, ranks: int) -> list[Any]:
    """What each rank wrote."""
    return [json.loads((root / f"{phase}.{rank}.json").read_text()) for rank in range(ranks)]


def in_order(rows: list[list[list[Any]]], epoch: int) -> list[int]:
    """Dataset indices over (step, rank); all ranks must have taken the same steps."""
    of_ranks = [[row[1:] for row in rank if row[0] == epoch] for rank in rows]
    steps = list(zip(*of_ranks, strict=True))
    assert all(len({step for step, _ in ranks}) == 1 for ranks in steps), "ranks are at different steps"
    return [index for ranks in steps for _, ids in ranks for index in ids]


# -- checks ----------------------------------------------------------------------------------------------------------


def check_gpus(found: list[Any]) -> str:
    if not found[0]["gpus"]:
        return "skipped: CPU ranks"
    own = [rank["gpus"]["own"] for rank in found]
    assert len(set(own)) == len(own), f"ranks share a GPU: {own}"
    for number, gpus in enumerate(rank["gpus"] for rank in found):
        assert gpus["contexts"] == [gpus["own"]], f"rank {number} has contexts on {gpus['contexts']}: {gpus}"
        assert set(gpus["listed"]) <= {gpus["own"]}, f"nvidia-smi has rank {number} on {gpus['listed']}: {gpus}"
        assert not gpus["workers"], f"nvidia-smi has workers of rank {number}: {gpus}"
    if not all(rank["gpus"]["listed"] for rank in found):  # a container's pids are not the driver's
        return f"each rank has a context on its own GPU only ({len(own)}); nvidia-smi does not list pids here"
    return f"nvidia-smi and the driver have each pid on its own GPU only ({len(own)}), and no worker"


def check_evaluation(found: list[Any]) -> str:
    counts = Counter(in_order([rank["val"] for rank in found], 0))
    assert counts == Counter(range(EVALUATED)), f"not each once: {counts}"
    return f"{EVALUATED} samples, each once over {len(found)} rank(s)"


def check_resume(found: list[Any], resumed: list[Any]) -> str:
    ranks, half = len(found), len(resumed)
    plan = TrainPlan(train_size(ranks), 1, shard=Shard(), seed=SEED)
    order = [index for task in plan.batches(1) for index in task.indices]
    before = in_order([rank["train"] for rank in found], 1)
    after = in_order([rank["train"] for rank in resumed], 1)
    assert len(before) == (STOP - 4) * BATCH * ranks, f"{len(before)} samples before the stop"
    left, step = len(order) - len(before), BATCH * half
    assert before + after == order[: len(before) + left // step * step], f"{before} + {after}, not {order}"
    assert all(row[0] == 1 for rank in resumed for row in rank["train"]), "an epoch was done again"
    return f"{ranks} ranks took {len(before)} samples of epoch 1, {half} went on with the next {len(after)}"


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] * (state not in "ZX")
    return found


def check_end(root: Path, ranks: int, code: int, log: str) -> str:
    """Called as soon as rank 0's process is gone."""
    raised = results(root, "raised", 1)[0]
    pids = list(chain(*results(root, "pids", ranks)))
    while alive(pids) and time.time() - raised < END_SECONDS + 5:
        time.sleep(0.02)
    seconds = time.time() - raised
    left = alive(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"still there after {seconds:.1f} s: {left}"
    assert code not in (0, 124), f"exit status {code}: {log}"
    assert seconds <= END_SECONDS, (
        f"all {len(pids)} processes are gone, but after {seconds:.1f} s (limit {END_SECONDS:g} s)"
    )
    return f"{len(pids)} processes (ranks and workers) gone {seconds:.1f} s after rank {ranks - 1} raised"


def checks(root: Path, ranks: int, cpu: list[str], cores: set[int]) -> Iterator[tuple[str, str]]:
    """Runs them all; yields a name and a finding."""
    make_photos(root / "photos", max(EVALUATED, train_size(ranks)), format="png", sizes=((40, 52), (52, 40)))
    trained = [*cpu, "--trained-on", str(ranks)]
    code, log = start("check", ranks, root, *trained, cores=cores, limit_seconds=300)
    if not (root / "raised.0.json").exists():
        raise RuntimeError(f"the ranks did not come to the exception (exit status {code}):\n{log}")
    yield "exception", judged(check_end, root, ranks, code, log)
    found = results(root, "check", ranks)
    yield "own GPU", judged(check_gpus, found)
    yield "evaluation", judged(check_evaluation, found)
    half = max(1, ranks // 2)
    code, log = start("resume", half, root, *trained, cores=cores, limit_seconds=300)
    if code:
        raise RuntimeError(f"the resumed training failed (exit status {code}):\n{log}")
    yield "resume", judged(check_resume, found, results(root, "resume", half))


def judged(check: Any, *arguments: Any) -> str:
    try:
        return f"ok: {check(*arguments)}"
    except AssertionError as error:
        return f"FAILED: {error}"


# -- throughput ------------------------------------------------------------------------------------------------------


def curve(root: Path, folder: Path, options: argparse.Namespace, most: int, cpu: list[str], cores: set[int]) -> None:
    """Prints the table, a row as soon as it is there."""
    share = max(1, len(cores) // most)
    print(f"\n{share} core(s) a rank; samples a second and GPU, and the ratio to one GPU with as many cores\n")
    print("| media | ranks | workers a rank | loader alone | ratio | in training | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in options.kinds:
        if not any(folder.glob(PATTERNS[kind])):
            continue
        one: dict[str, float] = {}
        for ranks in [ranks for ranks in CURVE if ranks <= most]:
            more = [*cpu, "--kind", kind, "--folder", str(folder), "--seconds", str(options.seconds)]
            more += ["--batch-size", str(options.batch_size)] if options.batch_size else []
            taken = set(sorted(cores)[: share * ranks])
            code, log = start("rate", ranks, root, *more, cores=taken, limit_seconds=240 + 4 * options.seconds)
            if code:
                raise RuntimeError(f"{kind} on {ranks} rank(s) failed (exit status {code}):\n{log}")
            found = results(root, "rate", ranks)
            mean = {name: sum(rank[name] for rank in found) / ranks for name in ("alone", "training")}
            one = one or mean
            cells = [
                f"{mean[name]:.0f} | {mean[name] / one[name]:.2f}" if one[name] else "too slow | -" for name in mean
            ]
            print(f"| {kind} | {ranks} | {found[0]['workers']} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--cpu-ranks", type=int, default=0, metavar="N", help="N CPU ranks instead of the GPUs")
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=list(BATCH_SIZES), choices=list(BATCH_SIZES))
    parser.add_argument("--batch-size", type=int, help="of a rank; by default that of the benchmark of one GPU")
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    ranks, cpu = options.cpu_ranks or torch.cuda.device_count(), ["--cpu"] if options.cpu_ranks else []
    if not ranks:
        parser.error("torch sees no CUDA device here; do: pass --cpu-ranks N")
    cores, failed = os.sched_getaffinity(0), False
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, finding in checks(root, ranks, cpu, cores):
            failed |= not finding.startswith("ok")
            print(f"{name}: {finding}", flush=True)
        if not options.checks_only:
            if options.folder is None:
                sizes = ((375, 500), (500, 375), (333, 500))
                make_photos(root / "images" / "made_up", MADE_UP, sizes=sizes)
            curve(root, options.folder or root, options, ranks, cpu, cores)
    sys.exit(failed)


if __name__ == "__main__":
    main()
