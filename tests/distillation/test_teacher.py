"""The command that makes the micro teacher: what it trains on, how it is scored, what it leaves."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lumen_lab.distillation import teacher
from lumen_lab.distillation.training import Recipe
from lumen_lab.network import MICRO, load_network
from lumen_lab.specs import Manifest


class Halves:
    """Scenes whose left half is the object; what they were asked for is kept."""

    def __init__(self, sources, **asked):
        self.asked = {"sources": sources, **asked}

    def __getitem__(self, index):
        matte = torch.zeros(1, 8, 8)
        matte[..., :4] = 1
        return {"image": torch.cat([matte] * 3), "matte": matte}


@pytest.fixture(autouse=True)
def halves(monkeypatch):
    monkeypatch.setattr(teacher, "ComposedScenes", Halves)


class Says(nn.Module):
    """Logits by hand: the image's first channel, scaled and shifted."""

    def __init__(self, scale, shift):
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, image):
        return self.scale * image[:, :1] + self.shift


@pytest.mark.parametrize(
    ("model", "mae", "iou"),
    [
        (Says(200.0, -100.0), 0.0, 1.0),
        (Says(-200.0, 100.0), 1.0, 0.0),
        (Says(0.0, 100.0), 0.5, 0.5),  # everything is the object
        (Says(0.0, -100.0), 0.5, 0.0),
    ],
)
def test_held_out_scores_by_hand(model, mae, iou):
    assert teacher.held_out_scores(model, "sources", scenes=4) == pytest.approx({"mae": mae, "iou": iou})


def test_training_and_scoring_use_different_splits(monkeypatch):
    recipe = Recipe(steps=3, batch=2, seed=5)
    asked = teacher.training_scenes("sources", recipe, (64, 96)).asked
    assert asked == {"sources": "sources", "split": "train", "size": (64, 96), "length": 6, "seed": 5}
    made = []
    monkeypatch.setattr(teacher, "ComposedScenes", lambda *given, **more: made.append(more) or Halves(*given, **more))
    teacher.held_out_scores(Says(1.0, 0.0), "sources", scenes=1)
    assert (made[0]["split"], made[0]["size"]) == ("test", MICRO.image_size)


def test_the_command_leaves_weights_that_load_and_say_where_they_come_from(tmp_path, monkeypatch, capsys):
    trained = load_network("micro", "golden")
    trains = []
    monkeypatch.setattr("sys.argv", ["teacher", "sources", str(tmp_path), "--threads", "1"])
    monkeypatch.setattr(teacher, "train", lambda network, *given: trains.append((network.config, *given)) or trained)
    monkeypatch.setattr(teacher, "held_out_scores", lambda model, sources: {"mae": 0.0625, "iou": 0.5})
    monkeypatch.setattr(teacher, "open_sources", lambda sources: SimpleNamespace(index=Index()))
    teacher.main()
    ((config, scenes_at, recipe, out_dir),) = trains
    assert (config, recipe, out_dir) == (MICRO, teacher.RECIPE, str(tmp_path))
    assert scenes_at((64, 64)).asked["split"] == "train"
    path = tmp_path / "teacher.safetensors"
    manifest = Manifest.beside(path)
    assert json.loads(manifest.made_from["recipe"])["steps"] == teacher.RECIPE.steps
    assert manifest.made_from["sources"].startswith("3 cutouts (2 train); index sha256 ")
    assert "mae 0.0625, iou 0.5000" in str(manifest.made_from)
    found, expected = load_network("micro", path).state_dict(), trained.state_dict()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-3) for name in expected)


class Index:
    """What a folder of sources says of itself."""

    def to_json(self):
        return {"pictures": ["a", "b", "c"]}

    def rows(self):
        return [{"kind": "cutout", "kept": 3, "train": 2}, {"left out": "blank"}]
