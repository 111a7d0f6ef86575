"""Linear layers as 1×1 convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lumen_lab.rewrites.convolution import unlike
from lumen_lab.rewrites.record import Constraint, Rewrite, Site
from lumen_lab.specs import Exact


class PointwiseConv(nn.Module):
    """``nn.Linear`` on tokens (…, tokens, C) as a 1×1 conv over a map of all of them.

    Maps (N, H, W, C) stay what they are, and windows (B, tokens, C) become the rows of one map. As maps of their own,
    (B, 7, 7, C), they cost half as much again, and for 144 windows the compiler (QAIRT 2.51) made a graph that left
    all but 8 of them out of the matrix products that followed, without a word.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
        self.conv.to(linear.weight)
        with torch.no_grad():
            self.conv.weight.copy_(linear.weight[:, :, None, None])
            if linear.bias is not None:
                self.conv.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.ndim == 4 else x.reshape(1, -1, x.shape[-2], x.shape[-1])  # N, H, W, C
        y = self.conv(rows.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _no_map(site: Site) -> str | None:
    if any(len(shape) < 3 for shape in site.input_shapes):
        return "its input is one row of features a sample, (N, C): there is no map for a conv to run over"
    return unlike(site.module, nn.Linear)


HEADS_FIRST = "the heads are cut out of the fused linear layer, and would find a conv in its place"

CONVERT_LINEAR_TO_CONV = Rewrite(
    name="convert_linear_to_conv",
    replaces=nn.Linear,
    built=lambda site: {site.path: PointwiseConv(site.module)},
    refused=_no_map,
    claim=Exact(),
    because="nothing in float16: this compiler runs both by the same kernel, tile for tile; in integers a conv has one "
    "rule for its weights (a scale per output channel, axis 0) where linear layers have two",
    source="one Swin block compiled for SM8850 both ways (onnxruntime-qnn 2.7.0, QAIRT 2.51)",
    after=tuple(
        Constraint(name, HEADS_FIRST)
        for name in (
            "split_attention_by_heads",
            "reduce_attention_rank",
            "substitute_window",
            "substitute_global_window",
        )
    ),
)
