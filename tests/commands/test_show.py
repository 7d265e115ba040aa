"""The catalogues are listed for people and for machines."""

from __future__ import annotations

import json

import pytest

from polygon.commands.show import main
from polygon.formats import catalogue


@pytest.mark.parametrize(
    ("what", "known"),
    [
        ("devices", catalogue.devices),
        ("models", catalogue.models),
        ("links", catalogue.links),
        ("runtimes", catalogue.runtimes),
    ],
)
def test_lists_every_entry(what, known, capsys):
    """One row an entry, as a table and as JSON."""
    assert main([what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *known()]
    assert main([what, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(known())


def test_units_of_a_row(capsys):
    """The numbers are those of the data sheet."""
    main(["devices", "--json"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "a100-80gb"]
    assert (row["memory_gib"], row["bf16_tflops"], row["intra_node_gbps"]) == pytest.approx((80, 312, 2400))
