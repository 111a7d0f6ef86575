"""The widget's module in a real browser, with a stand-in for the model that Jupyter gives it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from lumen_lab.widgets import MaskCompare, mask_compare

pytestmark = pytest.mark.browser

HEIGHT, WIDTH = 80, 500
IMAGE = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
FLOAT = np.linspace(0, 1, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
MASKS = {"float": FLOAT, "NPU <int8>": 0.1 + 0.8 * FLOAT, "empty": np.zeros_like(FLOAT)}

# The model has Jupyter's four methods; like Jupyter's, it holds bytes as DataViews.
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<link rel="stylesheet" href="mask_compare.css">
<style>body { margin: 20px; color-scheme: light dark }</style><div id="cell"></div>
<script type="module">
  import widget from "./mask_compare.js";
  const view = async (name) => new DataView(await (await fetch(name)).arrayBuffer());
  const state = await (await fetch("state.json")).json();
  state.photograph = await view("photograph");
  state.masks = Object.fromEntries(
    await Promise.all(state.names.map(async (name, place) => [name, await view(`mask${place}`)])));
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
    save_changes: () => window.saved.push(state.position),
  };
  window.listening = () => Object.values(listeners).flat().length;
  window.cleanUp = await widget.render({ model: window.model, el: document.getElementById("cell") });
  window.ready = true;
</script>"""


@pytest.fixture
def open_page(browser):
    """Opens the widget in a page that gets its files from here, and fails on any error in the console."""
    complaints, pages = [], []

    def open_with(widget, **options):
        page = browser.new_page(viewport={"width": 700, "height": 400}, **options)
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
    folder = Path(mask_compare.__file__).parent
    state = {trait: getattr(widget, trait) for trait in ("left", "right", "mode", "position", "paint")}
    bodies = {
        "page.html": ("text/html", PAGE),
        "state.json": ("application/json", json.dumps({**state, "names": list(widget.masks)})),
        "photograph": ("image/png", widget.photograph),
        **{f"mask{place}": ("image/png", png) for place, png in enumerate(widget.masks.values())},
    }
    if name in bodies:
        kind, body = bodies[name]
        route.fulfill(content_type=kind, body=body)
    elif name in ("mask_compare.js", "mask_compare.css"):
        kind = "text/javascript" if name.endswith("js") else "text/css"
        route.fulfill(content_type=kind, body=(folder / name).read_text())
    else:
        route.abort()


@pytest.fixture
def page(open_page):
    return open_page(MaskCompare(IMAGE, MASKS))


def chooser(page, label):
    return page.get_by_role("combobox", name=label)


def position(page):
    return page.evaluate("model.get('position')")


def line_share(page):
    """Where the line is, as a share of the stage's width."""
    stage, line = (page.locator(f".lumen-compare-{part}").bounding_box() for part in ("stage", "line"))
    return (line["x"] + line["width"] / 2 - stage["x"]) / stage["width"]


def canvas_pixels(page):
    data = page.evaluate(
        "Array.from(document.querySelector('canvas').getContext('2d').getImageData(0, 0, 500, 80).data)"
    )
    return np.array(data, dtype=np.uint8).reshape(HEIGHT, WIDTH, 4)


def drag(page, start, end):
    box = page.locator(".lumen-compare-stage").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2 * box["width"], middle, steps=4)
    page.mouse.move(box["x"] + end * box["width"], middle, steps=4)
    page.mouse.up()


@pytest.mark.parametrize("mode", mask_compare.MODES)
def test_the_browser_paints_what_the_static_picture_shows(open_page, mode):
    widget = MaskCompare(IMAGE, MASKS, mode=mode, position=0.37)
    masks = [np.rint(MASKS[name] * 255).astype(np.float32) / 255 for name in ("float", "NPU <int8>")]
    wanted = mask_compare.compare_picture(IMAGE, *masks, mode=mode, position=0.37)
    pixels = canvas_pixels(open_page(widget))
    assert (pixels[..., 3] == 255).all()
    assert np.abs(pixels[..., :3].astype(int) - wanted).max() <= 1


def test_dragging_moves_the_line_and_tells_the_model(page):
    before = canvas_pixels(page)
    drag(page, 0.5, 0.8)
    assert position(page) == pytest.approx(0.8, abs=0.01)
    assert line_share(page) == pytest.approx(0.8, abs=0.01)
    page.wait_for_function("saved.at(-1) === model.get('position')")
    after = canvas_pixels(page)
    np.testing.assert_array_equal(before[:, :249], after[:, :249])
    assert (before[:, 260:390] != after[:, 260:390]).any()


def test_dragging_past_the_edges_stops_there(page):
    drag(page, 0.5, 1.2)
    assert position(page) == 1
    drag(page, 0.9, -0.02)
    assert position(page) == 0
    page.mouse.move(300, 100)
    assert position(page) == 0


def test_a_click_moves_the_line_and_gives_it_the_keyboard(page):
    box = page.locator(".lumen-compare-stage").bounding_box()
    page.mouse.click(box["x"] + 0.25 * box["width"], box["y"] + 20)
    assert position(page) == pytest.approx(0.25, abs=0.01)
    start = position(page)
    page.keyboard.press("ArrowRight")
    assert position(page) == pytest.approx(start + 0.01)


def test_keys_move_the_line_and_reach_no_one_else(page):
    page.evaluate("window.heard = []; document.addEventListener('keydown', (event) => heard.push(event.key))")
    page.get_by_role("slider").focus()
    for keys, place in [
        ("ArrowLeft ArrowDown", 0.48),
        ("ArrowUp", 0.49),
        ("PageUp Shift+ArrowRight", 0.69),
        ("PageDown", 0.59),
        ("End ArrowRight", 1),
        ("Home ArrowLeft", 0),
    ]:
        for key in keys.split():
            page.keyboard.press(key)
        assert position(page) == pytest.approx(place), keys
    page.wait_for_function("saved.at(-1) === 0")
    page.keyboard.press("a")
    assert [key for key in page.evaluate("heard") if key != "Shift"] == ["a"]


def test_the_line_tells_a_screen_reader_where_it_is(page):
    slider = page.get_by_role("slider", name="Line between the left and the right mask")
    assert [slider.get_attribute(f"aria-value{end}") for end in ("min", "max", "now")] == ["0", "100", "50"]
    page.evaluate("model.set('position', 0.62)")
    assert slider.get_attribute("aria-valuenow") == "62"
    assert slider.get_attribute("aria-valuetext") == "62 % float, 38 % NPU <int8>"
    assert page.get_by_role("group", name="Mask comparison").count() == 1
    assert page.get_by_role("img", name="overlay: float against NPU <int8>").count() == 1


def test_choosing_in_the_page_changes_the_model_and_the_picture(page):
    before = canvas_pixels(page)
    chooser(page, "Show").select_option("masks")
    chooser(page, "Right").select_option("empty")
    chooser(page, "Left").select_option("NPU <int8>")
    state = page.evaluate("['left', 'mode', 'right'].map((name) => model.get(name))")
    assert state == ["NPU <int8>", "masks", "empty"]
    assert page.evaluate("saved.length") == 3
    after = canvas_pixels(page)
    assert (after[:, 250:, :3] == 0).all() and (after[:, :250] != before[:, :250]).any()
    options = chooser(page, "Show").locator("option").all_text_contents()
    assert options == list(mask_compare.MODES)


def test_python_moves_the_page(page):
    page.evaluate("model.set('mode', 'difference'); model.set('right', 'empty'); model.set('position', 0.1)")
    assert chooser(page, "Show").input_value() == "difference"
    assert line_share(page) == pytest.approx(0.1, abs=0.01)
    assert page.locator(".lumen-compare-before").text_content() == "photograph"
    assert page.locator(".lumen-compare-after").text_content() == "empty − float"
    assert "−1.000" in page.locator(".lumen-compare-scale").text_content()
    assert page.locator(".lumen-compare-scale").is_visible()
    page.evaluate("model.set('mode', 'masks')")
    assert page.locator(".lumen-compare-scale").is_hidden()


def luminance(color):
    channels = [value / 255 for value in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "scheme, theme", [("light", ""), ("dark", ""), ("light", "--jp-ui-font-color1:#eee;--jp-layout-color1:#111")]
)
def test_text_can_be_read_in_light_dark_and_jupyter_s_own_theme(open_page, scheme, theme):
    page = open_page(MaskCompare(IMAGE, MASKS), color_scheme=scheme)
    page.evaluate("theme => document.body.style.cssText = theme", theme)
    for part in (".lumen-compare", ".lumen-compare-select"):
        # Painting the colours makes plain numbers of names such as CanvasText.
        ink, paper = page.evaluate(
            """part => {
              const style = getComputedStyle(document.querySelector(part));
              const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
              return [style.color, style.backgroundColor].map((color) => {
                context.fillStyle = color;
                context.fillRect(0, 0, 1, 1);
                return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
              });
            }""",
            part,
        )
        light, dark = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 7
        assert (luminance(paper) < 0.2) == (scheme == "dark" or bool(theme))


def test_taking_the_view_away_lets_go_of_the_model(page):
    assert page.evaluate("listening()") == 4
    page.evaluate("cleanUp()")
    assert page.evaluate("listening()") == 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 4000), (4000, 3)])
def test_extreme_photographs_stay_on_the_page(open_page, shape):
    masks = {"a": np.zeros(shape), "b": np.ones(shape)}
    page = open_page(MaskCompare(np.zeros((*shape, 3), np.uint8), masks))
    box = page.locator(".lumen-compare-stage").bounding_box()
    assert box["width"] <= 660 and box["height"] <= 721
    assert chooser(page, "Left").bounding_box()["width"] > 60


def test_a_tall_photograph_fits_the_page_undistorted(open_page):
    masks = {"a": np.zeros((1000, 400)), "b": np.ones((1000, 400))}
    page = open_page(MaskCompare(np.zeros((1000, 400, 3), np.uint8), masks))
    box = page.locator(".lumen-compare-canvas").bounding_box()
    assert box["height"] <= 721 and box["width"] / box["height"] == pytest.approx(0.4, rel=0.01)


def test_a_screenshot_shows_both_halves(open_page):
    widget = MaskCompare(IMAGE, {"full": np.ones_like(FLOAT), "none": np.zeros_like(FLOAT)}, mode="masks")
    page = open_page(widget)
    shot = PILImage.open(io.BytesIO(page.locator(".lumen-compare-canvas").screenshot())).convert("L")
    pixels = np.asarray(shot)[-8:]
    width = pixels.shape[1]
    assert pixels[:, : width // 2 - 30].mean() > 250 and pixels[:, width // 2 + 30 :].mean() < 5
