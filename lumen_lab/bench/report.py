"""The bench as one HTML page: tables, a reliability diagram, and sheets of scenes with the masks found in them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lumen_lab.bench.table import BenchTable
from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.figures.contact import contact_sheet, reliability_diagram
from lumen_lab.metrics import METRICS, READINGS, Scores
from lumen_lab.prediction import Predictor, predict_all
from lumen_lab.specs import html_table, write_whole

SHOWN = 24
STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:1500px}"
    "table{border-collapse:collapse;margin:1em 0;font-size:13px}"
    "td,th{padding:2px 8px;border-bottom:1px solid #ddd}img{max-width:100%}"
)


def write_report(
    path: str | Path,
    predictor: Predictor,
    table: BenchTable,
    scores: Mapping[str, Scores],
    scenes: Mapping[str, ComposedScenes],
) -> Path:
    """Write the page; it stands alone, pictures included. Returns its path."""
    parts = [f"<h1>Bench</h1><p>{html.escape(table.predictor)}</p>", html_table(table.rows(), caption="All lists")]
    parts.append(html_table(table.gates, caption="Gates, on scenes of the first list"))
    for name, found in scores.items():
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts += [html_table(found.attribute_rows(reading=r), caption=f"By attribute, {r}") for r in READINGS]
        parts.append(_picture(reliability_diagram(found.reliability.rows(), title="Reliability, raw")))
        every = range(0, len(found.images), max(1, len(found.images) // SHOWN))
        parts.append("<h3>Every so many-th scene</h3>" + _sheet(predictor, scenes[name], found, list(every)[:SHOWN]))
        parts.append("<h3>The worst by S-measure</h3>" + _sheet(predictor, scenes[name], found, worst(found, SHOWN)))
    parts.append(html_table([metric.to_json() for metric in METRICS.values()], caption="What is measured"))
    page = f"<!doctype html><meta charset='utf-8'><title>Bench</title><style>{STYLE}</style>{''.join(parts)}"
    return write_whole(path, page)


def worst(scores: Scores, count: int) -> list[int]:
    """Indices of the images with the lowest raw S-measure, the worst first."""
    order = np.argsort([image.values["raw"]["s_measure"] for image in scores.images], kind="stable")
    return [int(index) for index in order[:count]]


def _sheet(predictor: Predictor, scenes: ComposedScenes, scores: Scores, indices: list[int]) -> str:
    samples = [scenes.sample(index) for index in indices]
    masks = predict_all(predictor, [sample.image for sample in samples])
    tiles = [
        {"scene": sample.image, "matte": sample.matte, "mask": mask}
        for sample, mask in zip(samples, masks, strict=True)
    ]
    captions = [f"{index}: S {scores.images[index].values['raw']['s_measure']:.2f}" for index in indices]
    return _picture(contact_sheet(tiles, captions=captions))


def _picture(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return f"<p><img src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'></p>"
