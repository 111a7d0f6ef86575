"""One quantiser, timed: ``python -m tests.benchmarks.peers.quantisers NAME TASK.json``, run by ``quantizers.py``.

``TASK.json`` says where the float network (ONNX, and preset and plan to make it in torch), the calibration pictures
(``.npy``, normalised, N×3×H×W) and the result are. Prints seconds, seconds of processor time (a busy machine makes the
first longer, hardly the second) and peak memory as JSON. The methods are each quantiser's defaults for this NPU where
it has such; min-max where it leaves the choice.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Task = dict[str, str]


class Pictures:
    """Calibration pictures as onnxruntime reads them."""

    def __init__(self, task: Task):
        self.pictures = iter(np.load(task["pictures"])[:, None])

    def get_next(self) -> dict[str, np.ndarray] | None:
        picture = next(self.pictures, None)
        return None if picture is None else {"image": picture}


def batches(task: Task) -> Iterator[np.ndarray]:
    """The calibration pictures one by one, (1, 3, H, W)."""
    yield from np.load(task["pictures"])[:, None]


def lumen_lab(task: Task) -> None:
    """This library, from the torch network."""
    import torch

    import lumen_lab as lab
    from lumen_lab.quantization.calibration import calibrate
    from lumen_lab.quantization.quantize import placed

    size = np.load(task["pictures"], mmap_mode="r").shape[-2:]
    example = torch.zeros(1, 3, *size)
    student = lab.rewrite(
        lab.load_network(task["preset"], weights=task["weights"]), plan_of(task), example_inputs=(example,)
    ).model
    start()
    graph = placed(student, example)  # with calibrate, what quantize does
    lap("capture")
    calibrate(graph, map(torch.from_numpy, batches(task)), progress=False)
    lap("calibrate")
    lab.export_qdq(graph, task["out"])
    lap("emit")


def plan_of(task: Task) -> tuple:
    import lumen_lab as lab

    return getattr(lab, task["plan"])


def onnxruntime_plain(task: Task) -> None:
    """onnxruntime's ``quantize_static`` with weights per channel."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    one_thread()
    start()
    quantize_static(
        task["model"],
        task["out"],
        Pictures(task),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def onnxruntime_qnn(task: Task, *, overrides: Callable[[str], dict] = lambda model: {}) -> None:
    """onnxruntime's own settings for this NPU: ``qnn_preprocess_model``, ``get_qnn_qdq_config``."""
    from onnxruntime.quantization import QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    one_thread()
    start()
    prepared = str(Path(task["out"]).with_suffix(".prepared.onnx"))
    changed = qnn_preprocess_model(task["model"], prepared)
    source = prepared if changed else task["model"]
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    config = get_qnn_qdq_config(source, Pictures(task), **types, per_channel=True, init_overrides=overrides(source))
    quantize(source, task["out"], config)


def onnxruntime_overridden(task: Task) -> None:
    """The same by someone who knows what HTP refuses: factors of layer norms unsigned, one scale for all channels."""
    onnxruntime_qnn(task, overrides=unsigned_factors)


def unsigned_factors(model: str) -> dict[str, list[dict[str, object]]]:
    """onnxruntime's ``TensorQuantOverrides`` for the factor of every layer norm in a file."""
    import onnx
    from onnxruntime.quantization import QuantType

    norms = [node for node in onnx.load(model).graph.node if node.op_type == "LayerNormalization"]
    return {norm.input[1]: [{"quant_type": QuantType.QUInt8}] for norm in norms}


def torchao_pt2e(task: Task) -> None:
    """torchao's PT2E, as ONNX through ``torch.onnx.export``.

    The quantiser that it brings (X86InductorQuantizer) refuses this graph: "Input partition has more than one output
    node". So every operation is annotated alike here, which is the least that PT2E leaves to its user: the image and
    all outputs uint8, weights int8 per channel. Biases, and factors and shifts of layer norms, stay float.
    """
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    import lumen_lab as lab

    student = lab.rewrite(lab.load_network(task["preset"], weights=task["weights"]), plan_of(task)).model
    pictures = [torch.from_numpy(picture) for picture in batches(task)]
    start()
    prepared = prepare_pt2e(torch.export.export(student, (pictures[0],)).module(), every_operation())
    with torch.no_grad():
        for picture in pictures:
            prepared(picture)
    converted = convert_pt2e(prepared)
    how = {"dynamo": True, "opset_version": 20, "external_data": False}
    torch.onnx.export(converted, (pictures[0],), task["out"], input_names=["image"], output_names=["logits"], **how)


def every_operation():
    """A PT2E quantiser for the image, the output of every operation on floats, and the weights of convs and linears."""
    import torch
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

    activation = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_affine)
    weight = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0)
    weighted = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)

    class EveryOperation(Quantizer):
        def annotate(self, model):
            for node in model.graph.nodes:
                value = node.meta.get("val")
                computed = node.op in ("placeholder", "call_function")
                if not computed or not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    continue
                weights = {node.args[1]: weight} if node.target in weighted else {}
                node.meta["quantization_annotation"] = QuantizationAnnotation(weights, activation, _annotated=True)
            return model

        def validate(self, model):
            pass

    return EveryOperation()


def aimet(task: Task) -> None:
    """AIMET for ONNX, with its settings for this NPU."""
    import onnx

    one_thread()
    from aimet_onnx.quantsim import QuantizationSimModel

    start()
    model = onnx.load(task["model"])
    sim = QuantizationSimModel(model, param_type="int8", activation_type="int8", config_file="htp_v81")
    sim.compute_encodings([{"image": picture} for picture in batches(task)])
    onnx.save(sim.to_onnx_qdq(), task["out"])


QUANTISERS: dict[str, Callable[[Task], None]] = {
    "lumen_lab": lumen_lab,
    "onnxruntime": onnxruntime_plain,
    "onnxruntime for QNN": onnxruntime_qnn,
    "onnxruntime for QNN, overridden": onnxruntime_overridden,
    "torchao PT2E": torchao_pt2e,
    "AIMET": aimet,
}
LAPS: dict[str, tuple[float, float]] = {}


def one_thread() -> None:
    """Sessions that onnxruntime makes from now on have one thread; it does not read OMP_NUM_THREADS."""
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):
        def __init__(self):
            super().__init__()
            self.intra_op_num_threads = 1

    onnxruntime.SessionOptions = OneThread


def start() -> None:
    """From here on time counts: what was loaded and made before is each quantiser's input."""
    lap("start")


def lap(name: str) -> None:
    """A part of the work is done."""
    LAPS[name] = time.perf_counter(), time.process_time()


def seconds() -> dict[str, object]:
    """Wall and processor time from the start to the last lap, and of each part if there are several."""
    found = {}
    for clock, kind in enumerate(("s", "cpu_s")):
        at = [lap[clock] for lap in LAPS.values()]
        found[kind] = round(at[-1] - at[0], 2)
        if len(at) > 2:
            found[f"parts_{kind}"] = {name: round(b - a, 2) for name, a, b in zip(list(LAPS)[1:], at, at[1:])}
    return found


def main() -> None:
    name, task = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    QUANTISERS[name](task)
    if len(LAPS) == 1:
        lap("end")
    print("\n" + json.dumps(seconds() | {"peak_memory_mb": round(peak_memory_mb())}))


def peak_memory_mb() -> float:
    """The most that this process has held since it was started, of Linux.

    ``ru_maxrss`` begins at what the *parent* held, which here has a network and its export in memory.
    """
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    return int(kilobytes) * 1024 / 1e6


if __name__ == "__main__":
    main()
