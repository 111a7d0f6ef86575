"""Every head of the decoder on one picture, teacher beside student: click a pixel and see what each head says of it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

import anywidget
import numpy as np
import traitlets

from lumen_lab import images
from lumen_lab.distillation.head_readings import LEVELS, VIEWS, check_pixel, value_rows
from lumen_lab.errors import LumenError
from lumen_lab.widgets.head_page import FINAL, PALETTES, shown_maps, smaller, static_picture

if TYPE_CHECKING:
    from lumen_lab.distillation.head_readings import HeadReadings

SHOWN = (*VIEWS, "mask")
TITLES = {**VIEWS, "mask": "the final mask"}


class HeadBrowser(anywidget.AnyWidget):
    """A browser of ``HeadReadings`` (``distillation.heads.read_heads``).

    ``stage``: 4, the deepest, to 1; ``view``: one of ``SHOWN``, a head of that stage, or the final mask; ``pixel``:
    (row, column) of the picture at the network's size, whose values in all heads of all stages stand in a table. All
    three can be set from Python and follow the browser, and refuse what is none. Everything is shipped as arrays, so
    the page needs no kernel. Maps with a longer side than ``max_side_px`` are shipped smaller; ``values()`` and the
    page read the shipped ones, ``readings.values_at`` the whole ones.

    The side heads are the teacher's, read off each network's features: at inference nothing computes them. Where no
    widget can run, the notebook shows ``static_png()`` of the state in which the widget was displayed.
    """

    _esm = Path(__file__).with_suffix(".js")
    _css = Path(__file__).with_suffix(".css")

    photograph = traitlets.Bytes(read_only=True, help="PNG of the picture as the network saw it").tag(sync=True)
    maps = traitlets.Dict(read_only=True, help="stage/view/network → float32 or RGB bytes, row by row").tag(sync=True)
    shapes = traitlets.Dict(read_only=True, help="of each map: size, palette, values of least and full colour").tag(
        sync=True
    )
    palettes = traitlets.Dict(read_only=True, help="name → RGB bytes of its colours").tag(sync=True)
    codes = traitlets.Dict(read_only=True, help="stage → tensor → how often each of 256 codes is used").tag(sync=True)
    facts = traitlets.Dict(read_only=True, help="size, networks, stages and views with what they mean").tag(sync=True)
    stage = traitlets.Enum(LEVELS, LEVELS[0]).tag(sync=True)
    view = traitlets.Enum(SHOWN, "gate").tag(sync=True)
    pixel = traitlets.Tuple(traitlets.Int(), traitlets.Int()).tag(sync=True)

    def __init__(
        self,
        readings: HeadReadings,
        *,
        stage: int = LEVELS[0],
        view: str = "gate",
        pixel: tuple[int, int] | None = None,
        max_side_px: int = 512,
    ):
        self._size, self._maps = readings.size, shown_maps(readings, max_side_px)
        self._image = smaller(readings.image, max_side_px)
        flat = {f"{key[0]}/{key[1]}/{name}": one for key, maps in self._maps.items() for name, one in maps.items()}
        self.set_trait("photograph", images.encode_png(self._image))
        self.set_trait("maps", {name: one.values.tobytes() for name, one in flat.items()})
        self.set_trait("shapes", {name: one.described() for name, one in flat.items()})
        self.set_trait("palettes", {name: colours.tobytes() for name, colours in PALETTES.items()})
        self.set_trait("codes", shown_codes(readings))
        networks = list(readings.networks)
        facts = {"size": list(self._size), "networks": networks, "stages": list(LEVELS), "views": dict(TITLES)}
        self.set_trait("facts", facts | {"coded": networks[-1]})
        middle = (self._size[0] // 2, self._size[1] // 2)
        super().__init__(stage=stage, view=view, pixel=middle if pixel is None else tuple(pixel))

    @traitlets.validate("pixel")
    def _is_in_the_picture(self, proposal: dict) -> tuple[int, int]:
        try:
            return check_pixel(proposal["value"], self._size)
        except LumenError as error:
            raise traitlets.TraitError(f"pixel: {error}") from None

    def values(self) -> list[dict[str, object]]:
        """What every head says of the pixel: rows with stage, head, and each network's value, None where there is
        none; the page's table shows the same."""
        maps = {
            key: {name: one.values for name, one in shown.items()}
            for key, shown in self._maps.items()
            if key[0] != FINAL
        }
        masks = {name: one.values for name, one in self._maps[FINAL, "mask"].items()}
        return value_rows(maps, masks, self.pixel, self._size)

    def static_png(self) -> bytes:
        """The present state as the bytes of a PNG: the chosen head large, the stage's others small, and the values."""
        return images.encode_png(
            static_picture(
                self._image,
                self._maps,
                self.values(),
                stage=self.stage,
                view=self.view,
                pixel=self.pixel,
                size=self._size,
                views=SHOWN,
            )
        )

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        text = f"HeadBrowser: stage {self.stage}, {self.view}, row {self.pixel[0]}, column {self.pixel[1]}"
        return {**data, "text/plain": text, "image/png": base64.b64encode(self.static_png()).decode()}, metadata


def shown_codes(readings: HeadReadings) -> dict[str, dict[str, list[int]]]:
    """Stage → tensor → counts, of the network that has codes; JSON has text for keys."""
    found: dict[str, dict[str, list[int]]] = {}
    for network in readings.networks.values():
        for stage in network.stages:
            if stage.codes:
                found[str(stage.level)] = {name: np.asarray(counts).tolist() for name, counts in stage.codes.items()}
    return found
