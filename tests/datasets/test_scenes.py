"""Composed scenes: exact, deterministic, split as asked, with attributes that say what is there."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from lumen_lab.datasets import ATTRIBUTES, ComposedScenes, matte_attributes
from lumen_lab.errors import DatasetError
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD

SIZE = (64, 96)


def scenes(bank, **options):
    return ComposedScenes(bank, **{"size": SIZE, "length": 40, "seed": 3} | options)


def digest(item) -> str:
    return hashlib.sha256(item["image"].numpy().tobytes() + item["matte"].numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("kind", ["cutout", "thin", "shape"])
def test_the_matte_is_exact_before_the_camera(bank, kind):
    data = scenes(bank, mixture={kind: 1.0})
    for index in range(12):
        scene = data.scene(index)
        weight = scene.matte[..., None]
        expected = weight * scene.foreground + (1 - weight) * scene.background
        assert np.abs(scene.sharp_image - expected).max() < 1e-6
        assert scene.kind == kind
        assert 0.004 < scene.matte.mean() < 0.985
        assert np.abs(scene.foreground - scene.background)[scene.matte > 0.5].mean() > 0.01


def test_items_have_the_promised_types_and_ranges(bank):
    raw, normalised = scenes(bank, normalise=False), scenes(bank)
    for index in range(8):
        item = raw[index]
        assert item["image"].shape == (3, *SIZE)
        assert item["matte"].shape == (1, *SIZE)
        assert item["image"].dtype == item["matte"].dtype == torch.float32
        assert item["attributes"].dtype == torch.bool
        assert len(item["attributes"]) == len(ATTRIBUTES)
        for plane in (item["image"], item["matte"]):
            assert plane.min() >= 0
            assert plane.max() <= 1
        mean, std = torch.tensor(IMAGENET_MEAN)[:, None, None], torch.tensor(IMAGENET_STD)[:, None, None]
        assert torch.allclose(normalised[index]["image"], (item["image"] - mean) / std, atol=1e-5)


def test_a_scene_depends_on_seed_and_index_alone(bank):
    data = scenes(bank)
    late = digest(data[7])
    assert digest(data[3]) != late
    assert digest(scenes(bank, length=9)[7]) == late
    assert digest(scenes(bank, seed=4)[7]) != late
    with pytest.raises(IndexError, match="40 of 40"):
        data[40]


def test_another_process_draws_the_same_scene(bank, source_folder):
    program = (
        "import hashlib, sys; from lumen_lab.datasets import ComposedScenes\n"
        "data = ComposedScenes(sys.argv[1], size=(64, 96), length=40, seed=3)\n"
        "for i in (5, 2): item = data[i]; print(hashlib.sha256("
        "item['image'].numpy().tobytes() + item['matte'].numpy().tobytes()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(source_folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = scenes(bank)
    assert done.stdout.split() == [digest(data[5]), digest(data[2])]


def test_workers_load_the_same_batches(bank):
    data = scenes(bank, length=8)
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    loaded = torch.cat([batch["image"] for batch in loader])
    assert torch.equal(loaded, torch.stack([data[k]["image"] for k in range(8)]))


def test_splits_draw_from_their_own_pictures_only(bank):
    used = {split: scenes(bank, split=split) for split in ("train", "validation", "test")}
    for kind in ("foregrounds", "backgrounds"):
        names = [{p.tobytes() for group in getattr(data, kind) for p in group} for data in used.values()]
        assert all(names)
        assert sum(map(len, names)) == len(set.union(*names))


def test_the_mixture_chooses_the_kinds(bank):
    drawn = {scenes(bank).scene(k).kind for k in range(40)}
    assert {"cutout"} < drawn <= {"cutout", "thin", "shape"}
    assert {scenes(bank, mixture={"thin": 1}).scene(k).kind for k in range(6)} == {"thin"}


def test_wrong_requests_are_refused_with_what_was_asked(bank, tmp_path):
    with pytest.raises(DatasetError, match="'hair'"):
        scenes(bank, mixture={"hair": 1.0})
    with pytest.raises(DatasetError, match="at least 32 px"):
        scenes(bank, size=(16, 64))
    with pytest.raises(DatasetError, match="'holdout'"):
        scenes(bank, split="holdout")
    with pytest.raises(DatasetError, match="backgrounds/"):
        scenes(tmp_path)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("seed", (-1, None, 1.5, "3")),
        ("length", (0, 2.5, None, float("inf"))),
        ("size", (64, (64,), (64.5, 64), (float("nan"), 64), (float("inf"), 64), "ab", None)),
        ("mixture", ({}, None, "thin", ["thin"], {"thin": "1"}, {"thin": 0}, {"thin": -1, "shape": 2})),
        ("mixture", ({"thin": float("nan")}, {"thin": float("inf")}, {"thin": 1e308, "shape": 1e308}, {"thin": None})),
    ],
)
def test_what_would_fail_at_some_scene_is_refused_when_the_set_is_made(bank, option, values):
    for value in values:
        with pytest.raises(DatasetError, match=f"{option}.* was asked for; give"):
            scenes(bank, **{option: value})


def test_numbers_of_any_kind_make_the_same_scenes(bank):
    plain = scenes(bank, mixture={"thin": 1.0, "shape": 0.5})
    shares = {"thin": np.float32(1), "shape": np.float64(0.5)}
    numpy = scenes(bank, size=[64.0, np.int64(96)], length=np.int64(40), seed=np.uint8(3), mixture=shares)
    assert digest(numpy[2]) == digest(plain[2])
    assert numpy.identity() == plain.identity()


def test_scenes_reach_the_border_fill_the_frame_and_stay_small(bank):
    flags = np.stack([item["attributes"].numpy() for item in scenes(bank, length=150)])
    share = dict(zip(ATTRIBUTES, flags.mean(0)))
    assert share["touching_border"] > 0.15
    assert share["large"] > 0.05
    assert share["small"] > 0.05
    assert share["multiple"] > 0.05
    assert share["thin"] > 0.03


def constructed(**parts):
    """A matte and an image of 100×100: a square of 30 in the middle, changed by ``parts``."""
    matte, image = np.zeros((100, 100), np.float32), np.full((100, 100, 3), 0.2, np.float32)
    matte[parts.get("rows", slice(35, 65)), parts.get("columns", slice(35, 65))] = 1
    for rows, columns in parts.get("cuts", ()):
        matte[rows, columns] = 0
    image += matte[..., None] * parts.get("contrast", 0.6)
    return matte, image


def true_flags(matte, image, **options):
    return {name for name, value in matte_attributes(matte, image, **options).items() if value}


def test_a_plain_square_has_no_attribute():
    assert true_flags(*constructed()) == set()


@pytest.mark.parametrize(
    ("parts", "flags"),
    [
        ({"rows": slice(35, 37)}, {"thin", "small"}),
        ({"rows": slice(40, 55), "columns": slice(40, 55)}, {"small"}),
        ({"rows": slice(5, 90), "columns": slice(5, 90)}, {"large"}),
        ({"columns": slice(0, 30)}, {"touching_border"}),
        ({"rows": slice(0, 100)}, {"touching_border"}),
        ({"cuts": [(slice(45, 50), slice(45, 50))]}, {"hole"}),
        ({"cuts": [(slice(45, 50), slice(45, 70))]}, set()),
        ({"contrast": 0.03}, {"low_contrast"}),
    ],
)
def test_attributes_of_constructed_mattes(parts, flags):
    assert true_flags(*constructed(**parts)) == flags


def test_soft_edges_and_several_objects_are_seen():
    matte, image = constructed()
    rows, columns = np.mgrid[:100, :100]
    soft = np.clip((28 - np.hypot(rows - 50, columns - 50)) / 12 + 0.5, 0, 1).astype(np.float32)
    assert true_flags(soft, 0.2 + 0.6 * soft[..., None].repeat(3, 2)) == {"soft_edge"}
    assert true_flags(matte, image, objects=2) == {"multiple"}


def test_attributes_are_defined_for_empty_and_full_mattes():
    image = np.full((50, 50, 3), 0.5, np.float32)
    assert true_flags(np.zeros((50, 50), np.float32), image) == {"small"}
    assert true_flags(np.ones((50, 50), np.float32), image) == {"large", "touching_border"}
