"""ResNet-50 with the DALI Proxy, after DALI's docs/examples/use_cases/pytorch/resnet50/main.py (Apache-2.0), shortened.

python resnet50.py /path/to/imagenet/train
"""

import argparse

import numpy as np
import nvidia.dali.plugin.pytorch.experimental.proxy as dali_proxy
import torch
import torchvision
from nvidia.dali import fn, pipeline_def, types


@pipeline_def
def train_pipe(crop, device):
    filepaths = fn.external_source(name="images", no_copy=True)
    jpegs = fn.io.file.read(filepaths)
    images = fn.decoders.image_random_crop(
        jpegs, device=device, output_type=types.RGB, random_aspect_ratio=[0.75, 4.0 / 3.0], random_area=[0.08, 1.0]
    )
    images = fn.resize(images, size=[crop, crop], interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[0.485 * 255, 0.456 * 255, 0.406 * 255],
        std=[0.229 * 255, 0.224 * 255, 0.225 * 255],
        mirror=fn.random.coin_flip(probability=0.5),
    )


def read_filepath(path):
    return np.frombuffer(path.encode(), dtype=np.int8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    target_device = torch.device("cuda" if gpu else "cpu")

    pipe = train_pipe(
        args.crop, "mixed" if gpu else "cpu", batch_size=args.batch_size, num_threads=3, device_id=0 if gpu else None
    )
    with dali_proxy.DALIServer(pipe) as dali_server:
        dataset = torchvision.datasets.ImageFolder(args.data, transform=dali_server.proxy, loader=read_filepath)
        loader = dali_proxy.DataLoader(
            dali_server, dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True
        )
        model = getattr(torchvision.models, args.arch)(num_classes=len(dataset.classes)).to(target_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        for epoch in range(args.epochs):
            for images, target in loader:
                loss = torch.nn.functional.cross_entropy(model(images), target.to(target_device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
