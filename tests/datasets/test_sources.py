"""Scanning, filtering, splitting and fetching the sources of composed scenes."""

import json
import os
import shutil
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lumen_lab.datasets import sources
from lumen_lab.datasets.debian import fetch_debian_sources
from lumen_lab.datasets.sources import SourceIndex, assign_split, clean_edge_colours, group_key, open_sources
from lumen_lab.errors import DatasetError
from tests.datasets.pictures import cut_out, disc_alpha, grainy, write_folder


def dropped_for(tmp_path, pixels, *, kind="foreground", name="odd.png"):
    """The reason for which one more picture in a good folder is dropped, or None."""
    root = write_folder(tmp_path / "one", foregrounds=1, backgrounds=1)
    Image.fromarray(pixels).save(root / f"{kind}s" / name)
    index = open_sources(root, cache=False).index
    assert index.found[kind] == 2
    return next((reason for reason in index.dropped if reason.startswith(kind)), None)


def test_drawn_photographs_are_kept_and_counted(bank):
    assert bank.index.found == {"foreground": 40, "background": 40}
    assert bank.index.kept == bank.index.found
    assert bank.index.dropped == {}
    assert all(p.dtype == np.uint8 for p in bank.pixels)


def test_no_picture_and_no_group_is_in_two_splits(bank):
    for kind in ("foreground", "background"):
        homes = {}
        for source in bank.index.sources:
            if source.kind == kind:
                homes.setdefault(source.group, set()).add(source.split)
        assert all(len(splits) == 1 for splits in homes.values())
        per_split = [{p.tobytes() for group in bank.select(kind, s) for p in group} for s in sources.SPLITS]
        assert sum(map(len, per_split)) == len(set.union(*per_split)) == 40


def test_the_split_of_a_picture_does_not_depend_on_the_others(bank, source_folder, tmp_path):
    few = tmp_path / "few"
    shutil.copytree(source_folder, few, ignore=shutil.ignore_patterns("*[02468].png", ".scene_cache"))
    known = {source.name: source.split for source in bank.index.sources}
    found = open_sources(few, cache=False).index.sources
    assert 0 < len(found) < len(known)
    assert {source.name: source.split for source in found}.items() <= known.items()


def test_split_shares_are_near_what_is_asked():
    splits = [assign_split(f"group{k}", kind="foreground") for k in range(4000)]
    validation, test = sources.HELD_OUT["foreground"]
    assert abs(splits.count("validation") / 4000 - validation) < 0.02
    assert abs(splits.count("test") / 4000 - test) < 0.02


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("mine/cat.png", "mine/cat_mirror.png", True),
        ("mine/cat.png", "mine/cat_640x480.png", True),
        ("mine/IMG_0001.png", "mine/IMG_0002.png", False),
        ("mine/cat.png", "yours/cat.png", False),
        ("tuxpaint-stamps-default/a/tank-1.png", "tuxpaint-stamps-default/a/tank_two_mirror.png", True),
        ("tuxpaint-stamps-default/a/tank.png", "tuxpaint-stamps-default/a/car.png", False),
        (
            "plasma-workspace-wallpapers/Kite/contents/images/640x480.jpg",
            "plasma-workspace-wallpapers/Kite/contents/images_dark/1280x1024.jpg",
            True,
        ),
    ],
)
def test_variants_share_a_group(one, other, same):
    assert (group_key(one) == group_key(other)) is same


def test_a_mirrored_twin_is_dropped(tmp_path):
    twin = cut_out(0)[:, ::-1]
    assert dropped_for(tmp_path, twin) == "foreground: twin of another"


def test_flat_colours_are_a_drawing(tmp_path):
    drawing = np.zeros((80, 80, 4), np.uint8)
    drawing[..., :3] = np.kron(np.arange(16).reshape(4, 4) * 15, np.ones((20, 20)))[..., None]
    drawing[..., 3] = disc_alpha((80, 80), 38)
    assert "drawing" in dropped_for(tmp_path, drawing)


def test_useless_alpha_is_dropped(tmp_path):
    opaque, empty = cut_out(7), cut_out(7)
    opaque[..., 3], empty[..., 3] = 255, 0
    assert dropped_for(tmp_path / "a", opaque) == "foreground: alpha nearly all opaque"
    assert dropped_for(tmp_path / "b", empty) == "foreground: blank"
    assert dropped_for(tmp_path / "c", opaque[..., :3]) == "foreground: no alpha channel"


def test_tiny_and_blank_pictures_are_dropped(tmp_path):
    assert dropped_for(tmp_path / "a", cut_out(7, (30, 30), 14)) == "foreground: tiny"
    assert dropped_for(tmp_path / "b", grainy((100, 300), 7), kind="background") == "background: tiny"
    blank = np.full((300, 300, 3), 200, np.uint8)
    assert dropped_for(tmp_path / "c", blank, kind="background") == "background: blank"


def test_a_broken_file_is_counted(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=1, backgrounds=1)
    (root / "foregrounds" / "broken.png").write_bytes(b"\x89PNG not at all")
    assert open_sources(root, cache=False).index.dropped == {"foreground: unreadable, or above the pixel limit": 1}


def test_one_huge_picture_does_not_end_the_scan(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=1, backgrounds=1)
    # Headers alone: the smaller is above the library's limit, the larger above the one at which Pillow raises.
    for name, side_px in (("large", 12_000), ("bomb", 60_000)):
        header = struct.pack(">4sIIBBBBB", b"IHDR", side_px, side_px, 8, 6, 0, 0, 0)
        chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
        (root / "foregrounds" / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)
    index = open_sources(root, cache=False).index
    assert index.dropped == {"foreground: unreadable, or above the pixel limit": 2}
    assert index.kept["foreground"] == 1


def test_pictures_are_turned_as_their_exif_says(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=0, backgrounds=0)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its left side
    stored = {"foreground": cut_out(5, (64, 90)), "background": grainy((240, 300), 5)}
    for kind, pixels in stored.items():
        Image.fromarray(pixels).save(root / f"{kind}s" / "turned.png", exif=exif)
    bank = open_sources(root, cache=False)
    kept = {source.kind: pixels for source, pixels in zip(bank.index.sources, bank.pixels, strict=True)}
    assert np.array_equal(kept["background"], np.rot90(stored["background"], -1))
    assert kept["foreground"].shape[0] == kept["foreground"].shape[1] == 60
    solid = np.rot90(stored["foreground"][2:62, 15:75], -1)
    inside = solid[..., 3] == 255
    assert np.array_equal(kept["foreground"][inside], solid[inside])


def test_decoded_pixels_are_those_of_pillow_s_own_thumbnail(tmp_path):
    """A large JPEG is decoded at a fraction of its size: the same pixels for whoever scans the same folder."""
    root = write_folder(tmp_path / "one", foregrounds=0, backgrounds=0)
    Image.fromarray(cut_out(5, (500, 700), 240)).save(root / "foregrounds" / "large.png")
    Image.fromarray(grainy((2100, 2300), 5)).save(root / "backgrounds" / "large.jpg", quality=90)
    bank = open_sources(root, cache=False)
    kept = {source.kind: pixels for source, pixels in zip(bank.index.sources, bank.pixels, strict=True)}
    with Image.open(root / "backgrounds" / "large.jpg") as image:
        image.draft("RGB", (1024, 1024))
        image.load()
        assert image.size == (1150, 1050)
        picture = image.copy()
    picture.thumbnail((512, 512), Image.Resampling.BOX)
    assert np.array_equal(kept["background"], np.array(picture))
    picture = Image.fromarray(cut_out(5, (500, 700), 240))
    picture.thumbnail((384, 384), Image.Resampling.BOX)
    alpha = np.array(picture)[..., 3]
    rows, columns = np.nonzero(alpha > 8)
    window = alpha[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert np.array_equal(kept["foreground"][..., 3], window)


def test_names_with_spaces_and_any_case_are_read(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=1, backgrounds=1)
    Image.fromarray(cut_out(50)).save(root / "foregrounds" / "A cat #2.PNG", "PNG")
    assert open_sources(root, cache=False).index.kept["foreground"] == 2


def test_a_wrong_folder_says_what_was_asked_and_found(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(DatasetError, match=r"foregrounds/.*python -m lumen_lab.datasets.sources") as caught:
        open_sources(tmp_path)
    assert "photos" in str(caught.value)
    with pytest.raises(DatasetError, match="no such folder"):
        open_sources(tmp_path / "absent")


def test_nothing_usable_says_why(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=1, backgrounds=0)
    Image.fromarray(np.zeros((300, 300, 3), np.uint8)).save(root / "backgrounds" / "black.png")
    with pytest.raises(DatasetError, match="background: blank"):
        open_sources(root)


def test_an_empty_split_is_an_error(tmp_path):
    bank = open_sources(write_folder(tmp_path / "one", foregrounds=1, backgrounds=1), cache=False)
    empty = next(split for split in sources.SPLITS if split != bank.index.sources[0].split)
    with pytest.raises(DatasetError, match=f"{empty} split has no"):
        bank.select(bank.index.sources[0].kind, empty)
    with pytest.raises(DatasetError, match="'holdout'"):
        bank.select("foreground", "holdout")


def test_the_cache_gives_the_same_bank_and_a_damaged_one_is_made_again(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=3, backgrounds=3)
    first = open_sources(root)
    (kept,) = (root / ".scene_cache").iterdir()
    again = open_sources(root)
    assert again.index == first.index
    assert all(np.array_equal(a, b) for a, b in zip(first.pixels, again.pixels, strict=True))
    kept.write_bytes(kept.read_bytes()[:1000])
    assert open_sources(root).index == first.index


@pytest.mark.parametrize(("offset", "byte"), [(8, 99), (6, 1)], ids=["unknown method", "asks for a password"])
def test_a_cache_whose_zip_says_what_it_is_not_is_made_again(source_folder, tmp_path, offset, byte):
    root = shutil.copytree(source_folder, tmp_path / "copy", ignore=shutil.ignore_patterns(".scene_cache"))
    bank = open_sources(root)
    (path,) = (root / ".scene_cache").iterdir()
    stored = bytearray(path.read_bytes())
    stored[offset] = byte
    stored[stored.index(b"PK\x01\x02") + offset + 2] = byte  # the directory says the same of the first member
    path.write_bytes(stored)
    assert sources._load_bank(path) is None
    assert open_sources(root).index == bank.index


@pytest.mark.skipif(os.name == "nt", reason="making links needs a privilege on Windows")
class TestLinks:
    def linked(self, source_folder, root):
        for kind in ("foregrounds", "backgrounds"):
            (root / kind).mkdir(parents=True)
            for number, path in enumerate(sorted((source_folder / kind).iterdir())):
                store = root / "store" / kind / f"{number:03d}"
                store.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, store)
                (root / kind / path.name).symlink_to(store)
        return root

    def test_linked_files_are_pictures_of_the_link_s_name(self, source_folder, bank, tmp_path):
        found = open_sources(self.linked(source_folder, tmp_path / "set"))
        assert found.index == bank.index
        assert all(map(np.array_equal, found.pixels, bank.pixels))

    def test_a_link_to_nothing_is_counted(self, source_folder, tmp_path):
        root = self.linked(source_folder, tmp_path / "set")
        (root / "store" / "foregrounds" / "003").unlink()
        index = open_sources(root).index
        assert (index.found["foreground"], index.kept["foreground"]) == (40, 39)
        assert index.dropped == {"foreground: unreadable, or above the pixel limit": 1}

    def test_linked_folders_are_not_entered_and_the_error_says_so(self, source_folder, tmp_path):
        for kind in ("foregrounds", "backgrounds"):
            (tmp_path / kind).mkdir()
            (tmp_path / kind / "all").symlink_to(source_folder / kind)
        with pytest.raises(DatasetError, match="'foreground': 0, .*Links to folders are not followed"):
            open_sources(tmp_path)

    def test_second_names_inside_a_package_stay_out(self, tmp_path):
        package, inner = next(iter(sources.FOREGROUND_PACKAGES.items()))
        folder = tmp_path / package / inner
        folder.mkdir(parents=True)
        (tmp_path / "backgrounds").mkdir()
        Image.fromarray(cut_out(0)).save(folder / "thing.png")
        (folder / "a-second-name.png").symlink_to("thing.png")
        assert [Path(name).name for _, name in sources.list_candidates(tmp_path)] == ["thing.png"]


def test_a_changed_folder_is_scanned_again(tmp_path):
    root = write_folder(tmp_path / "one", foregrounds=3, backgrounds=3)
    open_sources(root)
    Image.fromarray(cut_out(99)).save(root / "foregrounds" / "new.png")
    assert open_sources(root).index.kept["foreground"] == 4


def test_the_index_is_kept_as_json(bank, tmp_path):
    assert SourceIndex.load(bank.index.save(tmp_path / "index.json")) == bank.index
    rows = bank.index.rows()
    assert rows[0]["train"] + rows[0]["validation"] + rows[0]["test"] == 40


def test_edge_colours_lose_the_old_ground():
    pixels = cut_out(3)
    half = (pixels[..., 3] > 0) & (pixels[..., 3] < 245)
    pixels[half, :3] = (255, 0, 255)
    cleaned = clean_edge_colours(pixels)
    assert not (cleaned[half, :3] == (255, 0, 255)).all(-1).any()
    assert np.array_equal(cleaned[..., 3], pixels[..., 3])
    assert np.array_equal(cleaned[pixels[..., 3] >= 245], pixels[pixels[..., 3] >= 245])


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def test_fetching_unpacks_each_package_beside_the_others(tmp_path, monkeypatch):
    bins, out = tmp_path / "bin", tmp_path / "out"
    bins.mkdir()
    stand_in(bins, "apt-get", '[ "$1" = download ] && touch "$2_1.0_all.deb" && echo "$2" >> asked.txt')
    stand_in(bins, "dpkg-deb", 'mkdir -p "$3/usr/share" && basename "$2" > "$3/usr/share/from.txt"')
    monkeypatch.setenv("PATH", f"{bins}{os.pathsep}{os.environ['PATH']}")
    fetch_debian_sources(out, packages=("pictures", "photographs"))
    fetch_debian_sources(out, packages=("pictures",))
    assert (out / "pictures/usr/share/from.txt").read_text() == "pictures_1.0_all.deb\n"
    assert (out / "photographs/usr/share/from.txt").is_file()
    assert (out / "debs/asked.txt").read_text().split() == ["pictures", "photographs"]


def test_a_failed_fetch_says_what_would_do(tmp_path, monkeypatch):
    stand_in(tmp_path, "apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DatasetError, match=r"Unable to locate package.*apt-get update"):
        fetch_debian_sources(tmp_path / "out", packages=("pictures",))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(DatasetError, match="apt-get is not here"):
        fetch_debian_sources(tmp_path / "out", packages=("pictures",))


def test_the_command_prints_counts_and_writes_the_index(source_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "fetch_debian_sources", lambda out_dir: source_folder)
    assert sources.main([str(tmp_path)]) == 0
    assert "kept 40" in capsys.readouterr().out
    assert json.loads((tmp_path / "index.json").read_text())["kept"] == {"foreground": 40, "background": 40}
    assert sources.main([]) == 2
