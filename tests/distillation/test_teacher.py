"""The command that makes the micro teacher: what it trains on, how it is scored, what it leaves, what it refuses."""

import csv
import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.distillation import teacher
from lumen_lab.distillation.checkpoint import save_state
from lumen_lab.distillation.loop import CHECKPOINT, begin
from lumen_lab.distillation.recipe import Recipe
from lumen_lab.distillation.training import SupervisedTask
from lumen_lab.network import MICRO, load_network
from lumen_lab.specs import Manifest

SIDE_PX = 32


class Halves:
    """Scenes whose left half is the object, and a hair on the right of it; what they were asked for is kept."""

    hair = True
    asked = ()

    def __init__(self, sources, **asked):
        type(self).asked = (*self.asked, {"sources": sources, **asked})

    def __len__(self):
        return self.asked[-1]["length"]

    def __getitem__(self, index):
        matte = torch.zeros(1, SIDE_PX, SIDE_PX)
        matte[..., : SIDE_PX // 2] = 1
        if self.hair:
            matte[:, SIDE_PX // 2 - 1] = 1
        return {"image": torch.cat([matte] * 3), "matte": matte}


@pytest.fixture(autouse=True)
def halves(monkeypatch):
    monkeypatch.setattr(teacher, "ComposedScenes", Halves)
    monkeypatch.setattr(Halves, "asked", ())


class Says(nn.Module):
    """Logits by hand: the image's first channel, scaled and shifted; the right half can be left out."""

    config = SimpleNamespace(image_size=(SIDE_PX, SIDE_PX))

    def __init__(self, scale, shift, *, blind=False):
        super().__init__()
        self.scale, self.shift, self.blind = scale, shift, blind

    def forward(self, image):
        logits = self.scale * image[:, :1] + self.shift
        if self.blind:
            logits[..., SIDE_PX // 2 :] = -100
        return logits


def test_a_mask_that_is_right_and_one_that_is_wrong():
    right = teacher.validation_scores(Says(200.0, -100.0), "bank", scenes=3)
    assert right == pytest.approx({"s_measure": 1.0, "weighted_f": 1.0, "mae": 0.0, "thin_recall": 1.0}, abs=1e-6)
    wrong = teacher.validation_scores(Says(-200.0, 100.0), "bank", scenes=3)
    assert wrong["mae"] == 1.0 and wrong["thin_recall"] == 0.0 and wrong["s_measure"] < 0.1


def test_a_mask_without_the_hair_loses_thin_recall_alone():
    scores = teacher.validation_scores(Says(200.0, -100.0, blind=True), "bank", scenes=3)
    assert scores["mae"] == pytest.approx(16 / 32**2)
    assert scores["thin_recall"] < 0.2 and scores["s_measure"] > 0.9


def test_a_score_that_no_scene_defines_is_none_and_not_perfect(monkeypatch):
    monkeypatch.setattr(Halves, "hair", False)
    scores = teacher.validation_scores(Says(200.0, -100.0), "bank", scenes=2)
    assert scores["thin_recall"] is None and scores["mae"] == 0.0


def test_training_and_validation_use_different_splits_and_never_the_test_split():
    recipe = Recipe(steps=3, batch=2, seed=5)
    teacher.training_scenes("bank", recipe, (64, 96))
    teacher.validation_scores(Says(1.0, 0.0), "bank", scenes=1)
    trained, scored = Halves.asked
    assert trained == {"sources": "bank", "split": "train", "size": (64, 96), "length": 6, "seed": 5}
    assert scored == {"sources": "bank", "split": "validation", "size": (32, 32), "length": 1, "seed": 2}


class Index:
    """What a folder of sources says of itself."""

    def to_json(self):
        return {"pictures": ["a", "b", "c"]}

    def rows(self):
        return [{"kind": "cutout", "kept": 3, "train": 2}, {"left out": "blank"}]


@pytest.fixture
def trains(monkeypatch):
    """Stands in for the training: what it was asked, and golden weights as its result."""
    asked = []

    def train(network, scenes_at, recipe, out_dir, **options):
        asked.append({"network": network, "scenes_at": scenes_at, "recipe": recipe, "out_dir": out_dir, **options})
        return load_network("micro", "golden")

    monkeypatch.setattr(teacher, "train", train)
    monkeypatch.setattr(teacher, "open_sources", lambda folder: SimpleNamespace(index=Index(), folder=folder))
    return asked


def test_the_command_leaves_weights_that_load_and_say_where_they_come_from(tmp_path, trains):
    assert teacher.main(["sources", str(tmp_path), "--steps", "9", "--seed", "3", "--precision", "no"]) == 0
    (asked,) = trains
    assert (asked["network"].config, asked["out_dir"]) == (MICRO, tmp_path)
    assert (asked["recipe"].steps, asked["recipe"].seed, asked["recipe"].dropout) == (9, 3, 0.0)
    asked["scenes_at"]((64, 64))
    assert Halves.asked[-1]["split"] == "train" and Halves.asked[-1]["sources"].folder == "sources"
    asked["validate"](Says(1.0, 0.0))
    assert Halves.asked[-1]["split"] == "validation"
    manifest = Manifest.beside(tmp_path / "teacher.safetensors")
    made_from = dict(manifest.made_from)
    assert json.loads(made_from.pop("recipe"))["steps"] == 9
    assert made_from.pop("sources").startswith("3 cutouts (2 train); index sha256 ")
    assert made_from == {
        "network": "micro",
        "command": "python -m lumen_lab.distillation.teacher SOURCES OUT_DIR",
        "precision": "no",
        "processes": "1",
        "start": "random",
    }
    found, expected = (load_network("micro", w).state_dict() for w in (tmp_path / "teacher.safetensors", "golden"))
    assert all(torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-3) for name in expected)


def test_a_run_can_go_on_from_weights_and_says_which(tmp_path, trains):
    assert teacher.main(["sources", str(tmp_path / "a"), "--precision", "no"]) == 0
    start = tmp_path / "a" / "teacher.safetensors"
    assert teacher.main(["sources", str(tmp_path / "b"), "--precision", "no", "--start", str(start)]) == 0
    assert torch.equal(
        trains[1]["network"].bb.patch_embed.proj.bias, load_network("micro", start).bb.patch_embed.proj.bias
    )
    assert not torch.equal(
        trains[0]["network"].bb.patch_embed.proj.weight, trains[1]["network"].bb.patch_embed.proj.weight
    )
    manifests = [Manifest.beside(tmp_path / name / "teacher.safetensors") for name in "ab"]
    assert manifests[1].made_from["start"] == f"weights sha256 {manifests[0].files['teacher.safetensors']}"


def test_a_run_can_go_on_from_the_average_of_a_checkpoint(tmp_path):
    recipe = dataclasses.replace(teacher.RECIPE, steps=1)
    state = begin(SupervisedTask(load_network(MICRO, "golden"), None, recipe), tmp_path, Accelerator()).state
    save_state(tmp_path / CHECKPOINT, state, 1)
    found = teacher.first_network(str(tmp_path / CHECKPOINT), 0).state_dict()
    expected = load_network(MICRO, "golden").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": torch.zeros(2)}, "is a dict without averaged weights; give the checkpoint.pt of a run of the micro"),
        ({"average": {"a": torch.zeros(2)}}, "averages other weights than this network has; give the checkpoint.pt"),
        ({"average": None}, "averages other weights than this network has; give the checkpoint.pt"),
        ([1], "is a list without averaged weights; give the checkpoint.pt of a run of the micro network"),
        (b"junk", "cannot be read as a checkpoint ("),
    ],
)
def test_a_checkpoint_of_something_else_is_no_start_and_need_not_go(tmp_path, trains, capsys, content, words):
    path = tmp_path / CHECKPOINT
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert teacher.main(["sources", str(tmp_path / "out"), "--start", str(path), "--precision", "no"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{path} {words}") and err.count("\n") == 1 and not trains
    assert "remove" not in err and "or weights (.safetensors)." in err


def test_a_run_goes_on_only_with_what_it_began_with(tmp_path, monkeypatch, capsys):
    recipe = dataclasses.replace(teacher.RECIPE, batch=2, sizes=((0.0, (32, 32)),))
    monkeypatch.setattr(teacher, "RECIPE", recipe)
    monkeypatch.setattr(teacher, "ComposedScenes", ComposedScenes)
    monkeypatch.setattr(teacher, "open_sources", lambda name: drawn_sources(pictures=5, side_px=48, seed=len(name)))
    monkeypatch.setattr(teacher, "validation_scores", lambda model, bank: {"mae": 0.0})
    whole, out = teacher.train, tmp_path / "out"
    monkeypatch.setattr(teacher, "train", lambda *given, **named: whole(*given, stop_after=1, **named))
    arguments = ["--steps", "2", "--workers", "0", "--precision", "no"]
    assert teacher.main(["a", str(out), *arguments]) == 0
    monkeypatch.setattr(teacher, "train", whole)
    before = (out / CHECKPOINT).read_bytes()
    assert teacher.main(["other", str(out), *arguments]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint.pt was made with sources 5 foregrounds" in err and ", now 5 foregrounds" in err
    start = out / "teacher.safetensors"
    assert teacher.main(["a", str(out), *arguments, "--start", str(start)]) == 1
    assert "checkpoint.pt was made with start random, now weights sha256 " in capsys.readouterr().err.splitlines()[-1]
    assert (out / CHECKPOINT).read_bytes() == before
    saved = torch.load(out / CHECKPOINT, weights_only=True)
    assert saved.pop("made_from").keys() == {"start", "sources"}
    torch.save(saved, out / CHECKPOINT)  # as versions before this one wrote it
    assert teacher.main(["a", str(out), *arguments]) == 0


def test_the_start_is_named_as_it_was_before_the_training(tmp_path, trains, monkeypatch):
    assert teacher.main(["sources", str(tmp_path / "a"), "--precision", "no"]) == 0
    start, trained = tmp_path / "a" / "teacher.safetensors", teacher.train
    expected = f"weights sha256 {Manifest.beside(start).files[start.name]}"

    def train(*given, **named):
        start.unlink()
        return trained(*given, **named)

    monkeypatch.setattr(teacher, "train", train)
    assert teacher.main(["sources", str(tmp_path / "b"), "--precision", "no", "--start", str(start)]) == 0
    assert trains[-1]["made_from"]["start"] == expected
    assert Manifest.beside(tmp_path / "b" / "teacher.safetensors").made_from["start"] == expected


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_split_is_refused_before_training(tmp_path, trains, monkeypatch, capsys, split):
    bank = drawn_sources(pictures=5, side_px=48)
    sources = tuple(s for s in bank.index.sources if s.split != split)
    pixels = tuple(p for s, p in zip(bank.index.sources, bank.pixels, strict=True) if s.split != split)
    without = dataclasses.replace(bank, index=dataclasses.replace(bank.index, sources=sources), pixels=pixels)
    monkeypatch.setattr(teacher, "open_sources", lambda folder: without)
    monkeypatch.setattr(teacher, "ComposedScenes", ComposedScenes)
    assert teacher.main(["sources", str(tmp_path), "--precision", "no"]) == 1
    assert capsys.readouterr().err.startswith(f"The {split} split has no foreground") and not trains


def test_sizes_are_read_as_shares_and_pixels():
    given = teacher.parse_arguments(["a", "b", "--sizes", "0:96", "0.5:192"])
    assert given.sizes == [(0.0, (96, 96)), (0.5, (192, 192))]
    assert tuple(teacher.parse_arguments(["a", "b"]).sizes) == teacher.RECIPE.sizes


def test_the_first_weights_are_those_of_the_seed():
    first, again, other = (teacher.first_network(None, seed).state_dict() for seed in (1, 1, 2))
    name = "bb.patch_embed.proj.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "A recipe cannot have steps 0; 1 is the least."),
        (["--rate", "-1"], "A recipe cannot have learning_rate -1.0; it is a number above 0."),
        (["--sizes", "0:96", "nan:128"], "A recipe cannot have sizes from the shares [0.0, nan] of the steps on"),
        (["--start", "nowhere.safetensors"], "No weights at nowhere.safetensors; give a .safetensors"),
        (["--precision", "no"], "Precision no was asked for, and accelerate refuses it here: AcceleratorState has"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, trains, capsys, arguments, said):
    Accelerator(mixed_precision="bf16")  # which is then the precision of the process
    assert teacher.main(["sources", str(tmp_path), *arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count("\n") == 1
    assert not trains and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--threads", "0"],
        ["--workers", "-1"],
        ["--steps", "many"],
        ["--precision", "8"],
        ["--seed", "-1"],
        ["--seed", str(2**70)],
    ],
)
def test_an_argument_that_is_no_such_number_is_a_usage_error(tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        teacher.main(["sources", str(tmp_path), *arguments])
    assert exit.value.code == 2
    assert arguments[1] in capsys.readouterr().err.splitlines()[-1]


def test_missing_sources_and_a_folder_that_is_a_file_are_refused_in_one_line(tmp_path, capsys, monkeypatch):
    assert teacher.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert str(tmp_path / "none") in err and err.count("\n") == 1
    monkeypatch.setattr(teacher, "open_sources", lambda folder: pytest.fail("the sources were read"))
    (tmp_path / "out").rmdir()
    (tmp_path / "out").write_text("")
    assert teacher.main(["sources", str(tmp_path / "out"), "--precision", "no"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"Asked to write in {tmp_path / 'out'}, which cannot be") and err.count("\n") == 1


def test_the_folder_of_another_recipe_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(teacher, "open_sources", lambda folder: SimpleNamespace(index=Index()))
    recipe = dataclasses.replace(teacher.RECIPE, steps=7)
    task = SupervisedTask(teacher.first_network(None, 0), None, recipe)
    begun = begin(task, tmp_path, Accelerator(mixed_precision="no"))
    begun.keep(1)
    begun.close()
    capsys.readouterr()
    assert teacher.main(["sources", str(tmp_path), "--steps", "8", "--precision", "no"]) == 1
    err = capsys.readouterr().err
    assert "checkpoint.pt was made with another recipe (steps 7, now 8); go on as it began" in err
    assert err.count("\n") == 1


def test_the_command_from_drawn_sources_to_weights(tmp_path, monkeypatch, capsys):
    recipe = dataclasses.replace(teacher.RECIPE, batch=2, sizes=((0.0, (64, 64)),))
    monkeypatch.setattr(teacher, "RECIPE", recipe)
    monkeypatch.setattr(teacher, "ComposedScenes", ComposedScenes)
    monkeypatch.setattr(teacher, "open_sources", lambda folder: drawn_sources(pictures=10, side_px=64))
    monkeypatch.setattr(teacher, "validation_scores", partial(teacher.validation_scores, scenes=2))
    assert teacher.main(["sources", str(tmp_path), "--steps", "2", "--workers", "0"]) == 0
    (scored,) = csv.DictReader((tmp_path / "validation.csv").open())
    assert scored["step"] == "2" and list(scored) == ["step", *teacher.VALIDATED]
    assert 0 < float(scored["mae"]) < 1 and 0 < float(scored["s_measure"]) < 1
    manifest = Manifest.beside(tmp_path / "teacher.safetensors")
    assert manifest.made_from["precision"] == teacher.best_precision()
    assert "10 foregrounds (6 train), 10 backgrounds (6 train); index sha256" in manifest.made_from["sources"]
    with torch.no_grad():
        mask = load_network("micro", tmp_path / "teacher.safetensors")(torch.zeros(1, 3, 64, 64))
    assert mask.isfinite().all()
