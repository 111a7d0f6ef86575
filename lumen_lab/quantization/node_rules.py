"""The rule of ``htp_rules.json`` that a node of the captured graph falls under."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch._ops import OpOverload

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import site_of
from lumen_lab.quantization.rules import TABLE, OpRule, htp_rules


def op_name(node: fx.Node) -> str:
    """The operation as the table spells it: "aten.conv2d.default", "getitem"."""
    return str(node.target) if isinstance(node.target, OpOverload) else node.target.__name__


def rule_of(node: fx.Node, rules: Mapping[str, OpRule] | None = None) -> OpRule:
    """The rule of a node; ``QuantizationError`` with its site if there is none."""
    rules = htp_rules() if rules is None else rules
    if op_name(node) not in rules:
        raise QuantizationError(
            f"{op_name(node)} at '{site_of(node) or '(network)'}' has no rule in {TABLE.name}, so nobody knows how the "
            "NPU wants it in integers; rewrite it (a norm: FOLD_BATCH_NORM), or compile it alone and add a rule."
        )
    return rules[op_name(node)]


def fused_into(node: fx.Node, rules: Mapping[str, OpRule] | None = None) -> fx.Node | None:
    """The ReLU that follows the node directly and takes its quantiser, if there is one."""
    (user, *others) = node.users or (None,)
    if others or user is None or user.op == "output":
        return None
    if not rule_of(node, rules).fuses_relu or op_name(user) != "aten.relu.default":
        return None
    return user
