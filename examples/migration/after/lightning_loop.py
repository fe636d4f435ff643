"""DALI's iterator under a Lightning Trainer, after docs/examples/frameworks/pytorch/pytorch-lightning.ipynb (Apache-2.0).

python lightning_loop.py /path/to/train
"""

import argparse

import lightning as L
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from torchvision.datasets import ImageFolder

from lightning_dali import DALIDataModule


@pipeline_def
def mnist():
    device = "cpu" if Pipeline.current().device_id is None else "mixed"
    jpegs = fn.io.file.read(fn.external_source(name="jpegs", no_copy=True))
    images = fn.decoders.image(jpegs, device=device, output_type=types.GRAY)
    images = fn.resize(images, size=[28, 28])
    images = fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mean=[0.1307 * 255], std=[0.3081 * 255]
    )
    return images


class LitMNIST(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(28 * 28, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch, batch_idx):
        images, target = batch
        return torch.nn.functional.cross_entropy(self.net(images), target)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    trainer = L.Trainer(max_epochs=args.epochs, logger=False, enable_checkpointing=False)
    dm = DALIDataModule(
        train_dataset=lambda p: ImageFolder(args.data, p, loader=str), train_pipeline=mnist, batch_size=args.batch_size
    )
    trainer.fit(LitMNIST(), dm)


if __name__ == "__main__":
    main()
