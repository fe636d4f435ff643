"""What stands beside torchaudio: transforms that it lacks, loading without torchcodec, manifests. Runs in the worker.

The transforms are modules: on samples they compute, in a `SpeechDataModule` they are recorded and run on the device.
"""

from lightning_dali.manifests import SpeechManifest
from lightning_dali.media import AudioError
from lightning_dali.proxies.audio_capture import load_audio
from lightning_dali.proxies.audio_modules import (
    CMVN,
    Dither,
    Downmix,
    GlobalCMVN,
    Log,
    RandomNoise,
    TrimSilence,
    mel_spectrogram,
)

__all__ = [
    "CMVN",
    "AudioError",
    "Dither",
    "Downmix",
    "GlobalCMVN",
    "Log",
    "RandomNoise",
    "SpeechManifest",
    "TrimSilence",
    "load_audio",
    "mel_spectrogram",
]
