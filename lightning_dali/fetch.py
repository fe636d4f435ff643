"""From a `BatchTask` to a `Request`: runs the dataset, collates, and plans what the device will do.

Runs in the worker (with `num_workers=0` in the rank's own thread). `Fetcher` is a value: the dataset and a few options.
"""

# Over 300 lines: a batch is made in one go, and what goes wrong on the way belongs to it (`repair.py` has the parts apart).

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_dali.collate import collate
from lightning_dali.failures import BadSample, BadSampleError
from lightning_dali.media import MediaError
from lightning_dali.proxies import capture, captures_follow, collect_notes, no_capture
from lightning_dali.repair import outliers, without_gaps
from lightning_dali.sampling import BatchTask
from lightning_dali.seeding import batch_seed, sample_seed, seed_all, seeded
from lightning_dali.structure import field_name, leaves, map_leaves
from lightning_dali.wire import KnownBad, Lane, Request, Slot, SlotStack

logger = logging.getLogger(__name__)


class Modality(Protocol):
    """What a kind of media adds to the engine: how its proxies become lanes. A value, sent to the workers."""

    # `captures = False`: what the dataset decodes itself comes as it is; otherwise as proxies, inside `scope()` if there
    # is such a method, else inside `capture()`. `less()`: the same with fewer kinds captured, to be tried before none is.

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf of a sample is one of this modality's proxies."""

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf of a collated batch is several of them, stacked; its `items` are the proxies."""

    def wrap(self, sample: Any, transform: Callable[[Any], Any] | None) -> Any:
        """Puts proxies into a sample that holds paths or bytes, and applies the field transform to them."""

    def check(self, proxy: Any) -> str | None:
        """Why the proxy cannot be decoded, as far as a cheap look tells; None if it seems fine."""

    def settle(self, proxy: Any) -> None:
        """Decodes in this process, because the device's decoder failed; raises if that fails too."""

    def path(self, proxy: Any) -> str | None:
        """The file behind it, for messages."""

    def notes(self, proxy: Any) -> Iterable[str]:
        """What needed pixels in the worker."""

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """Plans items of (field, dataset index, proxy): lanes, each with the positions of its rows in `items`."""


@dataclass
class Fetcher:
    """Makes the requests of one loader."""

    dataset: Any
    """The user's dataset, unchanged."""
    modality: Modality
    """How its media is handled."""
    transform: Callable[[Any], Any] | None = None
    """For datasets that have no transform of their own: applied to the proxied field."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """The user's collate function; it sees proxies in the places of images."""
    seed: int = 0
    rank: int = 0
    on_bad_sample: str = "raise"
    ragged: str = "error"
    with_index: bool = False
    restore_rng: bool = False
    """Whether this runs in the rank's process, whose random state must not change."""
    _eager: dict[str, str] = field(default_factory=dict)

    def __call__(self, task: BatchTask | KnownBad) -> Request:
        """Fetches, collates and plans one batch."""
        known: dict[int, MediaError] = {}
        if isinstance(task, KnownBad):
            known = {index: MediaError(reason, path) for index, reason, path in task.reasons}
            task = task.task
        start = time.perf_counter()
        reasons: set[str] = set()
        # once a batch, not once a sample: putting back numpy's state and replacing PIL's functions both take their time
        restore = seeded(batch_seed(self.seed, task.epoch, task.step), restore=self.restore_rng)
        with restore, collect_notes(reasons):
            with captures_follow():
                samples, indices, bad = self._samples(task, known)
            fetched = time.perf_counter()
            with seeded(batch_seed(self.seed, task.epoch, task.step), restore=False):
                batch, samples, indices = self._join(task, samples, indices, bad, known)
            request = self._plan(task, batch, samples, indices)
        request.bad = bad
        told = {reason for _, reason in request.notes}
        request.notes = sorted([*request.notes, *(("sample", reason) for reason in reasons - told)])
        request.seconds = {"fetch": fetched - start, "pack": time.perf_counter() - fetched}
        return request

    # -- samples

    def sample(self, epoch: int, index: int, *, restore: bool = True) -> Any:
        """One sample, with proxies in the places of its media, drawn under its own seed; `restore` as in `seeded`."""
        seed = sample_seed(self.seed, epoch, index)
        if not restore:
            seed_all(seed)
            return self._get(epoch, index)
        with seeded(seed, restore=True):
            return self._get(epoch, index)

    def _get(self, epoch: int, index: int) -> Any:
        captures = "dataset" not in self._eager and getattr(self.modality, "captures", True)
        scope = getattr(self.modality, "scope", capture)() if captures else nullcontext()
        try:
            with scope:
                return self._wrap(self.dataset[index])
        except (OSError, MediaError):
            raise
        except Exception as error:
            if not captures:
                raise
            # Perhaps the dataset insists on a real PIL image: the same draw again, with pixels.
            return self._get_eagerly(epoch, index, error)

    def _get_eagerly(self, epoch: int, index: int, error: Exception) -> Any:
        reason = f"{type(error).__name__}: {error}"
        for kind, fewer in getattr(self.modality, "less", tuple)():
            # What goes wrong with fewer kinds is not the user's concern: the first error is told if nothing helps.
            with suppress(Exception), seeded(sample_seed(self.seed, epoch, index), restore=False), fewer.scope():
                sample = self._wrap(self.dataset[index])
                self.modality, self._eager[kind] = fewer, reason
                return sample
        try:
            with seeded(sample_seed(self.seed, epoch, index), restore=False), no_capture():
                sample = self._wrap(self.dataset[index])
        except Exception:  # without any capture it fails too: the first error is the one to tell
            raise error from None
        self._eager["dataset"] = reason
        return sample

    def _wrap(self, sample: Any) -> Any:
        if sample is None:
            raise ValueError("the dataset returned None")
        return self.modality.wrap(sample, self.transform)

    def _samples(self, task: BatchTask, known: dict[int, MediaError]) -> tuple[list[Any], list[int], list[BadSample]]:
        samples: list[Any] = []
        bad: list[BadSample] = []
        for index in task.indices:
            try:
                sample = self._checked(task, index, known)
            except Exception as error:
                bad.append(self._bad(task, index, error))
                sample = None
            samples.append(sample)
        if not bad:
            return samples, list(task.indices), bad
        return *self._repair(task, samples, list(task.indices), bad, known), bad

    def _checked(self, task: BatchTask, index: int, known: dict[int, MediaError]) -> Any:
        """A sample whose media looks decodable.

        What DALI could not decode may be fine for PIL, whose word counts: then its pixels travel.
        """
        sample = self.sample(task.epoch, index, restore=False)
        self._check(sample)
        if index in known:
            try:
                for _, proxy in _proxies(sample, self.modality):
                    self.modality.settle(proxy)
            except Exception as error:
                raise known[index] from error
        return sample

    def _check(self, sample: Any) -> None:
        for _, proxy in _proxies(sample, self.modality):
            reason = self.modality.check(proxy)
            if reason is not None:
                raise MediaError(reason, self.modality.path(proxy))

    def _bad(self, task: BatchTask, index: int, error: Exception) -> BadSample:
        path = getattr(error, "path", None) or getattr(error, "filename", None)
        reason = str(error) if isinstance(error, MediaError) else f"{type(error).__name__}: {error}"
        sample = BadSample(
            dataset_index=index,
            path=None if path is None else os.fsdecode(path),
            rank=self.rank,
            epoch=task.epoch,
            reason=reason,
        )
        if self.on_bad_sample == "raise":
            if isinstance(error, (OSError, MediaError)):
                raise BadSampleError(sample) from error
            # A note is the last thing that a traceback shows, so it says the error once more: logs are read from their end.
            _add_note(
                error, f"{type(error).__name__}: {error} [dataset index {index}, rank {self.rank}, epoch {task.epoch}]"
            )
            raise error
        return sample

    def _repair(
        self,
        task: BatchTask,
        samples: list[Any],
        indices: list[int],
        bad: list[BadSample],
        known: dict[int, MediaError],
    ) -> tuple[list[Any], list[int]]:
        """Replaces or drops the samples that are None."""
        if any(sample is not None for sample in samples):
            return without_gaps(samples, indices, policy=self.on_bad_sample, seed=self.seed, epoch=task.epoch)
        index, sample = self._any_good(task, bad, known)
        rows = len(samples) if self.on_bad_sample == "replace" else 1
        return [sample] * rows, [index] * rows

    def _join(
        self,
        task: BatchTask,
        samples: list[Any],
        indices: list[int],
        bad: list[BadSample],
        known: dict[int, MediaError],
    ) -> tuple[Any, list[Any], list[int]]:
        """The batch, without the samples that do not fit the others if bad ones are replaced or dropped."""
        try:
            return self._collate(samples, indices), samples, indices
        except Exception:
            odd = {} if self.on_bad_sample == "raise" else outliers(samples, is_proxy=self.modality.is_proxy)
            if not odd:
                raise
        reasons = {indices[row]: reason for row, reason in odd.items()}
        bad += [self._bad(task, index, MediaError(reason)) for index, reason in reasons.items()]
        kept = [None if row in odd else sample for row, sample in enumerate(samples)]
        samples, indices = self._repair(task, kept, indices, bad, known)
        return self._collate(samples, indices), samples, indices

    def _any_good(self, task: BatchTask, bad: list[BadSample], known: dict[int, MediaError]) -> tuple[int, Any]:
        """When a whole batch is bad: the next sample of the dataset that is good, so that every rank keeps its step."""
        first = task.indices[0]
        for step in range(1, min(len(self.dataset), 1000)):
            index = (first + step) % len(self.dataset)
            if index in task.indices:
                continue
            try:
                return index, self._checked(task, index, known)
            except Exception:  # bad too: only a good one is looked for
                continue
        raise BadSampleError(bad[0])

    # -- the batch

    def _collate(self, samples: list[Any], indices: list[int]) -> Any:
        if self.collate_fn is not None:
            batch = self.collate_fn(samples)
        else:
            batch = collate(samples, indices, is_proxy=self.modality.is_proxy, ragged=self.ragged == "list")
        return _append_index(batch, indices) if self.with_index else batch

    def _plan(self, task: BatchTask, batch: Any, samples: list[Any], indices: list[int]) -> Request:
        """Finds the proxies that came through collating, plans their lanes, and puts slots in their places."""
        items: list[tuple[str, int, Any]] = []
        known: dict[int, int] = {}
        owners = _owners(samples, indices, self.modality)

        def register(proxy: Any) -> int:
            if id(proxy) not in known:
                name, index = owners.get(id(proxy), ("batch", -1))
                known[id(proxy)] = len(items)
                items.append((name, index, proxy))
            return known[id(proxy)]

        def find(leaf: Any) -> Any:
            if self.modality.is_stack(leaf):
                return _Found([register(proxy) for proxy in leaf.items], stacked=True, lead=getattr(leaf, "lead", None))
            return _Found([register(leaf)], stacked=False) if self.modality.is_proxy(leaf) else leaf

        found = map_leaves(find, batch)
        planned = self.modality.lanes(items)
        for lane, _ in planned:
            lane.spec = lane.spec.in_epoch(task.epoch)
        slots: dict[int, Slot] = {}
        for number, (_, positions) in enumerate(planned):
            slots.update({position: Slot(number, row) for row, position in enumerate(positions)})

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, _Found):
                return leaf
            if not leaf.stacked:
                return slots[leaf.items[0]]
            ragged = self._same_size(items, leaf.items)
            places = [slots[item] for item in leaf.items]
            return SlotStack(tuple(one.lane for one in places), tuple(one.row for one in places), ragged, leaf.lead)

        notes = [(name, note) for name, _, proxy in items for note in self.modality.notes(proxy)]
        notes += [("sample", reason) for reason in self._eager.values()]
        return Request(
            task=task,
            lanes=[lane for lane, _ in planned],
            batch=map_leaves(place, found),
            indices=tuple(indices),
            notes=sorted(set(notes)),
        )

    def _same_size(self, items: list[tuple[str, int, Any]], members: list[int]) -> bool:
        """Whether a stacked field has items of different sizes: allowed only with ragged="list"."""
        shapes = [_batch_shape(items[member][2]) for member in members]
        odd = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            return False
        if self.ragged == "list":
            return True
        field_, first, _ = items[members[0]]
        other = items[members[odd]][1]
        own = getattr(items[members[0]][2], "SIZE_ADVICE", None)
        advice = own or _SIZE_ADVICE
        if own is None and shapes[odd][1:] == shapes[0][1:]:
            advice = "Give all the same channels: convert('RGB') in the dataset, or v2.RGB() as the first transform."
        raise ValueError(
            f"field {field_!r} has different sizes in one batch: dataset index {first} gives {shapes[0]}, index {other} "
            f"gives {shapes[odd]}. {advice}"
        )


_SIZE_ADVICE = (
    "Add a transform that fixes the size, such as v2.Resize((H, W)), v2.RandomResizedCrop(size) or v2.Resize(size) followed "
    "by v2.CenterCrop(size); or pass ragged='list' to get a list of tensors."
)


def _batch_shape(proxy: Any) -> tuple[Any, ...]:
    """What of its shape must be that of its batch mates; nothing where only its graph knows."""
    shape = getattr(proxy, "batch_shape", None)
    return tuple(getattr(proxy, "shape", ()) if shape is None else shape)


class _Found:
    """Proxies in a batch, by their number."""

    def __init__(self, items: list[int], *, stacked: bool, lead: tuple[int, ...] | None = None) -> None:
        self.items, self.stacked, self.lead = items, stacked, lead


def _proxies(sample: Any, modality: Modality) -> Iterator[tuple[str, Any]]:
    """Yields (field, proxy), those that the sample's own transform stacked too."""
    for path, leaf in leaves(sample):
        if modality.is_proxy(leaf):
            yield field_name(path), leaf
        elif modality.is_stack(leaf):
            yield from ((field_name(path), proxy) for proxy in leaf.items)


def _owners(samples: list[Any], indices: list[int], modality: Modality) -> dict[int, tuple[str, int]]:
    """From a proxy's id to its field and the dataset index of its sample."""
    owners: dict[int, tuple[str, int]] = {}
    for index, sample in zip(indices, samples, strict=True):
        for name, proxy in _proxies(sample, modality):
            owners.setdefault(id(proxy), (name, index))
    return owners


def _append_index(batch: Any, indices: list[int]) -> Any:
    import torch

    index = torch.tensor(indices)
    if isinstance(batch, dict):
        return {**batch, "index": index}
    if type(batch) in (tuple, list):
        return type(batch)((*batch, index))
    return (batch, index)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
