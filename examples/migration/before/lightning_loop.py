"""DALI's iterator under a Lightning Trainer, after docs/examples/frameworks/pytorch/pytorch-lightning.ipynb (Apache-2.0).

python lightning_loop.py /path/to/train
"""

import argparse
import math

import lightning as L
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator


@pipeline_def
def mnist(root, shard_id, num_shards):
    device = "cpu" if Pipeline.current().device_id is None else "mixed"
    jpegs, labels = fn.readers.file(
        file_root=root, shard_id=shard_id, num_shards=num_shards, random_shuffle=True, name="Reader"
    )
    images = fn.decoders.image(jpegs, device=device, output_type=types.GRAY)
    images = fn.resize(images, size=[28, 28])
    images = fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mean=[0.1307 * 255], std=[0.3081 * 255]
    )
    return images, labels


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


class DALILitMNIST(LitMNIST):
    def __init__(self, root, batch_size):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def setup(self, stage=None):
        gpu = self.trainer.strategy.root_device.type == "cuda"
        pipe = mnist(
            self.root,
            self.global_rank,
            self.trainer.world_size,
            batch_size=self.batch_size,
            num_threads=4,
            device_id=self.local_rank if gpu else None,
        )

        class LightningWrapper(DALIClassificationIterator):
            def __init__(self, *kargs, **kvargs):
                super().__init__(*kargs, **kvargs)

            def __next__(self):
                out = super().__next__()
                # DDP is used so only one pipeline per process
                # also we need to transform dict returned by DALIClassificationIterator to iterable
                # and squeeze the lables
                out = out[0]
                return [out[k] if k != "label" else torch.squeeze(out[k], -1).long() for k in self.output_map]

            def __len__(self):
                return math.ceil(self._size / self.batch_size)

        self.train_loader = LightningWrapper(
            pipe, reader_name="Reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
        )

    def train_dataloader(self):
        return self.train_loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    trainer = L.Trainer(max_epochs=args.epochs, logger=False, enable_checkpointing=False)
    trainer.fit(DALILitMNIST(args.data, args.batch_size))


if __name__ == "__main__":
    main()
