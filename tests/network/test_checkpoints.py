"""Weights in and out: what is read, what is refused and in which words, what a fetch does without a network."""

import dataclasses
import pickle
import socket
import time

import pytest
import safetensors.torch
import torch

from lumen_lab import network
from lumen_lab.errors import CheckpointError
from lumen_lab.network import LARGE, LITE, MICRO, BiRefNet, checkpoints, load_network
from lumen_lab.network.checkpoints import (
    PUBLISHED_LITE,
    HubPin,
    check_pin,
    load_weights,
    read_weights,
    save_weights,
    weights_sha256,
)
from lumen_lab.specs import Manifest, file_sha256, manifest_path


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def layout(config):
    """A state dict of shapes alone."""
    with torch.device("meta"):
        return BiRefNet(config).state_dict()


@pytest.fixture
def state(tiny):
    return dict(tiny.state_dict())


@pytest.fixture
def saved(tmp_path):
    """``saved(name, content)``: path of a file written by safetensors or by ``torch.save``."""

    def write(name, content, **options):
        path = tmp_path / name
        if path.suffix == ".safetensors":
            safetensors.torch.save_file(content, path)
        else:
            torch.save(content, path, **options)
        return path

    return write


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth", "weights.pt"])
def test_a_file_gives_the_network_that_wrote_it(tiny, tiny_config, state, saved, name):
    loaded = load_network(tiny_config, saved(name, state))
    assert equal(loaded.state_dict(), state)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(loaded(image), tiny(image))


def test_a_file_of_the_old_torch_format_is_read(state, saved):
    assert equal(read_weights(saved("old.pth", state, _use_new_zipfile_serialization=False)), state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_wrappers_are_taken_off_in_any_nesting(state, saved, prefix):
    wrapped = {prefix + name: value for name, value in state.items()}
    assert equal(read_weights(wrapped), state)
    assert equal(read_weights(saved("wrapped.pth", wrapped)), state)


def test_a_name_that_only_ends_like_a_wrapper_keeps_it():
    assert list(read_weights({"squeeze_module.0.weight": torch.ones(1)})) == ["squeeze_module.0.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_as_float32(tiny_config, state, saved, dtype):
    half = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    path = saved("half.safetensors", half)
    assert {value.dtype for value in read_weights(path).values()} == {torch.float32, torch.int64}
    found = load_network(tiny_config, path).state_dict()
    assert {value.dtype for value in found.values()} == {torch.float32, torch.int64}
    assert all(torch.equal(found[name], half[name].to(found[name].dtype)) for name in found)


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_training_checkpoint_is_searched_for_its_weights(state, saved, key):
    path = saved("checkpoint.pth", {"epoch": 3, key: state, "optimizer": {"lr": 1e-3}})
    assert equal(read_weights(path), state)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    path, witness = tmp_path / "bad.pth", tmp_path / "ran"

    class Code:
        def __reduce__(self):
            return (open, (str(witness), "w"))

    torch.save({"weight": Code()}, path)
    with pytest.raises(CheckpointError, match="cannot be read as weights .*hold more than tensors"):
        read_weights(path)
    path.write_bytes(pickle.dumps(Code(), protocol=2))
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        read_weights(path)
    assert not witness.exists()


def test_a_refusal_does_not_advise_to_run_the_code(tmp_path):
    path = tmp_path / "bad.pth"
    torch.save({"weight": dataclasses.field}, path)
    with pytest.raises(CheckpointError) as refusal:
        read_weights(path)
    assert "weights_only" not in str(refusal.value)
    assert "dataclasses.field" in str(refusal.value)


@pytest.mark.parametrize("name", ["cut.safetensors", "cut.pth"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(state, saved, name, share):
    path = saved(name, state)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="cannot be read as weights .*cut short"):
        read_weights(path)


@pytest.mark.parametrize("name", ["page.safetensors", "page.pth"])
def test_a_text_named_like_weights_is_refused(tmp_path, name):
    (tmp_path / name).write_text("<html>404: not found</html>")
    with pytest.raises(CheckpointError, match="another kind of file"):
        read_weights(tmp_path / name)


def test_damage_anywhere_in_an_old_pickle_is_a_refusal(tmp_path):
    path = tmp_path / "old.pth"
    torch.save({"weight": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    content, refused = path.read_bytes(), 0
    for position in range(0, len(content) - 12, 7):
        path.write_bytes(content[:position])
        with pytest.raises(CheckpointError):
            read_weights(path)
        refused += 1
    assert refused > 20


@pytest.mark.parametrize(("content", "found"), [([torch.ones(1)], "list"), (torch.ones(1), "Tensor")])
def test_a_file_that_holds_no_state_dict_is_refused(saved, content, found):
    with pytest.raises(CheckpointError, match=f"Expected a state dict .* found {found}"):
        read_weights(saved("other.pth", content))


@pytest.mark.parametrize("content", [{}, {"epoch": 3}])
def test_a_mapping_without_tensors_is_refused(content):
    with pytest.raises(CheckpointError, match="found no tensors"):
        read_weights(content)


@pytest.mark.parametrize("path", ["/nowhere/weights.pth", "weights/lite.safetensors", "weights/lite.pth"])
def test_a_missing_file_is_called_missing_and_not_taken_for_a_hub_id(path):
    with pytest.raises(CheckpointError, match="^No weights at "):
        load_network("micro", path)


MISFITS = {
    "lite into micro": (MICRO, LITE, ("does not fit micro", "of another shape", "These look like 'lite' weights")),
    "large into lite": (LITE, LARGE, ("(bb.layers: 1", "unexpected", "These look like 'large' weights (embed 192)")),
    "lite into large": (LARGE, LITE, ("missing (bb.layers: ", "These look like 'lite' weights")),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_of_another_preset_are_summarised_with_their_name(case):
    into, weights, telling = MISFITS[case]
    with torch.device("meta"):
        model = BiRefNet(into)
    with pytest.raises(CheckpointError) as refusal:
        load_weights(model, layout(weights), source="the given state dict")
    message = str(refusal.value)
    assert len(message) < 600
    for words in telling:
        assert words in message


def test_counts_are_given_by_prefix(tiny, state):
    for name in list(state):
        if name.startswith("decoder.gdt_convs_pred_"):
            del state[name]
    state["head.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError) as refusal:
        load_weights(tiny, state, source="x.pth")
    message = str(refusal.value)
    assert message.startswith("x.pth does not fit tiny; 6 missing (decoder.gdt_convs_pred_4: 2, ")
    assert "1 unexpected (head.weight: 1)" in message


def test_weights_of_a_folded_network_are_recognised(tiny, state):
    folded = {name: value for name, value in state.items() if ".bn" not in name}
    with pytest.raises(CheckpointError, match="batch norm folded"):
        load_weights(tiny, folded, source="x.pth")


def test_names_that_are_all_strange_are_called_another_network(tiny):
    strange = {f"backbone.{'deep.' * 100}{index}": torch.ones(1) for index in range(1000)}
    with pytest.raises(CheckpointError, match="None of the names is known, e.g. 'backbone") as refusal:
        load_weights(tiny, strange, source="x.pth")
    assert len(str(refusal.value)) < 600


def test_a_refused_state_dict_changes_nothing(tiny_config, state):
    network = load_network(tiny_config, state)
    state["decoder.conv_out1.0.bias"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="1 of another shape"):
        load_weights(network, {name: value + 1 for name, value in state.items()}, source="x.pth")
    assert equal({**network.state_dict(), "decoder.conv_out1.0.bias": state["decoder.conv_out1.0.bias"]}, state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_of_a_training_that_diverged_are_refused(tiny_config, state, bad):
    """A deformable conv with such an offset would look outside its memory."""
    state["bb.norm0.weight"] = torch.full_like(state["bb.norm0.weight"], bad)
    with pytest.raises(
        CheckpointError, match=r"1 of \d+ tensors of .* hold NaN or infinity, the first is bb.norm0.weight"
    ):
        load_network(tiny_config, state)


# The hub: conftest.py has set it offline.


@pytest.mark.parametrize("given", [{}, {"weights": PUBLISHED_LITE.hub_id}])
def test_without_a_network_it_says_so_at_once_and_names_what_works_offline(given):
    from huggingface_hub import hf_hub_download  # noqa: F401  (its import is not what is timed)

    started = time.monotonic()
    with pytest.raises(CheckpointError) as refusal:
        load_network("lite", **given)
    assert time.monotonic() - started < 2
    for choice in ("cannot be reached", "load_network('micro')", "model.safetensors", "weights='golden'"):
        assert choice in str(refusal.value)


def test_an_unreachable_hub_is_not_asked_again_and_again(monkeypatch):
    from huggingface_hub import constants

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoints, "proxy_bypass", lambda host: True)
    monkeypatch.setattr(socket, "create_connection", lambda *where: asked.append(where) or refuse())
    with pytest.raises(CheckpointError, match="cannot be reached"):
        load_network("lite")
    assert asked == [(("huggingface.co", 443), 3)]


def refuse():
    raise socket.gaierror("Name or service not known")


def test_a_proxy_is_asked_in_place_of_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoints, "getproxies", lambda: {"https": "http://proxy.example:3128"})
    monkeypatch.setattr(checkpoints, "proxy_bypass", lambda host: False)
    monkeypatch.setattr(socket, "create_connection", lambda *where: asked.append(where[0]) or refuse())
    assert not checkpoints.reachable("https://huggingface.co")
    assert asked == [("proxy.example", 3128)]


def test_a_listening_host_is_reachable(monkeypatch):
    monkeypatch.setattr(checkpoints, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert checkpoints.reachable(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_a_hub_id_without_a_pin_needs_a_revision():
    with pytest.raises(CheckpointError, match="No revision is pinned for 'owner/name'; pass revision="):
        load_network("lite", "owner/name")


def test_the_published_file_is_pinned_by_size_and_hash(tmp_path, monkeypatch, state, saved):
    path = saved("model.safetensors", state)
    right = HubPin("owner/name", "0" * 40, path.stat().st_size, file_sha256(path))
    check_pin(path, right)
    monkeypatch.setitem(checkpoints.PINS, "owner/name", right)
    monkeypatch.setattr(checkpoints, "_download", lambda *asked: path)
    assert equal(read_weights("owner/name"), state)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="should have SHA-256"):
        read_weights("owner/name")
    with pytest.raises(CheckpointError, match="should have 177,634,392 bytes, found"):
        check_pin(path, PUBLISHED_LITE)


# What is saved


@pytest.mark.parametrize("half", [False, True])
def test_saved_weights_come_back_and_their_manifest_fits(tmp_path, tiny, tiny_config, half):
    path = save_weights(tiny, tmp_path / "new" / "tiny.safetensors", made_from={"seed": "0"}, half=half)
    manifest = Manifest.load(manifest_path(path))
    manifest.check_files(path.parent)
    assert manifest.made_from == {"network": "tiny", "seed": "0"}
    assert manifest.inputs[0].shape == (1, 3, 64, 96)
    loaded = load_network(tiny_config, path).state_dict()
    expected = {n: v.half().float() if half and v.is_floating_point() else v for n, v in tiny.state_dict().items()}
    assert equal(loaded, expected)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "tiny.safetensors",
        "tiny.safetensors.manifest.json",
    ]


def test_weights_are_saved_as_safetensors_only(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="saved as .safetensors, asked for 'tiny.pth'"):
        save_weights(tiny, tmp_path / "tiny.pth", made_from={})
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_saving_leaves_the_earlier_file(tmp_path, tiny, monkeypatch):
    path = save_weights(tiny, tmp_path / "tiny.safetensors", made_from={})
    before = path.read_bytes()

    def full(tensors, where):
        where.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_weights(tiny, path, made_from={})
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_hash_of_weights_depends_on_names_and_values(tiny, tiny_config, state):
    assert weights_sha256(load_network(tiny_config, state)) == weights_sha256(tiny)
    state["decoder.conv_out1.0.bias"] = state["decoder.conv_out1.0.bias"] + 1e-6
    assert weights_sha256(load_network(tiny_config, state)) != weights_sha256(tiny)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Trained micro weights as they lie in ``data/``, in a copy."""
    model = load_network("micro", "golden")
    path = save_weights(model, tmp_path / "teacher.safetensors", made_from={}, half=True)
    monkeypatch.setattr(network, "MICRO_WEIGHTS", path)
    return path


def test_published_micro_weights_are_those_that_are_shipped(shipped):
    assert equal(load_network("micro").state_dict(), read_weights(shipped))


@pytest.mark.parametrize("harm", ["a flipped bit", "no manifest", "another manifest"])
def test_shipped_weights_that_do_not_fit_their_manifest_are_refused(shipped, harm):
    manifest = manifest_path(shipped)
    if harm == "a flipped bit":
        content = shipped.read_bytes()
        shipped.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"files": {', '"files": {"other.bin": "0",'))
    with pytest.raises(CheckpointError, match="micro weights do not fit their manifest"):
        load_network("micro")


def test_a_preset_without_trained_weights_says_so(tiny_config):
    with pytest.raises(CheckpointError, match="No trained weights are known for 'tiny' here; pass weights=path"):
        load_network(tiny_config)


def test_a_tensor_that_half_precision_cannot_hold_stays_whole(tmp_path, tiny_config):
    torch.manual_seed(0)
    model = BiRefNet(tiny_config)
    name = next(name for name in model.state_dict() if name.endswith("running_var"))
    model.state_dict()[name][0] = 1e6
    found = read_weights(save_weights(model, tmp_path / "teacher.safetensors", made_from={}, half=True))
    assert float(found[name].max()) == 1e6
    assert all(value.isfinite().all() for value in found.values())
