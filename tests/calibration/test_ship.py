"""Constants of some known rows, and shipping them again changes nothing."""

import sys
from dataclasses import replace

from shipped import _same, ship

from madmax_lib.simulator.rates.parameters import shipped

SOME = [
    "foundation-model-stack/fms-fsdp",
    "calculon-ai/calculon",
    "pytorch/torchtitan",
    "NVIDIA/NeMo",
]


def test_a_second_time_leaves_the_file_as_it_is(rows, tmp_path, monkeypatch):
    some, path = rows[rows["repository"].isin(SOME)], tmp_path / "parameters.json"
    monkeypatch.setattr(sys.modules[ship.__module__], "known_rows", lambda: some)
    ship(path)
    written = path.read_bytes()
    ship(path)
    assert path.read_bytes() == written


def test_other_constants_are_others():
    name = shipped().fitted[0]
    for factor, same in ((1 + 1e-6, True), (1.001, False)):
        moved = shipped().constants | {name: factor * shipped().constants[name]}
        assert _same(shipped(), replace(shipped(), constants=moved)) == same
    assert not _same(
        shipped(), replace(shipped(), provenance={"sha256": "of other rows"})
    )
