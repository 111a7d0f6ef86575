"""A captured graph as torch modules, one an operation: the form that AIMET's quantiser for torch works on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import fx, nn

from lumen_lab.quantization.capture import attribute

aten = torch.ops.aten
Made = tuple[nn.Module, tuple]


def with_weights(module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
    """The module with the graph's own weights, shared."""
    module.weight = weight
    module.bias = bias
    return module


def weights_of(graph: fx.GraphModule, node: fx.Node, place: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The weight at ``place`` among the arguments, and the bias behind it."""
    both = [node.args[at] if len(node.args) > at else None for at in (place, place + 1)]
    return tuple(None if one is None else attribute(graph, one.target) for one in both)


def conv(graph: fx.GraphModule, node: fx.Node) -> Made:
    weight, bias = weights_of(graph, node, 1)
    stride, padding, dilation, groups = (*node.args[3:], *((1, 0, 1, 1)[len(node.args[3:]) :]))
    channels = weight.shape[1] * groups, weight.shape[0]
    made = nn.Conv2d(*channels, tuple(weight.shape[2:]), stride, padding, dilation, groups, bias is not None)
    return with_weights(made, weight, bias), node.args[:1]


def linear(graph: fx.GraphModule, node: fx.Node) -> Made:
    weight, bias = weights_of(graph, node, 1)
    return with_weights(nn.Linear(*reversed(weight.shape), bias is not None), weight, bias), node.args[:1]


def layer_norm(graph: fx.GraphModule, node: fx.Node) -> Made:
    made = nn.LayerNorm(node.args[1], eps=node.args[4] if len(node.args) > 4 else 1e-5)
    return with_weights(made, *weights_of(graph, node, 2)), node.args[:1]


def resize(graph: fx.GraphModule, node: fx.Node) -> Made:
    size = tuple(node.args[1]) if node.args[1] else None
    factor = tuple(node.args[3]) if size is None else None
    return nn.Upsample(size, factor, "bilinear", align_corners=node.args[2]), node.args[:1]


def makers() -> dict[object, Callable[[fx.GraphModule, fx.Node], Made]]:
    """Operation → what makes its module, and the arguments that this is called with."""
    from aimet_torch.nn.modules import custom

    plain = {aten.relu.default: nn.ReLU, aten.gelu.default: nn.GELU, aten.sigmoid.default: nn.Sigmoid}
    plain |= {aten.add.Tensor: custom.Add, aten.sub.Tensor: custom.Subtract, aten.mul.Tensor: custom.Multiply}
    plain |= {aten.matmul.default: custom.MatMul}
    found = {target: lambda graph, node, kind=kind: (kind(), node.args) for target, kind in plain.items()}
    found |= {aten.conv2d.default: conv, aten.linear.default: linear, aten.layer_norm.default: layer_norm}
    found |= {aten.upsample_bilinear2d.vec: resize}
    found[aten.softmax.int] = lambda graph, node: (nn.Softmax(node.args[1]), node.args[:1])
    found[aten.cat.default] = lambda graph, node: (custom.Concat(*node.args[1:]), tuple(node.args[0]))
    return found


def as_modules(captured: fx.GraphModule) -> fx.GraphModule:
    """A copy in which every operation that computes is a module; those that move data stay functions."""
    graph, known = copy.deepcopy(captured), makers()
    for node in [node for node in graph.graph.nodes if node.op == "call_function" and node.target in known]:
        module, arguments = known[node.target](graph, node)
        graph.add_submodule(f"of_{node.name}", module)
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(f"of_{node.name}", tuple(arguments))
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph
