"""lumen_lab: audit, rewrite, quantise, distil and deploy dense-prediction networks on phone NPUs.

The names that a notebook needs are doors of this package: ``from lumen_lab import audit, rewrite``. Each is fetched
from its room on first use, so that ``import lumen_lab`` itself loads nothing heavy. Doors are verbs and rooms are
nouns: importing a submodule binds it here by its name, which must therefore never be the name of a door.
"""

from importlib import import_module

__version__ = "0.1.0"

DOORS = {
    "load_network": "lumen_lab.network",
    "load_image": "lumen_lab.images",
    "save_mask": "lumen_lab.images",
    "predict": "lumen_lab.prediction",
    "audit": "lumen_lab.auditing",
    "EXACT_PLAN": "lumen_lab.rewrites",
    "LEAN_PLAN": "lumen_lab.rewrites",
    "LUMEN_PLAN": "lumen_lab.rewrites",
    "rewrite": "lumen_lab.rewrites",
    "check_equivalence": "lumen_lab.equivalence",
    "quantize": "lumen_lab.quantization.quantize",
    "distill": "lumen_lab.distillation.distill",
    "export_onnx": "lumen_lab.deploy.onnx_export",
    "export_qdq": "lumen_lab.deploy.qdq_export",
    "compile_for_chip": "lumen_lab.deploy.htp",
    "emulate": "lumen_lab.deploy.htp",
    "evaluate": "lumen_lab.evaluation",
    "find_chip": "lumen_lab.chips",
}

__all__ = ["DOORS", "__version__", *DOORS]


def __getattr__(name: str) -> object:
    if name not in DOORS:
        raise AttributeError(f"lumen_lab has no {name!r}; its doors are {', '.join(sorted(DOORS))}.")
    value = getattr(import_module(DOORS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
