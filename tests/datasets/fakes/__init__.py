"""Made-up files for every image dataset of torchvision: `FAKES` maps a class's name to a function that writes them and opens
the dataset with a transform.

Files are as small and as few as each class allows, in the layout that torchvision's source reads. Where a class compares
checksums with the original archive's, `tests/datasets/test_torchvision.py` lets them pass.
"""

from tests.datasets.fakes import arrays, classification, pairs, targets
from tests.datasets.fakes.files import FAKES, folders, photo
from tests.datasets.fakes.targets import cityscapes, coco, kitti, pets, voc

__all__ = [
    "FAKES",
    "arrays",
    "cityscapes",
    "classification",
    "coco",
    "folders",
    "kitti",
    "pairs",
    "pets",
    "photo",
    "targets",
    "voc",
]
