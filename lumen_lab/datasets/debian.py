"""Debian packages of free pictures: which ones, what in them is no use here, and how to fetch them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from lumen_lab.errors import DatasetError

# Each package, and the folder in it that holds the pictures.
FOREGROUND_PACKAGES = {"tuxpaint-stamps-default": "usr/share/tuxpaint/stamps"}
BACKGROUND_PACKAGES = {
    "gnome-backgrounds": "usr/share/backgrounds",
    "mate-backgrounds": "usr/share/backgrounds",
    "plasma-workspace-wallpapers": "usr/share/wallpapers",
    "lomiri-wallpapers-16.04": "usr/share/backgrounds",
    "lomiri-wallpapers-20.04": "usr/share/backgrounds",
    "tuxpaint-data": "usr/share/tuxpaint/templates",
    "extremetuxracer-data": "usr/share/games/etr/terrains",
    "digikam-data": "usr/share/digikam/data",
}
DEBIAN_PACKAGES = (*FOREGROUND_PACKAGES, *BACKGROUND_PACKAGES)
SKIPPED_FOLDERS = frozenset({"symbols", "cartoon", "flags", "roadsigns", "screenshot"})
# Pictures of those packages that are themselves of a salient object: as a background they would be a wrong label.
SALIENT_BACKGROUNDS = frozenset(
    "ladybird onestandsout safelanding flyingkonqui autumn freshflower yellowflower garden twowings colorfulcups "
    "greentraditional float-into-mate patak aqua pixels-l pixels-d fallenleaf kite lighthouse wine_by_jakkub_mede "
    "picture_0b_by_freespace picture_1a_by_freespace greentock_by_peter_nerlich free_by_peter_nerlich "
    "kleiber_by_lukas_baubkus friends_by_aitzol_berasategi logo-digikam splash-digikam lut3d jellyfish "
    "seeding_by_clements_engelhardt icecold altai infinite-sea_by_aury88".split()
)
# Rendered wallpapers that statistics take for photographs.
DRAWN_BACKGROUNDS = frozenset(
    "adwaita-l adwaita-d licorice-l licorice-d truchet-l truchet-d grid-l grid-d kay canopee cascade opal shell "
    "cluster honeywave milkyway umang_by_abhishek_mudgal".split()
)


def fetch_debian_sources(out_dir: str | Path, *, packages: Sequence[str] = DEBIAN_PACKAGES) -> Path:
    """Download Debian packages with ``apt-get download`` and unpack each to ``out_dir/<package>``; returns it.

    Needs apt-get and dpkg-deb (Debian or Ubuntu) and a network; nothing is installed and no root is needed.
    """
    out_dir = Path(out_dir)
    debs = out_dir / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if (out_dir / package).is_dir():
            continue
        _call(["apt-get", "download", package], cwd=debs)
        archives = sorted(debs.glob(f"{package}_*.deb"))
        unpacked = out_dir / f".{package}.part"
        _call(["dpkg-deb", "-x", str(archives[-1].resolve()), str(unpacked.resolve())], cwd=debs)
        unpacked.rename(out_dir / package)
    return out_dir


def _call(command: list[str], *, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise DatasetError(f"{command[0]} is not here; fetching needs Debian or Ubuntu. Any folders do.") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()[-1:]
        raise DatasetError(f"{' '.join(command)} failed ({said}); run apt-get update, or check the network.") from None
