"""The quantised graph as an ONNX file: the same integers in onnxruntime, sites on every node, nothing half-written."""

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import fx, nn

from lumen_lab.deploy.model_file import QUANTISERS, node_sites
from lumen_lab.deploy.qdq_builder import integers_of
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.errors import ExportError
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.specs import Manifest

SIZE = (8, 12)


def graph_of(module, *, seed=0, size=SIZE, channels=3):
    """A calibrated NPU graph of a module that takes (N, 3, 8, 12)."""
    torch.manual_seed(seed)
    graph = NPUGraph(put_quantisers(capture(module.eval(), torch.zeros(1, channels, *size))), size)
    calibrate(graph, [torch.randn(2, channels, *size)])
    return graph


def session_of(path, names=()):
    """onnxruntime with graph optimisation off, further outputs at the values called ``names``."""
    import onnxruntime as ort

    model = onnx.load(path)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Values(fx.Interpreter):
    """Runs a graph and keeps what each quantiser makes of the operation before it."""

    def __init__(self, graph):
        super().__init__(graph)
        self.found = {}

    def run_node(self, node):
        value = super().run_node(node)
        if node.op == "call_module":
            self.found.setdefault(node.args[0].name, value)
        return value


def integers(graph, path, image):
    """(torch's, onnxruntime's) integers of the output for one image."""
    manifest = Manifest.beside(path)
    given, returned = manifest.inputs[0], manifest.outputs[0]
    encoding = graph.quantisers[given.name].encoding
    assert (given.scale, given.zero_point) == (encoding.scale, encoding.zero_point)
    pixels = encoding.quantise(image.numpy())
    (found,) = session_of(path).run([returned.name], {given.name: pixels})
    with torch.no_grad():
        real = graph(torch.from_numpy(encoding.dequantise(pixels))).numpy()
    expected = np.rint(real / np.float32(returned.scale)) + returned.zero_point
    return expected.astype(np.int64), found.astype(np.int64)


class Mix(nn.Module):
    """Every emitter in one small network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=1)
        self.wide = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4, bias=False)
        self.norm, self.fc, self.bare = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.shuffle = nn.PixelShuffle(2)
        self.register_buffer("mask", -100.0 * (torch.rand(1, 1, 8) > 0.5))

    def forward(self, x):
        x = self.conv(x).relu()
        x = x + self.wide(x)
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        tokens = self.bare(nn.functional.gelu(self.fc(tokens)))
        x = tokens.transpose(1, 2).reshape(-1, 8, 8, 12)
        x = torch.roll(x, (2, -3), (2, 3))
        left, right = x.split([3, 5], 1)
        first, second = x.unbind(2)[:2]
        logits = (first.unsqueeze(2) @ second.unsqueeze(3)).squeeze(3) * 0.25
        x = torch.cat([right, left - 0.5], 1)
        x = x * (logits.transpose(1, 2) + self.mask).softmax(-1).mean((1, 2), keepdim=True).unsqueeze(3)
        x = nn.functional.pad(x, (1, 0, 0, 2))[:, :, :8, 1:]
        x = nn.functional.interpolate(x, size=(11, 17), mode="bilinear", align_corners=True)
        x = nn.functional.interpolate(x, size=(8, 12), mode="bilinear")
        return self.shuffle(x).permute(0, 2, 3, 1).sigmoid() * x.mean((1, 2, 3), keepdim=True).expand(-1, 1, 1, 2)


@pytest.fixture(scope="module")
def mix():
    torch.manual_seed(3)
    return graph_of(Mix())


def test_every_emitter_gives_the_integers_of_torch(mix, tmp_path):
    path = export_qdq(mix, tmp_path / "mix.onnx")
    for seed in range(3):
        expected, found = integers(mix, path, torch.randn(1, 3, *SIZE, generator=torch.Generator().manual_seed(seed)))
        off = np.abs(expected - found)
        assert expected.std() > 0 and (off == 0).mean() >= 0.99 and off.max() <= 2


def test_a_student_gives_the_integers_of_torch_at_every_tensor(tiny_student, tmp_path):
    graph = graph_of(copy.deepcopy(tiny_student), size=(64, 96))
    path = export_qdq(graph, tmp_path / "student.onnx", output_name="logits")
    encoding = graph.quantisers["image"].encoding
    pixels = encoding.quantise(torch.randn(1, 3, 64, 96).numpy())
    written = {value for node in onnx.load(path).graph.node for value in node.output}
    names = [name for name in graph.quantisers if integers_of(name) in written]
    session = session_of(path, [integers_of(name) for name in names])
    found = dict(zip(names, session.run([integers_of(name) for name in names], {"image": pixels})))
    run = Values(graph.graph_module)
    with torch.no_grad():
        run.run(torch.from_numpy(encoding.dequantise(pixels)))
    off = {
        name: np.abs(graph.quantisers[name].encoding.quantise(run.found[name].numpy()).astype(int) - found[name]).max()
        for name in names
    }
    assert len(names) > 400
    assert sum(bool(steps) for steps in off.values()) <= 0.02 * len(names), off
    assert max(off.values()) <= 1


def test_one_weight_of_another_integer_is_seen(mix, tmp_path):
    path = export_qdq(mix, tmp_path / "mix.onnx")
    spoiled = copy.deepcopy(mix)
    with torch.no_grad():
        weight = spoiled.graph_module.get_parameter("fc.weight")
        weight[0, 0] += weight[0].abs().max() / 127 * 20
    expected, found = integers(spoiled, path, torch.randn(1, 3, *SIZE))
    assert not np.array_equal(expected, found)


def test_every_operation_carries_its_site(mix, tmp_path):
    model = onnx.load(export_qdq(mix, tmp_path / "mix.onnx"))
    sites = node_sites(model)
    (norm,) = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert sites[norm.name] == "norm"
    assert all(node.name in sites for node in model.graph.node if node.op_type not in QUANTISERS)


def test_ends_are_integers_and_the_manifest_says_what_they_mean(mix, tmp_path):
    path = export_qdq(mix, tmp_path / "mix.onnx", output_name="map")
    manifest = Manifest.beside(path)
    (given,), (returned,) = manifest.inputs, manifest.outputs
    assert (given.name, given.dtype, given.shape) == ("x", "uint8", (1, 3, *SIZE))
    assert (returned.name, returned.dtype) == ("map", "uint8")
    assert returned.scale > 0 and 0 <= returned.zero_point <= 255


def test_weights_are_eight_bits_and_biases_thirty_two(mix, tmp_path):
    model = onnx.load(export_qdq(mix, tmp_path / "mix.onnx"))
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert kinds["conv_weight_integers"] == kinds["fc_weight_transposed_integers"] == onnx.TensorProto.INT8
    assert kinds["conv2d_bias_integers"] == onnx.TensorProto.INT32
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert all(tensor.name.endswith("_scale") for tensor in floats)


def test_an_operation_without_a_form_is_refused_by_name_and_site(tmp_path, monkeypatch):
    from lumen_lab.deploy import qdq_ops

    monkeypatch.delitem(qdq_ops.EMITTERS, "aten.gelu.default")
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GELU())
    with pytest.raises(ExportError, match="aten.gelu.default at '1' has no ONNX form"):
        export_qdq(graph_of(net), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_another_ending_is_refused(mix, tmp_path):
    with pytest.raises(ExportError, match="named .onnx"):
        export_qdq(mix, tmp_path / "mix.bin")


def test_a_graph_of_another_precision_is_refused(mix, tmp_path):
    with pytest.raises(ExportError, match=r"in float64; integers are counted in float32: \.float\(\) it"):
        export_qdq(copy.deepcopy(mix).double(), tmp_path / "mix.onnx")


def test_biases_where_nothing_comes_in_are_those_of_torch(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    with torch.no_grad():
        net[0].bias -= 100
        net[2].weight[0] = 0
    graph = graph_of(net)
    expected, found = integers(graph, export_qdq(graph, tmp_path / "dead.onnx"), torch.randn(1, 3, *SIZE))
    assert np.array_equal(expected, found) and np.ptp(found) > 100


def test_an_output_that_is_called_like_another_value_is_refused(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 1)

        def forward(self, mask):
            return self.conv(mask)

    with pytest.raises(ExportError, match="'mask' is a value of this graph already; give the output another"):
        export_qdq(graph_of(Masked().eval()), tmp_path / "net.onnx", output_name="mask")
