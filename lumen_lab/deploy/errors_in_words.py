"""The compiler's log in words: which operations it refused and why, and what its error numbers mean.

Numbers and names as printed by onnxruntime-qnn 2.7.0 (QAIRT 2.51). Those marked "seen" were provoked with that
version; the others are reported by users of the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KEPT_LINES = 4000


@dataclass(frozen=True)
class KnownError:
    """One error of the compiler: ``mark`` is the pattern that shows it in the log."""

    mark: str
    cause: str
    would_do: str


KNOWN_ERRORS = (
    KnownError(  # seen
        r"No space left on device|Failed to write context cache file",
        "the context binary could not be written",
        "free disk space, or choose another out_dir",
    ),
    KnownError(  # seen: any soc_model that this version of the compiler does not know
        r"QNN_DEVICE_ERROR_INVALID_CONFIG",
        "the compiler does not know this soc_model",
        "choose a chip that it serves, or a newer onnxruntime-qnn",
    ),
    KnownError(  # seen: a binary built for another chip
        r"QNN_CONTEXT_ERROR_CREATE_FROM_BINARY|contextCreateFromBinary failed",
        "the context binary does not fit this chip or this QAIRT version",
        "compile it again for the chip, with the installed version",
    ),
    KnownError(  # seen: a float graph for a chip without float16
        r"QNN_COMMON_ERROR_MEM_ALLOC|Code: 1002\b",
        "QNN error 1002: finalising ran out of the NPU's on-chip memory, which is also what float operations "
        "give on a chip without float16",
        "quantise the network if the chip has no float16; else split the largest operation "
        "(grid sample, matrix product, full-resolution convolution) over channels or rows",
    ),
    KnownError(  # seen: a float convolution for a chip without float16
        r"was inserted using the NHWC format as requested by QNN, but was not selected",
        "HTP refused an operation whose layout had been changed for it already, and which no longer fits the CPU",
        "look in the log for what it refused, and rewrite that or quantise it",
    ),
    KnownError(
        r"(?i:code):? (?:1100|6001)\b",
        "QNN error 1100/6001: every operation was accepted by itself, and finalising the graph failed",
        "cut the graph in halves and compile each, to find the operation; then rewrite or split it",
    ),
    KnownError(
        r"(?i:code):? 6004\b",
        "QNN error 6004: a tensor that the NPU cannot hold (rank, type or encoding)",
        "look for a rank above 5, a 64-bit integer, or per-channel weights on another axis than 0",
    ),
    KnownError(
        r"exceeds? (?:the )?maximum protobuf size|ValidateSerializedSize|2147483647 bytes",
        "the graph passes the 2 GB that can be serialised",
        "use a smaller input, or split the network into two files",
    ),
    KnownError(
        r"std::bad_alloc|Cannot allocate memory",
        "the compiler ran out of this machine's memory",
        "free memory, or use a smaller input",
    ),
    KnownError(  # seen
        r"error code 3110\b",
        "QNN error 3110: operations were refused with these shapes, ranks, types or encodings",
        "rewrite them (rank 5 at most, static shapes, types and encodings that HTP takes for the operation)",
    ),
)


def explain(log: str) -> str:
    """What the known errors in ``log`` mean and what would do, the gravest first; "" if none is known."""
    found = [known for known in KNOWN_ERRORS if re.search(known.mark, log)]
    return "; ".join(f"{known.cause}: {known.would_do}" for known in found[:2])


@dataclass(frozen=True)
class Refusal:
    """An ONNX node that the compiler did not take, with its words; ``code`` is QNN's number (None: by rule)."""

    onnx_node: str
    op_type: str
    code: int | None
    reason: str


VERDICT = re.compile(r"LogNodeSupport\] Validation (PASSED|FAILED) for")
MEMBER = re.compile(r"\tOperator type: (\S*) Node name: (.*) Node index: \d+")
VALIDATION = re.compile(r"backendValidateOpConfig\(\) failed for node `(.*?)` of type `(.*?)` with error code (\d+)")


def read_refusals(lines: Iterable[str]) -> dict[str, Refusal]:
    """The nodes refused in the last look that the compiler took, by ONNX node name, from its verbose log.

    It looks twice, before and after its change of layout to N H W C; a node can be refused in the first only.
    """
    refusals: dict[str, Refusal] = {}
    number, members, refused = None, [], False
    for line in lines:
        if found := VALIDATION.search(line):
            number = (found[2], int(found[3]))
        elif found := VERDICT.search(line):
            members, refused = [], found[1] == "FAILED"
            spent, number = number, None
        elif found := MEMBER.match(line):
            members.append((found[2], found[1]))
            if not refused:
                refusals.pop(found[2], None)
        elif refused and line.startswith("\tREASON :"):
            reason = line.split(":", 1)[1].strip()
            refusals |= {node: _refusal(node, op_type, reason, spent) for node, op_type in members}
    return refusals


def _refusal(node: str, op_type: str, reason: str, number: tuple[str, int] | None) -> Refusal:
    if number is not None:
        return Refusal(node, op_type, number[1], f"HTP refused QNN {number[0]} (error {number[1]})")
    rule = re.match(r"Operators of type `(.*?)` are not supported", reason)
    words = f"the QNN provider has no translation of {rule[1]}" if rule else reason.rstrip(".")
    return Refusal(node, op_type, None, words)


def read_log(path: str | Path) -> Iterator[str]:
    """Lines of a log without terminal colours; nothing if there is no such file."""
    try:
        with open(path, errors="replace") as file:
            for line in file:
                yield re.sub(r"\x1b\[[\d;]*m", "", line.rstrip("\n"))
    except FileNotFoundError:
        return


def kept_log(lines: Iterable[str]) -> list[str]:
    """The part of a verbose log worth keeping: all but the routine messages, at most the last ``KEPT_LINES``."""
    kept, keeping = [], True
    for line in lines:
        if re.match(r"\d{4}-\d\d-\d\d ", line):
            routine = line.split("[", 1)[-1][:1] in "VI"
            keeping = not routine or any(mark in line for mark in ("FAILED", "FinalizeGraphs", "compatibility info"))
        elif not line.startswith((" ", "\t")):
            keeping = True
        if keeping and line.strip():
            kept.append(line)
    return kept[-KEPT_LINES:]


def telling_lines(lines: Sequence[str], limit: int = 8) -> list[str]:
    """The last lines of a kept log that may tell why it ended, without the noise that every run makes."""
    noise = ("File mapped weights", "EPContext encryption", "LIBNATIVE", "GetProducerInfo", '  File "', "    ")
    return [line[:300] for line in lines if not any(mark in line for mark in noise)][-limit:]
