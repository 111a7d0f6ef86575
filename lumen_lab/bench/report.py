"""The bench as one HTML page: tables, a reliability diagram, and sheets of scenes with the masks found in them."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lumen_lab.bench.lists import BenchList
from lumen_lab.bench.table import BenchTable
from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.figures import contact_sheet, reliability_diagram
from lumen_lab.images import load_image, paint_cutout, resize_image, resize_mask
from lumen_lab.metrics import METRICS, READINGS, Scores
from lumen_lab.prediction import Predictor, predict_all
from lumen_lab.specs import html_table, write_whole

SHOWN = 24
PHOTOGRAPHS = Path(__file__).parents[2] / "data" / "photographs"
NAMES = ("cat", "astronaut", "coffee", "rocket", "flower", "china")
HEIGHT_PX = 240
STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:1500px}"
    "table{border-collapse:collapse;margin:1em 0;font-size:13px}"
    "td,th{padding:2px 8px;border-bottom:1px solid #ddd}img{max-width:100%}"
)


def write_report(
    path: str | Path,
    predictor: Predictor,
    table: BenchTable,
    lists: Mapping[str, BenchList],
    scores: Mapping[str, Scores],
    scenes: Mapping[str, ComposedScenes],
) -> Path:
    """Write the page; it stands alone, pictures included. Returns its path."""
    parts = [f"<h1>Bench</h1><p>{html.escape(table.predictor)}</p>"]
    parts.append(html_table(aim_rows(table, lists), caption="Aims, raw reading"))
    parts.append(html_table(table.rows(), caption="All lists"))
    parts.append(html_table(table.gate_rows(), caption="Gates"))
    parts.append("<h2>Photographs</h2>" + _picture(photograph_sheet(predictor)))
    for name, found in scores.items():
        parts.append(f"<h2>{html.escape(name)}: {html.escape(lists[name].asks)}</h2>")
        parts.append(html_table(found.summary(), caption="All scenes"))
        parts += [html_table(found.attribute_rows(reading=r), caption=f"By attribute, {r}") for r in READINGS]
        parts.append(_picture(reliability_diagram(found.reliability.rows(), title="Reliability, raw")))
        step = max(1, len(found.images) // SHOWN)
        shown = list(range(0, len(found.images), step))[:SHOWN]
        parts.append(f"<h3>Scenes {shown[0]}, {step}, {2 * step} …</h3>")
        parts.append(_sheet(predictor, scenes[name], found, shown))
        parts.append("<h3>The worst by S-measure</h3>" + _sheet(predictor, scenes[name], found, worst(found, SHOWN)))
    parts.append(html_table([metric.to_json() for metric in METRICS.values()], caption="What is measured"))
    page = f"<!doctype html><meta charset='utf-8'><title>Bench</title><style>{STYLE}</style>{''.join(parts)}"
    return write_whole(path, page)


def aim_rows(table: BenchTable, lists: Mapping[str, BenchList]) -> list[dict[str, object]]:
    """What was aimed at on each list that was scored, and what was reached."""
    rows = []
    for name in table.lists:
        for metric, aim in lists[name].aims.items():
            value = table.value(name, metric)
            better = METRICS[metric].better
            reached = value is not None and (value >= aim if better == "higher" else value <= aim)
            rows.append({"list": name, "metric": metric, "aim": aim, "found": value, "reached": reached})
    return rows


def worst(scores: Scores, count: int) -> list[int]:
    """Indices of the images with the lowest raw S-measure, the worst first."""
    order = np.argsort([image.values["raw"]["s_measure"] for image in scores.images], kind="stable")
    return [int(index) for index in order[:count]]


def photograph_sheet(predictor: Predictor) -> Figure:
    """The sample photographs, the masks found and what they cut out: no score, for a person's eye."""
    images = [load_image(PHOTOGRAPHS / f"{name}.jpg") for name in NAMES]
    tiles = []
    for image, mask in zip(images, predict_all(predictor, images), strict=True):
        size = (HEIGHT_PX, round(HEIGHT_PX * image.shape[1] / image.shape[0]))
        image, mask = resize_image(image, size=size), resize_mask(mask, size=size)
        tiles.append({"photograph": image, "mask": mask, "cut-out": paint_cutout(image, mask)})
    return contact_sheet(tiles, columns=2, captions=NAMES)


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
    return f"<p><img src='data:image/png;base64,{base64.b64encode(figure._repr_png_()).decode()}'></p>"
