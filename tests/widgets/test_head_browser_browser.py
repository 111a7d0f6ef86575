"""The head browser's module in a real browser, with a stand-in for the model that Jupyter gives it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from lumen_lab.widgets import HeadBrowser, head_browser
from tests.widgets.heads import SHAPES, SIZE, readings

pytestmark = pytest.mark.browser

HEIGHT, WIDTH = SIZE
PLAIN = ("shapes", "codes", "facts", "stage", "view", "pixel")

# The model has Jupyter's four methods; like Jupyter's, it holds bytes as DataViews, here into one buffer whose parts
# begin where no float can.
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<link rel="stylesheet" href="head_browser.css">
<style>body { margin: 20px; color-scheme: light dark }</style><div id="cell"></div>
<script type="module">
  import widget from "./head_browser.js";
  const state = await (await fetch("state.json")).json();
  const buffer = await (await fetch("buffer")).arrayBuffer();
  const view = ([start, length]) => new DataView(buffer, start, length);
  const views = (places) => Object.fromEntries(Object.entries(places).map(([name, place]) => [name, view(place)]));
  Object.assign(state, { photograph: view(state.places.photograph), maps: views(state.places.maps),
                         palettes: views(state.places.palettes) });
  const listeners = {};
  window.saved = [];
  window.model = {
    get: (name) => state[name],
    set(name, value) {
      state[name] = value;
      for (const listener of listeners[`change:${name}`] ?? []) listener();
    },
    on: (event, listener) => (listeners[event] ??= []).push(listener),
    off: (event, listener) => (listeners[event] = listeners[event].filter((other) => other !== listener)),
    save_changes: () => window.saved.push({ pixel: state.pixel, stage: state.stage, view: state.view }),
  };
  window.listening = () => Object.values(listeners).flat().length;
  window.cleanUp = await widget.render({ model: window.model, el: document.getElementById("cell") });
  window.ready = true;
</script>"""


def packed(widget):
    """All bytes of the widget in one buffer after an odd one, and the place of each: (start, length)."""
    buffer, places = bytearray(b"\0"), {"maps": {}, "palettes": {}}

    def placed(value):
        start = len(buffer)
        buffer.extend(value)
        return start, len(value)

    places["photograph"] = placed(widget.photograph)
    for kind in ("palettes", "maps"):
        places[kind] = {name: placed(value) for name, value in getattr(widget, kind).items()}
    return bytes(buffer), places


@pytest.fixture
def open_page(browser):
    """Opens the widget in a page that gets its files from here, and fails on any error in the console."""
    complaints, pages = [], []

    def open_with(widget, width=1000, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.route("**/*", lambda route: serve(route, widget))
        page.goto("http://localhost/page.html")
        page.wait_for_function("window.ready")
        return page

    yield open_with
    for page in pages:
        page.close()
    assert not complaints


def serve(route, widget):
    name = route.request.url.rpartition("/")[2]
    buffer, places = packed(widget)
    state = {trait: getattr(widget, trait) for trait in PLAIN} | {"places": places}
    bodies = {
        "page.html": ("text/html", PAGE),
        "state.json": ("application/json", json.dumps(state)),
        "buffer": ("application/octet-stream", buffer),
    }
    if name in bodies:
        kind, body = bodies[name]
        route.fulfill(content_type=kind, body=body)
    elif name in ("head_browser.js", "head_browser.css"):
        kind = "text/javascript" if name.endswith("js") else "text/css"
        route.fulfill(content_type=kind, body=(Path(head_browser.__file__).parent / name).read_text())
    else:
        route.abort()


@pytest.fixture
def widget():
    return HeadBrowser(readings(), stage=3, view="gate", pixel=(40, 50))


@pytest.fixture
def page(open_page, widget):
    return open_page(widget)


def panel(page, name):
    return page.locator(".lumen-heads-panel", has=page.locator(f"canvas[aria-label^='{name}']"))


def pixels_of(page, name):
    canvas = panel(page, name).locator("canvas")
    shape = canvas.evaluate("canvas => [canvas.height, canvas.width]")
    data = canvas.evaluate(
        "canvas => Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data)"
    )
    return np.array(data, dtype=np.uint8).reshape(*shape, 4)


def table_values(page):
    """The table's cells: (stage, head, network) → number, or None for a dash."""
    found = {}
    stages = [int(text.split()[-1]) for text in page.locator("thead tr:first-child th[colspan]").all_text_contents()]
    networks = page.locator("thead tr:nth-child(2) th").all_text_contents()[
        : len(page.evaluate("model.get('facts').networks"))
    ]
    columns = [(stage, network) for stage in stages for network in networks]
    for row in page.locator("tbody tr").all():
        head = row.locator("th").text_content()
        for (stage, network), text in zip(columns, row.locator("td").all_text_contents(), strict=True):
            if text:
                key = "final" if head == "mask" else stage
                found[key, head, network] = None if text == "–" else float(text.replace("−", "-"))
    return found


def click(page, name, row, column):
    box = panel(page, name).locator(".lumen-heads-stage").bounding_box()
    page.mouse.click(box["x"] + (column + 0.5) / WIDTH * box["width"], box["y"] + (row + 0.5) / HEIGHT * box["height"])


def expected(widget):
    rows = widget.values()
    return {
        (row["stage"], row["head"], name): row[name] for row in rows for name in ("teacher", "student") if name in row
    }


def same(found, wanted):
    assert {key for key, value in found.items() if value is not None} == {
        key for key, value in wanted.items() if value is not None
    }
    for key, value in wanted.items():
        if value is not None:
            assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-9), key


@pytest.mark.parametrize("view", ["features", "components", "gate", "adds", "error", "mask"])
def test_the_browser_paints_what_python_paints(open_page, view):
    widget = HeadBrowser(readings(), stage=2, view=view)
    page = open_page(widget)
    key = (0 if view == "mask" else 2, view)
    for name, shown in widget._maps[key].items():
        pixels = pixels_of(page, name)
        np.testing.assert_array_equal(pixels[..., :3], shown.painted())
        assert (pixels[..., 3] == 255).all()
    np.testing.assert_array_equal(pixels_of(page, "photograph")[..., :3], readings().image)


def test_the_table_is_what_python_says(page, widget):
    same(table_values(page), expected(widget))
    assert page.locator("caption").text_content() == "Values at row 40, column 50"


@pytest.mark.parametrize("where, name", [((0, 0), "photograph"), ((95, 127), "teacher"), ((17, 93), "student")])
def test_a_click_on_any_picture_moves_the_pixel_and_the_table_follows(page, widget, where, name):
    click(page, name, *where)
    assert page.evaluate("model.get('pixel')") == list(where)
    page.wait_for_function("saved.length > 0")
    widget.set_state({"pixel": page.evaluate("saved.at(-1).pixel")})
    assert widget.pixel == where
    same(table_values(page), expected(widget))


def test_dragging_past_the_edge_stays_in_the_picture(page):
    box = panel(page, "teacher").locator(".lumen-heads-stage").bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 2 * box["width"], box["y"] - 50, steps=3)
    page.mouse.up()
    assert page.evaluate("model.get('pixel')") == [0, WIDTH - 1]


def test_the_mark_frames_the_cell_that_is_read(page):
    box = panel(page, "teacher").locator(".lumen-heads-stage").bounding_box()
    mark = panel(page, "teacher").locator(".lumen-heads-mark").bounding_box()
    rows, columns = SHAPES[3]
    row, column = 40 * rows // HEIGHT, 50 * columns // WIDTH
    assert mark["y"] - box["y"] == pytest.approx(row / rows * box["height"], abs=1)
    assert mark["x"] - box["x"] == pytest.approx(column / columns * box["width"], abs=1)
    assert mark["width"] == pytest.approx(box["width"] / columns, abs=1)


def test_arrow_keys_move_by_cells_of_the_map_and_reach_no_one_else(page):
    page.evaluate("window.heard = []; document.addEventListener('keydown', (event) => heard.push(event.key))")
    panel(page, "teacher").locator(".lumen-heads-stage").focus()
    page.keyboard.press("ArrowRight")  # from cell (2, 3) of 6 × 8 to (2, 4)
    assert page.evaluate("model.get('pixel')") == [40, 72]
    page.keyboard.press("ArrowUp")
    assert page.evaluate("model.get('pixel')") == [24, 72]
    for _ in range(3):
        page.keyboard.press("Shift+ArrowLeft")
    assert page.evaluate("model.get('pixel')") == [24, 8]
    panel(page, "photograph").locator(".lumen-heads-stage").focus()
    page.keyboard.press("ArrowDown")  # a pixel of the photograph
    assert page.evaluate("model.get('pixel')") == [25, 8]
    page.wait_for_function("saved.at(-1)?.pixel[0] === 25")
    page.keyboard.press("a")
    assert [key for key in page.evaluate("heard") if key != "Shift"] == ["a"]


def test_stages_and_heads_are_chosen_by_buttons(page):
    page.get_by_role("button", name="Stage 2").click()
    page.get_by_role("button", name="gradient:").click()
    assert page.evaluate("saved.at(-1)") == {"pixel": [40, 50], "stage": 2, "view": "gradient"}
    pressed = page.locator("button[aria-pressed='true']").all_text_contents()
    assert pressed == ["Stage 2", "gradient"]
    assert panel(page, "teacher").locator("figcaption").text_content() == "teacher: 12 × 16, 0 to 1"


def test_what_a_stage_or_a_network_has_not_is_said(page):
    assert "there is no" not in panel(page, "teacher").text_content()
    page.evaluate("model.set('view', 'error')")
    assert panel(page, "teacher").locator("figcaption").text_content() == "teacher: there is no error here"
    assert (
        panel(page, "teacher").locator("canvas").is_hidden() and panel(page, "student").locator("canvas").is_visible()
    )
    page.evaluate("model.set('stage', 1)")
    assert page.get_by_role("button", name="gate:").is_disabled()
    assert page.get_by_role("button", name="adds:").is_enabled()


def test_python_moves_the_page(page, widget):
    widget.stage, widget.view, widget.pixel = 4, "adds", (90, 3)
    page.evaluate("values => { for (const [name, value] of Object.entries(values)) model.set(name, value) }",
                  {"stage": 4, "view": "adds", "pixel": [90, 3]})  # fmt: skip
    same(table_values(page), expected(widget))
    row = next(row for row in widget.values() if (row["stage"], row["head"]) == (4, "adds"))
    said = page.get_by_role("status").text_content()
    assert said.startswith("row 90, column 3: adds of stage 4, teacher ")
    assert float(said.split("teacher ")[1].split(",")[0].replace("−", "-")) == pytest.approx(row["teacher"], rel=1e-3)


def test_histograms_are_those_of_the_stage(page):
    drawn = page.locator(".lumen-heads-codes svg")
    assert drawn.get_attribute("aria-label") == "features: 60 of 256 codes used"
    assert page.locator(".lumen-heads-codes path").get_attribute("d").count("M") == 60
    page.evaluate("model.set('stage', 1)")
    assert drawn.get_attribute("aria-label") == "features: 20 of 256 codes used"


def test_a_teacher_alone_has_one_column_a_stage_and_no_histograms(open_page):
    widget = HeadBrowser(readings(student=False), stage=4, view="features")
    page = open_page(widget)
    same(table_values(page), expected(widget))
    assert page.locator(".lumen-heads-panel").count() == 2
    assert page.locator(".lumen-heads-codes").count() == 0
    assert page.get_by_role("button", name="error:").is_disabled()


def luminance(color):
    channels = [value / 255 for value in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Painting the colours, the widget's paper first, makes plain numbers of names and of what is half transparent.
CONTRAST = """part => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const root = getComputedStyle(document.querySelector(".lumen-heads"));
  const found = getComputedStyle(document.querySelector(part));
  return [[root.backgroundColor, found.backgroundColor], [root.backgroundColor, found.color]].map((colors) => {
    for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  });
}"""


@pytest.mark.parametrize(
    "scheme, theme", [("light", ""), ("dark", ""), ("light", "--jp-ui-font-color1:#eee;--jp-layout-color1:#111")]
)
def test_text_can_be_read_in_light_dark_and_jupyter_s_own_theme(open_page, widget, scheme, theme):
    page = open_page(widget, color_scheme=scheme)
    page.evaluate("theme => document.body.style.cssText = theme", theme)
    dark_paper = scheme == "dark" or bool(theme)
    pressed = ".lumen-heads-button[aria-pressed='true']"
    for part in ("-table", "-chosen", "-meaning", "-status", "-caption", "-button", "-thumbnail", pressed):
        paper, ink = (luminance(c) for c in page.evaluate(CONTRAST, part if part[0] == "." else f".lumen-heads{part}"))
        light, dark = max(ink, paper), min(ink, paper)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, part
        assert (paper < 0.2) == (dark_paper != (part == pressed)), part


@pytest.mark.parametrize("width", [360, 640, 1400])
def test_nothing_is_wider_than_the_page(open_page, widget, width):
    page = open_page(widget, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_taking_the_view_away_lets_go_of_the_model(page):
    assert page.evaluate("listening()") == 3
    page.evaluate("cleanUp()")
    assert page.evaluate("listening()") == 0


def test_a_screenshot_shows_the_gate(open_page):
    """A gate that is open at the left and shut at the right, in grey."""
    given = readings(student=False)
    gate = given.teacher.stage(3).gate
    gate[:, :4], gate[:, 4:] = 1, 0
    page = open_page(HeadBrowser(given, stage=3, view="gate", pixel=(0, 0)))
    shot = PILImage.open(io.BytesIO(panel(page, "teacher").locator("canvas").screenshot())).convert("L")
    pixels = np.asarray(shot)[-20:]
    half = pixels.shape[1] // 2
    assert pixels[:, : half - 2].min() > 250 and pixels[:, half + 2 :].max() < 5
