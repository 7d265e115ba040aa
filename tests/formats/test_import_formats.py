"""Foreign formats of clusters: PTAFM's file against our own form of it, hostfiles."""

from __future__ import annotations

import numpy as np
import pytest

from polygon.domain.errors import InputError
from polygon.formats import files


def test_ptafm_file_and_our_own_form_of_it_are_one_cluster():
    """The ancestor's text file, unchanged, gives the shipped YAML; but for one slip in its data."""
    text, yaml = files.read_cluster("instances/ptafm-7dc.txt"), files.read_cluster("instances/ptafm-7dc.yaml")
    assert (text.stages, text.devices) == (yaml.stages, yaml.devices) == (5, 96)
    assert text.name == yaml.name == "ptafm-7dc"
    assert text.regions[:5] == yaml.regions[:5] and text.regions[6] == yaml.regions[6]
    np.testing.assert_array_equal(text.latency_s, yaml.latency_s)
    assert np.argwhere(text.bytes_per_s != yaml.bytes_per_s).tolist() == [[5, 5]]


PTAFM = """NUM_STAGE:2
POWER_SECTION
1 [1,2]
2 [0,3]
end
LATENCY_SECTION
1 1 0.1
1 2 30
2 2 0.1
end
BANDWIDTH_SECTION
1 1 200
2 1 0.5
2 2 200
end
"""


def test_ptafm_units(tmp_path):
    """Milliseconds one way, Gbit/s, and pairs of centers in either order."""
    file = tmp_path / "two.txt"
    file.write_text(PTAFM, encoding="utf-8")
    cluster = files.read_cluster(file)
    assert [region.name for region in cluster.regions] == ["dc1", "dc2"]
    assert [(pool.device.name, pool.devices) for pool in cluster.pools] == [("a100-40gb", 1), ("t4", 2), ("t4", 3)]
    assert cluster.latency_s[0, 1] == cluster.latency_s[1, 0] == 0.030
    assert cluster.bytes_per_s[0, 1] == cluster.bytes_per_s[1, 0] == 0.5e9 / 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1 [1,2]", "1 [1;2]", "line 3: found '1 [1;2]', expected 'CENTER [A100s,T4s]'"),
        ("1 [1,2]", "1 [0,0]", "line 3: POWER_SECTION: found '1 [0,0]', expected at least one device"),
        ("2 [0,3]", "1 [0,3]", "line 4: POWER_SECTION: found 1, expected a center that no earlier line gives"),
        ("1 2 30", "1 3 30", "line 8: LATENCY_SECTION: found 3, expected a center of POWER_SECTION"),
        ("1 2 30", "1 2 x", "line 8: found '1 2 x', expected 'CENTER CENTER NUMBER'"),
        ("2 1 0.5", "2 1 0", "line 13: BANDWIDTH_SECTION: found 0.0, expected a number > 0"),
        ("2 1 0.5\n", "", "BANDWIDTH_SECTION: found no line for centers 1 2, expected one a pair"),
        ("2 1 0.5", "2 1 0.5\n1 2 0.6", "line 14: BANDWIDTH_SECTION: found 0.6, expected 0.5, which an earlier line"),
        ("NUM_STAGE:2", "NUM_STAGE:two", "line 1: NUM_STAGE: found 'two', expected a number >= 1"),
        ("NUM_STAGE:2", "", "NUM_STAGE: found nothing, expected a line NUM_STAGE:n"),
        ("2 2 200\nend\n", "2 2 200\n", "BANDWIDTH_SECTION: found the end of the file, expected a line 'end'"),
        ("2 2 0.1\nend\n", "", "line 9: found 'BANDWIDTH_SECTION', expected 'end' of LATENCY_SECTION before it"),
        ("POWER_SECTION", "POWER", "line 2: found 'POWER', expected NUM_STAGE:n or POWER_SECTION, LATENCY_SECTION"),
    ],
)
def test_ptafm_faults_name_the_line(old, new, message, tmp_path):
    """Every fault says in which line or section, what was found and what is allowed."""
    assert old in PTAFM
    file = tmp_path / "bad.txt"
    file.write_text(PTAFM.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as error:
        files.read_cluster(file)
    assert str(error.value).startswith(f"{file}: {message}")


def test_hostfile(tmp_path):
    """Hosts of one type and size form a group of nodes; comments and blank lines are skipped."""
    file = tmp_path / "hostfile"
    file.write_text("# ours\nn1 slots=8 type=A100\n\nn2 slots=8 type=A100  # new\nn3 slots=4 type=T4\n", "utf-8")
    cluster = files.read_cluster(file)
    shape = [(pool.device.name, pool.nodes, pool.devices_per_node) for pool in cluster.pools]
    assert shape == [("a100-40gb", 2, 8), ("t4", 1, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2 type=t4\na slots=2 type=t4\n", "line 2: found 'a', expected each host once"),
        ("a slots=2\n", "line 1: found 'a slots=2' without a type, expected type=DEVICE at the end of the line"),
        ("a slots=2 type=t4\nb slot=2\n", "line 2: found 'b slot=2', expected 'HOST slots=N type=DEVICE' with N >= 1"),
        ("a slots=0 type=t4\n", "line 1: found 'a slots=0 type=t4', expected 'HOST slots=N type=DEVICE' with N >= 1"),
        ("a slots=2 type=t44\n", "regions[0].nodes[0].device: found device 't44', expected 't4' (nearest)"),
    ],
)
def test_hostfile_faults(text, message, tmp_path):
    """Every fault names its line."""
    file = tmp_path / "hostfile"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        files.read_cluster(file)
    assert str(error.value).startswith(f"{file}: {message}")
