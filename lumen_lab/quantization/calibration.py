"""Encodings of activations from pictures."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.npu_graph import NPUGraph


class MinMax(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = float("inf"), float("-inf")

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x.detach())
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        return x


@torch.no_grad()
def calibrate(graph: NPUGraph, pictures: Iterable[Tensor]) -> None:
    observers = {name: MinMax() for name, q in graph.quantisers.items() if not q.fixed}
    from lumen_lab.quantization.fake_quantize import First

    others = {name: First() for name in graph.calls() if name not in observers}
    with graph.put_in_place(observers | others):
        for picture in pictures:
            graph(picture)
    for name, seen in observers.items():
        quantiser = graph.quantisers[name]
        quantiser.encoding = encoding_for_range(seen.low, seen.high, bits=quantiser.bits)
