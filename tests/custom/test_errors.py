"""What goes wrong in a user's pipeline or dataset is named: inputs, dtypes, files, samples, the process's end."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import Pipeline

from lightning_dali import BadSampleError, DALIDataModule
from lightning_dali.testing import recover_ids
from tests.custom import pipelines
from tests.custom.pipelines import Files, Numbers
from tests.custom.run import batches, module


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda proxy: proxy(a=1.0),
            r"has the inputs \['a', 'b'\].*called with \['a'\]: missing \['b'\], surplus \[\]",
        ),
        (lambda proxy: proxy(a=1.0, b=2.0, c=3.0), r"called with \['a', 'b', 'c'\]: missing \[\], surplus \['c'\]"),
        (lambda proxy: proxy(1.0, 2.0), r"called with \['<positional float>'"),
    ],
)
def test_names_of_inputs_are_compared_at_setup(call: Callable[[Any], Any], words: str) -> None:
    def sample(files: Files, index: int) -> Any:
        return call(files.proxy)

    dataset = functools.partial(Files, [Path()] * 8, sample=sample)
    with pytest.raises(TypeError, match=words), module(dataset, pipelines.add_and_subtract, num_workers=1):
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: np.float32(i) if i == 3 else np.int32(i), r"expected int32.*\(as dataset index 0\), found float32.*at dataset index 3, field '0'"),
        (lambda i: np.zeros((1,) * (1 + (i == 9)), np.int32), r"expected int32 with 1 dimension .*found int32 with 2 dimensions at dataset index 9"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_workers", [0, 1])
def test_mixed_inputs_are_caught_in_the_worker(make: Callable[[int], Any], words: str, num_workers: int) -> None:
    with (
        module(
            functools.partial(Numbers, make=make), pipelines.identity, shuffle=False, num_workers=num_workers
        ) as datamodule,
        pytest.raises(ValueError, match=words),
    ):
        batches(datamodule)


def test_declared_dtypes_are_checked_at_setup() -> None:
    with (
        pytest.raises(TypeError, match=r"input 'x': expected float32 with 0 dimensions, found int64 with 1 dimension"),
        module(functools.partial(Numbers, make=lambda i: np.array([i])), pipelines.noise),
    ):
        pass
    with (
        pytest.raises(TypeError, match="expected numbers, found dict"),
        module(functools.partial(Numbers, make=lambda i: {}), pipelines.identity),
    ):
        pass


@pytest.fixture
def rotten(tmp_path: Path) -> list[Path]:
    paths = pipelines.make_files(tmp_path, 16)
    paths[6].write_bytes(paths[6].read_bytes()[:60])
    return paths


def by_path(files: Files, index: int) -> Any:
    return files.proxy(pipelines.read_filepath(str(files.paths[index]))), index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_corrupt_file_is_named(rotten: list[Path], num_workers: int) -> None:
    with module(functools.partial(Files, rotten), pipelines.decode, num_workers=num_workers) as datamodule:
        with pytest.raises(BadSampleError, match="sample 6 on rank 0 in epoch 0") as caught:
            batches(datamodule)
        assert caught.value.sample.reason
        with pytest.raises(BadSampleError, match="sample 6"):  # again, and no hang
            batches(datamodule)


@pytest.mark.parametrize(("what", "rows"), [("replace", 16), ("drop", 15)])
def test_a_corrupt_file_is_replaced_or_dropped(rotten: list[Path], what: str, rows: int) -> None:
    with module(functools.partial(Files, rotten), pipelines.decode, num_workers=1, on_bad_sample=what) as datamodule:
        seen = []
        for images, ids in batches(datamodule):
            assert recover_ids(images) == ids.tolist()
            seen += ids.tolist()
        assert len(seen) == rows and set(seen) == set(range(16)) - {6}
        assert [bad.dataset_index for bad in datamodule.bad_samples] == [6]


def test_a_file_that_the_pipeline_reads_itself_is_named_by_its_path(rotten: list[Path]) -> None:
    from tests.custom.test_proxy_api import read_and_decode

    with module(functools.partial(Files, rotten, sample=by_path), read_and_decode) as datamodule:
        with pytest.raises(BadSampleError, match="sample 6") as caught:
            batches(datamodule)
        assert caught.value.sample.path == str(rotten[6])


def test_what_is_no_pipeline_or_dataset_is_refused(paths: list[Path]) -> None:
    files = functools.partial(Files, paths)
    with pytest.raises(TypeError, match="pipeline 'train_pipeline' is 3: expected a function made with @pipeline_def"):
        DALIDataModule(train_dataset=files, train_pipeline=3)
    with pytest.raises(ValueError, match="val_dataset needs a pipeline: pass val_pipeline"):
        DALIDataModule(train_dataset=files, train_pipeline=pipelines.decode, val_dataset=files)
    with pytest.raises(TypeError, match="expected a function of the proxy"):
        DALIDataModule(train_dataset=files(None), train_pipeline=pipelines.decode)
    with pytest.raises(TypeError, match="returned dict, not a nvidia.dali.Pipeline"), module(files, lambda **_: {}):
        pass

    with (
        pytest.raises(TypeError, match="can be gone through only once"),
        module(lambda proxy: iter([proxy]), pipelines.decode),
    ):
        pass

    def no_input(**options: Any) -> Any:
        from nvidia.dali import fn

        pipeline = Pipeline(**options)
        with pipeline:
            pipeline.set_outputs(fn.random.uniform(range=[0, 1]))
        return pipeline

    with pytest.raises(ValueError, match="'train_pipeline' has no inputs"), module(files, no_input):
        pass


def test_a_failure_in_the_loop_ends_the_process(paths: list[Path], run_warm: Callable[..., Any]) -> None:
    """The stock proxy's thread keeps a process alive for ever after an exception of the user's."""
    code = f"""
import functools
from pathlib import Path
from lightning_dali import DALIDataModule
from tests.custom import pipelines
if __name__ == "__main__":
    paths = {list(map(str, paths))!r}
    datamodule = DALIDataModule(train_dataset=functools.partial(pipelines.Files, paths), train_pipeline=pipelines.decode,
                                num_workers=2, batch_size=2, device="cpu")
    datamodule.setup("fit")
    for batch in datamodule.train_dataloader():
        raise KeyError("mine")
"""
    rc, _, stderr = run_warm(code, timeout=120)
    assert rc == 1 and "KeyError: 'mine'" in stderr
