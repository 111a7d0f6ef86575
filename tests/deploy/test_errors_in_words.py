"""Words for the compiler's numbers, and refusals read out of its log."""

import pytest

from lumen_lab.deploy.errors_in_words import explain, kept_log, read_log, read_refusals, telling_lines

WHEN = "2030-01-01 10:00:00.000000000"


def verdict(outcome, *nodes, reason=""):
    lines = [
        f"{WHEN} [V:onnxruntime:, qnn_ep.cc:1 LogNodeSupport] Validation {outcome} for {len(nodes)} nodes in X (Y) :"
    ]
    lines += [f"\tOperator type: {kind} Node name: {name} Node index: 3" for kind, name in nodes]
    return lines + ([f"\tREASON : {reason}"] if reason else []) + [""]


def refused_by_htp(name, kind):
    return [
        f"{WHEN} [W:onnxruntime:, qnn_model_wrapper.cc:5 CreateQnnNode] QNN.backendValidateOpConfig() failed for node "
        f"`{name}` of type `{kind}` with error code 3110"
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Failed to finalize QNN graph. Error: QNN_COMMON_ERROR_MEM_ALLOC: Memory allocation, Code: 1002",
            "on-chip memory",
        ),
        ("failed for node `a` of type `Conv2d` with error code 3110", "were refused"),
        ("Failed to finalize QNN graph, Code: 6001", "finalising the graph failed"),
        ("Failed to finalize QNN graph. Code: 1100", "finalising the graph failed"),
        ("tensor could not be made. Error code: 6004", "rank, type or encoding"),
        ("QNN_DEVICE_ERROR_INVALID_CONFIG: Invalid config values", "does not know this soc_model"),
        ("contextCreateFromBinary failed. Error: QNN_CONTEXT_ERROR_CREATE_FROM_BINARY", "does not fit this chip"),
        ("EP_FAIL : Failed to write context cache file.", "could not be written"),
    ],
)
def test_known_errors_have_a_cause_and_a_remedy(line, words):
    told = explain(f"noise\n{line}\nmore noise")
    assert words in told.split(":", 1)[0] + told.split(":", 1)[1]
    assert ": " in told and len(told) > len(words) + 20


@pytest.mark.parametrize("line", ["all is well", "error code 31100", "Code: 11002", "size 6001 bytes"])
def test_other_text_is_not_taken_for_an_error(line):
    assert explain(line) == ""


def test_a_refusal_by_rule_names_the_operator():
    reason = "Operators of type `DeformConv` are not supported by QNN EP.DeformConv node `d` will not be assigned."
    found = read_refusals(verdict("FAILED", ("DeformConv", "d"), reason=reason))
    assert found["d"].op_type == "DeformConv" and found["d"].code is None
    assert found["d"].reason == "the QNN provider has no translation of DeformConv"


def test_a_refusal_by_htp_carries_its_number_for_every_node_of_the_group():
    lines = refused_by_htp("ln", "LayerNorm")
    lines += verdict("FAILED", ("DequantizeLinear", "dq"), ("LayerNormalization", "ln"), reason="Failed to add node.")
    found = read_refusals(lines)
    assert set(found) == {"dq", "ln"} and {refusal.code for refusal in found.values()} == {3110}
    assert found["ln"].reason == "HTP refused QNN LayerNorm (error 3110)"


def test_the_number_of_one_node_is_not_given_to_the_next():
    lines = refused_by_htp("a", "Relu") + verdict("FAILED", ("Relu", "a"), reason="Failed to add node.")
    lines += verdict("FAILED", ("Relu", "b"), reason="Cannot get shape")
    found = read_refusals(lines)
    assert (found["a"].code, found["b"].code) == (3110, None)
    assert found["b"].reason == "Cannot get shape"


def test_the_last_look_counts():
    lines = verdict("FAILED", ("Relu", "a b"), reason="Cannot get shape") + verdict("PASSED", ("Relu", "a b"))
    assert read_refusals(lines) == {}
    assert set(read_refusals(lines + verdict("FAILED", ("Relu", "a b"), reason="Cannot get shape"))) == {"a b"}


def test_the_kept_log_drops_routine_messages_and_their_details():
    lines = [
        f"{WHEN} [V:onnxruntime:, qnn.cc:1 CreateQnnNode] Qnn_OpConfig node name: a",
        " node_inputs:",
        *verdict("PASSED", ("Relu", "fine")),
        *verdict("FAILED", ("Relu", "bad"), reason="Cannot get shape"),
        f"{WHEN} [E:onnxruntime:, qnn.cc:1 Setup] it broke",
        " in detail",
        f"{WHEN} [V:onnxruntime:, qnn_model.cc:381 FinalizeGraphs] FinalizeGraphs started.",
        "Traceback (most recent call last):",
    ]
    kept = "\n".join(kept_log(lines))
    assert all(word in kept for word in ("bad", "Cannot get shape", "it broke", "in detail", "started", "Traceback"))
    assert not any(word in kept for word in ("Qnn_OpConfig", "node_inputs", "fine"))


def test_a_log_is_read_without_colours_and_a_missing_one_is_empty(tmp_path):
    (tmp_path / "log").write_bytes(b"\x1b[0;93mwarm\x1b[m\n\xff\n")
    lines = list(read_log(tmp_path / "log"))
    assert lines[0] == "warm" and len(lines) == 2
    assert list(read_log(tmp_path / "none")) == []


def test_the_telling_lines_are_the_last_that_are_not_noise():
    lines = [f"line {i}" for i in range(20)] + ["File mapped weights feature is only available elsewhere"]
    assert telling_lines(lines, 3) == ["line 17", "line 18", "line 19"]
