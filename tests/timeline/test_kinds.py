from pathlib import Path

import pandas as pd
import pytest

from madmax_lib.timeline.kinds import (
    COLLECTIVES,
    collective_names,
    kernel_kinds,
    load_kinds,
)

# names of the field, the lower ones those of communication libraries
_NAMES = Path(__file__).with_name("kernel_names.csv")
NAMES = pd.read_csv(_NAMES, keep_default_na=False).to_numpy().tolist()


@pytest.mark.parametrize(("name", "kind", "collective"), NAMES)
def test_names_of_the_field(name, kind, collective):
    assert kernel_kinds([name])[0] == kind
    if kind == "comm":
        assert collective_names([name])[0] == collective


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("comm", "ncclKernel_AllReduce"),
        ("compute", "NcclKernel, void ncclKernel, Stream Wait Event, volta_sgemm"),
        ("memcpy", "Memcpy DtoH, dma_request"),
        ("other", "my Memcpy, Event Sync"),
    ],
)
def test_rules_of_hta(kind, names):
    assert set(kernel_kinds(names.split(", "), rules="hta")) == {kind}


def test_user_rows_come_first(tmp_path):
    table = tmp_path / "kinds.csv"
    table.write_text("kind,pattern,collective\ncomm,^Memcpy PtoP,send_recv\n")
    kinds = load_kinds(table)
    names = ["Memcpy PtoP (Device -> Device)", "Memset"]
    assert kernel_kinds(names, table=kinds).tolist() == ["comm", "memcpy"]
    assert collective_names(names[:1], table=kinds)[0] == "send_recv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind\ncomm\n", "needs the columns kind and pattern"),
        ("kind,pattern\nmagic,x\n", "kind 'magic' is not one of"),
        ("kind,pattern\ncomm,(\n", "is not a regular expression"),
        ("kind,pattern,rules\ncomm,x,Exact\n", "rules 'Exact' .* exact, device, hta"),
        ("", "not a table of kernel kinds"),
    ],
)
def test_bad_user_tables_are_refused(tmp_path, text, message):
    table = tmp_path / "kinds.csv"
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_kinds(table)


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match=r"rules='hat' .* exact, annotation, hta"):
        kernel_kinds(["x"], rules="hat")


def test_every_row_has_a_source_and_a_known_collective():
    table = load_kinds()
    assert (table["source"] != "").all()
    is_comm = (table["rules"] == "exact") & (table["kind"] == "comm")
    assert set(table.loc[is_comm, "collective"]) <= set(COLLECTIVES)
