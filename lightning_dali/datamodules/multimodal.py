"""`MultiModalDataModule`: samples with images, videos and audio in any combination.

Runs in the rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from lightning_dali import environment
from lightning_dali.datamodules.arguments import explained_by, sort_arguments
from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.datasets import Datasets
from lightning_dali.datamodules.image import ImageDataModule
from lightning_dali.datamodules.plain import check_transform, plain
from lightning_dali.datamodules.speech import check_positive
from lightning_dali.datamodules.video import (
    DECODERS,
    LAYOUTS,
    VideoDataModule,
    clips_by_stage,
    hardware_of,
    on_device,
    per_clip,
)
from lightning_dali.failures import check_choice
from lightning_dali.fetch import Modality
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.media import ClipSampler, IndexCache
from lightning_dali.media.kinds import KINDS
from lightning_dali.modalities.audio import AudioModality
from lightning_dali.modalities.image import ImageModality
from lightning_dali.modalities.several import KindTransforms, SeveralModality
from lightning_dali.modalities.video import VideoModality
from lightning_dali.sampling import Shard

_VIDEO = ("clip", "eval_clip", "decoder", "layout", "with_times", "with_audio", "index_cache")
_OF_KIND = {
    **dict.fromkeys(_VIDEO, "video"),
    "sample_rate": "audio",
    "channels_last": "image",
    "hw_decoder_load": "image",
}
"""Arguments that mean nothing without media of a kind."""
Transforms = Mapping[str, Callable[[Any], Any]] | None


@explained_by(ImageDataModule)
@explained_by(VideoDataModule)
class MultiModalDataModule(BaseDataModule):
    """Trains on samples that hold media of several kinds: a picture and what is said about it, a video and its sound.

    The dataset is what it would be without this library: in a sample images, videos and audio stand wherever they like,
    loaded and transformed by the dataset, or as paths or encoded bytes, beside texts, tokens, numbers. Each kind is handled
    as by the datamodule of that kind, and comes out as there: images `(B, C, H, W)`, clips `(B, T, C, H, W)`, audio as
    `Padded(data, lengths)`, all on the rank's device. Every other field is collated as PyTorch does and moved to the device.

    Options that are not explained here are those of `ImageDataModule`, and mean the same.

    Args:
        kinds: What a sample holds, of ``"image"``, ``"video"``, ``"audio"``.
        train_dataset: As in `ImageDataModule`; torchvision's video datasets are best made by a function.
        train_transform: For fields that the dataset has not transformed itself: a mapping from a kind to the transform of
            its first field in a sample, ``{"image": v2.Compose([...]), "audio": MelSpectrogram(16_000)}``.
        eval_transform: The same for validation, test and prediction.
        clip: See `VideoDataModule`, as for `eval_clip`, `decoder`, `layout`, `with_times` and `index_cache`.
        with_audio: Whether a video field becomes ``{"video", "audio"}``, with what is heard in the file from the clip's first
            frame to the end of its last one (zeros where it has no sound). torchvision's video datasets, which have a place
            for sound, get it there. ``"audio"`` need not be among the `kinds` for it.
        sample_rate: See `SpeechDataModule`.
        num_threads: DALI's CPU threads; None: three quarters of this rank's cores, 24 at most, where there is audio or DALI
            decodes videos, else a quarter, from 2 to 8.

    Raises:
        ValueError: An option has a value that is not allowed or is for a kind that is not there, or a dataset is empty.
        TypeError: An option has the wrong type.
    """

    def __init__(
        self,
        *,
        kinds: Sequence[str],
        train_dataset: Datasets = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        train_transform: Transforms = None,
        eval_transform: Transforms = None,
        clip: ClipSampler | None = None,
        eval_clip: ClipSampler | None = None,
        decoder: str = "auto",
        layout: str = "TCHW",
        with_times: bool = False,
        with_audio: bool = False,
        index_cache: str | None = None,
        sample_rate: int | None = None,
        batch_size: int = 32,
        num_workers: int | None = None,
        num_threads: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        sampler: Any = None,
        batch_sampler: Any = None,
        seed: int | None = None,
        on_bad_sample: str = "raise",
        max_bad_samples: int | None = None,
        bad_samples_file: Any = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        release_memory: str = "stage",
        ragged: str = "error",
        with_index: bool = False,
        channels_last: bool = False,
        device: Any = "auto",
        prefetch: int | None = 2,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        depth: int = 3,
        hw_decoder_load: float | None = 1.0,
        watchdog_seconds: float = 60.0,
    ) -> None:
        given = dict(locals())
        shared = sort_arguments(given, own=("kinds", "sample_rate", *_VIDEO))
        held = _kinds(plain("kinds", kinds), with_audio=with_audio)
        _check_needed(given, held)
        for name in ("train_transform", "eval_transform"):
            shared[name] = _by_kind(name, plain(name, shared[name]), held)
        check_positive("sample_rate", sample_rate, int)
        self._clips = clips_by_stage(clip, eval_clip)
        self._decoder = check_choice("decoder", decoder, DECODERS)
        self._members = _members(
            held,
            VideoModality(
                self._clips["train"],
                layout=check_choice("layout", layout, LAYOUTS),
                with_times=bool(with_times),
                cache=IndexCache(index_cache),
                sound=AudioModality(sample_rate) if with_audio else None,
            ),
            AudioModality(sample_rate),
        )
        super().__init__(modality=SeveralModality(self._members), **shared)

    def _call(self, factory: Callable[[], Any]) -> Any:
        video = self._members.get("video")
        with nullcontext() if video is None else video.scope():  # as in `VideoDataModule`
            return factory()

    def _default_num_threads(self, device_index: int | None) -> int:
        """As the datamodule of the medium that needs the most of them."""
        dali_decodes = "audio" in self._members
        if "video" in self._members and device_index is not None:
            dali_decodes |= hardware_of(self._decoder, Device(device_index)) == "dali"
        if dali_decodes:
            return environment.default_decoding(self._trainer_or_none)[1]
        return super()._default_num_threads(device_index)

    def _loader(self, name: str, dataset: Any, shard: Shard, device: Device, *, label: str) -> Loader:
        members = dict(self._members)
        if "video" in members:
            video = replace(members["video"], clip=self._clips["train" if name == "train" else "eval"])
            members["video"] = on_device(video, self._decoder, device, num_workers=self._num_workers(device))
            dataset = per_clip(dataset, members["video"])
        self.modality = SeveralModality(members)
        return super()._loader(name, dataset, shard, device, label=label)


def _kinds(given: Any, *, with_audio: bool) -> tuple[str, ...]:
    """The kinds in the order of `KINDS`, checked."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise TypeError(f"kinds is {given!r}: expected a list with one or more of {', '.join(map(repr, KINDS))}.")
    found = {check_choice("kinds", kind, KINDS) for kind in given} | ({"audio"} if with_audio else set())
    return tuple(kind for kind in KINDS if kind in found)


def _members(kinds: Sequence[str], video: VideoModality, audio: AudioModality) -> dict[str, Any]:
    every: dict[str, Modality] = {"video": video, "image": ImageModality(), "audio": audio}
    return {kind: every[kind] for kind in kinds}


def _check_needed(given: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Refuses what would be accepted and ignored."""
    defaults = inspect.signature(MultiModalDataModule.__init__).parameters
    for name, kind in _OF_KIND.items():
        if kind not in kinds and given[name] != defaults[name].default:
            raise ValueError(
                f"{name} is {given[name]!r}, which is for {kind}, but kinds is {list(kinds)}: add {kind!r} to kinds, or drop "
                f"{name}."
            )


def _by_kind(name: str, given: Any, kinds: Sequence[str]) -> KindTransforms | None:
    if given is None or isinstance(given, KindTransforms):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} is {given!r:.80}: expected a mapping from a kind to its transform, such as "
            f"{{{kinds[0]!r}: v2.Compose([...])}}."
        )
    for kind, transform in given.items():
        if kind not in kinds:
            raise ValueError(
                f"{name} has the key {kind!r}: allowed are the kinds of this datamodule, {list(kinds)}. Add it to kinds, or "
                "transform that field in the dataset."
            )
        check_transform(f"{name}[{kind!r}]", transform)
    return KindTransforms({kind: transform for kind, transform in given.items() if transform is not None})
