"""Interactive views for notebooks: each is its traits, a small module of its own and a static picture of its state."""

from lumen_lab.errors import MissingDependencyError
from lumen_lab.widgets.graph_view import GraphView, show_graph

try:
    from lumen_lab.widgets.head_browser import HeadBrowser
    from lumen_lab.widgets.mask_compare import MaskCompare
    from lumen_lab.widgets.rewrite_picker import RewritePicker
except ModuleNotFoundError as error:
    if error.name not in ("anywidget", "ipywidgets", "traitlets"):
        raise
    raise MissingDependencyError(
        f"lumen_lab.widgets needs {error.name}, which is not installed; install lumen-lab[notebooks]."
    ) from None

__all__ = ["GraphView", "HeadBrowser", "MaskCompare", "RewritePicker", "show_graph"]
