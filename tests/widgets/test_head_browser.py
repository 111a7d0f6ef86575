"""The head browser without a browser: its traits, what it ships, its values, and the static picture."""

import base64
import dataclasses
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import traitlets
from PIL import Image as PILImage

from lumen_lab.widgets import HeadBrowser, head_browser
from lumen_lab.widgets.head_page import PALETTES, ShownMap, smaller
from tests.widgets.heads import SHAPES, SIZE, readings


@pytest.fixture
def widget():
    return HeadBrowser(readings(), stage=3, view="gate", pixel=(40, 50))


def decoded(png):
    return np.asarray(PILImage.open(io.BytesIO(png)).convert("RGB"))


def test_it_ships_arrays_as_bytes_with_what_is_needed_to_read_them(widget):
    given, state = readings(), widget.get_state()
    np.testing.assert_array_equal(decoded(state["photograph"]), given.image)
    assert state["shapes"]["3/gate/student"]["size"] == list(SHAPES[3])
    shipped = np.frombuffer(state["maps"]["3/gate/student"], "<f4").reshape(SHAPES[3])
    np.testing.assert_array_equal(shipped, given.student.stage(3).gate)
    colours = np.frombuffer(state["maps"]["2/components/teacher"], np.uint8)
    assert len(colours) == 3 * SHAPES[2][0] * SHAPES[2][1]
    assert all(isinstance(value, bytes) for value in (*state["maps"].values(), *state["palettes"].values()))
    assert set(state["maps"]) == set(state["shapes"])
    assert state["codes"]["3"]["features"][10:12] == [1, 2] and set(state["codes"]["3"]) == {"features"}


def test_what_there_is_not_is_not_shipped(widget):
    assert not [name for name in widget.maps if name.startswith("1/ga") or name.startswith("1/side")]
    assert "3/error/student" in widget.maps and "3/error/teacher" not in widget.maps
    alone = HeadBrowser(readings(student=False))
    assert not [name for name in alone.maps if "student" in name] and alone.codes == {}


def test_values_are_those_of_the_cell_that_covers_the_pixel(widget):
    given = readings()
    widget.pixel = (95, 0)  # the last row, the first column
    values = {(row["stage"], row["head"]): row for row in widget.values()}
    for level in (4, 3, 2):
        assert values[level, "gate"]["student"] == given.student.stage(level).gate[-1, 0]
    norm = np.linalg.norm(given.teacher.stage(1).features[:, -1, 0])
    assert values[1, "features"]["teacher"] == pytest.approx(norm, rel=1e-6)
    assert values["final", "mask"]["teacher"] == given.teacher.mask[95, 0]
    assert values[2, "adds"]["student"] == pytest.approx(float(given.student.mask[95, 0]) - 0.2, abs=1e-6)
    assert values[3, "error"]["teacher"] is None
    assert values == {(row["stage"], row["head"]): row for row in given.values_at((95, 0))}


def test_a_value_that_is_spoiled_on_the_way_is_seen(widget):
    before = widget.values()
    widget._maps[3, "gate"]["student"].values.setflags(write=True)
    widget._maps[3, "gate"]["student"].values[40 * 6 // 96, 50 * 8 // 128] += 0.5
    changed = [row["head"] for row, old in zip(widget.values(), before) if row != old]
    assert changed == ["gate"]


@pytest.mark.parametrize(
    "name, value",
    [("stage", 5), ("stage", 0), ("view", "heat"), ("pixel", (96, 0)), ("pixel", (0, 128)), ("pixel", (-1, 0))],
)
def test_states_that_are_none_are_refused(widget, name, value):
    before = getattr(widget, name)
    with pytest.raises(traitlets.TraitError, match=name):
        setattr(widget, name, value)
    assert getattr(widget, name) == before


def test_a_pixel_outside_says_how_large_the_picture_is(widget):
    with pytest.raises(traitlets.TraitError, match=r"row 96, column 0.*96 × 128"):
        widget.pixel = (96, 0)


def test_arrays_cannot_be_exchanged_under_the_widget(widget):
    for name, value in {"photograph": b"", "maps": {}, "palettes": {}, "shapes": {}, "codes": {}, "facts": {}}.items():
        with pytest.raises(traitlets.TraitError):
            setattr(widget, name, value)


def test_it_starts_in_the_middle_of_the_picture():
    assert HeadBrowser(readings()).pixel == (SIZE[0] // 2, SIZE[1] // 2)


@pytest.mark.parametrize("change", [{"stage": 2}, {"view": "adds"}, {"view": "mask"}, {"pixel": (10, 100)}])
def test_the_static_picture_follows_every_trait(widget, change):
    before = widget.static_png()
    assert widget.static_png() == before
    for name, value in change.items():
        setattr(widget, name, value)
    assert widget.static_png() != before


def test_the_static_picture_holds_the_chosen_map(widget):
    """A gate that is open above and shut below, seen in the large panel of the teacher."""
    given = readings()
    given.teacher.stage(3).gate[:3], given.teacher.stage(3).gate[3:] = 1, 0
    picture = decoded(HeadBrowser(given, stage=3, view="gate", pixel=(0, 0)).static_png())
    across = round(240 * SIZE[1] / SIZE[0])
    panel = picture[17 : 17 + 240, 8 + across + 8 : 8 + 2 * across + 8]
    assert panel[60:118].min() == 255 and panel[122:].max() == 0


def test_every_state_has_a_static_picture(widget):
    for stage in (4, 3, 2, 1):
        for view in head_browser.SHOWN:
            widget.stage, widget.view = stage, view
            assert decoded(widget.static_png()).shape[1] > 300


def test_signed_maps_have_white_at_zero_and_limits_their_end_colours():
    shown = ShownMap(np.array([[-2.0, 0.0, 2.0, 9.0]], np.float32), "signed", -2.0, 2.0).painted()[0]
    assert shown[1].tolist() == [255, 255, 255]
    assert shown[0].tolist() == PALETTES["signed"][0].tolist() and shown[2].tolist() == shown[3].tolist()
    assert shown[0][2] > shown[0][0] and shown[2][0] > shown[2][2]


def test_large_maps_are_shipped_smaller_and_keep_their_mean():
    large = np.tile(np.linspace(-1, 1, 64, dtype=np.float32), (32, 1))
    small = smaller(large, 16)
    assert small.shape == (8, 16) and small.mean() == pytest.approx(0, abs=1e-3)
    np.testing.assert_array_equal(smaller(large, 64), large)
    widget = HeadBrowser(readings(), max_side_px=32, pixel=(95, 127))
    assert widget.shapes["4/adds/teacher"]["size"] == [24, 32] and decoded(widget.photograph).shape == (24, 32, 3)
    assert widget.values()[-1]["head"] == "mask"  # the pixel is still one of the whole picture


def test_the_mime_bundle_holds_widget_and_picture_of_the_same_state(widget):
    widget.pixel = (3, 4)
    data, _ = widget._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id
    assert base64.b64decode(data["image/png"]) == widget.static_png()
    assert data["text/plain"] == "HeadBrowser: stage 3, gate, row 3, column 4"


def test_widths_that_differ_have_no_colours():
    given = readings()
    stage = given.student.stage(4)
    wide = dataclasses.replace(stage, features=np.concatenate([stage.features] * 2))
    stages = tuple(wide if one.level == 4 else one for one in given.student.stages)
    given = dataclasses.replace(given, student=dataclasses.replace(given.student, stages=stages))
    assert set(given.maps[4, "components"]) == {"teacher"} and set(given.maps[3, "components"]) == {
        "teacher",
        "student",
    }


def test_widget_and_readings_need_no_torch():
    code = "import sys, lumen_lab.widgets, lumen_lab.distillation.head_readings; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_nothing_is_fetched_from_a_network_and_the_module_is_valid(widget, tmp_path):
    for suffix in (".js", ".css"):
        source = Path(head_browser.__file__).with_suffix(suffix).read_text()
        assert not re.search(r"https?:|\burl\(|\bimport\b|\bfetch\(", source)
    if shutil.which("node"):
        script = tmp_path / "widget.mjs"
        script.write_text(str(widget._esm))
        checked = subprocess.run(["node", "--check", script], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
