"""Files for pipelines to decode."""

from pathlib import Path

import pytest

from tests.custom import pipelines


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return pipelines.make_files(tmp_path_factory.mktemp("images"))
