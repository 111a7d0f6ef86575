"""An encoder that starts from a timm Swin: the same maps, what is left as it was, and what is refused."""

import copy
import re

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from lumen_lab.errors import CheckpointError
from lumen_lab.network import LARGE, LITE, MICRO, checkpoints, pretrained
from lumen_lab.network.golden import golden_image, golden_state_dict
from lumen_lab.network.pretrained import SWIN_L, SWIN_T, EncoderStart, load_pretrained_encoder, to_encoder_layout
from lumen_lab.network.swin import PatchMerging, SwinTransformer


class Holder(nn.Module):
    """A network that is nothing but its encoder."""

    def __init__(self, config):
        super().__init__()
        self.bb = SwinTransformer(config)


@pytest.fixture(scope="module")
def reference():
    """timm's Swin-T with strong, untrained weights; its last map, one window large, is shifted too."""
    model = timm.create_model("swin_tiny_patch4_window7_224", always_partition=True).eval()
    model.load_state_dict(golden_state_dict(model.state_dict()))
    return model


@pytest.fixture(scope="module")
def state(reference):
    return dict(reference.state_dict())


@pytest.fixture(scope="module")
def fresh():
    return Holder(LITE).eval()


@pytest.fixture
def lite_encoder(fresh):
    """BiRefNet-lite's encoder, freshly initialised, for one test to fill."""
    return copy.deepcopy(fresh)


@pytest.fixture(scope="module")
def image():
    return torch.from_numpy(golden_image(224, 224))


@pytest.fixture(scope="module")
def reference_maps(reference, image):
    with torch.inference_mode():
        return reference.forward_intermediates(image, intermediates_only=True)


def maps_before_norms(encoder, image):
    """The four maps, (N, C, H, W), as they enter norm0..norm3."""
    bare = copy.copy(encoder)
    bare._modules = {**encoder._modules, **{f"norm{stage}": nn.Identity() for stage in range(4)}}
    with torch.inference_mode():
        return bare(image)


def differences(reference, actual):
    """Largest difference of each map, relative to the map's largest value."""
    return [float((a - r).abs().max() / r.abs().max()) for r, a in zip(reference, actual, strict=True)]


def swin_layout(state):
    """timm's state dict as Swin's own files have it: merging at the end of a stage, buffers stored, ``head`` bare."""
    moved = {
        re.sub(r"^layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name): value
        for name, value in state.items()
    }
    moved = {name.replace("head.fc.", "head."): value for name, value in moved.items()}
    moved["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    moved["layers.0.blocks.1.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    return moved


def features_only(state):
    """timm's names where only the features are built: stages beside each other, without norm and classifier."""
    kept = {name: value for name, value in state.items() if not name.startswith(("norm.", "head."))}
    return {name.replace("layers.", "layers_"): value for name, value in kept.items()}


def test_every_map_equals_timms(state, lite_encoder, image, reference_maps):
    load_pretrained_encoder(lite_encoder, state)
    actual = maps_before_norms(lite_encoder.bb, image)
    assert [tuple(found.shape[1:]) for found in actual] == [(96, 56, 56), (192, 28, 28), (384, 14, 14), (768, 7, 7)]
    assert max(differences(reference_maps, actual)) < 1e-5


def test_another_order_of_neighbours_would_be_seen(state, lite_encoder, image, reference_maps, monkeypatch):
    load_pretrained_encoder(lite_encoder, state)

    def row_by_row(merging, x):
        neighbours = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        return merging.reduction(merging.norm(torch.cat(neighbours, -1)))

    monkeypatch.setattr(PatchMerging, "forward", row_by_row)
    first, *deeper = differences(reference_maps, maps_before_norms(lite_encoder.bb, image))
    assert first < 1e-5
    assert min(deeper) > 1e-2


@pytest.mark.parametrize("spoiled", ["blocks.1.attn.relative_position_bias_table", "blocks.0.mlp.fc2.bias"])
def test_a_spoiled_tensor_would_be_seen(state, lite_encoder, image, reference_maps, spoiled):
    name = f"layers.0.{spoiled}"
    load_pretrained_encoder(lite_encoder, {**state, name: state[name].flip(0)})
    assert min(differences(reference_maps, maps_before_norms(lite_encoder.bb, image))) > 1e-4


def test_a_map_of_one_window_is_where_timm_does_not_shift(reference, state, lite_encoder, image):
    load_pretrained_encoder(lite_encoder, state)
    timms = copy.deepcopy(reference)
    timms.set_input_size(always_partition=False)  # its default
    with torch.inference_mode():
        maps = timms.forward_intermediates(image, intermediates_only=True)
    *earlier, last = differences(maps, maps_before_norms(lite_encoder.bb, image))
    assert max(earlier) < 1e-5
    assert last > 1e-3


def test_the_norms_of_the_maps_stay_and_the_classifier_goes(state, lite_encoder):
    encoder = lite_encoder.bb
    nn.init.constant_(encoder.norm2.weight, 0.5)
    start = load_pretrained_encoder(lite_encoder, state)
    assert torch.equal(encoder.norm2.weight, torch.full((384,), 0.5))
    assert start.dropped == ("norm.weight", "norm.bias", "head.fc.weight", "head.fc.bias")
    assert start.kept == tuple(f"norm{stage}.{part}" for stage in range(4) for part in ("weight", "bias"))
    own = {name for name in encoder.state_dict() if not name.endswith("relative_position_index")}
    assert set(start.loaded) == own - set(start.kept)
    assert [row["count"] for row in start.rows()] == [169, 8, 4]


def test_the_record_comes_back_from_disk(state, lite_encoder, tmp_path):
    start = load_pretrained_encoder(lite_encoder, state)
    assert EncoderStart.load(start.save(tmp_path / "start.json")) == start


@pytest.mark.parametrize("layout", [swin_layout, features_only])
def test_other_layouts_of_the_same_weights_come_to_the_same_names(state, layout):
    other = layout(state)
    assert other.keys() != state.keys()
    reference, actual = to_encoder_layout(state), to_encoder_layout(other)
    assert actual.keys() == reference.keys()
    assert all(actual[name] is reference[name] for name in reference)


@pytest.mark.parametrize("name", ["swin.safetensors", "swin.pth"])
def test_a_file_is_read_as_the_state_dict_it_holds(state, lite_encoder, tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save({"model": swin_layout(state)}, path)
    start = load_pretrained_encoder(lite_encoder, str(path))
    assert start.source == str(path)
    merged = lite_encoder.bb.layers[2].downsample.reduction.weight
    assert torch.equal(merged, state["layers.3.downsample.reduction.weight"])


def test_a_timm_name_is_fetched_from_timms_repository(state, lite_encoder, monkeypatch):
    asked = []

    def hub(source, *, revision):
        asked.append((source, revision))
        return state

    monkeypatch.setattr(pretrained, "read_weights", hub)
    start = load_pretrained_encoder(lite_encoder, revision="0123abc")
    assert asked == [("timm/swin_tiny_patch4_window7_224.ms_in1k", "0123abc")]
    assert start.source == SWIN_T
    assert torch.equal(lite_encoder.bb.patch_embed.proj.weight, state["patch_embed.proj.weight"])


def test_without_a_network_it_names_the_offline_choices(lite_encoder, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"cannot be reached\. Offline, pass source='path.*weights=None"
    ) as refusal:
        load_pretrained_encoder(lite_encoder)
    assert "micro" not in str(refusal.value)


def encoder_on_meta(config):
    with torch.device("meta"):
        return Holder(config)


@pytest.mark.parametrize(
    ("config", "source", "words"),
    [
        (LARGE, SWIN_T, ["of another shape", "missing (layers.2: ", "embed 96", "depths 2/2/18/2", f"take '{SWIN_L}'"]),
        (LITE, SWIN_L, ["unexpected (layers.2: ", "window 12", f"take '{SWIN_T}'"]),
        (LITE, "swin_s3_tiny_224.ms_in1k", ["window 7/14"]),
        (MICRO, SWIN_T, ["embed 96", "the encoder embed 32", "no source is known"]),
        (LITE, "swinv2_tiny_window8_256", ["neither a weights file nor a Swin v1", SWIN_T]),
        (LITE, "swin_tiny_patch4_window7_224.best", ["ms_in22k_ft_in1k"]),
        (LITE, "nowhere/swin.pth", ["No weights at nowhere/swin.pth"]),
    ],
)
def test_a_source_that_cannot_fit_is_refused_before_anything_is_fetched(config, source, words, monkeypatch):
    monkeypatch.setattr(checkpoints, "fetch", lambda *asked, **options: pytest.fail(f"fetched {asked}"))
    with pytest.raises(CheckpointError) as refusal:
        load_pretrained_encoder(encoder_on_meta(config), source)
    assert "Offline" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
    for word in words:
        assert word in str(refusal.value)


def test_a_file_that_lacks_a_tensor_is_refused_and_changes_nothing(state, lite_encoder):
    before = {name: value.clone() for name, value in lite_encoder.state_dict().items()}
    lacking = {name: value for name, value in state.items() if name != "layers.1.downsample.norm.bias"}
    with pytest.raises(CheckpointError, match=r"1 missing \(layers\.0: 1\)\. Its sizes are the encoder's"):
        load_pretrained_encoder(lite_encoder, lacking)
    assert all(torch.equal(value, before[name]) for name, value in lite_encoder.state_dict().items())


def test_weights_of_a_whole_network_are_sent_to_its_own_door(tiny):
    with pytest.raises(CheckpointError, match=r"whole BiRefNet: give them to load_network"):
        load_pretrained_encoder(tiny, tiny.state_dict())


def test_names_of_another_network_are_shown(lite_encoder):
    with pytest.raises(CheckpointError, match=r"not of a Swin v1, e\.g\. 'stem\.weight'"):
        load_pretrained_encoder(lite_encoder, {"stem.weight": torch.zeros(3)})


def test_a_model_without_an_encoder_is_refused():
    with pytest.raises(CheckpointError, match=r"Linear has no Swin encoder at \.bb"):
        load_pretrained_encoder(nn.Linear(2, 2), {})
