"""The bank of drawn sources that the tests of composed scenes share."""

import pytest

from lumen_lab.datasets.sources import open_sources
from tests.datasets.pictures import write_folder


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    """A folder with drawn cut-outs and backgrounds."""
    return write_folder(tmp_path_factory.mktemp("sources") / "pictures")


@pytest.fixture(scope="session")
def bank(source_folder):
    return open_sources(source_folder)
