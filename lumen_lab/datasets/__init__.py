"""Composed scenes with exact mattes, from folders of cut-outs and backgrounds; and folders of images and masks.

The names are imported when first asked for, so that ``python -m lumen_lab.datasets.sources`` runs without torch.
"""

from importlib import import_module

_HOMES = {
    "ATTRIBUTES": "attributes",
    "ComposedScenes": "scenes",
    "PairedFolder": "folders",
    "Sample": "sample",
    "compose_scene": "scenes",
    "matte_attributes": "attributes",
    "SourceBank": "sources",
    "SourceIndex": "sources",
    "fetch_debian_sources": "debian",
    "find_pairs": "pairing",
    "open_sources": "sources",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
