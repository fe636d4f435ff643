"""`VideoDataModule`: any video dataset with torchvision transforms, decoded by NVDEC and the workers.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_dali import environment
from lightning_dali.datamodules.arguments import explained_by, sort_arguments
from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.clips import PerClip, StreamOfClips, count_clips
from lightning_dali.datamodules.datasets import Datasets
from lightning_dali.datamodules.image import ImageDataModule
from lightning_dali.failures import check_choice
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.media import ClipSampler, IndexCache
from lightning_dali.modalities.video import VideoModality
from lightning_dali.sampling import Shard
from lightning_dali.streams import is_stream

DECODERS = ("auto", "nvdec", "dali", "cpu")
LAYOUTS = ("TCHW", "CTHW")


@explained_by(ImageDataModule)
class VideoDataModule(BaseDataModule):
    """Trains on clips of videos from an unmodified dataset of files.

    A sample holds a video as a path or as the bytes of a whole file, anywhere in it: `(path, label)`, `{"video": path}`. It
    becomes a clip of T frames, `(B, T, C, H, W)` in the batch, as the transform would have produced it; the same draw counts
    for all its frames. torchvision's Kinetics, UCF101 and HMDB51 choose their clips themselves. Every other field is
    collated as PyTorch does and moved to the device.

    Options that are not explained here are those of `ImageDataModule`, and mean the same.

    Args:
        train_dataset: As in `ImageDataModule`; or a zero-argument function that makes one (torchvision's video datasets read
            all files when they are made: made by a function, they do so here, without torchcodec).
        train_transform: Applied to the clip; a `v2` transform, for datasets that return paths or bytes.
        eval_transform: The same for validation, test and prediction.
        clip: Which frames make a clip in training.
        eval_clip: The same for validation, test and prediction; None: `clip`, from the centre where that is random. With
            `num_clips` above one, sample `i` is clip `i % num_clips` of video `i // num_clips`.
        decoder: ``"auto"``: NVDEC (through PyNvVideoCodec where it is installed, else DALI's decoder) and the workers
            together, each as much as it manages; ``"nvdec"`` or ``"dali"``: everything that the hardware knows goes there;
            ``"cpu"``: the workers decode everything, with PyAV. Without a GPU that is what happens anyway.
        layout: ``"TCHW"``, or ``"CTHW"`` as 3D networks take it.
        with_times: Whether a video field becomes ``{"video", "pts_seconds", "mask", "video_index", "clip_index"}``: times
            `(B, T)` in seconds, which frames are real, the dataset index of the video and the clip's number in it, `(B,)`.
        num_threads: DALI's CPU threads; None: a quarter of this rank's cores, from 2 to 8, or three quarters, 24 at most,
            where DALI decodes on the GPU.
        index_cache: File in which indices of videos are kept; None: in the user's cache folder.

    Raises:
        ValueError: An option has a value that is not allowed, or a dataset is empty.
        TypeError: An option has the wrong type.
    """

    def __init__(
        self,
        *,
        train_dataset: Datasets = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        clip: ClipSampler | None = None,
        eval_clip: ClipSampler | None = None,
        decoder: str = "auto",
        layout: str = "TCHW",
        with_times: bool = False,
        index_cache: str | None = None,
        batch_size: int = 8,
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
        device: Any = "auto",
        prefetch: int | None = 2,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        depth: int = 3,
        watchdog_seconds: float = 60.0,
    ) -> None:
        shared = sort_arguments(locals(), own=("clip", "eval_clip", "decoder", "layout", "with_times", "index_cache"))
        self._clips = clips_by_stage(clip, eval_clip)
        self._decoder, layout = check_choice("decoder", decoder, DECODERS), check_choice("layout", layout, LAYOUTS)
        self._video = VideoModality(
            self._clips["train"], layout=layout, with_times=bool(with_times), cache=IndexCache(index_cache)
        )
        super().__init__(modality=self._video, **shared)

    def _call(self, factory: Callable[[], Any]) -> Any:
        with self._video.scope():  # torchvision's datasets read every file when they are made
            return factory()

    def _default_num_workers(self, device: Device) -> int:
        """Without a GPU it is the workers that decode, and DALI has little to do: then each core gets one, 8 at most."""
        if device.index is not None:
            return super()._default_num_workers(device)
        return environment.default_num_workers(self._trainer_or_none, gpu=False, decoding=True)

    def _default_num_threads(self, device_index: int | None) -> int:
        """DALI's decoder takes a thread a clip, and each waits for NVDEC most of the time: 4 kept it busy for a half."""
        if device_index is not None and hardware_of(self._decoder, Device(device_index)) == "dali":
            return environment.default_decoding(self._trainer_or_none)[1]
        return super()._default_num_threads(device_index)

    def _loader(self, name: str, dataset: Any, shard: Shard, device: Device, *, label: str) -> Loader:
        video = replace(self._video, clip=self._clips["train" if name == "train" else "eval"])
        self.modality = on_device(video, self._decoder, device, num_workers=self._num_workers(device))
        return super()._loader(name, per_clip(dataset, video), shard, device, label=label)


def clips_by_stage(clip: ClipSampler | None, eval_clip: ClipSampler | None) -> dict[str, ClipSampler]:
    """The samplers of "train" and "eval" that the arguments mean.

    Raises:
        TypeError: One of them is something else.
    """
    clip = ClipSampler(16, stride=4) if clip is None else clip
    for name, value in (("clip", clip), ("eval_clip", eval_clip)):
        if value is not None and not isinstance(value, ClipSampler):
            raise TypeError(f"{name} is {value!r}: expected a ClipSampler, such as ClipSampler(16, stride=4).")
    if eval_clip is None:
        eval_clip = replace(clip, mode="center") if clip.is_random and clip.num_clips == 1 else clip
    return {"train": clip, "eval": eval_clip}


def per_clip(dataset: Any, video: VideoModality) -> Any:
    """The dataset with a sample a clip, where videos have several or clips say which they are."""
    if video.clip.num_clips > 1 or video.clip.mode == "all" or video.with_times:
        if is_stream(dataset):
            return StreamOfClips(dataset, video)
        return PerClip(dataset, count_clips(dataset, video.clip, video))
    return dataset


def on_device(video: VideoModality, decoder: str, device: Device, *, num_workers: int) -> VideoModality:
    """The modality with what decodes on that device, and as many workers to share the work.

    Raises:
        ValueError: The decoder is not there.
    """
    hardware = hardware_of(decoder, device)
    share = decoder == "auto" and hardware is not None
    return replace(video, hardware=hardware, share=share, num_workers=num_workers)


def hardware_of(decoder: str, device: Device) -> str | None:
    """What decodes on the device: "nvdec", "dali", or None.

    Args:
        decoder: As for `VideoDataModule`.
        device: This rank's.

    Raises:
        ValueError: It asks for what is not here.
    """
    if device.index is None or decoder == "cpu":
        if decoder in ("nvdec", "dali") and device.index is None:
            raise ValueError(
                f"decoder is {decoder!r}, but the device is the CPU: NVDEC needs a GPU. Pass decoder='auto' or 'cpu'."
            )
        return None
    from lightning_dali.graph.nvdec import available

    if decoder == "dali" or (decoder == "auto" and not available()):
        return "dali"
    if not available():
        raise ValueError(
            "decoder is 'nvdec', but PyNvVideoCodec is not installed: pip install 'lightning-dali[video-gpu]'."
        )
    return "nvdec"
