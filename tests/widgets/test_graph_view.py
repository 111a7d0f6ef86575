"""An ONNX graph in netron: the summary, what the server answers and to whom, and the page in a real browser."""

import http.client
import io
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit
from urllib.request import urlopen

import nbformat
import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image as PILImage

from lumen_lab.errors import LumenError, MissingDependencyError
from lumen_lab.widgets import show_graph
from lumen_lab.widgets.graph_view import GraphSummary, summarize_graph

NASTY = "<b>&\"'.onnx"
LAYER_BLUE = (51, 85, 136)  # netron's colour of a convolution


def write_model(path, *kinds, dtype=TensorProto.FLOAT):
    """A chain of a convolution and operators of one input and output, from x (N, 3, 8, 8) to y."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["t0"])]
    nodes += [helper.make_node(kind, [f"t{place}"], [f"t{place + 1}"]) for place, kind in enumerate(kinds)]
    nodes[-1].output[0] = "y"
    ends = [helper.make_tensor_value_info(name, dtype, ["N", 3, 8, 8]) for name in "xy"]
    weight = helper.make_tensor("w", dtype, [3, 3, 1, 1], [0.5] * 9)
    save(path, helper.make_graph(nodes, "chain", ends[:1], ends[1:], [weight]))
    return path


def save(path, graph):
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())


@pytest.fixture
def chain(tmp_path):
    return write_model(tmp_path / "chain.onnx", "Relu", "Sigmoid", "Relu")


@pytest.fixture
def view(chain):
    with show_graph(chain) as shown:
        yield shown


def answer(view, path, *, method="GET", host=None):
    """Status and body of a request for ``path`` (as it is, dots and all) below the view's token."""
    url = urlsplit(view.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
    try:
        connection.request(method, url.path + path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def port_is_open(url):
    with socket.socket() as probe:
        return probe.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) == 0


def test_the_summary_counts_what_is_in_the_file(chain):
    summary = summarize_graph(chain)
    assert summary.operators == (("Relu", 2), ("Conv", 1), ("Sigmoid", 1))
    assert (summary.file, summary.size_bytes, summary.opset) == ("chain.onnx", chain.stat().st_size, 17)
    assert summary.inputs == (("x", "float", "N × 3 × 8 × 8"),)  # and not the weight
    assert summary.outputs == (("y", "float", "N × 3 × 8 × 8"),)
    assert GraphSummary.from_json(summary.to_json()) == summary


def test_branches_and_other_domains_are_counted(tmp_path):
    out = helper.make_tensor_value_info("r", TensorProto.INT8, None)
    branches = {
        f"{name}_branch": helper.make_graph([helper.make_node(kind, ["x"], ["r"])], name, [], [out])
        for name, kind in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [
        helper.make_node("If", ["c"], ["t"], **branches),
        helper.make_node("Relu", ["t"], ["y"], domain="com.example"),
    ]
    ends = [
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.INT8, [None, 4]),
        helper.make_tensor_sequence_value_info("y", TensorProto.INT8, None),
    ]
    save(tmp_path / "m.onnx", helper.make_graph(nodes, "if", ends[:2], ends[2:]))
    summary = summarize_graph(tmp_path / "m.onnx")
    assert dict(summary.operators) == {"If": 1, "Relu": 1, "Neg": 1, "com.example::Relu": 1}
    assert summary.inputs == (("c", "bool", ""), ("x", "int8", "? × 4"))
    assert summary.outputs == (("y", "sequence", ""),)


def test_the_page_around_it_is_true_and_escaped(tmp_path):
    path = write_model(tmp_path / NASTY, "Relu")
    with show_graph(path, height_px=321) as view:
        shown = view._repr_html_()
        assert view.url in shown and "height:321px" in shown and "kernel" in shown
        assert "&lt;b&gt;&amp;&quot;&#x27;.onnx" in shown and '<b>&"' not in shown
        assert re.search(r">Relu</td><td[^>]*>1</td>", shown)
        page = answer(view, "")[1].decode()
        assert '<meta name="name" content="&lt;b&gt;&amp;&quot;&#x27;.onnx">' in page
    assert view.url not in view._repr_html_() and "Relu" in view._repr_html_()


def test_it_reads_as_a_table_in_a_report(view):
    nbconvert = pytest.importorskip("nbconvert")
    data = {"text/plain": repr(view), "text/html": view._repr_html_()}
    output = nbformat.v4.new_output("execute_result", data, execution_count=1)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show_graph(path)", outputs=[output])])
    page, _ = nbconvert.HTMLExporter(embed_images=True).from_notebook_node(notebook)
    assert "4 operators of 3 kinds" in page and ">Sigmoid</td>" in page and "N × 3 × 8 × 8" in page


def test_the_server_gives_this_model_and_no_other_file(view, chain):
    write_model(chain.with_name("other.onnx"), "Neg")
    assert answer(view, "data/model.onnx?cb=1") == (200, chain.read_bytes())
    assert answer(view, "data/model.onnx", method="HEAD") == (200, b"")
    for path in ("data/other.onnx", "data/chain.onnx", "../data/model.onnx", "data/../../chain.onnx", "server.py"):
        assert answer(view, path)[0] == 404, path
    for path in ("../index.html", "..%2f..%2fpyproject.toml", "__pycache__/", "/etc/passwd", "%00.js"):
        assert answer(view, path)[0] == 404, path
    assert answer(view, "data/model.onnx", host="evil.example:80")[0] == 404


def test_a_file_that_has_changed_is_not_served_under_the_old_summary(view, chain):
    write_model(chain, "Neg")
    assert answer(view, "data/model.onnx")[0] == 404
    chain.unlink()
    assert answer(view, "data/model.onnx")[0] == 404


def test_the_page_is_told_to_be_quiet(view):
    page = answer(view, "")[1].decode()
    released = re.search(r'name="date" content="(.*?) ', page)[1]
    assert datetime.now(UTC) - datetime.fromisoformat(released).replace(tzinfo=UTC) < timedelta(days=2)
    assert page.index("answers.js") < page.index("index.js")
    assert re.findall(r'name="version" content="(.*?)"', page) == ["0.0.0"]
    with urlopen(view.url) as response:
        policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self';" in policy


def test_two_views_show_two_models(view, tmp_path):
    other = write_model(tmp_path / "other.onnx", "Neg")
    with show_graph(other) as second:
        assert answer(second, "data/model.onnx")[1] == other.read_bytes() != answer(view, "data/model.onnx")[1]
    assert not port_is_open(second.url) and port_is_open(view.url)


def test_closing_gives_the_port_back(chain):
    view = show_graph(chain)
    assert port_is_open(view.url) and view.url in repr(view)
    view.close()
    assert not port_is_open(view.url) and "closed" in repr(view)
    view.close()


def test_the_end_of_the_interpreter_closes_it(chain):
    program = f"from lumen_lab.widgets import show_graph\nprint(show_graph({str(chain)!r}).url)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert not port_is_open(done.stdout.strip())


@pytest.mark.parametrize("content", [b"", b"not a model at all\n", b"\x89PNG\r\n\x1a\n" + bytes(99), bytes(64)])
def test_what_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(LumenError, match=r"m\.onnx .* is not an ONNX model"):
        show_graph(tmp_path / "m.onnx")


def test_a_missing_file_a_folder_and_no_height_are_refused(tmp_path, chain):
    for path in (tmp_path / "none.onnx", tmp_path):
        with pytest.raises(LumenError, match="No file"):
            show_graph(path)
    with pytest.raises(LumenError, match="height_px"):
        show_graph(chain, height_px=0)


def test_without_netron_it_says_what_to_install(chain, monkeypatch):
    monkeypatch.setitem(sys.modules, "netron", None)
    with pytest.raises(MissingDependencyError, match="netron, which is not installed"):
        show_graph(chain)


def test_another_release_of_netron_is_refused_rather_than_let_talk(chain, tmp_path, monkeypatch):
    netron = pytest.importorskip("netron")
    (tmp_path / "index.html").write_text('<meta name="version" content="10.0.0"><script src="app.js"></script>')
    monkeypatch.setattr(netron, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(LumenError, match="netron==9.3.3"):
        show_graph(chain)


@pytest.fixture
def page(browser):
    """A page that keeps a list of what it asked for and fails on any error in the console."""
    page = browser.new_page(viewport={"width": 800, "height": 1500})
    page.asked, complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    assert not complaints


def open_views(page, path, *views):
    path.write_text("<meta charset=utf-8>" + "".join(view._repr_html_() for view in views), encoding="utf-8")
    page.goto(path.as_uri())
    for view in views:
        frame = page.frame(url=view.url)
        frame.locator("body.default:not(.spinner) svg .node-item").first.wait_for(timeout=60_000)
        # One by one: netron's page forbids eval, through which a browser driver reads many at once.
        yield [label.text_content() for label in frame.locator("svg .node-item text").all()]


@pytest.mark.browser
def test_netron_draws_both_graphs_and_asks_nobody_else(page, tmp_path, view):
    other = write_model(tmp_path / NASTY, "Neg", dtype=TensorProto.FLOAT16)
    with show_graph(other, height_px=400) as second:
        drawn, drawn_beside = open_views(page, tmp_path / "views.html", view, second)
        page.wait_for_timeout(1000)  # time to say what it should not
        shot = PILImage.open(io.BytesIO(page.screenshot())).convert("RGB")
    assert [text for text in drawn if text[:1].isupper() and len(text) > 1] == ["Conv", "Relu", "Sigmoid", "Relu"]
    assert "Neg" in drawn_beside and "Relu" not in drawn_beside
    assert (np.asarray(shot) == LAYER_BLUE).all(-1).sum() > 1000
    assert {url.split("/")[2] for url in page.asked} == {"", *(urlsplit(v.url).netloc for v in (view, second))}


@pytest.mark.browser
def test_without_a_server_the_table_stands_alone(page, tmp_path, chain):
    with show_graph(chain, height_px=600) as view:
        live = view._repr_html_()
    (tmp_path / "kept.html").write_text("<meta charset=utf-8>" + live, encoding="utf-8")
    page.goto((tmp_path / "kept.html").as_uri())
    page.wait_for_timeout(500)
    box = page.get_by_text("4 operators of 3 kinds").bounding_box()
    assert box["y"] < 60, "a broken frame takes the place of the graph"
