"""What people write on a waveform between loading and their transforms gives what torch gives."""

from __future__ import annotations

import pytest
import torch
import torchaudio
from torch import nn
from torchaudio import functional as F
from torchaudio import transforms as T

from lightning_dali import SpeechDataModule
from lightning_dali.audio import CMVN, Downmix, Log
from tests.speech.audio_files import Files, normalised, rows, samples, write


class Wrapped(nn.Module):
    """A user's module of vocabulary and arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.mel = T.MelSpectrogram(16_000, n_mels=20, n_fft=256)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        return torch.log(self.mel(wave.mean(0, keepdim=True)) + 1e-6).squeeze(0)


IDIOMS = {
    "mean(0)": lambda wave: wave.mean(0),
    "mean keepdim, [0]": lambda wave: wave.mean(dim=0, keepdim=True)[0],
    "[:1]": lambda wave: wave[:1],
    "[1]": lambda wave: wave[1],
    "[:, a:b]": lambda wave: wave[:, 1000:3000],
    "[..., -n:]": lambda wave: wave[..., -500:] * 0.5,
    "[..., -n:] of something": lambda wave: T.Vol(0.5)(wave)[..., -500:],
    "AddNoise": lambda wave: T.AddNoise()(wave[:1], torch.arange(wave.shape[1])[None].sin(), torch.tensor([10.0])),
    "pad": lambda wave: nn.functional.pad(wave, (100, 6000 - wave.shape[-1])),
    "pad and cut": lambda wave: nn.functional.pad(wave, (-100, 6000 - wave.size(1)))[:, :5000],
    "squeeze": lambda wave: wave[:1].squeeze(0).unsqueeze(0),
    "arithmetic": lambda wave: ((wave * 2 - 0.5) / 3 + 1).clamp(-1, 1.1).abs(),
    "in place": lambda wave: wave.clone().mul_(0.5).add_(1),
    "resample": lambda wave: F.resample(wave, 16_000, 12_000),
    "wrapped": Wrapped(),
    "a stack of modules": nn.Sequential(
        Downmix(), T.Preemphasis(), T.MelSpectrogram(16_000, n_mels=20, n_fft=256), Log(), CMVN()
    ),
}
NEED_SAMPLES = {
    "normalised": normalised,
    "flip": lambda wave: wave.flip(-1)[:, :2000],
    "numpy": lambda wave: torch.from_numpy(wave.numpy()[:, ::2].copy()),
    "after a module": lambda wave: T.Vol(0.5)(wave).cumsum(-1),
}


@pytest.mark.parametrize("name", [*IDIOMS, *NEED_SAMPLES])
def test_idioms_give_what_torch_gives(tmp_path, name):
    paths = [write(tmp_path / f"{n}.flac", n, seconds=0.3 + 0.02 * n, channels=2) for n in range(3)]
    transform = {**IDIOMS, **NEED_SAMPLES}[name]
    dm = SpeechDataModule(
        val_dataset=Files(paths, torchaudio.load, transform), batch_size=3, num_workers=0, num_threads=1, device="cpu"
    )
    loader = dm.val_dataloader()
    batched = list(loader)
    notes = loader.trace().notes
    dm.close()
    for got, path in zip(rows(batched), paths, strict=True):
        torch.testing.assert_close(got, transform(samples(path)[0]), atol=2e-4, rtol=1e-3)
    assert bool(notes) == (name in NEED_SAMPLES), notes
