"""Convolutions cut over their channels, and channels filled up with zeros: widths that suit the NPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.errors import RewriteError
from lumen_lab.network.decoder import Decoder
from lumen_lab.rewrites.convolution import DEFORM_REWRITES, slots, unlike
from lumen_lab.rewrites.parameters import whole_number
from lumen_lab.rewrites.record import Constraint, Rewrite, Site, by_name, with_weights
from lumen_lab.specs import Exact

VECTOR_CHANNELS = 32  # of one tile of HTP's memory layout


class InputSplitConv(nn.Module):
    """A conv as the sum of convs that each read a slice of the channels (of every group); the first has the bias."""

    def __init__(self, parts: list[nn.Conv2d]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.groups = parts[0].groups
        self.widths = [part.in_channels // self.groups for part in parts]  # kept: a part may be cut again

    def forward(self, x: Tensor) -> Tensor:
        read = 0
        outputs = []
        for part, width in zip(self.parts, self.widths, strict=True):
            outputs.append(part(self.slice_of(x, read, read + width)))
            read += width
        return reduce(torch.add, outputs)

    def slice_of(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Channels ``start`` to ``stop`` of every group: (N, groups · (stop − start), H, W)."""
        if self.groups == 1:
            return x[:, start:stop]
        per_group = x.shape[1] // self.groups
        firsts = range(0, x.shape[1], per_group)
        return torch.cat([x[:, first + start : first + stop] for first in firsts], 1)


class OutputSplitConv(nn.Module):
    """A conv as the concatenation of convs that each give some of the channels.

    ``reads``: for each part the (start, stop) of the channels it reads, which are all of them in a conv without
    groups.
    """

    def __init__(self, parts: list[nn.Conv2d], reads: list[tuple[int, int]]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.reads = tuple(reads)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(self.slice_of(x, *read)) for part, read in zip(self.parts, self.reads, strict=True)], 1)

    @staticmethod
    def slice_of(x: Tensor, start: int, stop: int) -> Tensor:
        return x if stop - start == x.shape[1] else x[:, start:stop]


def slices(channels: int, max_channels: int) -> list[tuple[int, int]]:
    """(start, stop) of the fewest slices no wider than ``max_channels``, in whole tiles of 32 where that fits."""
    count = -(-channels // max_channels)
    even = -(-channels // count)
    tiles = -(-even // VECTOR_CHANNELS) * VECTOR_CHANNELS
    width = tiles if tiles <= max_channels else even
    return [(start, min(start + width, channels)) for start in range(0, channels, width)]


def _split_over_inputs(max_channels: int, site: Site) -> dict[str, nn.Module]:
    conv: nn.Conv2d = site.module
    parts = [
        with_weights(conv, conv.weight[:, start:stop], None if start else conv.bias)
        for start, stop in slices(conv.weight.shape[1], max_channels)
    ]
    return {site.path: InputSplitConv(parts)}


def output_slices(conv: nn.Conv2d, max_channels: int) -> Iterator[tuple[int, int, int]]:
    """(first output, last output + 1, groups) of each part: whole groups where they fit, slices of one otherwise."""
    per_group = conv.out_channels // conv.groups
    if conv.groups > 1 and per_group <= max_channels:
        taken = max_channels // per_group
        for first in range(0, conv.groups, taken):
            last = min(first + taken, conv.groups)
            yield first * per_group, last * per_group, last - first
        return
    for group in range(conv.groups):
        for start, stop in slices(per_group, max_channels):
            yield group * per_group + start, group * per_group + stop, 1


def _split_over_outputs(max_channels: int, site: Site) -> dict[str, nn.Module]:
    conv: nn.Conv2d = site.module
    per_group_in, per_group_out = conv.weight.shape[1], conv.out_channels // conv.groups
    parts, reads = [], []
    for start, stop, groups in output_slices(conv, max_channels):
        bias = None if conv.bias is None else conv.bias[start:stop]
        parts.append(with_weights(conv, conv.weight[start:stop], bias, groups=groups))
        first = start // per_group_out * per_group_in
        reads.append((first, first + groups * per_group_in))
    return {site.path: OutputSplitConv(parts, reads)}


def _narrow_inputs(wider_than: int, site: Site) -> str | None:
    width = site.module.weight.shape[1]
    if width <= wider_than:
        return f"it reads no more than {wider_than} channels" + (" a group" if site.module.groups > 1 else "")
    return unlike(site.module, nn.Conv2d)


def _narrow_outputs(max_channels: int, site: Site) -> str | None:
    if site.module.out_channels <= max_channels:
        return f"it gives no more than {max_channels} channels"
    return unlike(site.module, nn.Conv2d)


def checked_channels(name: str, value: int) -> int:
    """The value itself; ``RewriteError`` unless it is a whole number above 0."""
    return whole_number(name, value, of="channels", instead="1024 or 32 would do")


MEASURED = "compiles for SM8850 with onnxruntime-qnn 2.7.0 (QAIRT 2.51): tests/benchmarks/convolution_traffic.py"
PADDED_FIRST = Constraint("pad_channels", "it fills the channels of whole convs up, not those of their parts")
FOLDED_FIRST = Constraint("fold_batch_norm", "a norm is folded into the one conv before it, not into parts of it")
WHOLE_FIRST = tuple(Constraint(name, "it takes the weights of whole convs, not of parts") for name in DEFORM_REWRITES)


def split_conv_over_inputs(max_channels: int = 1024, *, wider_than: int | None = None) -> Rewrite:
    """Every conv that reads more than ``wider_than`` channels becomes a sum of convs of ``max_channels`` at most.

    ``wider_than`` is ``max_channels`` unless given: convs a little wider lose more by a second pass than they gain.
    """
    checked_channels("max_channels", max_channels)
    limit = max_channels if wider_than is None else checked_channels("wider_than", wider_than)
    if limit < max_channels:
        raise RewriteError(f"wider_than is max_channels ({max_channels}) or more, asked for {wider_than}.")
    arguments = f"max_channels={max_channels}" + ("" if wider_than is None else f", wider_than={wider_than}")
    return Rewrite(
        name="split_conv_over_inputs",
        replaces=nn.Conv2d,
        built=partial(_split_over_inputs, max_channels),
        refused=partial(_narrow_inputs, limit),
        claim=Exact(),
        because="the conv on the 3072 channels of image tiles moves 35.8 MB of DRAM whole and 16.4 MB as three convs "
        "in float16, where its input is spilled; in INT8 this compiler needs it no more (5.2 MB either way), nor does "
        "the 1×1 conv behind the ASPP's concat",
        source=MEASURED,
        after=(PADDED_FIRST, FOLDED_FIRST, *WHOLE_FIRST),
        code=f"split_conv_over_inputs({arguments})",
    )


def split_conv_over_outputs(max_channels: int = 1024) -> Rewrite:
    """Every conv that gives more than ``max_channels`` channels becomes a concatenation of convs that give fewer."""
    checked_channels("max_channels", max_channels)
    return Rewrite(
        name="split_conv_over_outputs",
        replaces=nn.Conv2d,
        built=partial(_split_over_outputs, max_channels),
        refused=partial(_narrow_outputs, max_channels),
        claim=Exact(),
        because="the published recipe splits wide convs on both sides; this compiler needs it no more (64 to 1536 "
        "channels whole and in two: the same bytes and tiles, float16 and INT8)",
        source=MEASURED,
        after=(
            PADDED_FIRST,
            FOLDED_FIRST,
            *WHOLE_FIRST,
            Constraint("split_conv_over_inputs", "a conv that is wide on both sides is cut over its inputs first"),
        ),
        code=f"split_conv_over_outputs(max_channels={max_channels})",
    )


SPLIT_CONV_OVER_INPUTS = by_name(split_conv_over_inputs(wider_than=2048))
SPLIT_CONV_OVER_OUTPUTS = by_name(split_conv_over_outputs())


# Padding: a conv that makes a few channels, and the convs that read them

GATES, TILES = (4, 3, 2), (5, 4, 3, 2, 1)
CHANNEL_GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    *(((f"ipt_blk{level}.conv1",), (f"ipt_blk{level}.conv_out",)) for level in TILES),
    *(((f"ipt_blk{level + 1}.conv_out",), (f"decoder_block{level}.conv_in",)) for level in (4, 3, 2, 1)),
    (("ipt_blk1.conv_out",), ("conv_out1.0",)),
    *(
        (
            (f"gdt_convs_{level}.0", f"gdt_convs_{level}.1"),
            (f"gdt_convs_attn_{level}.0", f"gdt_convs_pred_{level}.0"),
        )
        for level in GATES
    ),
)
"""Inside the decoder: the modules that make some channels, and those that read them as their last input channels."""


def padded_conv(conv: nn.Conv2d, more_outputs: int, more_inputs: int) -> nn.Conv2d:
    """The conv with zero weights for further channels behind its own."""
    weight = F.pad(conv.weight, (0, 0, 0, 0, 0, more_inputs, 0, more_outputs))
    return with_weights(conv, weight, None if conv.bias is None else F.pad(conv.bias, (0, more_outputs)))


def padded_norm(norm: nn.BatchNorm2d, more: int) -> nn.BatchNorm2d:
    """The norm with further channels that leave zeros as they are (mean 0, variance 1, no shift)."""
    new = nn.BatchNorm2d(norm.num_features + more, eps=norm.eps, momentum=norm.momentum).to(norm.weight)
    fill = {"weight": 1.0, "running_var": 1.0}
    state = {
        name: F.pad(v, (0, more), value=fill.get(name, 0.0)) if v.ndim else v for name, v in norm.state_dict().items()
    }
    new.load_state_dict(state)
    return new


def missing_channels(site: Site, multiple: int) -> Iterator[tuple[tuple, tuple, int]]:
    """(makers, readers, channels to add) of every group of ``CHANNEL_GROUPS`` that is no multiple and can be padded."""
    decoder = inside(site)[1]
    for makers, readers in CHANNEL_GROUPS:
        first, *norms = (decoder.get(path) for path in makers)
        convs = [first, *(decoder.get(path) for path in readers)]
        plain = not any(unlike(conv, nn.Conv2d) for conv in convs)
        plain = plain and all(isinstance(norm, nn.Identity) or not unlike(norm, nn.BatchNorm2d) for norm in norms)
        if plain and all(slots(site, module) == 1 for module in (*convs, *norms)):
            missing = -first.out_channels % multiple
            if missing and first.groups == 1:
                yield makers, readers, missing


def inside(site: Site) -> tuple[str, dict[str, nn.Module]]:
    """The prefix of paths inside the site, and the modules there by their path from it."""
    prefix = f"{site.path}." if site.path else ""
    return prefix, {path.removeprefix(prefix): m for path, m in site.modules.items() if path.startswith(prefix)}


def _padded(multiple: int, site: Site) -> dict[str, nn.Module]:
    prefix, decoder = inside(site)
    outputs, inputs = Counter(), Counter()
    for makers, readers, missing in missing_channels(site, multiple):
        outputs.update(dict.fromkeys(makers, missing))
        inputs.update(dict.fromkeys(readers, missing))
    built = {}
    for path in dict.fromkeys([*outputs, *inputs]):
        module = decoder[path]
        if isinstance(module, nn.Conv2d):
            built[prefix + path] = padded_conv(module, outputs[path], inputs[path])
        elif isinstance(module, nn.BatchNorm2d):
            built[prefix + path] = padded_norm(module, outputs[path])
    return built


def _nothing_to_pad(multiple: int, site: Site) -> str | None:
    if next(missing_channels(site, multiple), None) is None:
        return f"between its plain convs there are multiples of {multiple} channels everywhere"
    return None


def pad_channels(multiple: int = VECTOR_CHANNELS) -> Rewrite:
    """Channels that pass from conv to conv inside the decoder are filled up to a multiple with zeros.

    Padded where whole groups of convs can be (image tiles, gates), so that nothing is sliced off again; the zeros stay
    zeros in training, since no gradient reaches them.
    """
    checked_channels("multiple", multiple)
    return Rewrite(
        name="pad_channels",
        replaces=Decoder,
        built=partial(_padded, multiple),
        refused=partial(_nothing_to_pad, multiple),
        claim=Exact(),
        because="it costs with this compiler, which fills its tiles of 32 channels up itself: alone, 16 % more MACs, "
        "18 % more DRAM and no fewer tiles (micro). Worth it only for a compiler that does not",
        source=f"data/recorded/plan_costs_micro.json; {MEASURED}",
        after=(
            Constraint("fold_full_resolution_tail", "the channels between the convs of the tail are gone then"),
            Constraint("substitute_slim_tail", "the channels between the convs of the tail are gone then"),
        ),
        code=f"pad_channels(multiple={multiple})",
    )


PAD_CHANNELS = by_name(pad_channels())
