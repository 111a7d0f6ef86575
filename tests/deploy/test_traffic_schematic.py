"""The reader of the compiler's schematic, on a miniature of one: what it finds, and what it refuses."""

import re
from pathlib import Path

import pytest

from lumen_lab.deploy.traffic_schematic import read_schematic
from lumen_lab.errors import ArtifactError

# A conv with a ReLU in the compiler's format: its input, weights and output, a spill, and a tile of unknown origin.
MINIATURE = Path(__file__).with_name("fixtures") / "miniature_schematic.txt"
TILES = (  # what it holds: id, kind, DRAM read and written, VTCM read and written, DMA
    (0x408100000002, "q::*InputSlice", 4096, 0, 0, 4096, 1),
    (0x408200000012, "q::ConvLayer.opt.weights_to_vtcm", 128, 0, 0, 128, 1),
    (0x40830000001B, "q::ConvLayer_s1.opt", 0, 0, 4224, 2048, 0),
    (0x40840000001B, "q::ConvLayer_s1.opt", 0, 0, 4224, 2048, 0),
    (0x40850000001B, "@Spill", 0, 2048, 2048, 0, 1),
    (0x40860000001B, "@Fill", 2048, 0, 0, 2048, 1),
    (0x408700000099, "q::Mystery", 10, 20, 30, 40, 0),
    (0x408800000003, "q::*OutputSlice", 0, 4096, 4096, 0, 1),
)


@pytest.fixture
def write(tmp_path):
    """Write a text as a schematic; returns its path."""

    def to_file(text):
        path = tmp_path / "net_1_schematic.bin"
        path.write_text(text)
        return path

    return to_file


def test_every_tile_is_read_with_the_operation_behind_it(write):
    schematic = read_schematic(write(MINIATURE.read_text()))
    tiles = list(schematic.tiles())
    assert schematic.graph_name == "net_1"
    assert [int(tile.name, 16) for tile in tiles] == [row[0] for row in TILES]
    assert [
        (tile.dram_read_bytes, tile.dram_write_bytes, tile.vtcm_read_bytes, tile.vtcm_write_bytes, tile.is_dma)
        for tile in tiles
    ] == [(*row[2:6], bool(row[6])) for row in TILES]
    assert [tile.kind for tile in tiles] == [row[1].removeprefix("q::") for row in TILES]
    assert [(tile.qnn_op, tile.qnn_kind) for tile in tiles] == [
        (None, "Input"),
        ("stem_token_1", "Conv2d"),  # a constant of two operations: the first of them
        *[("act", "Relu")] * 4,
        (None, ""),
        (None, "Output"),
    ]


def test_one_changed_number_changes_the_sum(write):
    text = MINIATURE.read_text()
    before = read_schematic(write(text)).moved_bytes.sum(0)
    after = read_schematic(write(text.replace('"dram_read": 128 ', '"dram_read": 129 '))).moved_bytes.sum(0)
    assert (after - before).tolist() == [1, 0, 0, 0]


def test_a_partition_that_moves_nothing_is_no_error(write):
    schematic = read_schematic(write(re.sub(r'\{"opid".*\n', "", MINIATURE.read_text())))
    assert list(schematic.tiles()) == [] and schematic.moved_bytes.shape == (0, 4)


def test_a_name_with_a_quote_in_it_is_read(write):
    text = MINIATURE.read_text().replace("'stem_token_1'", "\"layer['stem']\"")
    assert "layer['stem']" in {tile.qnn_op for tile in read_schematic(write(text)).tiles()}


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7, 0.9, 0.98])
def test_a_schematic_that_is_cut_off_is_refused(write, share):
    text = MINIATURE.read_text()
    with pytest.raises(ArtifactError, match="cut off.*compile again"):
        read_schematic(write(text[: int(len(text) * share)] if share > 0.02 else text[:40]))


@pytest.mark.parametrize("text", ["", "Msg Timestamp,Message,Time\n", "{}"])
def test_what_is_no_schematic_is_refused(write, text):
    with pytest.raises(ArtifactError, match=r"net_1_schematic\.bin (is not a schematic|cannot be read)"):
        read_schematic(write(text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="cannot be read as a schematic.*compile again"):
        read_schematic(tmp_path / "none.bin")


@pytest.mark.parametrize(
    ("pattern", "to", "words"),
    [
        ('"dram_read": 128 ', '"dram_read": many ', "line of traffic that cannot be read.*many"),
        ('"dram_read"', '"ddr_read"', "line of traffic that cannot be read.*ddr_read"),
        ("bandwidth_information", "traffic", "no whole section 'bandwidth_information'"),
        ("qnn_name_translations", "names", "no whole section 'qnn_name_translations'"),
        ("qnn_graph_name = .*", "", "no whole section 'qnn_graph_name'"),
        ("'act',", "act", "names of QNN operations that cannot be read"),
        ("opdesc_map", "ops_map", "lists .* and announces no number"),
        ("#Number of OpDesc = 10", "#Number of OpDesc = 11", "lists 10 scheduled operations and announces 11"),
        ("opdesc[(] 0x40840000001b", "opdesc( 0x40840000001a", "traffic of operations that it does not schedule"),
        ('"opid" : 0x00004', '"opid" : 0xfffff4', "cannot be read as a schematic"),
        ('[{]"opid" : 0x0000408200000012', '("opid" : 0x0000408200000012', "line of traffic that cannot be read.*opid"),
        ('([{]"opid" : 0x0000408200000012.*\n)', r"\1\1", "traffic of an operation twice"),
        ('"dram_read": 128 ', '"dram_read": 9223372036854775000 ', "more traffic than"),
        ('"dram_read": 128 ', f'"dram_read": {2**64} ', "cannot be read as a schematic"),
    ],
)
def test_a_schematic_of_another_version_is_refused_and_says_what_differs(write, pattern, to, words):
    spoiled, changes = re.subn(pattern, to, MINIATURE.read_text())
    assert changes
    with pytest.raises(ArtifactError, match=words):
        read_schematic(write(spoiled))
