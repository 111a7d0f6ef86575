"""The log of a run: what a kill leaves behind is mended, in CSV and for TensorBoard."""

import pytest

from lumen_lab.distillation.run_log import RunLog
from lumen_lab.errors import LumenError
from tests.distillation.ellipses import events


@pytest.fixture
def opened(tmp_path):
    """``opened(train=0, validation=1)`` opens a log; every one is closed in the end."""
    logs = []

    def open_log(**begins):
        logs.append(RunLog(tmp_path, begins))
        return logs[-1]

    yield open_log
    for log in logs:
        log.close()


def test_lines_have_the_step_and_six_digits(tmp_path, opened):
    log = opened(train=0)
    log.add("train", 0, {"learning_rate": 2e-3 / 200, "bce": 1 / 3})
    log.add("train", 20, {"bce": 12345678.0, "learning_rate": 0.5})  # each under its name, whatever the order
    assert (tmp_path / "train.csv").read_text() == "step,learning_rate,bce\n0,1e-05,0.333333\n20,0.5,1.23457e+07\n"


def test_a_resumed_log_forgets_what_the_checkpoint_does_not_know(tmp_path, opened):
    log = opened(train=0, validation=1)
    for step in range(4):
        log.add("train", step, {"bce": float(step)})
    log.add("validation", 2, {"mae": 0.25})
    log.add("validation", 4, {"mae": 0.125})
    log.flush()
    log = opened(train=2, validation=3)  # two steps are kept: those with index 0 and 1, and the scores after them
    for step in range(2, 5):
        log.add("train", step, {"bce": 10.0 + step})
    log.add("validation", 4, {"mae": 0.5})
    log.flush()
    assert (tmp_path / "train.csv").read_text() == "step,bce\n0,0\n1,1\n2,12\n3,13\n4,14\n"
    assert (tmp_path / "validation.csv").read_text() == "step,mae\n2,0.25\n4,0.5\n"
    assert events(tmp_path, "train", "bce") == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert events(tmp_path, "validation", "mae") == [(2, 0.25), (4, 0.5)]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path, opened):
    log = opened(train=0)
    log.add("train", 0, {"bce": 7.0})
    log.flush()
    log = opened(train=0)
    assert not (tmp_path / "train.csv").exists()
    log.add("train", 0, {"bce": 8.0})
    log.flush()
    assert events(tmp_path, "train", "bce") == [(0, 8.0)]


@pytest.mark.parametrize("cut", ["1", "1,0.5", "1,0.5,", "\x00\x00,1,2\n", ",,\n", "loss\n"])
def test_a_line_that_is_cut_or_damaged_is_dropped(tmp_path, opened, cut):
    """The last line may be of step 12 and read "1": it is dropped even though step 1 is kept."""
    whole = "step,bce,iou\n0,0.5,2\n"
    (tmp_path / "train.csv").write_text(whole + cut)
    opened(train=5)
    assert (tmp_path / "train.csv").read_text() == whole


@pytest.mark.parametrize("content", ["", "step,b", "step,bce\n"])
def test_a_log_without_a_whole_line_is_removed(tmp_path, opened, content):
    (tmp_path / "train.csv").write_text(content)
    opened(train=5).add("train", 5, {"mae": 1.0})
    assert (tmp_path / "train.csv").read_text() == "step,mae\n5,1\n"


def test_other_files_in_the_folder_are_left_alone(tmp_path, opened):
    (tmp_path / "notes.csv").write_text("who,what\nme,mine\n")
    opened(train=0, validation=1)
    assert (tmp_path / "notes.csv").read_text() == "who,what\nme,mine\n"


def test_an_undefined_value_is_an_empty_cell_and_no_event(tmp_path, opened):
    log = opened(validation=0)
    log.add("validation", 1, {"mae": 0.5, "thin_recall": None})
    log.add("validation", 2, {"mae": 0.25, "thin_recall": 1.0})
    log.flush()
    assert (tmp_path / "validation.csv").read_text() == "step,mae,thin_recall\n1,0.5,\n2,0.25,1\n"
    assert events(tmp_path, "validation", "thin_recall") == [(2, 1.0)]


def test_other_values_than_the_file_began_with_are_refused(tmp_path, opened):
    opened(validation=0).add("validation", 1, {"mae": 0.5})
    with pytest.raises(LumenError, match="validation.csv began with mae, and mae, iou came at a later step"):
        opened(validation=2).add("validation", 2, {"mae": 0.5, "iou": 1.0})
    assert (tmp_path / "validation.csv").read_text() == "step,mae\n1,0.5\n"


def test_a_log_that_is_opened_again_in_the_same_second_is_still_read_last(tmp_path, opened, monkeypatch):
    """Event files of one second are read in the order of their process numbers: here the later one has the lower."""
    monkeypatch.setattr("os.getpid", lambda: 99)
    log = opened(train=0)
    for step in range(3):
        log.add("train", step, {"bce": 0.0})
    log.close()
    monkeypatch.setattr("os.getpid", lambda: 11)
    opened(train=2).add("train", 2, {"bce": 1.0})
    opened(train=2).close()
    assert events(tmp_path, "train", "bce") == [(0, 0.0), (1, 0.0), (2, 1.0)]
