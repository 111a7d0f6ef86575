"""Quantisation: the graph as the NPU runs it, its encodings, calibration, precision. Each name is fetched from its
module on first use, so that the table of rules can be read without torch."""

from importlib import import_module

NAMES = {
    "Encoding": "encoding",
    "NPUGraph": "npu_graph",
    "calibrate": "calibration",
    "choose_precision": "precision",
    "coverage_report": "coverage",
    "in_widths": "precision",
    "load_graph": "graph_file",
    "measure_pareto": "precision",
    "measure_sensitivity": "sensitivity",
    "reconstruct_block": "reconstruction",
    "save_graph": "graph_file",
}

__all__ = ["NAMES", *NAMES]


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"lumen_lab.quantization has no {name!r}; it has {', '.join(sorted(NAMES))}.")
    value = getattr(import_module(f"lumen_lab.quantization.{NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
