"""Rewrites to pick and what they do, without a network: four rows, and a measure that counts."""

CHOICES = [
    {
        "name": "decompose_deform_conv",
        "family": "deform",
        "claim": "exact (float64, ≤ 1e-09 of the scale)",
        "because": "the NPU compiler has no DeformConv",
        "excludes": [["substitute_plain_conv", "both replace the deformable convs"]],
    },
    {
        "name": "substitute_plain_conv",
        "family": "deform",
        "claim": "learned: S-measure ≥ 0.9",
        "because": "one conv in place of offsets, modulator and samples <cheap>",
    },
    {
        "name": "convert_image_tiles_to_4d",
        "family": "resolution",
        "claim": "exact, bit for bit",
        "because": "the published rearrangement goes through rank 6, which HTP takes at batch 1 only.",
    },
    {
        "name": "fold_batch_norm",
        "family": "convolution",
        "claim": "exact (float64, ≤ 1e-09 of the scale)",
        "because": "one operator less a conv, and one set of weights for the quantiser to look at",
        "after": [["decompose_deform_conv", "a deformable conv is no Conv2d"]],
    },
]
NAMES = [choice["name"] for choice in CHOICES]


def operations_of(names):
    """Kinds in the order in which they run: two blocks of conv, deformable conv, norm."""
    deform = ["deform_conv2d"]
    if "decompose_deform_conv" in names:
        deform = ["grid_sample", "mul", "conv2d"]
    if "substitute_plain_conv" in names:
        deform = ["conv2d"]
    norm = [] if "fold_batch_norm" in names else ["batch_norm"]
    return 2 * [*10 * ["conv2d"], *deform, *norm, *20 * ["add"]]


def effect_of(names):
    """What a plan does, with the fields of ``PlanEffect``."""
    kinds, partition, rows = operations_of(names), 0, []
    for index, kind in enumerate(kinds):
        on_cpu = kind == "deform_conv2d"
        partition += on_cpu
        rows.append({"index": index, "kind": kind, "partition": partition, "runs_on": "CPU" if on_cpu else "NPU"})
    statuses = {"passed": 2, "failed": 0, "pending": 0}
    pending = {"passed": 0, "failed": 0, "pending": 2}
    verdicts = [
        {"rewrite": name, "claim": "", "sites": 2, "worst": 1e-14, **(pending if "substitute" in name else statuses)}
        for name in names
    ]
    blocked = {"kind": "deform_conv2d", "operations": 2, "first": "block.0", "reason": "HTP has no DeformConv"}
    return {
        "plan": tuple(names),
        "code": f"plan = ({''.join(f'{name.upper()}, ' for name in names)})\n",
        "chip": "SM8850",
        "operations": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "partition_rows": rows,
        "blocking": [blocked] if "deform_conv2d" in kinds else [],
        "macs": 1_800_000_000 + 100_000_000 * ("decompose_deform_conv" in names),
        "interpolation_macs": 0,
        "parameters": 5_500_000 - 900 * ("fold_batch_norm" in names),
        "peak_activation_bytes": 12_238_848,
        "largest_rank": 4 if "convert_image_tiles_to_4d" in names else 6,
        "log": [{"rewrite": name, "sites": 2, "refused": 0, "why refused": ""} for name in names],
        "verdicts": verdicts,
        "seconds": {"rewrite": 1.0, "audit": 2.5},
        "refused": None,
    }


class Measure:
    """``effect_of``, which keeps what it was asked and may be told to fail or to do something first."""

    def __init__(self):
        self.asked, self.failure, self.meanwhile = [], None, None

    def __call__(self, names):
        self.asked.append(names)
        if self.meanwhile:
            self.meanwhile()
        if self.failure:
            raise self.failure
        return effect_of(names)
