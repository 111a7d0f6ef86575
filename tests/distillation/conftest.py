"""What every test of training gets."""

import pytest
import torch

from tests.distillation.ellipses import forget_accelerator, started, weight_of


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """No test sees the accelerator of another."""
    forget_accelerator()
    yield
    forget_accelerator()


@pytest.fixture(autouse=True)
def same_threads():
    """A test that runs a command which sets the number of threads leaves it as it was: the last bits depend on it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tiny_config, tmp_path):
    """``run(name, ...)`` trains in a folder of that name."""
    return lambda name, *given, **options: started(tiny_config, tmp_path / name, *given, **options)


@pytest.fixture(scope="package")
def whole(tiny_config, tmp_path_factory):
    """A run that nothing disturbed: its folder, which no test may change, and the network that it gave."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, started(tiny_config, folder, validate=weight_of, validate_every=2)
