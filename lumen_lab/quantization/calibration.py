"""Encodings of activations from pictures: one pass in float, in which every tensor is looked at and none is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lumen_lab.errors import QuantizationError
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD, check_image, to_network_input
from lumen_lab.quantization.capture import device_of, live_nodes
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.fake_quantize import FakeQuantize, First
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.observers import Observer
from lumen_lab.quantization.ranges import ENDS_ONLY, LEAST_ERROR, METHODS, MIN_MAX, Seen, chosen_range
from lumen_lab.quantization.readers import ANYTHING, readers_of
from lumen_lab.specs import Record

NORMALISED_RANGE = (
    min((0 - mean) / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD)),
    max((1 - mean) / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD)),
)
"""Between what a normalised picture lies, whatever it shows: black to white over all channels."""

CONSTANT = "constant"  # what chose the range of a tensor that does not depend on the picture

NO_PICTURES = "Calibration was given no pictures; give a few dozen that are like those to come."


@dataclass(frozen=True)
class TensorRange(Record):
    """How one tensor was calibrated: what occurred (``lowest`` to ``highest``), and the encoding's ``low`` to ``high``.

    ``reader`` is what reads it; ``method`` what chose the range: "fixed" where it was known, "constant" where the
    tensor does not depend on the picture.
    """

    name: str
    site: str
    reader: str
    method: str
    lowest: float
    highest: float
    low: float
    high: float
    bits: int


@dataclass(frozen=True)
class Calibration(Record):
    """What a calibration found: one line a tensor; and of the pictures, how many and a hash."""

    method: str
    by_reader: bool
    pictures: int
    pictures_sha256: str
    tensors: tuple[TensorRange, ...]

    def rows(self) -> list[dict[str, object]]:
        return [row for tensor in self.tensors for row in tensor.rows()]


@torch.no_grad()
def calibrate(
    graph: NPUGraph,
    pictures: Iterable,
    *,
    method: str = MIN_MAX,
    by_reader: bool = True,
    input_range: tuple[float, float] | None = NORMALISED_RANGE,
    progress: bool = True,
) -> Calibration:
    """Set the encoding of every activation from one pass over ``pictures``, run in float; returns what was found.

    ``pictures``: batches (B, 3, H, W), planes (3, H, W), dicts with such an "image", or images (uint8 H×W×3).
    Batches are taken apart, so that their size changes nothing. ``method``: a name of ``METHODS``, or "least_error",
    which takes for each tensor the one that leaves the least error. ``by_reader=False`` looks at all tensors alike,
    whatever reads them. ``input_range``: what the network's input lies between; None: observed as well.
    An interrupted pass leaves the graph as it was. ``QuantizationError`` for no pictures, for one of another size or
    with NaN in it, and where a tensor becomes NaN.
    """
    check_method(method)
    observers = observers_of(graph, method, by_reader=by_reader)
    digest, count = hashlib.sha256(), 0
    for picture, _ in observed(graph, observers, pictures, total=length_of(pictures), progress=progress):
        digest.update(np.ascontiguousarray(picture.cpu().numpy()).tobytes())
        count += 1
    source, sites, quantisers = input_name(graph), graph.sites(), graph.quantisers
    known, constants = {source: input_range}, constants_of(graph)
    rows = []
    for name, observer in observers.items():
        by = CONSTANT if name in constants else method
        rows.append(TensorRange(name, sites[name], **set_encoding(quantisers[name], observer, by, known.get(name))))
    return Calibration(method, by_reader, count, digest.hexdigest(), tuple(rows))


def check_method(method: str) -> None:
    """``QuantizationError`` with the names, if there is no such method."""
    if method not in (*METHODS, LEAST_ERROR):
        raise QuantizationError(f"No calibration method '{method}'; there are {', '.join((*METHODS, LEAST_ERROR))}.")


def observers_of(graph: NPUGraph, method: str, *, by_reader: bool) -> dict[str, Observer]:
    """An observer for every quantiser that no rule fixes."""
    readers = readers_of(graph.graph_module) if by_reader else {}
    live, calls = live_nodes(graph.graph_module), graph.calls()
    found = {}
    for name, quantiser in graph.quantisers.items():
        node = calls[name]
        if not quantiser.fixed or name == input_name(graph):
            shape = node in live and method not in ENDS_ONLY
            found[name] = Observer(readers.get(node.target, ANYTHING), shape=shape)
    return found


def constants_of(graph: NPUGraph) -> frozenset[str]:
    """The quantisers of tensors that do not depend on the picture."""
    live = live_nodes(graph.graph_module)
    return frozenset(name for name, node in graph.calls().items() if node not in live)


def observed(
    graph: NPUGraph, observers: Mapping[str, Observer], pictures: Iterable, *, total: int | None, progress: bool
) -> Iterator[tuple[Tensor, list[tuple[float, float]]]]:
    """Run the graph in float on one picture after the other, observers in place.

    Yields each picture afterwards, and (low, high) of it alone in every observer. ``total``: how many batches come.
    """
    others = {name: First() for name in graph.calls() if name not in observers}
    device = device_of(graph)
    count = 0
    with graph.put_in_place({**observers, **others}), torch.no_grad():
        for batch in tqdm(pictures, total=total, desc="Calibrating", unit="batch", leave=False, disable=not progress):
            for picture in checked_batch(batch, graph.size, channels=graph.channels, number=count):
                graph(picture.to(device))
                ends = {name: observer.end_picture() for name, observer in observers.items()}
                check_finite(graph, ends, number=count)
                count += 1
                yield picture, list(ends.values())
    if not count:
        raise QuantizationError(NO_PICTURES)


def check_finite(graph: NPUGraph, ends: Mapping[str, tuple[float, float]], *, number: int) -> None:
    """``QuantizationError`` with the first tensor of a picture that is not finite."""
    bad = next((name for name, (low, _) in ends.items() if np.isnan(low)), None)
    if bad is not None:
        raise QuantizationError(
            f"Calibration picture {number} makes '{bad}' at '{graph.sites()[bad]}' NaN or infinite; look at the "
            "weights before it."
        )


def length_of(pictures: Iterable) -> int | None:
    """How many batches there are, where that is known."""
    return len(pictures) if hasattr(pictures, "__len__") else None


def set_encoding(
    quantiser: FakeQuantize, observer: Observer, method: str, fixed: tuple[float, float] | None = None
) -> dict[str, object]:
    """One quantiser's encoding, by the range that is known (``fixed``) or by what was seen; the fields of its row."""
    quantiser.fixed = fixed is not None
    if fixed is not None:
        method, ends = "fixed", fixed
    elif method == CONSTANT:
        ends = observer.lowest, observer.highest
    else:
        method, ends = chosen_range(Seen(observer), method, bits=quantiser.bits)
    quantiser.encoding = encoding_for_range(*ends, bits=quantiser.bits)
    low, high = quantiser.encoding.range
    seen = {"lowest": observer.lowest, "highest": observer.highest}
    return {"reader": observer.reader.kind, "method": method, **seen, "low": low, "high": high, "bits": quantiser.bits}


def input_name(graph: NPUGraph) -> str:
    """The name of the quantiser behind the network's input."""
    return next(node.name for node in graph.graph_module.graph.nodes if node.op == "placeholder")


def checked_batch(batch: object, size: tuple[int, int], *, channels: int = 3, number: int = 0) -> Iterator[Tensor]:
    """The pictures of a batch one by one, (1, C, H, W); ``QuantizationError`` for one that cannot be calibrated on."""
    values = batch["image"] if isinstance(batch, Mapping) else batch
    if isinstance(values, np.ndarray) and values.dtype == np.uint8:
        values = torch.from_numpy(to_network_input(check_image(values), size=size))
    if not isinstance(values, Tensor) or values.ndim not in (3, 4) or not values.is_floating_point():
        found = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise QuantizationError(
            f"A calibration picture is a normalised float tensor (B, 3, H, W) or an image (uint8 H×W×3); found {found}."
        )
    values = (values if values.ndim == 4 else values[None]).float()
    if values.shape[1] != channels:
        raise QuantizationError(
            f"Calibration picture {number} has {values.shape[1]} channels, the network takes {channels}; a grey one is "
            "repeated: x.expand(-1, 3, -1, -1)."
        )
    if tuple(values.shape[-2:]) != tuple(size):
        raise QuantizationError(
            f"Calibration picture {number} is {values.shape[-2]} × {values.shape[-1]}, the network takes {size[0]} × "
            f"{size[1]}; resize it (images do so: to_network_input)."
        )
    for place, picture in enumerate(values):
        if not picture.isfinite().all():
            raise QuantizationError(
                f"Calibration picture {number + place} holds NaN or infinity; look at how it was made."
            )
        yield picture[None]
