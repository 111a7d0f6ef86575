"""The picker without a browser: its traits, when it measures, and the static page that stands in for it."""

import asyncio
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbconvert
import nbformat
import pytest
import traitlets

from lumen_lab import figures
from lumen_lab.errors import RewriteError
from lumen_lab.widgets import plan_page, rewrite_picker
from lumen_lab.widgets.rewrite_picker import RewritePicker
from tests.widgets.plans import CHOICES, NAMES, Measure, effect_of

EXACT = [name for name in NAMES if "substitute" not in name]
DEFORM, PLAIN, TILES, NORM = NAMES


@pytest.fixture
def measure():
    return Measure()


@pytest.fixture
def picker(measure):
    recorded = [
        {"plan": "EXACT_PLAN", "chip": "SM8850", "DRAM MB": 412.5, "QNN ops": 3246},
        {"plan": [NORM], "chip": "SM8850", "DRAM MB": 99.25, "QNN ops": 11},
    ]
    return RewritePicker(CHOICES, measure, presets={"EXACT_PLAN": EXACT}, recorded_rows=recorded)


def cells(page):
    """Text of the table cells in a piece of HTML, by the head of their line."""
    lines = re.findall(r"<tr>(.*?)</tr>", page)
    texts = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", re.sub(r"</?span[^>]*>", "", line)) for line in lines]
    return {first: rest for first, *rest in texts}


def test_it_starts_with_the_network_as_it_is(picker, measure):
    assert picker.picked == picker.measured == () and measure.asked == [(), ()]
    assert picker.effect["plan"] == () and picker.code == "plan = ()\n" and picker.error == ""
    assert picker.summary.startswith("The network as it is: 3 NPU partitions predicted for SM8850, 2 of 64 operations")
    assert "<td>2</td><td>block.0</td><td>HTP has no DeformConv</td>" in picker.panel


def test_picking_measures_and_shows_the_difference(picker, measure):
    effect = picker.pick([NORM, DEFORM])
    assert effect is picker.effect and effect["plan"] == (DEFORM, NORM) == measure.asked[-1]
    assert picker.picked == picker.measured == (DEFORM, NORM)
    assert picker.code == f"plan = ({DEFORM.upper()}, {NORM.upper()}, )\n"
    assert plan_page.code_html(picker.code) in picker.panel
    found = cells(picker.panel)
    assert found["operations on the CPU, predicted"] == ["2", "0", "−2"]
    assert found["MACs"] == ["1.800 G", "1.900 G", "+0.100 G (+5.6%)"]
    assert found["parameters"] == ["5,500,000", "5,499,100", "−900"]
    assert found["peak of activations in memory"] == ["12.2 MB", "12.2 MB", ""]
    assert found["batch_norm"] == ["2", "0", "−2"] and found["grid_sample"] == ["0", "2", "+2"]
    assert found["add"] == ["40"]  # unchanged, so folded away
    assert found[NORM] == ["2", "✓ 2 passed, worst 1.0e-14"]
    assert picker.summary == (
        "2 rewrites: 1 NPU partition predicted for SM8850, nothing on the CPU, checks: 4 passed; measured in 3.5 s"
    )


def test_the_same_choice_is_not_measured_again(picker, measure):
    picker.pick([NORM])
    count = len(measure.asked)
    picker.pick([NORM])
    assert picker.effect and picker.code and picker.static_html() and len(measure.asked) == count


def test_the_compiler_s_figures_are_those_of_the_plan_picked(picker):
    assert "What the compiler recorded" not in picker.panel
    picker.pick(EXACT)
    assert cells(picker.panel)["SM8850"] == ["412.5", "3,246"]
    picker.pick([NORM])
    assert cells(picker.panel)["SM8850"] == ["99.25", "11"]
    picker.pick([TILES, NORM])
    assert "What the compiler recorded" not in picker.panel


@pytest.mark.parametrize("names", [[DEFORM, PLAIN], [PLAIN, DEFORM], [PLAIN, NORM, DEFORM]])
def test_rewrites_that_exclude_each_other_are_refused_with_the_reason(picker, names):
    picker.pick([NORM])
    sentence = "cannot be picked: not beside .*: both replace the deformable convs"
    with pytest.raises(RewriteError, match=sentence):
        picker.pick(names)
    with pytest.raises(traitlets.TraitError, match=sentence):
        picker.picked = names
    assert picker.picked == picker.measured == (NORM,)


def test_unknown_names_are_refused(picker):
    with pytest.raises(RewriteError, match=f"no rewrite 'fold' to pick; there are {DEFORM}, "):
        picker.pick(["fold"])
    with pytest.raises(RewriteError, match="a list of names, found the text 'fold_batch_norm'"):
        picker.pick(NORM)
    with pytest.raises(RewriteError, match=r"a list of names, found None; write \[\]"):
        picker.pick(None)
    with pytest.raises(traitlets.TraitError):
        picker.picked = None


def test_what_is_picked_cannot_be_changed_in_place(picker):
    picker.pick([NORM])
    with pytest.raises(AttributeError):
        picker.picked.append(TILES)
    assert picker.get_state()["picked"] == picker.picked == (NORM,)


def test_a_refusal_is_gone_once_something_is_picked_even_what_was_picked_before(picker):
    picker.pick([NORM])
    summary = picker.summary
    picker.set_state({"picked": ["nope"]})
    assert "no rewrite 'nope'" in picker.error
    assert picker.pick([NORM])["plan"] == (NORM,)
    assert (picker.error, picker.summary) == ("", summary)


def test_an_error_of_measure_is_shown_and_raised(picker, measure):
    measure.failure = ValueError("out of <room>\nand more")
    with pytest.raises(ValueError, match="out of <room>"):
        picker.pick([NORM])
    assert picker.error == "Measuring failed with ValueError: out of <room>"
    assert picker.effect is None and picker.code == picker.panel == picker.summary == ""
    assert picker.measured == (NORM,)
    assert "Measuring failed with ValueError: out of &lt;room&gt;" in picker.static_html()
    measure.failure = RewriteError("A sentence of our own.")
    with pytest.raises(RewriteError):
        picker.pick([NORM])
    assert picker.error == "A sentence of our own."
    measure.failure = None
    assert picker.pick([NORM])["plan"] == (NORM,)  # asked again, not answered from the failure
    assert picker.error == "" and picker.panel


def test_a_refused_plan_is_answered_with_its_sentence():
    def measure(names):
        return {**effect_of(names), "refused": "Plan has both." if names else None}

    picker = RewritePicker(CHOICES, measure)
    assert picker.pick([NORM])["refused"] == "Plan has both."
    assert picker.error == "Plan has both." and picker.panel == picker.summary == ""


def in_a_kernel(story):
    """Run ``story(picker, measure)`` as a cell: a loop runs in its thread, and callbacks run where it awaits.

    A thread of its own, since a browser that other tests have opened may keep a loop running in this one.
    """

    async def cell():
        measure = Measure()
        return await story(RewritePicker(CHOICES, measure), measure)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, cell()).result()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(rewrite_picker, "DEBOUNCE_S", 0.02)


def test_the_browser_s_choice_is_measured_when_the_kernel_is_idle():
    async def story(picker, measure):
        picker.set_state({"picked": [NORM]})
        assert picker.busy and picker.picked == (NORM,) and picker.measured == ()
        await asyncio.sleep(0.1)
        assert not picker.busy and picker.measured == (NORM,) and "1 rewrite:" in picker.summary

    in_a_kernel(story)


def test_quick_ticks_are_measured_once():
    async def story(picker, measure):
        for names in ([NORM], [TILES, NORM], [DEFORM, TILES, NORM]):
            picker.set_state({"picked": names})
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        return measure.asked

    assert in_a_kernel(story) == [(), (), (DEFORM, TILES, NORM)]


def test_an_answer_to_an_older_choice_is_dropped():
    async def story(picker, measure):
        shown = []
        picker.observe(lambda change: shown.append(change["new"]), "measured")

        def tick_another():
            measure.meanwhile = None
            picker.set_state({"picked": [TILES]})

        measure.meanwhile = tick_another
        picker.set_state({"picked": [NORM]})
        await asyncio.sleep(0.15)
        assert measure.asked[2:] == [(NORM,), (TILES,)]
        assert shown == [(TILES,)] and picker.effect["plan"] == (TILES,)

    in_a_kernel(story)


def test_a_choice_from_another_thread_is_measured_in_the_kernel_s_own():
    """JupyterLab's messages may arrive in a thread of their own, and torch.export is not to run twice at once."""

    async def story(picker, measure):
        threads = []
        measure.meanwhile = lambda: threads.append(threading.current_thread())
        sender = threading.Thread(target=picker.set_state, args=({"picked": [NORM]},))
        sender.start()
        sender.join()
        await asyncio.sleep(0.1)
        assert threads == [threading.current_thread()] and picker.measured == (NORM,)

    in_a_kernel(story)


def test_what_the_browser_chose_is_measured_at_once_if_a_cell_asks():
    async def story(picker, measure):
        picker.set_state({"picked": [NORM]})
        assert picker.effect["plan"] == (NORM,) and picker.code.startswith("plan = (FOLD")
        await asyncio.sleep(0.1)
        assert measure.asked == [(), (), (NORM,)]

    in_a_kernel(story)


def test_a_choice_of_the_browser_that_is_refused_is_sent_back(picker, monkeypatch):
    sent = []
    monkeypatch.setattr(picker, "send_state", lambda key=None: sent.append(key))
    picker.set_state({"picked": [DEFORM, PLAIN]})
    assert picker.picked == () and "not beside" in picker.error and "picked" in sent
    picker.pick([NORM])
    assert picker.error == ""


def test_the_state_that_the_browser_gets_is_plain(picker):
    state = picker.get_state()
    assert [choice["name"] for choice in state["choices"]] == NAMES
    assert state["presets"] == {"original": [], "EXACT_PLAN": EXACT}
    assert state["choices_html"].count("type='checkbox'") == len(NAMES)
    assert "&lt;cheap&gt;" in state["choices_html"] and "<cheap>" not in state["choices_html"]
    with pytest.raises(traitlets.TraitError):
        picker.panel = "<p>mine</p>"


def test_wrong_rows_are_refused(measure):
    def with_row(place, **change):
        return [{**choice, **(change if at == place else {})} for at, choice in enumerate(CHOICES)]

    with pytest.raises(RewriteError, match=r"has no because\."):
        RewritePicker([{key: value for key, value in CHOICES[0].items() if key != "because"}], measure)
    with pytest.raises(RewriteError, match="fold_batch_norm stands twice"):
        RewritePicker(with_row(0, name=NORM), measure)
    with pytest.raises(RewriteError, match=f"list {DEFORM} before {NORM}, after which it must come"):
        RewritePicker(with_row(0, after=[[NORM, "a reason"]]), measure)
    with pytest.raises(RewriteError, match="cannot be picked: not beside"):
        RewritePicker(CHOICES, measure, presets={"both": [DEFORM, PLAIN]})
    with pytest.raises(RewriteError, match="The preset 'original' is the network as it is; call yours otherwise"):
        RewritePicker(CHOICES, measure, presets={"original": [NORM]})
    with pytest.raises(RewriteError, match="found a Fold; rewrites.effect.choice_rows makes rows of rewrites"):
        RewritePicker([type("Fold", (), {})()], measure)
    with pytest.raises(RewriteError, match="recorded row says its plan, found only DRAM"):
        RewritePicker(CHOICES, measure, recorded_rows=[{"DRAM": 1}])
    with pytest.raises(RewriteError, match="found no macs"):
        RewritePicker(CHOICES, lambda names: {k: v for k, v in effect_of(names).items() if k != "macs"})
    assert measure.asked == []


@pytest.mark.parametrize("rows", [[], effect_of([])["partition_rows"]])
def test_the_strip_has_a_bar_a_piece(rows):
    svg = plan_page.strip_svg(rows, label="<original>")
    bars = re.findall(r"<rect x='([\d.]+)' y='(\d+)' width='([\d.]+)' height='(\d+)' fill='(#\w+)'", svg)
    on_cpu = [bar for bar in bars if bar[-1] == plan_page.VERMILLION]
    assert len(bars) == (5 if rows else 0) and "aria-label='&lt;original&gt;'" in svg
    assert [bar[0] for bar in on_cpu] == (["10", "42"] if rows else [])
    assert sum(float(bar[2]) for bar in bars) == len(rows)
    assert all(bar[3] == str(plan_page.STRIP_HEIGHT_PX) for bar in on_cpu)


def test_a_single_operation_on_the_cpu_can_be_seen_in_a_long_strip():
    rows = [{"index": i, "kind": "add", "partition": 0, "runs_on": "CPU" if i == 0 else "NPU"} for i in range(6000)]
    (width,) = re.findall(
        rf"width='([\d.]+)' height='\d+' fill='{plan_page.VERMILLION}'", plan_page.strip_svg(rows, label="")
    )
    assert float(width) / 6000 >= 1 / 300


def test_colours_are_those_of_the_figures():
    sheet = sys.modules[f"{figures.__name__}.sheet"]
    assert (plan_page.BLUE, plan_page.SKY, plan_page.VERMILLION) == (sheet.BLUE, sheet.SKY, sheet.VERMILLION)


def test_refused_sites_and_pending_checks_are_told(picker, measure):
    effect = effect_of([PLAIN])
    effect["log"] = [{"rewrite": PLAIN, "sites": 1, "refused": 3, "why refused": "it has <stride> 2"}]
    effect["verdicts"].append(
        {"rewrite": "whole network", "sites": 1, "worst": 0.5, "passed": 0, "failed": 1, "pending": 0}
    )
    found = cells(plan_page.panel_html(effect_of([]), effect, []))
    assert found[PLAIN] == ["1, refused at 3: it has &lt;stride&gt; 2", "… in 2 modules: 2 pending, worst 1.0e-14"]
    assert found["whole network"] == ["", "✗ 1 failed, worst 5.0e-01"]
    unchecked = cells(plan_page.panel_html(effect_of([]), {**effect, "log": [], "verdicts": []}, []))
    assert unchecked[PLAIN] == ["none found", "not checked"]
    assert "checks: 1 failed, 2 pending" in plan_page.summary_text(effect)


def test_the_static_page_has_choices_figures_and_code(picker):
    picker.pick([DEFORM, NORM])
    page = picker.static_html()
    ticks = re.findall(r"<span>([☑☐])</span> <span class='lumen-picker-name'>(\w+)", page)
    assert ticks == [("☑", DEFORM), ("☐", PLAIN), ("☐", TILES), ("☑", NORM)]
    assert "not beside decompose_deform_conv: both replace the deformable convs" in page
    assert picker.panel in page and picker.summary in page
    assert "<input" not in page and "<script" not in page and "<button" not in page


def test_the_mime_bundle_holds_widget_and_page_of_the_same_state(picker):
    picker.picked = [NORM]
    data, _ = picker._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == picker.model_id
    assert data["text/html"] == picker.static_html() and picker.code in data["text/html"]
    assert data["text/plain"].endswith("; measured in 3.5 s [fold_batch_norm]")


def test_a_report_without_widget_state_shows_the_page(picker):
    picker.pick([DEFORM])
    data, _ = picker._repr_mimebundle_()
    cell = nbformat.v4.new_code_cell("picker", outputs=[nbformat.v4.new_output("display_data", data=data)])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert cells(page) == cells(picker.panel) != {}
    assert page.count("<svg") == 2 and picker.code in page


def test_script_and_style_are_installed_with_the_package(repository):
    folder = Path(rewrite_picker.__file__).parent
    kinds = {path.suffix for path in folder.iterdir() if path.suffix not in (".py", ".pyc", "")}
    declared = re.search(r'"\*" = \[(.*?)\]', (repository / "pyproject.toml").read_text())[1]
    assert {".js", ".css"} <= kinds and all(f'"*{kind}"' in declared for kind in kinds)


def test_a_real_module_is_picked_apart(tiny_config):
    """Rows, measure and widget together: what the rewrites say is what the widget shows."""
    import torch

    from lumen_lab.network.decoder import DecoderBlock
    from lumen_lab.rewrites.catalogue import CATALOGUE
    from lumen_lab.rewrites.effect import choice_rows, effect_of_names

    module = torch.nn.Sequential(DecoderBlock(4, 6, tiny_config)).eval()
    measure = effect_of_names(module, CATALOGUE, example_inputs=(torch.empty(1, 4, 8, 12),))
    picker = RewritePicker(choice_rows(CATALOGUE), measure)
    effect = picker.pick(["fold_batch_norm", "decompose_deform_conv"])
    assert list(picker.picked) == list(effect.plan) == ["decompose_deform_conv", "fold_batch_norm"]
    found = cells(picker.panel)
    assert found["operations on the CPU, predicted"] == ["4", "0", "−4"] and effect.cpu_operations == 0
    assert found["deform_conv2d"] == ["4", "0", "−4"]
    assert found["NPU partitions, predicted"][1] == str(effect.partitions) == "1"
    assert found["decompose_deform_conv"] == ["4", "not checked"]
    assert "DECOMPOSE_DEFORM_CONV" in picker.code


def test_an_order_holds_only_where_a_plan_has_both_and_equal_reasons_are_joined(measure):
    after = [["a", "sizes <change>"], ["b", "a third reason."], ["c", "sizes <change>"]]
    page = plan_page.choices_html([{**CHOICES[0], "after": after}], (), blocked={}, live=False)
    assert (
        "no DeformConv. If the plan also has a or c: after them, since sizes &lt;change&gt;. "
        "If the plan also has b: after it, since a third reason.</span>"
    ) in page


def test_checks_of_modules_that_hold_several_sites_say_how_many_there_were():
    effect = effect_of([NORM])
    effect["log"] = [{"rewrite": NORM, "sites": 43, "refused": 0, "why refused": ""}]
    effect["verdicts"][0] |= {"passed": 38}
    page = plan_page.panel_html(effect_of([]), effect, [])
    assert cells(page)[NORM] == ["43", "✓ in 38 modules: 38 passed, worst 1.0e-14"]
    assert "<span style='white-space:nowrap'>1.0e-14</span>" in page


def test_the_static_page_says_that_it_is_a_picture(picker):
    assert plan_page.STATIC_NOTE in picker.static_html()
