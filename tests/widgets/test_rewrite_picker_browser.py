"""The picker's module in a real browser; the kernel's part is played by the widget itself, when the test says so."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from lumen_lab.widgets import rewrite_picker
from lumen_lab.widgets.rewrite_picker import RewritePicker
from tests.widgets.plans import CHOICES, NAMES, Measure

pytestmark = pytest.mark.browser

DEFORM, PLAIN, TILES, NORM = NAMES
TRAITS = "choices presets choices_html picked measured summary error panel".split()
PRESETS = {"EXACT_PLAN": [name for name in NAMES if "substitute" not in name]}

# The model has Jupyter's four methods; `receive` is what a message from the kernel does.
PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<link rel="stylesheet" href="rewrite_picker.css">
<style>body { margin: 20px; color-scheme: light dark }</style><div id="cell"></div>
<script type="module">
  import widget from "./rewrite_picker.js";
  const state = await (await fetch("state.json")).json();
  const listeners = {};
  const tell = (name) => { for (const listener of listeners[`change:${name}`] ?? []) listener(); };
  window.saved = [];
  window.model = {
    get: (name) => state[name],
    set(name, value) { state[name] = value; tell(name); },
    on: (event, listener) => (listeners[event] ??= []).push(listener),
    off: (event, listener) => (listeners[event] = listeners[event].filter((other) => other !== listener)),
    save_changes: () => window.saved.push(state.picked),
  };
  window.receive = (values) => {
    const changed = Object.keys(values).filter((name) => JSON.stringify(values[name]) !== JSON.stringify(state[name]));
    Object.assign(state, values);
    changed.forEach(tell);
  };
  window.listening = () => Object.values(listeners).flat().length;
  window.cleanUp = await widget.render({ model: window.model, el: document.getElementById("cell") });
  window.ready = true;
</script>"""


@pytest.fixture
def measure():
    return Measure()


@pytest.fixture
def picker(measure):
    recorded = [{"plan": "EXACT_PLAN", "chip": "SM8850", "DRAM MB": 412.5, "QNN ops": 3246}]
    made = RewritePicker(CHOICES, measure, presets=PRESETS, recorded_rows=recorded)
    made._loop = None  # Playwright runs a loop of its own in this thread, which is no kernel's
    return made


@pytest.fixture
def open_page(browser):
    """Opens the widget in a page that gets its files from here, and fails on any error in the console."""
    complaints, pages = [], []

    def open_with(widget, width=1000, static=False, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.route("**/*", lambda route: serve(route, widget))
        page.goto(f"http://localhost/{'static' if static else 'page'}.html")
        if not static:
            page.wait_for_function("window.ready")
        return page

    yield open_with
    for page in pages:
        page.close()
    assert not complaints


def state_of(widget):
    return {trait: getattr(widget, trait) for trait in TRAITS}


def serve(route, widget):
    name = route.request.url.rpartition("/")[2]
    folder = Path(rewrite_picker.__file__).parent
    head = "<!doctype html><meta charset='utf-8'><link rel='icon' href='data:,'>"
    if name == "page.html":
        route.fulfill(content_type="text/html", body=PAGE)
    elif name == "static.html":
        route.fulfill(content_type="text/html", body=head + widget.static_html())
    elif name == "state.json":
        route.fulfill(content_type="application/json", body=json.dumps(state_of(widget)))
    elif name in ("rewrite_picker.js", "rewrite_picker.css"):
        kind = "text/javascript" if name.endswith("js") else "text/css"
        route.fulfill(content_type=kind, body=(folder / name).read_text())
    else:
        route.abort()


@pytest.fixture
def page(open_page, picker):
    return open_page(picker)


def kernel_answers(page, widget):
    """The kernel takes the last choice that the page saved and sends back its state."""
    widget.set_state({"picked": page.evaluate("saved.at(-1)")})
    page.evaluate("values => receive(values)", state_of(widget))


def box(page, name):
    return page.get_by_role("checkbox", name=name)


def table(page, caption):
    """The cells of a table of the panel, line by line."""
    rows = page.locator(".lumen-picker-table", has=page.locator("caption", has_text=caption)).locator("tbody tr")
    return [row.locator("th, td").all_text_contents() for row in rows.all()]


def test_a_tick_goes_to_python_and_table_picture_and_code_follow(page, picker):
    assert dict(row[:2] for row in table(page, "Figures"))["largest rank of a tensor"] == "6"
    box(page, DEFORM).click()
    assert page.evaluate("saved") == [[DEFORM]]
    kernel_answers(page, picker)
    assert picker.picked == (DEFORM,)
    figures = {row[0]: row[1:] for row in table(page, "Figures")}
    assert figures["operations on the CPU, predicted"] == ["2", "0", "−2"]
    assert figures["NPU partitions, predicted"] == ["3", "1", "−2"]
    assert figures["MACs"] == ["1.800 G", "1.900 G", "+0.100 G (+5.6%)"]
    assert ["deform_conv2d", "2", "0", "−2"] in table(page, "Operations by kind")
    assert page.locator(".lumen-picker-code").text_content() == "plan = (DECOMPOSE_DEFORM_CONV, )\n"
    strips = page.get_by_role("img").all()
    assert [strip.get_attribute("aria-label").split(":")[0] for strip in strips] == ["original", "this plan"]
    assert [strip.locator("rect[fill='#D55E00']").count() for strip in strips] == [2, 0]
    assert "1 rewrite: 1 NPU partition" in page.get_by_role("status").text_content()


def test_ticks_are_put_in_order_and_numbered(page, picker):
    for name in (NORM, DEFORM):
        box(page, name).click()
    assert page.evaluate("saved.at(-1)") == [DEFORM, NORM]
    kernel_answers(page, picker)
    places = page.locator(".lumen-picker-place").all_text_contents()
    assert places == ["#1", "", "", "#2"]
    box(page, DEFORM).click()
    assert page.evaluate("saved.at(-1)") == [NORM]


@pytest.mark.parametrize("first, other", [(DEFORM, PLAIN), (PLAIN, DEFORM)], ids=["declared", "declared by the other"])
def test_an_excluded_rewrite_is_disabled_with_its_reason_at_once(page, first, other):
    box(page, first).click()  # the kernel has not answered yet
    assert box(page, other).is_disabled()
    reason = f"not beside {first}: both replace the deformable convs"
    described = box(page, other).get_attribute("aria-describedby").split()
    assert page.locator(f"#{described[-1]}").text_content() == reason
    assert page.get_by_text(reason).is_visible()
    assert box(page, first).is_enabled()
    box(page, first).click()
    assert box(page, other).is_enabled() and page.get_by_text(reason).count() == 0


def test_what_is_not_measured_yet_is_said_and_dimmed(page, picker):
    panel = page.get_by_role("region", name="What the plan does")
    assert panel.get_attribute("aria-busy") == "false"
    box(page, NORM).click()
    assert panel.get_attribute("aria-busy") == "true"
    assert page.get_by_role("status").text_content() == "Measuring a plan of 1 rewrite …"
    kernel_answers(page, picker)
    assert panel.get_attribute("aria-busy") == "false"
    assert page.get_by_role("status").text_content() == picker.summary


def test_an_answer_to_an_older_choice_leaves_the_page_waiting(page, picker):
    box(page, NORM).click()
    older = page.evaluate("saved.at(-1)")
    box(page, TILES).click()
    picker.set_state({"picked": older})
    answer = {name: value for name, value in state_of(picker).items() if name != "picked"}
    page.evaluate("values => receive(values)", answer)
    assert page.get_by_role("status").text_content() == "Measuring a plan of 2 rewrites …"
    kernel_answers(page, picker)
    assert "2 rewrites: " in page.get_by_role("status").text_content()


def test_an_error_is_one_sentence_in_place_of_figures(page, picker, measure):
    measure.failure = ValueError("no room <left>\nTraceback")
    box(page, NORM).click()
    kernel_answers(page, picker)
    assert page.get_by_role("alert").text_content() == "Measuring failed with ValueError: no room <left>"
    assert page.locator(".lumen-picker-table").count() == 0
    measure.failure = None
    box(page, NORM).click()
    kernel_answers(page, picker)
    assert page.get_by_role("alert").text_content() == "" and page.locator(".lumen-picker-table").count() > 0


def test_a_choice_that_python_refuses_is_taken_back_in_the_page(page, picker):
    page.evaluate("model.set('picked', ['decompose_deform_conv', 'substitute_plain_conv']); model.save_changes()")
    kernel_answers(page, picker)
    assert "cannot be picked: not beside" in page.get_by_role("alert").text_content()
    assert not box(page, DEFORM).is_checked() and picker.picked == ()


def test_a_plan_s_button_picks_it_and_shows_that_it_is_picked(page, picker):
    button, original = (page.get_by_role("button", name=name) for name in ("EXACT_PLAN", "original"))
    assert [original.get_attribute("aria-pressed"), button.get_attribute("aria-pressed")] == ["true", "false"]
    button.click()
    kernel_answers(page, picker)
    assert list(picker.picked) == PRESETS["EXACT_PLAN"] and button.get_attribute("aria-pressed") == "true"
    assert table(page, "What the compiler recorded") == [["SM8850", "412.5", "3,246"]]
    assert [NORM, "2", "✓ 2 passed, worst 1.0e-14"] in table(page, "Sites and checks")
    box(page, NORM).click()
    assert button.get_attribute("aria-pressed") == "false"


def test_python_moves_the_page(page, picker):
    picker.pick([PLAIN])
    page.evaluate("values => receive(values)", state_of(picker))
    assert box(page, PLAIN).is_checked() and box(page, DEFORM).is_disabled()
    assert [PLAIN, "2", "… 2 pending, worst 1.0e-14"] in table(page, "Sites")


def test_everything_is_reached_and_ticked_by_the_keyboard(page):
    page.get_by_role("button", name="original").focus()
    for _ in range(2):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == DEFORM
    page.keyboard.press("Space")
    assert box(page, DEFORM).is_checked()
    page.keyboard.press("Tab")  # past the one that is excluded now
    assert page.evaluate("document.activeElement.value") == TILES
    groups = [
        page.get_by_role("group", name=name).count() for name in ("Rewrite picker", "Plans", "Rewrites", "deform")
    ]
    assert groups == [1, 1, 1, 1]
    assert page.get_by_role("table", name="Figures").count() == 1


def test_reading_a_reason_moves_no_other_rewrite(open_page, picker):
    """Else a click that takes the focus away would slip off the rewrite that it was meant for."""
    page = open_page(picker, width=400)
    box(page, TILES).focus()
    page.keyboard.press("Space")
    reason = page.locator(".lumen-picker-choice", has=box(page, TILES)).locator(".lumen-picker-because span")
    assert reason.bounding_box()["height"] > 30  # it is read whole, on several lines
    at = box(page, NORM).bounding_box()
    page.mouse.click(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    assert reason.bounding_box()["height"] < 30
    assert page.evaluate("saved.at(-1)") == [TILES, NORM]
    assert box(page, NORM).bounding_box() == at


def test_the_code_is_copied(open_page, picker, browser):
    picker.pick([NORM])
    page = open_page(picker, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == picker.code


def test_without_a_clipboard_the_code_is_left_selected(page, picker):
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Press Ctrl+C").wait_for()
    assert page.evaluate("getSelection().toString()").strip() == picker.code.strip()


def test_a_list_that_was_opened_stays_open(page, picker):
    page.locator("summary").click()
    assert page.locator("details").get_attribute("open") is not None
    box(page, NORM).click()
    kernel_answers(page, picker)
    assert page.locator("details").get_attribute("open") is not None


def luminance(color):
    channels = [value / 255 for value in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Painting the colours, the widget's paper first, makes plain numbers of names and of what is half transparent.
CONTRAST = """part => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const root = getComputedStyle(document.querySelector(".lumen-picker"));
  const found = getComputedStyle(document.querySelector(part));
  return [[root.backgroundColor, found.backgroundColor], [root.backgroundColor, found.color]].map((colors) => {
    for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  });
}"""


@pytest.mark.parametrize(
    "scheme, theme", [("light", ""), ("dark", ""), ("light", "--jp-ui-font-color1:#eee;--jp-layout-color1:#111")]
)
def test_text_can_be_read_in_light_dark_and_jupyter_s_own_theme(open_page, picker, scheme, theme):
    picker.pick([DEFORM])
    page = open_page(picker, color_scheme=scheme)
    page.evaluate("theme => document.body.style.cssText = theme", theme)
    parts = "because reason code table button blocked error"
    for part in parts.split():
        paper, ink = (luminance(color) for color in page.evaluate(CONTRAST, f".lumen-picker-{part}"))
        light, dark = max(ink, paper), min(ink, paper)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, part
        assert (paper < 0.2) == (scheme == "dark" or bool(theme)), part


@pytest.mark.parametrize("width", [360, 640, 1400])
def test_nothing_is_wider_than_the_page(open_page, picker, width):
    picker.pick([DEFORM])
    page = open_page(picker, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    choices, result = (page.locator(f".lumen-picker-{part}").bounding_box() for part in ("choices", "result"))
    assert (result["y"] >= choices["y"] + choices["height"]) == (width < 700)


def test_the_static_page_shows_the_same_without_a_script(open_page, picker):
    picker.pick(PRESETS["EXACT_PLAN"])
    live, static = open_page(picker), open_page(picker, static=True, java_script_enabled=False)
    assert static.locator(".lumen-picker-code").text_content() == picker.code
    for caption in ("Figures", "Operations by kind", "Sites and checks", "What the compiler recorded"):
        assert table(static, caption) == table(live, caption) != []
    ticks = [text.split()[0] for text in static.locator(".lumen-picker-choice label").all_text_contents()]
    assert ticks == ["☑", "☐", "☑", "☑"]
    assert static.get_by_text("not beside decompose_deform_conv").is_visible()
    assert static.get_by_role("checkbox").count() == static.get_by_role("button").count() == 0


def test_taking_the_view_away_lets_go_of_the_model(page):
    assert page.evaluate("listening()") == 5
    page.evaluate("cleanUp()")
    assert page.evaluate("listening()") == 0


def test_a_screenshot_shows_where_the_cpu_is(page):
    shot = PILImage.open(io.BytesIO(page.locator(".lumen-picker-strip svg").screenshot())).convert("RGB")
    pixels = np.asarray(shot).astype(int)
    orange = (np.abs(pixels - (0xD5, 0x5E, 0x00)).sum(axis=2) < 30).any(axis=0)
    runs = np.flatnonzero(np.diff(orange.astype(int)) == 1)
    assert len(runs) == 2
    assert runs / pixels.shape[1] == pytest.approx([10 / 64, 42 / 64], abs=0.01)
