"""The cluster generator keeps its word: exact numbers, same seed same cluster."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.commands import cli
from polygon.commands.generate import NODES, generate, main
from polygon.domain.errors import InputError
from polygon.formats import convert
from polygon.formats.schema import ClusterSpec, check


@given(data=st.data())
def test_exactly_what_was_asked_for(data):
    """Regions, device types and devices are exactly those asked for, and every pair of regions has a link."""
    regions = data.draw(st.integers(1, 24))
    devices = data.draw(st.integers(regions, 3000))
    types = data.draw(st.integers(1, min(len(NODES), regions, devices)))
    cluster = generate(regions, types, devices, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert len(cluster.regions) == regions
    assert cluster.devices == devices
    assert len({pool.device.name for pool in cluster.pools}) == types == len(cluster.catalogue)
    assert all(cluster.connected(a, b) for a in range(regions) for b in range(regions))
    assert all(pool.devices_per_node <= NODES[pool.device.name][0] for pool in cluster.pools)


def test_same_seed_same_cluster_other_seed_another():
    """The seed alone decides."""
    first, again, other = (convert.cluster_data(generate(5, 3, 100, np.random.default_rng(seed))) for seed in (7, 7, 8))
    assert first == again != other


def test_ten_thousand_devices(tmp_path, capsys):
    """The documented command writes 10,240 devices in 64 regions, byte for byte the same each time."""
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        options = ["--regions", "64", "--types", "8", "--devices", "10240", "--seed", "0"]
        assert main([*options, "-o", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert capsys.readouterr().err.count("10240 devices in 64 regions") == 2


def test_json_is_json_on_standard_output_too(capsys):
    """What a program asked for with --json and no file is the cluster, as one that -o names .json would hold."""
    assert main(["--regions", "2", "--types", "1", "--devices", "4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "polygon-cluster" and len(data["regions"]) == 2
    assert convert.cluster_from_spec(check(ClusterSpec, data)).devices == 4


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 1, 2), "devices: found 2, expected at least one a region, 3"),
        ((3, 99, 200), "types: found 99, expected at most 16: a100-40gb"),
        ((1, 4, 9), "types: found 4, expected at most 3 (one a device, 3 a region)"),
        ((3, 4, 3), "types: found 4, expected at most 3 (one a device, 3 a region)"),
    ],
)
def test_numbers_that_do_not_go_together(numbers, message):
    """The message says what is allowed."""
    with pytest.raises(InputError) as error:
        generate(*numbers, np.random.default_rng(0))
    assert str(error.value).startswith(message)


def test_bad_arguments_exit_2(tmp_path, capsys):
    """Through the command: one line on stderr, exit 2."""
    assert cli.run(main, ["--regions", "3", "--types", "1", "--devices", "2"]) == 2
    with pytest.raises(SystemExit, match=r"^2$"):  # a folder that is not there is refused with the arguments
        cli.run(main, ["--regions", "3", "--types", "1", "--devices", "9", "-o", str(tmp_path / "no" / "x")])
    assert capsys.readouterr().err.count("\n") == 2
