"""DALI's AutoAugment and its iterator, after docs/examples/use_cases/pytorch/efficientnet (Apache-2.0), shortened.

python autoaugment.py /path/to/imagenet/train
"""

import argparse

import torch
import torchvision
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug import auto_augment

import lightning_dali.proxy_api as dali_proxy


@pipeline_def(enable_conditionals=True)
def training_pipe(crop, device):
    jpegs = fn.io.file.read(fn.external_source(name="jpegs", no_copy=True))
    images = fn.decoders.image_random_crop(jpegs, device=device, output_type=types.RGB)
    images = fn.resize(images, size=[crop, crop], interp_type=types.INTERP_CUBIC, antialias=False)
    images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
    images = auto_augment.auto_augment_image_net(images, shape=[crop, crop])
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[0.485 * 255, 0.456 * 255, 0.406 * 255],
        std=[0.229 * 255, 0.224 * 255, 0.225 * 255],
    )
    return images


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--arch", default="efficientnet_b0")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    target_device = torch.device("cuda" if gpu else "cpu")

    pipe = training_pipe(
        args.crop,
        "mixed" if gpu else "cpu",
        batch_size=args.batch_size,
        num_threads=args.workers,
        device_id=0 if gpu else None,
    )
    server = dali_proxy.DALIServer(pipe)
    dataset = torchvision.datasets.ImageFolder(args.data, server.proxy, loader=str)
    loader = dali_proxy.DataLoader(server, dataset, args.batch_size, shuffle=True, num_workers=args.workers)
    model = getattr(torchvision.models, args.arch)().to(target_device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    for epoch in range(args.epochs):
        for images, target in loader:
            loss = torch.nn.functional.cross_entropy(model(images), target.to(target_device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
