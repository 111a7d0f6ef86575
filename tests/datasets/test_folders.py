"""Folders of images and masks as a data set: what is read, at which size, and what is refused."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from lumen_lab.datasets import ATTRIBUTES, PairedFolder, folders
from lumen_lab.datasets.folders import count_objects
from lumen_lab.errors import DatasetError, ImageError
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD, resize_image, resize_mask
from tests.datasets.pictures import grainy

SHAPES = {"1#Bag#x y": (40, 56), "tall": (64, 33)}


def disc(shape, share=0.3):
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    distance = np.hypot(rows - shape[0] / 2, columns - shape[1] / 2)
    return np.uint8(np.clip(share * min(shape) - distance + 0.5, 0, 1) * 255)


def write(root, name, pixels, **options):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(root / name, **options)


@pytest.fixture
def folder(tmp_path):
    for seed, (stem, shape) in enumerate(SHAPES.items()):
        write(tmp_path, f"im/{stem}.png", grainy(shape, seed))
        write(tmp_path, f"gt/{stem}.PNG", disc(shape))
    return tmp_path


def test_a_sample_is_the_files_themselves(folder):
    data = PairedFolder(folder, size=(32, 32))
    assert len(data) == 2
    for k, (stem, shape) in enumerate(SHAPES.items()):
        sample = data.sample(k)
        assert sample.name == stem
        assert np.array_equal(sample.image, grainy(shape, k))
        assert np.array_equal(np.rint(sample.matte * 255), disc(shape))
        assert (sample.image.dtype, sample.matte.dtype) == (np.uint8, np.float32)
        assert list(sample.attributes) == list(ATTRIBUTES)


def test_an_item_is_resized_by_the_one_resampler_and_normalised(folder):
    raw, normalised = (PairedFolder(folder, size=(48, 32), normalise=n)[1] for n in (False, True))
    sample = PairedFolder(folder).sample(1)
    image = torch.from_numpy(resize_image(sample.image, size=(48, 32))).permute(2, 0, 1) / 255
    assert torch.equal(raw["image"], image)
    assert torch.equal(raw["matte"][0], torch.from_numpy(resize_mask(sample.matte, size=(48, 32))))
    mean, std = torch.tensor(IMAGENET_MEAN)[:, None, None], torch.tensor(IMAGENET_STD)[:, None, None]
    assert torch.allclose(normalised["image"], (image - mean) / std, atol=1e-5)
    assert raw["attributes"].dtype == torch.bool
    assert (raw["index"], raw["name"]) == (1, "tall")
    own = PairedFolder(folder)[1]
    assert own["image"].shape == (3, *SHAPES["tall"])
    assert own["matte"].shape == (1, *SHAPES["tall"])


def test_a_loader_batches_them_in_worker_processes(folder):
    data = PairedFolder(folder, size=(32, 32))
    (batch,) = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
    assert torch.equal(batch["image"], torch.stack([data[0]["image"], data[1]["image"]]))
    assert batch["name"] == list(SHAPES)


def test_the_identity_follows_names_and_bytes_but_not_the_place(folder):
    data = PairedFolder(folder)
    assert [data.name(k) for k in (0, 1)] == list(SHAPES)
    known = data.identity()
    moved = folder.rename(folder.with_name("elsewhere"))
    assert PairedFolder(moved, size=(32, 32)).identity() == known
    assert PairedFolder(moved, from_alpha=True).identity() != known
    mask = moved / "gt" / "tall.PNG"
    before = mask.read_bytes()
    write(moved, "gt/tall.PNG", 255 - disc(SHAPES["tall"]))
    assert PairedFolder(moved).identity() != known
    mask.write_bytes(before)
    assert PairedFolder(moved).identity() == known
    for side in ("im/tall.png", "gt/tall.PNG"):
        (moved / side).rename((moved / side).with_stem("high"))
    assert PairedFolder(moved).identity() != known


@pytest.mark.parametrize("name", ["folders.py", "attributes.py"])
def test_the_identity_sees_the_code_that_reads(folder, tmp_path, monkeypatch, name):
    known, code = PairedFolder(folder).identity(), folders.SAMPLE_CODE
    changed = tmp_path / name
    changed.write_bytes(next(path for path in code if path.name == name).read_bytes() + b"#")
    monkeypatch.setattr(folders, "SAMPLE_CODE", tuple(changed if path.name == name else path for path in code))
    found = PairedFolder(folder).identity()
    assert {key for key in known if known[key] != found[key]} == {"sample code"}


def test_every_form_of_mask_is_read_alike(tmp_path):
    shape = (30, 40)
    hard = disc(shape) // 128 * 255
    grey = Image.fromarray(hard)
    forms = {
        "l": grey,
        "rgb": grey.convert("RGB"),
        "rgba": grey.convert("RGBA"),
        "bit": grey.convert("1"),
        "palette": grey.convert("P"),
        "deep": Image.fromarray(hard.astype(np.uint16) * 257),
    }
    for stem, mask in forms.items():
        write(tmp_path, f"images/{stem}.jpg", grainy(shape, 1))
        (tmp_path / "masks").mkdir(exist_ok=True)
        mask.save(tmp_path / "masks" / f"{stem}.png")
    data = PairedFolder(tmp_path)
    assert len(data) == len(forms)
    for k in range(len(data)):
        assert np.array_equal(data.sample(k).matte, hard / np.float32(255)), data.sample(k).name


def test_the_mask_may_be_the_alpha_of_a_cutout(tmp_path):
    shape = (30, 40)
    write(tmp_path, "images/a.jpg", grainy(shape, 1))
    write(tmp_path, "masks/a.png", np.dstack([grainy(shape, 1), disc(shape)]))
    assert np.array_equal(PairedFolder(tmp_path, from_alpha=True).sample(0).matte, disc(shape) / np.float32(255))
    with pytest.raises(ImageError, match=r"masks/a\.png has both a picture and a varying alpha"):
        PairedFolder(tmp_path).sample(0)


def test_a_mask_of_another_size_is_refused_with_both_names(folder):
    write(folder, "gt/tall.PNG", disc((63, 33)))
    data = PairedFolder(folder, size=(32, 32))
    for read in (data.sample, data.__getitem__):
        with pytest.raises(DatasetError, match=r"im/tall\.png is 64 × 33 px, .*gt/tall\.PNG is 63 × 33 .*export"):
            read(1)
    assert data.sample(0).name == "1#Bag#x y"


def test_orientation_is_applied_before_sizes_are_compared(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    for stem, shape in (("upright", (50, 30)), ("unturned", (30, 50))):
        write(tmp_path, f"images/{stem}.jpg", grainy((30, 50), 1), exif=turned)
        write(tmp_path, f"masks/{stem}.png", disc(shape))
    data = PairedFolder(tmp_path)
    assert data.sample(1).image.shape[:2] == data.sample(1).matte.shape == (50, 30)
    with pytest.raises(DatasetError, match=r"unturned\.jpg is 50 × 30 .* 30 × 50 .*was the mask drawn on the unturned"):
        data.sample(0)


def test_what_cannot_be_read_is_named(folder):
    (folder / "im" / "tall.png").write_bytes(b"not a picture")
    (folder / "gt" / "1#Bag#x y.PNG").write_bytes(b"")
    data = PairedFolder(folder)
    with pytest.raises(ImageError, match=r"im/tall\.png is not an image"):
        data[1]
    with pytest.raises(ImageError, match=r"gt/1#Bag#x y\.PNG is empty"):
        data.sample(0)


def test_orphans_stop_the_data_set_or_are_warned_of(folder):
    (folder / "gt" / "tall.PNG").unlink()
    with pytest.raises(DatasetError, match=r"1 image without a mask: im/tall\.png"):
        PairedFolder(folder)
    with pytest.warns(UserWarning, match=r"1 image without a mask: im/tall\.png"):
        data = PairedFolder(folder, on_orphans="report")
    assert len(data) == 1
    (folder / "gt" / "1#Bag#x y.PNG").rename(folder / "gt" / "z.png")
    with pytest.raises(DatasetError, match="0 paired.*needs a pair"):
        PairedFolder(folder, on_orphans="report")


def test_wrong_requests_are_refused_with_what_was_asked(folder):
    for size in (32, (0, 32), (32, 32, 3), (31.5, 32)):
        with pytest.raises(DatasetError, match="size=.*give .H, W."):
            PairedFolder(folder, size=size)
    with pytest.raises(IndexError, match="pair 2 of 2"):
        PairedFolder(folder).sample(2)


def test_objects_are_the_parts_above_half_a_percent_of_the_frame(tmp_path):
    matte = np.zeros((100, 100), np.float32)
    matte[10:30, 10:30] = 1
    matte[30:40, 30:40] = 1  # touches the first at a corner
    assert count_objects(matte) == 1
    matte[60:70, 60:65] = 1  # 50 of 10 000 pixels
    assert count_objects(matte) == 1
    matte[70, 60] = 1
    assert count_objects(matte) == 2
    assert count_objects(np.zeros((9, 9), np.float32)) == 0
    write(tmp_path, "im/two.png", grainy((100, 100), 1))
    write(tmp_path, "gt/two.png", np.uint8(matte * 255))
    data = PairedFolder(tmp_path)
    assert data.sample(0).attributes["multiple"]
    assert data[0]["attributes"][ATTRIBUTES.index("multiple")]
    assert not data.sample(0).attributes["large"]


def test_contrast_is_judged_on_the_scale_of_composed_scenes(tmp_path):
    """A pale square on a background 30 levels darker: 0.2 apart as the root of three squares, not low."""
    hard = np.zeros((50, 50), np.uint8)
    hard[15:35, 15:35] = 255
    for stem, step in (("faint", 5), ("seen", 30)):
        write(tmp_path, f"im/{stem}.png", np.repeat(np.uint8(120 + step * (hard[..., None] > 0)), 3, 2))
        write(tmp_path, f"gt/{stem}.png", hard)
    data = PairedFolder(tmp_path)
    assert [data.sample(k).attributes["low_contrast"] for k in (0, 1)] == [True, False]


def test_class_indices_do_not_pass_for_pictures_without_foreground(folder):
    write(folder, "gt/tall.PNG", np.uint8(disc(SHAPES["tall"]) > 127) * np.uint8(2))
    with pytest.raises(ImageError, match="tall.PNG holds only the levels 0, 2"):
        PairedFolder(folder).sample(1)


@pytest.mark.skipif(os.name == "nt", reason="making links needs a privilege on Windows")
def test_a_file_that_cannot_be_read_is_named_by_the_identity(folder, monkeypatch):
    (folder / "im" / "tall.png").unlink()
    (folder / "im" / "tall.png").symlink_to(".annex/gone")
    data = PairedFolder(folder)
    with pytest.raises(DatasetError, match="tall.png, a link to .annex/gone, cannot be read .No such file"):
        data.identity()

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folders, "file_sha256", closed)
    with pytest.raises(DatasetError, match=r"1#Bag#x y.png, cannot be read .Permission denied"):
        data.identity()


@pytest.mark.parametrize("size", [5, (5,), (0, 5), (5.5, 5), (float("inf"), 5), (float("nan"), 5), "55", (True, 5)])
def test_a_size_that_is_none_is_refused(folder, size):
    with pytest.raises(DatasetError, match="size=.* was asked for; give .H, W., two whole numbers"):
        PairedFolder(folder, size=size)
