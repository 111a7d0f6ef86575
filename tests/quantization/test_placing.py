"""Quantisers where the NPU's rules want them, under the names of what they follow, in the widths asked for."""

import copy
import sys

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.fake_quantize import BiasQuantize, FakeQuantize, WeightQuantize
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import QUANTISER, encoding_source, put_quantisers, without_quantisers

SIZE = (8, 8)


class Everything(nn.Module):
    """A conv called twice, a gate, attention with a mask and a number, a resize, a concatenation."""

    def __init__(self):
        super().__init__()
        self.begin, self.twice = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.gate, self.norm, self.linear = nn.Conv2d(8, 1, 1), nn.LayerNorm(8), nn.Linear(8, 8)
        self.end = nn.Conv2d(16, 1, 1)
        self.register_buffer("mask", torch.zeros(64, 64))
        self.mask[:, :8] = -8

    def forward(self, image):
        x = F.relu(self.begin(image))
        x = self.twice(self.twice(x)) + x
        x = x * torch.sigmoid(self.gate(x))
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        q = self.linear(tokens) * 0.25
        weights = torch.softmax(q @ tokens.transpose(1, 2) + self.mask, -1)
        y = (weights @ tokens).transpose(1, 2).reshape(-1, 8, 8, 8)
        y = F.interpolate(y, size=(12, 12), mode="bilinear", align_corners=True)
        x = F.interpolate(x, size=(12, 12), mode="bilinear", align_corners=True)
        return self.end(torch.cat([y, self.twice(x)], 1))


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Everything().eval()


@pytest.fixture(scope="module")
def captured(module):
    return capture(module, torch.zeros(1, 3, *SIZE))


@pytest.fixture
def place(captured):
    """Place quantisers in a copy; returns the graph for those of a set of widths."""
    return lambda **bits: NPUGraph(put_quantisers(copy.deepcopy(captured), bits=bits), SIZE)


def node_of(graph, name):
    return next(node for node in graph.graph_module.graph.nodes if node.name == name)


def capture_of(function):
    """The captured graph of a function of an image (N, 3, 8, 8)."""

    class Wrapped(nn.Module):
        def forward(self, image):
            return function(image)

    return capture(Wrapped().eval(), torch.zeros(1, 3, *SIZE))


def test_in_float_it_is_the_network(place, module, noise):
    image = noise[..., :8, :8]
    graph = place()
    with torch.no_grad(), graph.in_float():
        assert torch.equal(graph(image), module(image))


def test_names_are_those_of_operations_and_sites_those_of_modules(place):
    sites = place().sites()
    assert (sites["image"], sites["sigmoid"], sites["layer_norm"], sites["linear"]) == ("", "", "norm", "linear")
    assert sites["twice_weight"] == "twice" and sites["gate_weight"] == "gate"
    assert {sites[name] for name in sites if name.endswith("_bias")} == {
        "begin",
        "twice",
        "gate",
        "norm",
        "linear",
        "end",
    }


def test_a_mask_and_a_number_belong_to_those_who_read_them():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, 8))

        def forward(self, x):
            return (x + self.table) * 0.5

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, image):
            return self.inner(image)

    graph = NPUGraph(put_quantisers(capture(Outer().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    constants = [name for name, node in graph.calls().items() if node.args[0].op == "get_attr"]
    assert len(constants) == 2
    assert {graph.sites()[name] for name in constants} == {"inner"}


def test_a_module_called_again_has_one_weight_and_a_bias_for_each_call(place):
    graph = place()
    modules = {name: getattr(graph.graph_module, node.target) for name, node in graph.calls().items()}
    weights = [name for name, module in modules.items() if isinstance(module, WeightQuantize) and "twice" in name]
    assert weights == ["twice_weight"]
    biases = [node for name, node in graph.calls().items() if isinstance(modules[name], BiasQuantize)]
    of_twice = [node for node in biases if node.args[0].target == "twice.bias"]
    assert len(of_twice) == 3
    assert len({node.args[1].target for node in of_twice}) == 3  # each in steps of what that call reads


def test_no_quantiser_between_a_conv_and_its_relu(place):
    graph = place()
    relu = node_of(graph, "relu")
    assert relu.args[0].op == "call_function" and "conv2d" not in graph.quantisers and "relu" in graph.quantisers


def test_a_resize_is_rounded_in_the_steps_of_its_input(place):
    graph = place()
    resize = node_of(graph, "upsample_bilinear2d")
    (behind,) = resize.users
    assert behind.target == encoding_source(resize.args[0]).target == f"{QUANTISER}matmul_1"


def test_what_a_concatenation_alone_reads_is_written_in_its_steps(place):
    graph = place()
    parts = node_of(graph, "cat").args[0]
    assert parts[0].target == f"{QUANTISER}matmul_1"  # tied to what another reads
    assert parts[1].target == f"{QUANTISER}cat"
    assert graph.calls()["cat"].args[0].name == "cat"


def test_a_concatenation_leaves_what_others_read_too():
    graph = put_quantisers(capture_of(lambda x: torch.cat([y := x + x, x * x], 1) * torch.cat([y, y], 1)))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert {f"{QUANTISER}add", f"{QUANTISER}cat"} <= set(targets) and f"{QUANTISER}mul" not in targets


def test_the_shift_of_a_layer_norm_is_in_steps_of_its_output(place):
    graph = place()
    bias = node_of(graph, "layer_norm").args[3]
    assert bias.args[1].target == f"{QUANTISER}layer_norm.scale"
    assert float(getattr(graph.graph_module, bias.args[2].target)) == 1.0


def test_a_constant_is_quantised_for_the_reader_and_not_for_what_is_computed_from_it():
    table = nn.Parameter(torch.linspace(0.001, 1, 8))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, image):
            return (image + self.table) * self.table.square()

    graph = put_quantisers(capture(Twice().eval(), torch.zeros(1, 3, *SIZE)))
    powers = [node for node in graph.graph.nodes if node.op == "call_function" and "pow" in str(node.target)]
    powers += [node for node in graph.graph.nodes if node.op == "call_function" and "square" in str(node.target)]
    assert powers and all(node.args[0].op == "get_attr" for node in powers)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.erf(x), "aten.erf.default at '.network.' has no rule"),
        (lambda x: torch.add(x, x, alpha=2), "multiplies its second operand by alpha"),
        (lambda x: F.layer_norm(x, (8,)), "has no weight, which its rule wants"),
        (lambda x: F.conv2d(x, x[:1, :, :3, :3].reshape(1, 3, 3, 3)), "a weight or bias computed from the input"),
        (lambda x: F.linear(x, torch.ones(3, 8), x.mean((0, 1, 2))[:3]), "a weight or bias computed from the input"),
        (lambda x: x * x.shape[0], "the size of the batch, which is open"),
        (lambda x: x + torch.full((8,), -torch.inf), "holds infinity or NaN.*finite numbers, such as -100"),
        (lambda x: x, "returns nothing that is computed from its image"),
        (lambda x: torch.ones(1, 3, 8, 8).expand(x.shape[0], 3, 8, 8), "returns nothing that is computed"),
    ],
    ids=["no rule", "alpha", "no weight", "live weight", "live bias", "batch", "infinity", "image", "constant"],
)
def test_what_has_no_rule_is_refused(function, words):
    with pytest.raises(QuantizationError, match=words):
        put_quantisers(capture_of(function))


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ({"nothing": 16}, "no operation of this graph is called so"),
        ({"transpose": 16}, "moves data and has the width of what it moves"),
        ({"relu": 12}, "have 8 or 16"),
    ],
    ids=["name", "movement", "width"],
)
def test_widths_that_cannot_be_are_refused(place, bits, words):
    with pytest.raises(QuantizationError, match=words):
        place(**bits)


@pytest.mark.parametrize("name", ["constant_add", "constant_mul", "one_step", "mask"])
def test_names_of_the_network_are_not_taken(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer(name, torch.full((8,), 3.0))
            self.norm = nn.LayerNorm(8)

        def forward(self, image):
            return self.norm((image + 1) * 0.5 + torch.arange(8.0).exp()) + getattr(self, name)

    net, image = Net().eval(), torch.rand(1, 3, *SIZE)
    graph = NPUGraph(put_quantisers(capture(net, image)), SIZE)
    with torch.no_grad(), graph.in_float():
        assert torch.equal(graph(image), net(image))


def test_a_module_called_as_quantisers_are_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.quantiser_relu = nn.Conv2d(3, 3, 1)

        def forward(self, image):
            return self.quantiser_relu(image).relu()

    with pytest.raises(QuantizationError, match="module 'quantiser_relu'.*give it another"):
        put_quantisers(capture(Net().eval(), torch.zeros(1, 3, *SIZE)))


def test_quantisers_are_where_the_weights_are():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.ReLU()).eval().to("meta")
    graph = put_quantisers(capture(net, torch.zeros(1, 3, *SIZE)))
    assert {tensor.device.type for tensor in graph.buffers()} == {"meta"}


def test_a_weight_that_is_used_again_leaves_room_for_both_biases():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.full((8,), 50.0))

        def forward(self, image):
            return F.linear(F.linear(image, self.weight, self.first).relu(), self.weight, self.second)

    graph = NPUGraph(put_quantisers(capture(Net().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    set_ranges(graph, torch.rand(1, 3, *SIZE))
    assert torch.allclose(graph(torch.rand(1, 3, *SIZE)), torch.tensor(50.0), rtol=0.01)


# 16 bits


def widths(graph):
    return {name: quantiser.bits for name, quantiser in graph.quantisers.items()}


def read_bits(graph, name):
    """The width of each operand that an operation reads."""
    node, found = node_of(graph, name), []
    fx.map_arg(node.args, lambda other: found.append(other) if other.op != "get_attr" else None)
    modules = [getattr(graph.graph_module, encoding_source(one).target) for one in found if one in node.args]
    return [module.bits for module in modules if isinstance(module, FakeQuantize)]


def test_all_8_bits_has_no_conversion(place):
    assert set(widths(place()).values()) == {8}
    assert not any("8bit" in name or "16bit" in name for name in place().calls())


def test_an_operation_reads_and_writes_one_width(place):
    graph = place(add=16)
    assert widths(graph)["add"] == 16
    assert read_bits(graph, "add") == [16, 16]
    assert read_bits(graph, "mul") == [8, 8] and read_bits(graph, "conv2d_3")[0] == 8
    assert {"relu_16bit", "add_8bit"} < set(graph.calls())


def test_readers_of_the_other_width_share_one_conversion(place):
    graph = place(add=16)
    (conversion,) = [node for node in graph.graph_module.graph.nodes if node.target == f"{QUANTISER}add_8bit"]
    assert {user.name for user in conversion.users} == {"mul", "conv2d_3"}


def test_the_second_factor_of_a_product_stays_at_8_bits(place):
    graph = place(linear=16, mul_1=16, matmul=16, layer_norm=16)
    assert read_bits(graph, "matmul") == [16, 8] and widths(graph)["matmul"] == 16


def test_constants_have_the_width_of_the_operation(place):
    graph = place(add_1=16, mul_1=16)
    assert widths(graph)["mask_16bit"] == widths(graph)["constant_mul_1_16bit"] == 16
    assert "mask" not in graph.quantisers


def test_softmax_and_sigmoid_have_steps_of_65536ths(place):
    graph = place(softmax=16, sigmoid=16)
    for name in ("softmax", "sigmoid"):
        assert (graph.quantisers[name].encoding.scale, graph.quantisers[name].bits) == (2.0**-16, 16)


def test_what_moves_data_and_resizes_keeps_the_width(place):
    graph = place(matmul_1=16)
    resize = node_of(graph, "upsample_bilinear2d")
    assert getattr(graph.graph_module, encoding_source(resize.args[0]).target).bits == 16
    assert next(iter(resize.users)).target == f"{QUANTISER}matmul_1"
    assert read_bits(graph, "matmul_1") == [16, 8]


def test_a_resize_can_have_more_bits_than_its_input(place):
    graph = place(upsample_bilinear2d=16)
    resize = node_of(graph, "upsample_bilinear2d")
    assert getattr(graph.graph_module, resize.args[0].target).bits == 16
    assert next(iter(resize.users)).target == resize.args[0].target


def test_a_conv_and_its_relu_are_of_one_width(place):
    for name in ("conv2d", "relu"):
        graph = place(**{name: 16})
        assert widths(graph)["relu"] == 16 and read_bits(graph, "conv2d")[0] == 16


def test_a_bias_is_in_steps_of_what_is_really_read(place):
    graph = place(linear=16)
    node = node_of(graph, "linear")
    assert node.args[2].args[1].target == f"{node.args[0].target}.scale" == f"{QUANTISER}layer_norm_16bit.scale"


def test_more_bits_come_closer_to_float(place, module, noise):
    image = noise[..., :8, :8]
    with torch.no_grad():
        expected = module(image)
        errors = []
        for bits in ({}, {n: 16 for n in place().quantisers if not n.startswith(("constant", "mask", "norm"))}):
            graph = place(**bits)
            set_ranges(graph, image)
            errors.append(float((graph(image) - expected).abs().mean()))
    assert errors[1] < errors[0] * 0.6  # weights and second factors stay at 8 bits


def set_ranges(graph, image):
    """Encodings from the least and greatest values in float."""
    seen = {}

    class Seen(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x, *scales):
            low, high = seen.get(self.name, (0.0, 0.0))
            seen[self.name] = min(low, float(x.min())), max(high, float(x.max()))
            return x

    with graph.put_in_place({name: Seen(name) for name in graph.calls()}):
        graph(image)
    for name, quantiser in graph.quantisers.items():
        if not quantiser.fixed:
            quantiser.encoding = encoding_for_range(*seen[name], bits=quantiser.bits)


def test_placing_calls_in_proportion_to_the_graph():
    """Calls of functions, counted: the same on every machine."""

    def calls(length):
        graph = fx.Graph()
        node = graph.placeholder("image")
        for _ in range(length // 2):
            node = graph.call_function(torch.ops.aten.gelu.default, (node,))
            node = graph.call_function(torch.ops.aten.unsqueeze.default, (node, 0))
        graph.output((node,))
        module, count = fx.GraphModule(nn.Module(), graph), 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            put_quantisers(module)
        finally:
            sys.setprofile(None)
        return count

    calls(20)
    assert calls(1600) < 10 * calls(200)


def test_without_quantisers_the_graph_is_as_it_was_captured():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5), nn.LayerNorm(5)).eval()
    captured = capture(net, torch.zeros(1, 3, 8, 8))
    before = [(node.op, node.name) for node in captured.graph.nodes]
    placed = put_quantisers(copy.deepcopy(captured), bits={"linear": 16})
    bare, image = without_quantisers(placed), torch.randn(2, 3, 8, 8)
    assert [(node.op, node.name) for node in bare.graph.nodes] == before
    assert not any(name.startswith(QUANTISER) for name, _ in bare.named_modules())
    assert torch.equal(bare(image), captured(image))
    assert any(node.op == "call_module" for node in placed.graph.nodes)


def test_widths_are_asked_for_by_name(place):
    with pytest.raises(QuantizationError, match="bits maps names of operations to 8 or 16; 16 was given"):
        put_quantisers(capture(nn.Conv2d(3, 4, 1).eval(), torch.zeros(1, 3, *SIZE)), bits=16)
    with pytest.raises(QuantizationError, match=r"'conv', .* called so \(near: conv2d.*\); list\(graph"):
        place(conv=16)
