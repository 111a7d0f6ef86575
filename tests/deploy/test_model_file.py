"""What is refused before the compiler starts, and the torch site of every node."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lumen_lab.deploy.model_file import content_hashes, graph_inputs, model_bytes, node_sites, read_onnx, tensor_specs
from lumen_lab.errors import CompileError


def relu_net(path, shape):
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CompileError, match="no ONNX file .*none.onnx"):
        read_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize("content", [b"", b"a photograph, not a network", bytes(range(256)) * 20, b"\x08\x0a"])
def test_what_is_not_onnx_is_refused(tmp_path, content):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(CompileError, match="not an ONNX model"):
        read_onnx(path)


def test_half_a_file_is_refused(tmp_path, nets):
    path = nets.conv(tmp_path / "net.onnx")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CompileError, match="not an ONNX model"):
        read_onnx(path)


@pytest.mark.parametrize(
    ("shape", "words"),
    [(["batch", 3, 32, 32], r"x \(batch, 3, 32, 32\)"), ([1, 3, "h", "w"], r"x \(1, 3, h, w\)"), (None, "no shape")],
)
def test_open_shapes_are_refused_with_the_input(tmp_path, shape, words):
    with pytest.raises(CompileError, match=f"fixed shapes only.*{words}"):
        read_onnx(relu_net(tmp_path / "net.onnx", shape))


def test_external_weights_count_and_must_be_there(tmp_path, nets):
    path = nets.conv(tmp_path / "net.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="net.weights", size_threshold=0)
    model = read_onnx(path)
    assert set(content_hashes(path, model)) == {"onnx", "net.weights"}
    assert model_bytes(path, model) == path.stat().st_size + (tmp_path / "net.weights").stat().st_size
    before = content_hashes(path, model)
    (tmp_path / "net.weights").write_bytes(bytes((tmp_path / "net.weights").stat().st_size))
    assert content_hashes(path, model)["net.weights"] != before["net.weights"]
    (tmp_path / "net.weights").unlink()
    with pytest.raises(CompileError, match=r"net\.weights, which is not beside it"):
        read_onnx(path)


def test_the_contract_of_inputs_leaves_weights_out(tmp_path, nets):
    model = onnx.load(nets.conv(tmp_path / "net.onnx"))
    model.graph.input.append(helper.make_tensor_value_info("w1", TensorProto.FLOAT, [8, 3, 3, 3]))
    (spec,) = tensor_specs(graph_inputs(model))
    assert (spec.name, spec.shape, spec.layout, spec.dtype) == ("x", (1, 3, 32, 32), "NCHW", "float32")


def scoped(node, scopes):
    node.metadata_props.append(onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value=scopes))
    return node


def test_sites_come_from_what_torch_wrote_and_quantisers_take_their_neighbours():
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["w_f"], name="weight_dq"),
        scoped(helper.make_node("Conv", ["x", "w_f"], ["c"], name="conv"), "['', 'encoder', 'encoder.stem', 'conv2d']"),
        helper.make_node("QuantizeLinear", ["c", "s"], ["c_q"], name="q"),
        helper.make_node("DequantizeLinear", ["c_q", "s"], ["c_f"], name="dq"),
        scoped(helper.make_node("Relu", ["c_f"], ["r"]), "['', 'relu']"),
        helper.make_node("Sigmoid", ["r"], ["u"], name="unknown"),
        scoped(helper.make_node("Tanh", ["u"], ["t"], name="broken"), "['', 'never closed"),
    ]
    weights = [numpy_helper.from_array(np.float32(1), "s"), numpy_helper.from_array(np.zeros(4, np.int8), "w")]
    model = helper.make_model(helper.make_graph(nodes, "net", [], [], weights))
    stem = "encoder.stem"
    assert node_sites(model) == {"weight_dq": stem, "conv": stem, "q": stem, "dq": stem, "r": ""}


def test_torch_writes_sites_as_they_are_read(tmp_path):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.GELU())

        def forward(self, image):
            return torch.tanh(self.encoder(image))

    path = tmp_path / "net.onnx"
    image = torch.zeros(1, 3, 8, 8)
    torch.onnx.export(Net().eval(), (image,), path, dynamo=True, verbose=False, opset_version=20)
    model = read_onnx(path)
    sites = node_sites(model)
    by_kind = {node.op_type: sites[node.name] for node in model.graph.node}
    assert by_kind == {"Conv": "encoder.0", "Gelu": "encoder.1", "Tanh": ""}
