"""The table of chips and the names by which they are found."""

from dataclasses import replace

import pytest

from lumen_lab import chips
from lumen_lab.chips import Chip, find_chip, load_chips
from lumen_lab.errors import ChipError


def test_the_table_has_every_chip_once_with_an_architecture_that_the_compiler_serves():
    table = load_chips()
    assert len(table) == 60 and len({chip.name for chip in table}) == 60
    assert {chip.htp_arch for chip in table} == {68, 69, 73, 75, 79, 81, 85}
    assert len({chip.soc_model for chip in table} - {None}) == 41
    assert all(chip.sources for chip in table)


def test_a_chip_carries_the_numbers_of_its_row():
    chip = find_chip("SM8850")
    assert (chip.marketing_name, chip.htp_arch, chip.soc_model, chip.vtcm_mb) == ("8 Elite Gen 5", 81, 87, 8)
    assert chip.supports_fp16 is True
    assert find_chip("SM8350").supports_fp16 is False
    assert find_chip("SM8845").supports_fp16 is None and find_chip("SM7425").soc_model is None


def silent_float16(table):
    """The chips that share a ``soc_model`` without sharing its float16, and whose notes do not say why."""
    known = {}
    for chip in table:
        known.setdefault(chip.soc_model, set()).add(chip.supports_fp16)
    known.pop(None, None)
    return [c.name for c in table if len(known.get(c.soc_model, ())) > 1 and "float16 conflict" not in c.note]


def test_chips_of_one_soc_model_do_not_differ_in_float16_without_saying_so():
    table = load_chips()
    assert silent_float16(table) == []
    forgotten = [replace(c, supports_fp16=None, note="") if c.name == "SM8350P" else c for c in table]
    assert silent_float16(forgotten) == ["SM8350", "SM8350P"]


@pytest.mark.parametrize("name", ["SM8350P", "QCM6490", "QCS6690", "SAR2230P", "QCS7790", "SM7750", "SM8735"])
def test_float16_is_refused_where_the_soc_model_refuses_it(name):
    chip = find_chip(name)
    assert chip.supports_fp16 is False and "float16" in chip.note


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SM8850", "SM8850"),
        (" sm-8850 ", "SM8850"),
        ("Snapdragon 8 Elite Gen 5", "SM8850"),
        ("Qualcomm Snapdragon® 8 elite-gen5", "SM8850"),
        ("8 Gen 1", "SM8450"),
        ("8+ Gen 1", "SM8475"),
        ("X Elite", "SC8380XP"),
        ("Dragonwing IQ-9075", "QCS9075"),
        ("IQ 9075", "QCS9075"),
        ("SA8255P", "SA8255"),
    ],
)
def test_names_are_found_in_any_spelling(name, expected):
    assert find_chip(name).name == expected


def test_every_part_number_and_marketing_name_leads_to_its_own_chip():
    for chip in load_chips():
        assert find_chip(chip.name) == chip
        assert find_chip(chip) is chip
        if chip.marketing_name:
            assert find_chip(f"Snapdragon {chip.marketing_name}") == chip


@pytest.mark.parametrize(
    ("name", "nearest"), [("SM8851", "SM8850"), ("8 Elite Gen 55", "8 Elite Gen 5"), ("SM845", "SM8450")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ChipError, match=f"No chip called '{name}' .*Did you mean .*{nearest}"):
        find_chip(name)


@pytest.mark.parametrize("name", ["", "Snapdragon", "Kirin 9000", "Dimensity"])
def test_a_name_near_to_nothing_is_refused_with_the_way_to_the_list(name):
    with pytest.raises(ChipError, match=r"load_chips\(\) lists them"):
        find_chip(name)


def test_a_chip_older_than_v68_is_refused():
    old = Chip("SM8250", "865", 66, 21, 4, False, "a list", "")
    with pytest.raises(ChipError, match="HTP v66; .* serves v68 and later"):
        find_chip(old)


@pytest.mark.parametrize(
    ("name", "arch"), [("SM8250", 66), ("sm-8150", 66), ("Snapdragon 865", 66), ("SDM845", 65), ("845", 65)]
)
def test_an_older_chip_is_refused_as_such_by_name(name, arch):
    with pytest.raises(ChipError, match=f"{name} has HTP v{arch}; .* serves v68 and later") as caught:
        find_chip(name)
    assert "Did you mean" not in str(caught.value)


def test_no_older_chip_is_in_the_table():
    table = {chips._key(name) for chip in load_chips() for name in (chip.name, chip.marketing_name)}
    assert len(chips._older()) > 15 and not table & set(chips._older())


def test_one_marketing_name_of_two_chips_is_refused_as_ambiguous(monkeypatch, tmp_path):
    header = ",".join(chips.COLUMNS)
    table = tmp_path / "chips.csv"
    table.write_text(f"{header}\nAB1,Twin,v81,1,,yes,a,\nAB2,Twin,v79,2,,,a,\n")
    monkeypatch.setattr(chips, "TABLE", table)
    chips._index.cache_clear()
    try:
        assert find_chip("AB2").soc_model == 2
        with pytest.raises(ChipError, match=r"several chips: AB1 \(Twin\), AB2 \(Twin\)"):
            find_chip("twin")
    finally:
        chips._index.cache_clear()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("chip,htp_arch\nSM1,v81\n", "marketing_name"),
        ("", "no table of chips"),
        (",".join(chips.COLUMNS) + "\nSM1,,eighty,1,,,a,\n", "row of SM1"),
        (",".join(chips.COLUMNS) + "\nSM1,,v81,1,,perhaps,a,\n", "row of SM1"),
    ],
)
def test_a_spoiled_table_is_refused(tmp_path, content, words):
    table = tmp_path / "chips.csv"
    table.write_text(content)
    with pytest.raises(ChipError, match=words):
        load_chips(table)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(ChipError, match="cannot be read"):
        load_chips(tmp_path / "none.csv")
