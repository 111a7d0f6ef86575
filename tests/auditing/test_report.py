"""The report: figures that add up, tables, HTML, and a file that gives the same report back."""

import json

import pytest
import torch
from torch import nn

from lumen_lab.auditing import AuditReport, audit
from lumen_lab.errors import ArtifactError


class Network(nn.Module):
    """Two convs around what the NPU refuses; the first conv runs twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.head = nn.ModuleDict({"deep": nn.Conv2d(8, 1, 1)})
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        both = self.stem(x) + self.stem(x.flip(3))
        return self.head["deep"](both.erf()) * self.table.sum() * float("inf")


@pytest.fixture(scope="module")
def report():
    return audit(Network().eval(), (torch.empty(1, 3, 4, 6),), name="<network>")


def test_totals(report):
    stem, head = 8 * 4 * 6 * 3 * 9, 4 * 6 * 8
    assert report.macs == 2 * stem + head
    assert report.macs_by_site(depth=1) == {"stem": 2 * stem, "head": head}
    assert report.macs_by_site(depth=2, by_call=True) == {"stem.0": stem, "stem.0 (call 2)": stem, "head.deep": head}
    assert report.parameter_bytes == 4 * (8 * 27 + 8 + 8 + 1 + 4)
    assert report.partitions == 2
    assert report.cut_bytes == 2 * 4 * 8 * 4 * 6


def test_blocking_comes_with_site_and_reason(report):
    (row,) = report.blocking_rows()
    assert (row["site"], row["kind"], row["output"]) == ("(network)", "erf", "1×8×4×6")
    assert "Erf" in row["reason"]


def test_rows_say_what_an_operation_is(report):
    rows = report.rows()
    assert len(rows) == len(report.operations)
    assert rows[0]["site"] == "stem.0"
    assert (rows[0]["kind"], rows[0]["inputs"], rows[0]["outputs"]) == ("conv2d", "1×3×4×6", "1×8×4×6")
    assert (rows[0]["channels mod 32"], rows[0]["rank"], rows[0]["dtype"]) == (8, 4, "float32")
    assert [row["site"] for row in rows if row["kind"] == "conv2d"] == ["stem.0", "stem.0 (call 2)", "head.deep"]


def test_partition_rows_hold_what_the_figure_takes(report):
    rows = report.partition_rows()
    assert set(rows[0]) == {"index", "site", "kind", "partition", "runs_on"}
    assert [row["kind"] for row in rows if row["runs_on"] == "CPU"] == ["erf"]
    assert "sum" not in {row["kind"] for row in rows}  # of a constant


def test_kinds_are_counted_once(report):
    kinds = {row["kind"]: row for row in report.kind_rows()}
    assert sum(row["operations"] for row in kinds.values()) == len(report.operations)
    assert kinds["conv2d"]["operations"] == 3
    assert kinds["sum"]["predicted"] == "1 folded"


def test_one_line(report):
    assert str(report) == (
        f"<network> for SM8850: {len(report.operations)} operations, 0.0 GMAC, 2 partitions predicted, 1 erf on the CPU"
    )


def test_the_page_shows_what_blocks_first_and_escapes_names(report):
    page = report._repr_html_()
    assert page.index("Would stay on the CPU") < page.index("Operations by kind")
    assert "&lt;network&gt;" in page
    assert "<network>" not in page


def test_nothing_blocks_is_said():
    page = audit(nn.ReLU().eval(), (torch.empty(1),))._repr_html_()
    assert "Nothing blocks." in page
    assert "What crosses" not in page


def test_a_saved_report_is_the_same_report(report, tmp_path):
    path = report.save(tmp_path / "audit.json")
    loaded = AuditReport.load(path)
    assert loaded == report
    assert loaded.operations[-1].setting("other") == "inf"
    assert loaded.save(tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_report_with_an_unknown_field_is_refused(report, tmp_path):
    values = json.loads(report.save(tmp_path / "audit.json").read_text())
    values["operations"][0]["flops"] = 1
    (tmp_path / "audit.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match="flops"):
        AuditReport.load(tmp_path / "audit.json")


def test_a_report_holds_no_tensors(report):
    json.dumps(report.to_json())
