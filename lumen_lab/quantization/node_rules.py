"""The rule of ``htp_rules.json`` that a node of the captured graph falls under."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch._ops import OpOverload

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import site_of
from lumen_lab.quantization.rules import OWN, TABLE, OpRule, htp_rules

REMEDY = "write it with operations that have one (docs/quantization.md lists them)"
FOLD = (
    "fold it into the conv before it: rewrite(network, (lumen_lab.rewrites.FOLD_BATCH_NORM,), "
    "example_inputs=(example,)).model"
)
REMEDIES = {"aten.batch_norm.default": FOLD, "aten._native_batch_norm_legit_no_training.default": FOLD}


def op_name(node: fx.Node) -> str:
    """The operation as the table spells it: "aten.conv2d.default", "getitem"."""
    return str(node.target) if isinstance(node.target, OpOverload) else node.target.__name__


def rule_of(node: fx.Node, rules: Mapping[str, OpRule] | None = None) -> OpRule:
    """The rule of a node; ``QuantizationError`` with its site if there is none."""
    rules = htp_rules() if rules is None else rules
    if op_name(node) not in rules:
        raise QuantizationError(
            f"{op_name(node)} at '{site_of(node) or '(network)'}' has no rule in {TABLE.name}, so nobody knows how the "
            f"NPU wants it in integers; {REMEDIES.get(op_name(node), REMEDY)}."
        )
    return rules[op_name(node)]


def fused_into(node: fx.Node, rules: Mapping[str, OpRule] | None = None) -> fx.Node | None:
    """The ReLU that follows the node directly and takes its quantiser, if there is one: the NPU makes one operation of
    both, and what lies between is on no grid of its own."""
    (user, *others) = node.users or (None,)
    if others or user is None or user.op == "output":
        return None
    rule = rule_of(node, rules)
    if rule.output != OWN or rule.bias_in_output_steps or op_name(user) != "aten.relu.default":
        return None
    return user
