"""Datasets that are lists of audio files: JSON lines as NeMo writes them. Runs in the worker, and wherever it is indexed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lightning_dali.proxies.audio_capture import load_audio

_PATH_KEYS = ("audio_filepath", "path", "audio_path", "wav", "audio", "file")
"""What manifests call the file, the first found counts."""


class SpeechManifest(Dataset[tuple[Any, ...]]):
    """A JSON-lines manifest: one object a line with `path` (or `audio_filepath`), `text`, `duration`, `offset`.

    A sample is `(waveform, sample_rate, text)`, as torchaudio's datasets have it, followed by the values of `fields`. The
    waveform is `(C, S)`, or what the transform makes of it. Where there is an `offset` only that segment is read; without
    one, `duration` only serves to plan batches.

    Args:
        file: The manifest; or its entries, as dicts.
        root: What relative paths are relative to; None: the manifest's folder.
        transform: Applied to the waveform.
        fields: More keys of the entries, to be part of each sample.
        min_seconds: Entries that are shorter, by their own word, are left out.
        max_seconds: Likewise those that are longer.

    Raises:
        ValueError: A line is no JSON object, or names no file; with its number.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
        *,
        root: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        fields: Sequence[str] = (),
        min_seconds: float = 0.0,
        max_seconds: float | None = None,
    ) -> None:
        if isinstance(file, (str, os.PathLike)):
            name, base, entries = str(file), Path(file).parent, _read(Path(file))
        else:
            name, base, entries = "the manifest", Path(), [dict(entry) for entry in file]
        base = base if root is None else Path(root)
        self.transform, self.fields = transform, tuple(fields)
        self.entries: list[dict[str, Any]] = []
        """The lines that are kept."""
        self.paths: list[str] = []
        """Their files."""
        for number, entry in enumerate(entries, 1):
            key = next((key for key in _PATH_KEYS if key in entry), None)
            if key is None:
                raise ValueError(f"entry {number} of {name} names no file: {entry}")
            seconds = entry.get("duration")
            if seconds is not None and not min_seconds <= seconds <= (max_seconds or float("inf")):
                continue
            self.entries.append(entry)
            self.paths.append(str(base / entry[key]))

    @property
    def durations(self) -> list[float | None]:
        """Seconds of each sample by the manifest's word, None where it does not say."""
        return [entry.get("duration") for entry in self.entries]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        entry = self.entries[index]
        offset = float(entry.get("offset") or 0.0)
        duration = entry.get("duration") if "offset" in entry else None
        waveform: Any
        waveform, sample_rate = load_audio(self.paths[index], offset_seconds=offset, duration_seconds=duration)
        if self.transform is not None:
            waveform = self.transform(waveform)
        return (waveform, sample_rate, entry.get("text", ""), *(entry.get(name) for name in self.fields))

    def __repr__(self) -> str:
        return f"SpeechManifest({len(self)} entries)"


def _read(file: Path) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: {error}. A manifest has one JSON object a line.") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{file}, line {number}: {entry!r} is no JSON object. A manifest has one object a line.")
        entries.append(entry)
    return entries
