"""Train a Lightning model on DALI, with the dataset and the transforms you already have.

    The worker fetches, torchvision decides, DALI executes.

```text
 worker process  (no CUDA context, no DALI)                     |  rank process (one per GPU)
                                                                |
 sampling ──(epoch, index)──► your Dataset ──► your transforms  |
    seeds every draw             │                 │            |
                                 ▼                 ▼            |
                        proxies: stand in for pixels and        |
                        samples, and record the calls           |
                                           │                    |
                                 wire: one Request a batch ────►|  server: one thread a pass
                                 (one slab of bytes)            |    graph: recorded calls as DALI operators,
                                                                |           torchvision's arithmetic for the rest
                                                                |      │
                                                                |  loader: batch on this rank's device ──► Trainer
```

`datamodules` holds what you use; the other folders are the boxes above, and docs/architecture.md walks through them.
Importing this package does nothing else: the names below are looked up when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; tests/test_imports.py keeps the two lists equal
    from lightning_dali.datamodules import DALIDataModule as DALIDataModule
    from lightning_dali.datamodules import ImageDataModule as ImageDataModule
    from lightning_dali.datamodules import MultiModalDataModule as MultiModalDataModule
    from lightning_dali.datamodules import SpeechDataModule as SpeechDataModule
    from lightning_dali.datamodules import VideoDataModule as VideoDataModule
    from lightning_dali.failures import BadSample as BadSample
    from lightning_dali.failures import BadSampleError as BadSampleError
    from lightning_dali.manifests import SpeechManifest as SpeechManifest
    from lightning_dali.media import ClipSampler as ClipSampler
    from lightning_dali.monitor import ThroughputMonitor as ThroughputMonitor
    from lightning_dali.padded import Padded as Padded

__version__ = "0.1.0"

_HOMES = {
    "DALIDataModule": "lightning_dali.datamodules",
    "ImageDataModule": "lightning_dali.datamodules",
    "MultiModalDataModule": "lightning_dali.datamodules",
    "BadSample": "lightning_dali.failures",
    "BadSampleError": "lightning_dali.failures",
    "ThroughputMonitor": "lightning_dali.monitor",
    "Padded": "lightning_dali.padded",
    "SpeechDataModule": "lightning_dali.datamodules",
    "SpeechManifest": "lightning_dali.manifests",
    "VideoDataModule": "lightning_dali.datamodules",
    "ClipSampler": "lightning_dali.media",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
