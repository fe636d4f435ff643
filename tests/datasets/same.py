"""Is a delivered batch what the dataset itself gives?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_dali.structure import leaves
from tests.graph.vocabulary import compare, delivered, expected


def check_same(dataset: Any, size: int | None = None, *, mean: float = 1.0, p99: float = 4.0) -> Any:
    """Delivers the first samples of a dataset as one batch and compares them with `dataset[index]` under the same seed.

    Args:
        dataset: With its own transform, giving tensors for images.
        size: How many samples; all by default.
        mean: Allowed mean difference of an image, in 255ths.
        p99: Allowed 99th percentile.

    Returns:
        The request that a worker makes for the batch.
    """
    size = len(dataset) if size is None else size
    batch, request = delivered(dataset, size)
    images = []
    for row in range(size):
        for path, leaf in leaves(expected(dataset, row)):
            found = _find(batch, path, row)
            where = f"sample {row}, field {path}"
            if leaf is None or isinstance(leaf, str):
                assert found == leaf, where
            elif isinstance(leaf, np.ndarray) or not hasattr(leaf, "shape"):
                np.testing.assert_allclose(np.asarray(found), np.asarray(leaf), err_msg=where)
            else:
                images.append(compare(found, leaf, where=where))
    differences = torch.cat([one for one in images if one is not None])
    found_mean, found_p99 = differences.mean().item(), differences.quantile(0.99).item()
    assert found_mean < mean and found_p99 < p99, (found_mean, found_p99, differences.max().item())
    return request


def _find(batch: Any, path: tuple[Any, ...], row: int) -> Any:
    """The row's leaf; annotations whose number differs are one list a sample, above the path's last keys."""
    if not path:
        return batch[row]
    try:
        return _find(batch[path[0]], path[1:], row)
    except (TypeError, IndexError, KeyError):
        batch = batch[row]
        for key in path:
            batch = batch[key]
        return batch
