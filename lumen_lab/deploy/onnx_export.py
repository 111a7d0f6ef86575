"""A torch network as an ONNX file that the NPU compiler reads: static shapes, one site per node, nothing private."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lumen_lab.deploy.model_file import tensor_specs
from lumen_lab.errors import ArtifactError, ExportError
from lumen_lab.network.checkpoints import model_name, weights_sha256
from lumen_lab.rewrites.plan import inputs_for
from lumen_lab.specs import Manifest, file_sha256, files_sha256, manifest_path, replacing, tool_versions

OPSET = 20  # the first with GELU as one operator, which the NPU takes whole; DeformConv needs 19
TOOLS = ("torch", "torchvision", "onnx", "onnxscript")
PRIVATE_METADATA = ("pkg.torch.onnx.stack_trace", "pkg.torch.export.ExportedProgram.graph_signature")


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    example_inputs: tuple[Tensor, ...] | None = None,
    input_names: Sequence[str] = ("image",),
    output_names: Sequence[str] = ("logits",),
    reuse: bool = False,
) -> Path:
    """Write ``model`` as ONNX (opset 20) with a manifest beside it; returns the path.

    Shapes are those of ``example_inputs`` (default: the model's own image size, batch 1) and static: the NPU takes no
    others. Every node keeps the torch module that it comes from in its metadata. A deformable conv becomes ONNX
    DeformConv, so that the compiler can be asked about it. With ``reuse``, a file made from the same weights, rewrites,
    shapes and versions is taken as it is. Raises ``ExportError``; the file appears whole or not.
    """
    path = Path(path)
    if any(module.training for module in model.modules()):
        raise ExportError("The network is in training mode, where dropout and batch statistics are live; call .eval().")
    if path.suffix != ".onnx":
        raise ExportError(f"An ONNX file is named .onnx, asked for '{path.name}'; change the ending.")
    example_inputs = inputs_for(model, example_inputs)
    origin = made_from(model, example_inputs, (*input_names, *output_names))
    if reuse and fits(path, origin):
        return path
    proto = traced(model, example_inputs, input_names, output_names)
    if len(proto.graph.output) != len(output_names):
        raise ExportError(f"{len(output_names)} output names for {len(proto.graph.output)} outputs; name each once.")
    strip_private(proto)
    write_proto(proto, path)
    try:
        onnx_manifest(proto, path, origin).save(manifest_path(path))
    except OSError as error:
        raise ExportError(f"{manifest_path(path)} cannot be written: {error.strerror or error}.") from None
    return path


def made_from(model: nn.Module, example_inputs: tuple[Tensor, ...], names: Sequence[str]) -> dict[str, str]:
    """What the file depends on: network, weights, rewrites, shapes and names."""
    rewrites = sorted({module.rewritten_by for module in model.modules() if hasattr(module, "rewritten_by")})
    return {
        "network": model_name(model),
        "weights_sha256": weights_sha256(model),
        "rewrites": ", ".join(rewrites) or "none",
        "input_shapes": shapes_in_words(example_inputs),
        "names": ", ".join(names),
        "opset": str(OPSET),
        "code_sha256": code_sha256(),
    }


def shapes_in_words(tensors: Sequence[Tensor]) -> str:
    """ "1x3x192x192" for each tensor."""
    return ", ".join("x".join(map(str, value.shape)) for value in tensors)


def code_sha256() -> str:
    """A hash of the code that decides the graph: a changed rewrite must not be taken for the one of an old file."""
    package = Path(__file__).parents[1]
    sources = sorted([*package.glob("network/*.py"), *package.glob("rewrites/*.py"), Path(__file__)])
    return files_sha256(sources)


def fits(path: Path, origin: dict[str, str]) -> bool:
    """Whether ``path`` is whole and was made from ``origin`` with the versions that are installed."""
    try:
        manifest = Manifest.beside(path)
    except ArtifactError:
        return False
    return manifest.made_from == origin and manifest.versions == tool_versions(*TOOLS)


def traced(model: nn.Module, example_inputs, input_names, output_names):
    """The ONNX model of ``model``, through ``torch.export``."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                model,
                example_inputs,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(input_names),
                output_names=list(output_names),
                custom_translation_table={torch.ops.torchvision.deform_conv2d.default: deform_conv},
                verbose=False,
            )
        except Exception as error:
            reason = str(error.__cause__ or error).strip().splitlines()
            raise ExportError(
                f"{type(model).__name__} cannot be exported to ONNX: {reason[0][:300] if reason else error!r}. "
                "An audit (lumen_lab.audit) lists the operations and their sites."
            ) from error
    return program.model_proto


def deform_conv(
    input, weight, offset, mask, bias, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    groups, offset_groups, use_mask,
):  # fmt: skip
    """ONNX DeformConv (opset 19) for ``torchvision::deform_conv2d``: same layout of offsets, (dy, dx) per tap."""
    from onnxscript import opset19 as op

    return op.DeformConv(
        input,
        weight,
        offset,
        bias,
        mask if use_mask else None,
        strides=[stride_h, stride_w],
        pads=[pad_h, pad_w, pad_h, pad_w],
        dilations=[dilation_h, dilation_w],
        group=groups,
        offset_group=offset_groups,
    )


def strip_private(proto) -> None:
    """Drop stack traces (they hold the paths of the machine that exported) and bulky copies of the torch graph."""
    for holder in (
        proto,
        proto.graph,
        *proto.graph.node,
        *proto.graph.value_info,
        *proto.graph.input,
        *proto.graph.output,
    ):
        kept = [entry for entry in holder.metadata_props if entry.key not in PRIVATE_METADATA]
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)


def write_proto(proto, path: Path) -> None:
    """Check the model and write it whole."""
    import onnx

    try:
        onnx.checker.check_model(proto)
        with replacing(path) as temporary:
            onnx.save(proto, temporary)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}.") from None
    except onnx.checker.ValidationError as error:
        raise ExportError(
            f"The exported graph is not valid ONNX ({str(error)[:200]}); report it with the model."
        ) from None


def onnx_manifest(proto, path: Path, origin: dict[str, str]) -> Manifest:
    """What made the file, and its contract."""
    return Manifest(
        kind="onnx",
        made_from=origin,
        versions=tool_versions(*TOOLS),
        inputs=tensor_specs(proto.graph.input),
        outputs=tensor_specs(proto.graph.output),
        files={path.name: file_sha256(path)},
    )
