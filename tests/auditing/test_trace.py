"""The trace: every operation once, in order, with its module, call, reads and weights; refusals in one sentence."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.auditing.trace import trace
from lumen_lab.errors import AuditError


class Twice(nn.Module):
    """One conv called at two sizes, an unbind and a constant."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())

    def forward(self, x):
        large = self.stem(x)
        small = self.stem(x[:, :, ::2, ::2])
        first, second = large.unbind(1)
        return first + second.mean(), small + torch.arange(2)


class Calls(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.how(x)


def traced(model, *shapes, device="meta"):
    return trace(model.eval(), tuple(torch.empty(shape, device=device) for shape in shapes))


@pytest.fixture(scope="module")
def twice():
    return traced(Twice(), (1, 2, 4, 4))


def test_every_operation_once_and_in_order(twice):
    kinds = [op.kind for op in twice.operations]
    assert kinds[:2] == ["conv2d", "relu"]
    assert sorted(kinds) == sorted("conv2d relu slice slice conv2d relu unbind mean add arange add".split())
    assert [op.index for op in twice.operations] == list(range(len(kinds)))


def test_site_and_call(twice):
    convs = [op for op in twice.operations if op.kind == "conv2d"]
    assert [(op.site, op.call) for op in convs] == [("stem.0", 0), ("stem.0", 1)]
    assert {op.site for op in twice.operations if op.kind in ("slice", "unbind", "add")} == {""}


def test_reads_lead_to_the_right_output(twice):
    by_kind = {op.kind: op for op in twice.operations}
    unbind, mean = by_kind["unbind"], by_kind["mean"]
    assert len(unbind.outputs) == 2
    assert [(read.producer, read.output) for read in mean.reads] == [(unbind.index, 1)]
    first = twice.operations[0]
    assert [read.producer for read in first.reads] == [-1]
    assert set(first.parameters) == {"stem.0.weight", "stem.0.bias"}


def test_views_share_storage_and_copies_do_not():
    model = Calls(lambda x: x.permute(0, 2, 1).reshape(-1) + x.view(-1))
    permute, reshape, view, _ = traced(model, (1, 2, 3)).operations
    storage = {op.kind: op.outputs[0].untyped_storage()._cdata for op in (permute, reshape, view)}
    source = permute.reads[0].tensor.untyped_storage()._cdata
    assert storage["permute"] == storage["view"] == source
    assert storage["reshape"] != source


def written_in_place(x):
    y = x * 2
    y.relu_()
    return y + 1


def test_what_is_written_in_place_is_read_by_the_next():
    product, relu, total = traced(Calls(written_in_place), (4,)).operations
    assert [read.producer for read in relu.reads] == [product.index]
    assert [read.producer for read in total.reads] == [relu.index]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_inputs_on_any_device_with_weights_on_the_cpu(device):
    assert [op.kind for op in traced(nn.Linear(3, 2), (1, 3), device=device).operations] == ["linear"]


def test_the_model_is_left_as_it_was():
    model = Twice()
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    traced(model, (1, 2, 4, 4))
    after = model.state_dict(keep_vars=True)
    assert before.keys() == after.keys()
    assert all(id(after[name]) == kept and torch.equal(after[name], value) for name, (kept, value) in before.items())


def test_training_mode_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(AuditError, match=r"training mode \(1 of its modules, first 1\).*\.eval\(\)"):
        trace(model, (torch.empty(1, 1, 2, 2),))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.empty(1, 3), r"pass \(x,\)"),
        ((), "found an empty tuple"),
        (None, "found NoneType"),
        ((torch.empty(1, 3), 4), r"example_inputs\[1\] is int"),
        ("photo.jpg", "found str"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(inputs, message):
    with pytest.raises(AuditError, match=message):
        trace(nn.Linear(3, 2).eval(), inputs)


def test_what_is_no_module_is_refused():
    with pytest.raises(AuditError, match="reads a torch.nn.Module, found function"):
        trace(F.relu, (torch.empty(1),))


def test_inputs_that_do_not_fit_are_refused_with_their_shape():
    with pytest.raises(AuditError, match=r"Linear cannot be exported with inputs \(1, 4\): "):
        traced(nn.Linear(3, 2), (1, 4))


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x + 1 if x.sum() > 0 else x - 1,
        lambda x: x[: int(x.sum())],
    ],
    ids=["branch", "size"],
)
def test_control_flow_on_values_is_refused(how):
    with pytest.raises(AuditError, match="depends on the values of a tensor"):
        traced(Calls(how), (4,))


def test_a_shape_that_depends_on_values_is_refused():
    with pytest.raises(AuditError, match="nonzero.* depends on the values of a tensor; an NPU takes fixed shapes"):
        traced(Calls(lambda x: x.nonzero()), (4,))
