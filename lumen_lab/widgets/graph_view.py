"""An ONNX graph in netron, inside a notebook and without a network, over a summary that needs no kernel.

Left alone, netron's page asks a host on the internet for the reader's country, shows a consent screen when it gets no
answer, reports to an analytics host and, half a year after its release, shows nothing but a request to update. The
server here gives that page the answers that keep it quiet, and a policy under which a browser lets it speak to this
server only.
"""

from __future__ import annotations

import atexit
import html
import os
import re
import secrets
import shutil
import socketserver
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from lumen_lab.errors import LumenError, MissingDependencyError
from lumen_lab.specs import Record, html_table

PAIRS_PER_ROW = 4
MODEL = "data/model.onnx"
MIME_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; worker-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; sandbox allow-scripts allow-same-origin "
    "allow-downloads"
)
# The page takes a cookie of this name for consent given. Answering for it works where a frame may keep no cookies.
ANSWERS = 'Object.defineProperty(document, "cookie", { get: () => "consent=0", set: () => {} });\n'


@dataclass(frozen=True)
class GraphSummary(Record):
    """An ONNX file in numbers: its size, its operators by kind (most frequent first), its inputs and outputs.

    Operators inside the branches of If, Loop and Scan are counted; a kind outside the standard domain is written
    ``domain::kind``. Inputs and outputs are (name, dtype, shape) with a name or "?" for a dimension that is not fixed.
    """

    file: str
    size_bytes: int
    opset: int
    operators: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]

    def rows(self) -> list[dict[str, object]]:
        """One dict a kind of operator."""
        return [{"operator": kind, "count": count} for kind, count in self.operators]

    def _repr_html_(self) -> str:
        ends = [("input", *end) for end in self.inputs] + [("output", *end) for end in self.outputs]
        total = sum(count for _, count in self.operators)
        title = (
            f"<p><b>{html.escape(self.file)}</b>: {_size(self.size_bytes)}, opset {self.opset}, "
            f"{total:,} operators of {len(self.operators)} kinds</p>"
        )
        return title + html_table([dict(zip(("", "name", "dtype", "shape"), end)) for end in ends]) + self._kinds()

    def _kinds(self) -> str:
        cells = [
            f"<td style='text-align:left'>{html.escape(kind)}</td><td style='padding-right:2em'>{n:,}</td>"
            for kind, n in self.operators
        ]
        lines = (cells[start : start + PAIRS_PER_ROW] for start in range(0, len(cells), PAIRS_PER_ROW))
        return "<table>" + "".join(f"<tr>{''.join(line)}</tr>" for line in lines) + "</table>"


class GraphView:
    """One graph in netron, made by ``show_graph``; the value of a cell shows it.

    ``url`` serves netron's page and this one file, to this machine only, until ``close()``, the end of a ``with``
    block or the end of the interpreter. ``summary`` is what a page shows where there is no server.
    """

    def __init__(self, path: Path, summary: GraphSummary, *, page_dir: Path, height_px: int):
        self.summary, self.height_px = summary, height_px
        token = secrets.token_urlsafe(9)
        handler = partial(_Handler, token=token, model=path, seen=_state(path), page_dir=page_dir)
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{token}/"
        self.is_open = True
        threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True, name="GraphView").start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the server and give its port back; a second call does nothing."""
        if self.is_open:
            self.is_open = False
            self._server.shutdown()
            self._server.server_close()
            atexit.unregister(self.close)

    def __enter__(self) -> GraphView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"at {self.url}" if self.is_open else "closed"
        return f"GraphView of {self.summary.file}, {sum(n for _, n in self.summary.operators):,} operators, {place}"

    def _repr_html_(self) -> str:
        note = (
            "The graph itself is drawn above this summary while the kernel that wrote it is running, in a browser on "
            "the same machine; Ctrl+F inside it finds an operator."
        )
        # Unlike an iframe, an object leaves no broken frame where nothing answers: it shows what it encloses, nothing.
        frame = (
            f'<object data="{self.url}" type="text/html" aria-label="Graph of {html.escape(self.summary.file)}" '
            f'style="width:100%;height:{self.height_px}px"></object>'
        )
        summary = self.summary._repr_html_()
        return f"{frame}{summary}<p><small>{note}</small></p>" if self.is_open else summary


def show_graph(onnx_path: str | Path, *, height_px: int = 600) -> GraphView:
    """The graph of an ONNX file, to be walked through in netron inside a notebook, ``height_px`` high.

    Nothing is fetched from a network and nothing is sent. Each view has a server of its own and shows the file as it
    is now: one that has changed since is no longer served. Weights in a second file beside it are not served.
    ``LumenError`` for a file that is missing or not an ONNX model; ``MissingDependencyError`` without netron.
    """
    try:
        import netron
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "show_graph draws with netron, which is not installed: pip install lumen-lab[notebooks]."
        ) from None
    if height_px < 1:
        raise LumenError(f"show_graph takes height_px in whole pixels, 1 or more; found {height_px}.")
    path = Path(onnx_path).resolve()
    page_dir = Path(netron.__file__).parent
    summary = summarize_graph(path)
    _page(page_dir, summary.file)
    return GraphView(path, summary, page_dir=page_dir, height_px=int(height_px))


def summarize_graph(onnx_path: str | Path) -> GraphSummary:
    """The summary of an ONNX file; ``LumenError`` if it is missing or not an ONNX model."""
    path = Path(onnx_path)
    if not path.is_file():
        raise LumenError(f"No file {path}: show_graph takes the path of an ONNX model, such as export_onnx writes.")
    model = _model(path)
    stored = {tensor.name for tensor in model.graph.initializer}
    kinds = Counter(_nodes(model.graph))
    return GraphSummary(
        file=path.name,
        size_bytes=path.stat().st_size,
        opset=next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0),
        operators=tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        inputs=tuple(_end(value) for value in model.graph.input if value.name not in stored),
        outputs=tuple(_end(value) for value in model.graph.output),
    )


def _model(path: Path):
    import onnx

    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # of protobuf, which belongs to onnx and which nothing else here imports
        model = onnx.ModelProto()
    # Protobuf reads an empty file, and now and then some other one, as a message in which nothing is set.
    if not (model.ir_version and model.opset_import and (model.graph.node or model.graph.output)):
        raise LumenError(f"{path} ({_size(len(content))}) is not an ONNX model; show_graph reads no other kind.")
    return model


def _nodes(graph) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _end(value) -> tuple[str, str, str]:
    from onnx import TensorProto

    kind = value.type.WhichOneof("value") or "unknown"
    if kind != "tensor_type":
        return value.name, kind.removesuffix("_type"), ""
    tensor = value.type.tensor_type
    sides = (str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim)
    return value.name, TensorProto.DataType.Name(tensor.elem_type).lower(), " × ".join(sides)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes:,} bytes"


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _page(page_dir: Path, file: str) -> bytes:
    """netron's page for ``file``: as a copy of its sources, which reports nothing, and released today, so not too old.

    ``LumenError`` if the page lacks the places to say so, as another release may.
    """
    page = (page_dir / "index.html").read_text(encoding="utf-8")
    name, stem = html.escape(file), html.escape(Path(file).stem)
    told = (
        f'<meta name="type" content="Python">\n<meta name="version" content="0.0.0">\n'
        f'<meta name="file" content="{MODEL}">\n<meta name="name" content="{name}">\n'
        f'<meta name="identifier" content="{stem}.onnx">'
    )
    changes = {
        r'<meta name="version" content="[^"]*">': told,
        r'<meta name="date" content="[^"]*">': time.strftime('<meta name="date" content="%Y-%m-%d %H:%M:%S">'),
        r'(?=<script type="text/javascript" src="index.js">)': '<script src="answers.js"></script>\n',
    }
    for pattern, replacement in changes.items():
        page, count = re.subn(pattern, lambda _, text=replacement: text, page)
        if count != 1:
            raise LumenError("This release of netron has another page than the one known here: install netron==9.3.3.")
    return page.encode()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a reader who leaves early is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers for netron's page, the files beside it and one model, all below ``/token/``; 404 to anything else."""

    def __init__(self, *args: object, token: str, model: Path, seen: tuple[int, int], page_dir: Path):
        self.token, self.model, self.seen, self.page_dir = token, model, seen, page_dir
        super().__init__(*args)

    def do_GET(self) -> None:
        _, token, name = (urlsplit(self.path).path + "//").split("/", 2)
        name = name.rstrip("/") or "index.html"
        # A foreign page that points its own host name at this machine still gives itself away by that name.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if token != self.token or host not in ("127.0.0.1", "localhost"):
            self.send_error(404)
        elif name == MODEL:
            self._send_model()
        elif name == "index.html":
            self._send(_page(self.page_dir, self.model.name), ".html")
        elif name == "answers.js":
            self._send(ANSWERS.encode(), ".js")
        elif Path(name).suffix in MIME_TYPES and name in os.listdir(self.page_dir):
            self._send((self.page_dir / name).read_bytes(), Path(name).suffix)
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_model(self) -> None:
        if not self.model.is_file() or _state(self.model) != self.seen:
            self.send_error(404, "The file has changed since it was shown")
            return
        self._head("application/octet-stream", self.seen[0])
        if self.command == "GET":
            with open(self.model, "rb") as file:
                shutil.copyfileobj(file, self.wfile)

    def _send(self, content: bytes, suffix: str) -> None:
        self._head(MIME_TYPES[suffix], len(content))
        if self.command == "GET":
            self.wfile.write(content)

    def _head(self, kind: str, size_bytes: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size_bytes))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing: a notebook would show it."""
