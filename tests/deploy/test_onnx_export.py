"""A network as an ONNX file: the same numbers, static shapes, its sites, nothing private, and whole or not there."""

import ast
import getpass
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from lumen_lab.deploy import onnx_export
from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.errors import ExportError
from lumen_lab.network.golden import golden_image
from lumen_lab.rewrites import EXACT_PLAN, rewrite
from lumen_lab.specs import Manifest, file_sha256, manifest_path

IMAGE = torch.from_numpy(golden_image(64, 96))


@pytest.fixture(scope="module")
def networks(tiny):
    return {"original": tiny, "rewritten": rewrite(tiny, EXACT_PLAN).model}


@pytest.fixture(scope="module")
def exported(networks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return {name: export_onnx(network, folder / f"{name}.onnx") for name, network in networks.items()}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1)).eval()


def on_cpu(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


def op_types(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("name", ["original", "rewritten"])
def test_onnxruntime_computes_what_torch_does(networks, exported, name):
    with torch.no_grad():
        expected = networks[name](IMAGE).numpy()
    (found,) = on_cpu(exported[name], IMAGE)
    assert np.abs(found - expected).max() <= 1e-4


def test_the_original_keeps_its_deformable_convs_and_the_rewritten_has_none(exported):
    original, rewritten = op_types(exported["original"]), op_types(exported["rewritten"])
    assert original.count("DeformConv") == 20
    assert "DeformConv" not in rewritten
    assert rewritten.count("GridSample") == 5 * (1 + 1 + 1 + 6)  # the 49 taps of a 7×7 conv go in six parts
    assert rewritten.count("Gelu") == 2 * 8  # the encoder runs twice


def test_a_fixed_constant_is_not_computed_in_the_graph(exported):
    """What depends on a size alone (grids, masks) is stored, so the NPU is not asked for it."""
    assert not {"Range", "Shape", "NonZero", "Where"} & set(op_types(exported["rewritten"]))


@pytest.mark.parametrize("name", ["original", "rewritten"])
def test_every_shape_is_static(exported, name):
    graph = onnx.shape_inference.infer_shapes(onnx.load(exported[name])).graph
    values = [*graph.input, *graph.output, *graph.value_info]
    assert len(values) > 100
    dims = [dim for value in values for dim in value.type.tensor_type.shape.dim]
    assert all(dim.HasField("dim_value") and dim.dim_value > 0 for dim in dims)


@pytest.mark.parametrize("name", ["original", "rewritten"])
def test_the_file_holds_nothing_of_the_machine_that_wrote_it(exported, repository, name):
    content = exported[name].read_bytes()
    private = {str(repository), str(Path.home()), os.path.dirname(torch.__file__), "site-packages", "lumen_lab/", ".py"}
    private |= {f"/{getpass.getuser()}/", os.uname().nodename}
    assert [text for text in private if len(text) > 2 and text.encode() in content] == []


def test_the_test_for_private_paths_can_fail(tmp_path, monkeypatch, repository):
    monkeypatch.setattr(onnx_export, "strip_private", lambda proto: None)
    path = export_onnx(small(), tmp_path / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),))
    assert str(repository).encode() in path.read_bytes()


@pytest.mark.parametrize("name", ["original", "rewritten"])
def test_nodes_name_the_module_that_they_come_from(networks, exported, name):
    modules = dict(networks[name].named_modules())
    sites = []
    for node in onnx.load(exported[name]).graph.node:
        kept = {entry.key: entry.value for entry in node.metadata_props}
        if "pkg.torch.onnx.name_scopes" in kept:
            sites.append(ast.literal_eval(kept["pkg.torch.onnx.name_scopes"])[-2])
    assert len(sites) > 0.95 * len(op_types(exported[name]))
    assert [site for site in sites if site not in modules] == []
    heads, tail = {
        "original": ("attn.qkv", "decoder.conv_out1.0"),
        "rewritten": ("attn.projection.query.0", "decoder.tail.project"),
    }[name]
    assert {tail, f"bb.layers.0.blocks.1.{heads}", "bb.layers.3.blocks.0.mlp.act"} <= set(sites)


@pytest.mark.parametrize("name", ["original", "rewritten"])
def test_the_manifest_is_the_contract_of_the_file(exported, name):
    path = exported[name]
    manifest = Manifest.beside(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for specs, values in ((manifest.inputs, session.get_inputs()), (manifest.outputs, session.get_outputs())):
        assert [(spec.name, list(spec.shape)) for spec in specs] == [(value.name, value.shape) for value in values]
        assert {spec.dtype for spec in specs} == {"float32"}
    assert manifest.inputs[0].name == "image"
    assert manifest.outputs[0].shape == (1, 1, 64, 96)
    assert manifest.files == {path.name: file_sha256(path)}
    assert manifest.made_from["network"] == "tiny"
    rewrites = set(manifest.made_from["rewrites"].split(", "))
    assert rewrites == ({"none"} if name == "original" else {rule.name for rule in EXACT_PLAN})


def test_several_inputs_and_outputs_keep_their_names(tmp_path):
    class Two(nn.Module):
        def forward(self, image, half):
            return image + 1, half * 2

    inputs = (torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 4, 4))
    names = {"input_names": ("image", "half"), "output_names": ("more", "twice")}
    path = export_onnx(Two().eval(), tmp_path / "two.onnx", example_inputs=inputs, **names)
    manifest = Manifest.beside(path)
    assert [(spec.name, spec.shape) for spec in manifest.inputs] == [("image", (1, 3, 8, 8)), ("half", (1, 3, 4, 4))]
    assert [spec.name for spec in manifest.outputs] == ["more", "twice"]


def test_exporting_leaves_the_network_as_it_was(networks, tiny):
    """The weights are compared with golden ones that are made again."""
    from lumen_lab.network.golden import golden_state_dict

    expected = golden_state_dict(tiny.state_dict())
    assert all(torch.equal(value, expected[name]) for name, value in tiny.state_dict().items())
    assert not any(module.training for network in networks.values() for module in network.modules())


# What is refused


def test_training_mode_is_refused_wherever_it_hides(tmp_path):
    network = small()
    with pytest.raises(ExportError, match=r"training mode, .*call .eval\(\)"):
        export_onnx(network.train(), tmp_path / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),))
    network.eval()
    network[1].train()
    with pytest.raises(ExportError, match="training mode"):
        export_onnx(network, tmp_path / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),))
    assert list(tmp_path.iterdir()) == []


def test_names_for_other_outputs_than_there_are_are_refused(tmp_path):
    with pytest.raises(ExportError, match="2 output names for 1 outputs; name each once"):
        export_onnx(
            small(), tmp_path / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),), output_names=("mask", "edges")
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.pt", "a", "a.onnx.bin"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(ExportError, match=f"is named .onnx, asked for '{name}'"):
        export_onnx(small(), tmp_path / name, example_inputs=(torch.zeros(1, 3, 8, 8),))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match="file/a.onnx cannot be written"):
        export_onnx(small(), tmp_path / "file" / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),))


def test_a_network_that_cannot_be_traced_is_refused_in_words_and_leaves_nothing(tmp_path, capfd):
    class Branches(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(ExportError, match=r"Branches cannot be exported to ONNX: .*lumen_lab.audit") as refusal:
        export_onnx(Branches().eval(), tmp_path / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),))
    assert len(str(refusal.value)) < 600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["save", "checker"])
def test_a_failure_while_writing_leaves_the_earlier_file(tmp_path, monkeypatch, failing):
    example = (torch.zeros(1, 3, 8, 8),)
    path = export_onnx(small(), tmp_path / "a.onnx", example_inputs=example)
    before = path.read_bytes()

    def full(proto, where):
        Path(where).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def invalid(proto):
        raise onnx.checker.ValidationError("not a model")

    if failing == "save":
        monkeypatch.setattr(onnx, "save", full)
    else:
        monkeypatch.setattr(onnx.checker, "check_model", invalid)
    with pytest.raises(ExportError, match="No space left" if failing == "save" else "not valid ONNX"):
        export_onnx(nn.Sequential(small()).eval(), path, example_inputs=example)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path, manifest_path(path)]
    Manifest.beside(path)


def test_a_manifest_that_cannot_be_written_is_named(tmp_path):
    manifest_path(tmp_path / "a.onnx").mkdir()
    with pytest.raises(ExportError, match=r"a\.onnx\.manifest\.json cannot be written"):
        export_onnx(small(), tmp_path / "a.onnx", example_inputs=(torch.zeros(1, 3, 8, 8),))


# What is taken as it is


def test_an_export_is_reused_only_while_everything_it_was_made_from_is_the_same(tmp_path, monkeypatch):
    network, example, path = small(), (torch.zeros(1, 3, 8, 8),), tmp_path / "a.onnx"
    traced = []
    trace = onnx_export.traced
    monkeypatch.setattr(onnx_export, "traced", lambda *given: traced.append(1) or trace(*given))

    def export(example=example, **more):
        export_onnx(network, path, example_inputs=example, reuse=True, **more)
        return len(traced)

    assert export() == 1
    assert export() == 1
    assert export(example=(torch.zeros(1, 3, 8, 16),)) == 2
    assert export(output_names=("mask",), example=(torch.zeros(1, 3, 8, 16),)) == 3
    assert export() == 4
    with torch.no_grad():
        network[0].bias += 1e-3
    assert export() == 5
    path.write_bytes(path.read_bytes()[:-1])
    assert export() == 6
    monkeypatch.setattr(onnx_export, "code_sha256", lambda: "another version of the rewrites")
    assert export() == 7
    assert export() == 7
