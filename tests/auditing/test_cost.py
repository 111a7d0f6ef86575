"""Costs of small operations, worked out by hand."""

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from lumen_lab.auditing import audit, cost
from lumen_lab.auditing.operations import folded_operations
from lumen_lab.auditing.trace import trace


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_buffer(name, value)

    def forward(self, *inputs):
        return self.function(*inputs, **dict(self.named_buffers()))


def total(model, *shapes):
    operations = trace(model.eval(), tuple(torch.empty(shape) for shape in shapes)).operations
    return sum(map(cost.macs, operations)), sum(map(cost.interpolation_macs, operations))


def deform(x, offset, mask, weight):
    return torchvision.ops.deform_conv2d(x, offset, weight, padding=1, mask=mask)


@pytest.mark.parametrize(
    ("model", "shapes", "macs", "interpolation"),
    [
        (nn.Conv2d(3, 8, 5, stride=2, padding=2), [(1, 3, 16, 12)], 8 * 8 * 6 * 3 * 25, 0),
        (nn.Conv2d(6, 12, 3, groups=3), [(2, 6, 5, 5)], 2 * 12 * 3 * 3 * 2 * 9, 0),
        (nn.Conv1d(4, 6, 3), [(1, 4, 10)], 6 * 8 * 4 * 3, 0),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), [(1, 4, 5, 7)], 4 * 5 * 7 * 6 * 4, 0),
        (nn.Linear(7, 5), [(2, 3, 7)], 2 * 3 * 5 * 7, 0),
        (Calls(torch.matmul), [(4, 2, 3, 5), (5, 6)], 4 * 2 * 3 * 6 * 5, 0),
        (Calls(torch.bmm), [(4, 3, 5), (4, 5, 6)], 4 * 3 * 6 * 5, 0),
        (Calls(torch.addmm), [(3, 6), (3, 5), (5, 6)], 3 * 6 * 5, 0),
        (Calls(torch.matmul), [(5,), (5,)], 5, 0),
        (Calls(lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b)), [(1, 2, 3, 5), (1, 2, 4, 5)], 2 * 3 * 4 * 5, 0),
        (Calls(F.scaled_dot_product_attention), [(1, 2, 3, 5), (1, 2, 4, 5), (1, 2, 4, 6)], 2 * 3 * 4 * (5 + 6), 0),
        (
            Calls(deform, weight=torch.ones(4, 6, 3, 3)),
            [(1, 6, 8, 7), (1, 18, 8, 7), (1, 9, 8, 7)],
            4 * 8 * 7 * 6 * 9,
            4 * 6 * 9 * 8 * 7,
        ),
        (Calls(lambda x, g: F.grid_sample(x, g, align_corners=False)), [(1, 3, 9, 9), (1, 4, 5, 2)], 0, 4 * 3 * 4 * 5),
        (
            Calls(lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=False)),
            [(1, 3, 9, 9), (1, 4, 5, 2)],
            0,
            0,
        ),
        (Calls(lambda x: F.interpolate(x, (6, 5), mode="bilinear")), [(1, 3, 9, 9)], 0, 4 * 3 * 6 * 5),
        (Calls(lambda x: F.interpolate(x, (6, 5))), [(1, 3, 9, 9)], 0, 0),
        (nn.Sequential(nn.BatchNorm2d(3), nn.GELU(), nn.AvgPool2d(2)), [(1, 3, 4, 4)], 0, 0),
    ],
    ids=lambda value: getattr(value, "__class__", type(value)).__name__ if isinstance(value, nn.Module) else None,
)
def test_macs(model, shapes, macs, interpolation):
    assert total(model, *shapes) == (macs, interpolation)


class Small(nn.Module):
    """x (64 B) -> conv (128 B) -> ReLU (128 B) -> both concatenated (256 B) -> a view -> the mean (8 B)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, x):
        first = self.conv(x)
        both = torch.cat([first, first.relu()], 1)
        return both.view(1, 2, 2, 16).mean((1, 3))


def test_bytes_of_one_operation():
    conv, relu, *_ = audit(Small().eval(), (torch.empty(1, 1, 4, 4),)).operations
    assert (conv.parameter_bytes, conv.activation_bytes) == (4 * (2 + 2), 128)
    assert (relu.parameter_bytes, relu.activation_bytes) == (0, 128)


def test_live_bytes_and_the_peak():
    report = audit(Small().eval(), (torch.empty(1, 1, 4, 4),))
    assert [(row.kind, row.live_bytes) for row in report.operations] == [
        ("conv2d", 64 + 128),
        ("relu", 64 + 128 + 128),
        ("cat", 64 + 128 + 128 + 256),
        ("view", 64 + 256),
        ("mean", 64 + 256 + 8),
    ]
    assert report.peak_activation_bytes == 576
    assert report.peak.kind == "cat"


def test_in_place_operations_and_views_take_no_memory_of_their_own():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(inplace=True), nn.Flatten())
    report = audit(model.eval(), (torch.empty(1, 1, 4, 4),))
    assert [row.live_bytes for row in report.operations] == [64 + 128] * 3
    assert [row.view for row in report.operations] == [False, True, True]


def test_constants_are_no_activations():
    model = Calls(lambda x, table: x + (table * 2).sum(0), table=torch.ones(100, 4))
    report = audit(model.eval(), (torch.empty(1, 4),))
    assert [row.folded for row in report.operations] == [True, True, False]
    assert report.operations[-1].live_bytes == 16 + 16
    assert report.parameter_bytes == 1600


def test_a_weight_read_twice_is_counted_once():
    conv = nn.Conv2d(1, 1, 3, padding=1)
    report = audit(nn.Sequential(conv, conv).eval(), (torch.empty(1, 1, 4, 4),))
    assert report.parameter_bytes == 40
    assert [row.parameter_bytes for row in report.operations] == [40, 40]


def test_folding_ends_where_an_input_comes_in():
    model = Calls(lambda x: torch.arange(4).float().view(2, 2).t() @ x)
    operations = trace(model.eval(), (torch.empty(2, 3),)).operations
    folded = folded_operations(trace(model.eval(), (torch.empty(2, 3),)))
    assert {op.kind for op in operations if op.index not in folded} == {"matmul"}


def test_what_no_result_depends_on_is_left_out():
    def unused(x):
        x.sigmoid().tanh()
        return x.relu()

    rows = audit(Calls(unused).eval(), (torch.empty(1, 4),)).operations
    assert [(row.kind, row.unused, row.predicted) for row in rows] == [
        ("sigmoid", True, "folded"),
        ("tanh", True, "folded"),
        ("relu", False, "NPU"),
    ]
