"""Tiny networks for the NPU compiler, and what it made of them (compiled once a run)."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

SCOPES = "pkg.torch.onnx.name_scopes"


def weight(rng, name, *shape):
    return numpy_helper.from_array((rng.standard_normal(shape) * 0.2).astype(np.float32), name)


def constant(name, values):
    return numpy_helper.from_array(np.asarray(values, dtype=np.int64), name)


def saved(path, nodes, weights=(), *, shape=(1, 3, 32, 32), out_shape=(1, 4, 32, 32), out="y"):
    """Write a network with the input x and one output; every node gets its name as torch site."""
    for node in nodes:
        node.metadata_props.append(
            onnx.StringStringEntryProto(key=SCOPES, value=str(["", f"net.{node.name}", node.name]))
        )
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, out_shape)],
        list(weights),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def conv_net(path):
    """conv 3x3 - ReLU - conv 1x1: 3 channels to 4."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="stem", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], name="act"),
        helper.make_node("Conv", ["r1", "w2"], ["y"], name="head"),
    ]
    return saved(path, nodes, [weight(rng, "w1", 8, 3, 3, 3), weight(rng, "b1", 8), weight(rng, "w2", 4, 8, 1, 1)])


def wide_net(path):
    """One conv of 1.2 million weights, so that the context binary is above a megabyte."""
    rng = np.random.default_rng(0)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="wide", pads=[1] * 4)
    return saved(path, [node], [weight(rng, "w", 512, 256, 3, 3)], shape=(1, 256, 8, 8), out_shape=(1, 512, 8, 8))


def deform_net(path):
    """conv - deformable conv - ReLU, as BiRefNet's decoder has them."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="stem", pads=[1] * 4),
        helper.make_node("Conv", ["c1", "wo"], ["offset"], name="offset_conv", pads=[1] * 4),
        helper.make_node(
            "DeformConv", ["c1", "wd", "offset"], ["d1"], name="deform", pads=[1] * 4, kernel_shape=[3, 3]
        ),
        helper.make_node("Relu", ["d1"], ["y"], name="act"),
    ]
    weights = [weight(rng, "w1", 8, 3, 3, 3), weight(rng, "wo", 18, 8, 3, 3), weight(rng, "wd", 4, 8, 3, 3)]
    return saved(path, nodes, weights)


def only_deform_net(path):
    """Nothing that the NPU takes."""
    rng = np.random.default_rng(0)
    nodes = [helper.make_node("DeformConv", ["x", "wd", "offset"], ["y"], name="deform", pads=[1] * 4)]
    offset = numpy_helper.from_array(np.zeros((1, 18, 32, 32), np.float32), "offset")
    return saved(path, nodes, [weight(rng, "wd", 4, 3, 3, 3), offset])


def rank_seven_net(path):
    """ReLU - reshape to rank 7 and back through a transpose - ReLU."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="before"),
        helper.make_node("Reshape", ["a", "wide"], ["b"], name="unfold"),
        helper.make_node("Transpose", ["b"], ["c"], name="swap", perm=[0, 2, 1, 4, 3, 6, 5]),
        helper.make_node("Reshape", ["c", "narrow"], ["d"], name="fold"),
        helper.make_node("Relu", ["d"], ["y"], name="after"),
    ]
    shapes = [constant("wide", [1, 4, 4, 4, 4, 4, 4]), constant("narrow", [1, 64, 64])]
    return saved(path, nodes, shapes, shape=(1, 64, 64), out_shape=(1, 64, 64))


def quantised_net(path, *, whole=True):
    """conv - GELU in INT8 with float input and output; not ``whole``: the GELU is left in float."""
    rng = np.random.default_rng(0)
    scale = {name: numpy_helper.from_array(np.float32(value), name) for name, value in SCALES.items()}
    zero = numpy_helper.from_array(np.uint8(128), "zero")
    kernel = numpy_helper.from_array(rng.integers(-99, 99, (8, 3, 3, 3)).astype(np.int8), "w")

    def q(value, s, name):
        return helper.make_node("QuantizeLinear", [value, s, "zero"], [f"{value}_q"], name=name)

    def dq(value, s, name):
        return helper.make_node("DequantizeLinear", [f"{value}_q", s, "zero"], [f"{value}_f"], name=name)

    weights = helper.make_node("DequantizeLinear", ["w", "s_w"], ["w_f"], name="w_dq")
    nodes = [q("x", "s_x", "x_q"), dq("x", "s_x", "x_dq"), weights]
    nodes.append(helper.make_node("Conv", ["x_f", "w_f"], ["c"], name="stem", pads=[1] * 4))
    nodes += [q("c", "s_c", "c_q"), dq("c", "s_c", "c_dq"), helper.make_node("Gelu", ["c_f"], ["g"], name="gelu")]
    nodes += (
        [q("g", "s_c", "g_q"), dq("g", "s_c", "g_dq")]
        if whole
        else [helper.make_node("Relu", ["g"], ["g_f"], name="r")]
    )
    return saved(path, nodes, [kernel, zero, *scale.values()], out_shape=(1, 8, 32, 32), out="g_f")


SCALES = {"s_x": 1 / 128, "s_c": 1 / 16, "s_w": 1 / 512}


def half_quantised_net(path):
    """As ``quantised_net``, but nothing quantises behind the GELU, which therefore stays in float."""
    return quantised_net(path, whole=False)


NETS = SimpleNamespace(
    conv=conv_net,
    wide=wide_net,
    deform=deform_net,
    only_deform=only_deform_net,
    rank_seven=rank_seven_net,
    quantised=quantised_net,
    half_quantised=half_quantised_net,
)


@pytest.fixture(scope="session")
def nets():
    """Functions that write a tiny network to a path, by name."""
    return NETS


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """``compiled(net, chip)``: the report of a tiny network for a chip, compiled at the first call."""
    from lumen_lab.deploy.htp import compile_for_chip

    folder, reports = tmp_path_factory.mktemp("compiled"), {}

    def get(net, chip="SM8850"):
        if (net, chip) not in reports:
            path = getattr(NETS, net)(folder / f"{net}.onnx")
            reports[net, chip] = compile_for_chip(path, chip, out_dir=folder / "out", progress=False)
        return reports[net, chip]

    return get


@pytest.fixture
def own_copy(compiled, tmp_path):
    """``own_copy(net)``: path of a compiled context that the test may spoil."""

    def get(net):
        source = Path(compiled(net).context_path)
        shutil.copytree(source.parent, tmp_path / "copy")
        return tmp_path / "copy" / source.name

    return get
