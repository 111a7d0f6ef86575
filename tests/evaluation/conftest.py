"""What the tests of evaluation share: a log of calls, undisturbed scores, a place to leave scores."""

import pytest

from lumen_lab import evaluate
from tests.evaluation.predictors import SIZE, Logged, scenes


@pytest.fixture
def log(tmp_path):
    return tmp_path / "calls.log"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "left" / "scores.json"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Scores of ``Logged`` on ``scenes()``, made in one go in this process."""
    return evaluate(Logged(tmp_path_factory.mktemp("undisturbed") / "log"), scenes(), size=SIZE, workers=0)
