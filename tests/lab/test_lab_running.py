"""A real lab on this machine: what links give, live changes, processes on hosts, and that nothing stays behind."""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runners.lab import main
from runners.lab_net import registry
from runners.lab_net.measuring import measure
from runners.lab_net.running import Lab
from runners.lab_net.topology import LabHost, LabNetwork, SharedCapacity
from runners.probe_net.wire import DataServer, measure_messages_s, measure_rtt_s
from runners.relay import processes_of_lab
from tests.patience import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the in-process lab needs root"),
]

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = """
regions:
  - {name: Tokyo, nodes: [{device: T4, count: 1}]}
  - {name: Berlin, nodes: [{device: T4, count: 1}]}
links:
  - {between: [Tokyo, Berlin], latency_ms: 20, bandwidth_gbps: 0.05}
"""


SINK = """
import socket
listener = socket.create_server(("", 9))
print("ready", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 20):
    pass
"""
FORKED = """
import os, time
from tests.lab.test_lab_running import two_hosts
from runners.lab_net.running import Lab
lab = Lab(two_hosts(), backend="relay").__enter__()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    lab.move_to(lab.network.hosts[0])
    os.write(writer, b"x")
    time.sleep(100_000)
os.read(reader, 1)
print(lab.name, child, flush=True)
time.sleep(100_000)
"""
SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9))
end_s = time.monotonic() + 1
while time.monotonic() < end_s:
    connection.send(bytes(65536))
"""
CARRIED_BYTES = 1_000_000


def network_of(latency_s, bytes_per_s, shared=()):
    """Hosts h0, h1, ... each in a region and a pool of its own."""
    n = len(latency_s)
    hosts = tuple(
        LabHost(
            index=i, name=f"h{i}", region=i, region_name=f"R{i}", pool=i, node=0, address=f"10.88.{i}.1", devices=(i,)
        )
        for i in range(n)
    )
    return LabNetwork(hosts=hosts, latency_s=np.array(latency_s), bytes_per_s=np.array(bytes_per_s), shared=shared)


def two_hosts(one_way_s=0.02, mbit_per_s=50.0):
    """Two hosts with the same link both ways."""
    rate = mbit_per_s * 1e6 / 8
    return network_of([[0, one_way_s], [one_way_s, 0]], [[0, rate], [rate, 0]])


def interfaces():
    """Network interfaces and named namespaces of the machine itself."""
    named = Path("/run/netns")
    return sorted(Path("/sys/class/net").iterdir()), sorted(named.iterdir()) if named.exists() else []


def rate_is_as_asked(lab, pair, bytes_per_s=None):
    """Whether a link's measured rate is near the asked one; never is its round trip shorter than asked."""
    (row,) = measure(lab, [pair], streams=2, seconds=0.8)
    assert row["rtt_s"] >= row["asked_rtt_s"]
    return 0.3 < row["bytes_per_s"] / (bytes_per_s or row["asked_bytes_per_s"]) < 1.05


def carried_s(lab, pair):
    """Seconds from before a megabyte is sent until all of it has arrived: other load makes them more, and never less.

    By messages of the probe, which are answered: the way back is a round trip more.
    """
    a, b = (lab.network.hosts[place] for place in pair)
    with lab.inside(b):
        server = DataServer()
    with lab.inside(a), contextlib.closing(server):
        return measure_messages_s((b.address, server.port), [CARRIED_BYTES], times=1)[CARRIED_BYTES]


def test_links_give_what_was_asked():
    """Round trip (10 ms there, 30 back): never below what was asked; each direction has its own rate, which it gets."""
    network = network_of([[0, 0.01], [0.03, 0]], [[0, 1.25e7], [2.5e6, 0]])
    with Lab(network, backend="relay") as lab:
        for pair in ((0, 1), (1, 0)):
            assert carried_s(lab, pair) >= CARRIED_BYTES / network.bytes_per_s[pair] + 0.04
            assert eventually(lambda pair=pair: rate_is_as_asked(lab, pair))


def test_flows_share_a_capacity():
    """Two links of 100 Mbit/s behind one capacity of 40: each alone gets it, together they share it."""
    rate, capacity = 12.5e6, 5e6
    network = network_of(
        np.full((3, 3), 0.005),
        np.full((3, 3), rate) * (1 - np.eye(3)),
        (SharedCapacity(name="egress", bytes_per_s=capacity, pairs=((0, 1), (0, 2))),),
    )
    with Lab(network) as lab:
        assert lab.backend == "relay"
        assert carried_s(lab, (0, 1)) >= CARRIED_BYTES / capacity
        assert eventually(lambda: rate_is_as_asked(lab, (0, 1), capacity))

        def both_get_a_part():
            start_s = time.monotonic()
            before = lab.counters()
            send_to_both(lab)
            after = lab.counters()
            elapsed_s = time.monotonic() - start_s  # of all that is counted
            sent = {pair: count[0] - before.get(pair, (0,))[0] for pair, count in after.items()}
            assert sent[0, 1] + sent[0, 2] <= 1.05 * capacity * elapsed_s
            return min(sent[0, 1], sent[0, 2]) > 0.1 * max(sent[0, 1], sent[0, 2])

        assert eventually(both_get_a_part)


def send_to_both(lab):
    """Host 0 sends to hosts 1 and 2 for a second, as fast as it can."""
    hosts = lab.network.hosts
    sinks = [lab.popen(host, [sys.executable, "-c", SINK], stdout=subprocess.PIPE) for host in hosts[1:]]
    for process in sinks:
        process.stdout.readline()
        process.stdout.close()
    senders = [lab.popen(hosts[0], [sys.executable, "-c", SOURCE, host.address]) for host in hosts[1:]]
    for process in senders + sinks:
        process.wait(PATIENCE_S)


def some_round_trip_is_below(limit_s, target):
    """Whether one of many is: a busy machine makes any of them late, and none short."""
    return eventually(lambda: measure_rtt_s(target, times=5)[0] < limit_s)


def test_links_change_live_and_partitions_heal():
    """A latency can be raised, a link cut and joined, while the hosts run."""
    network = two_hosts(0.005)
    with Lab(network, backend="relay") as lab:
        a, b = network.hosts
        with lab.inside(b):
            server = DataServer()
        with lab.inside(a):
            assert some_round_trip_is_below(0.3, (b.address, server.port))
        lab.change(a, b, latency_s=0.3)
        with lab.inside(a):
            assert measure_rtt_s((b.address, server.port), times=2)[0] >= 0.305
        lab.change(a, b, latency_s=0.05)
        lab.cut([b])
        with lab.inside(a), pytest.raises(OSError, match="timed out"):
            socket.create_connection((b.address, server.port), timeout=0.5)
        lab.cut([b], connected=True)
        with lab.inside(a):
            assert measure_rtt_s((b.address, server.port), times=2)[0] >= 0.055
            assert some_round_trip_is_below(0.3, (b.address, server.port))
        server.close()


@pytest.mark.skipif(
    shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None, reason="veth wiring needs iproute2"
)
def test_veth_wiring_gives_rates():
    """The kernel's own wiring (veth, htb) shapes rates; delays need netem, which not every kernel has."""
    with Lab(two_hosts(0.0), backend="netem") as lab:
        assert eventually(lambda: rate_is_as_asked(lab, (0, 1)))
        a, b = lab.network.hosts
        lab.change(a, b, bytes_per_s=1.25e6)
        assert eventually(lambda: rate_is_as_asked(lab, (0, 1), 1.25e6))


def test_a_lab_leaves_nothing():
    """After the lab: no process, no interface, no namespace, no folder."""
    before = interfaces()
    with Lab(two_hosts(), backend="relay") as lab:
        process = lab.popen(lab.network.hosts[0], ["sh", "-c", "trap '' TERM; sleep 100000 & sleep 100001"])
        assert eventually(lambda: processes_of_lab(lab.name))
    assert process.poll() is not None
    assert processes_of_lab(lab.name) == [] and interfaces() == before
    assert lab.name not in [record.name for record in registry.labs()]


@pytest.fixture
def cluster_file(tmp_path):
    """A cluster of two hosts, 40 ms apart."""
    path = tmp_path / "two.yaml"
    path.write_text(CLUSTER)
    return str(path)


def lab_command(*words, **options):
    """Run the lab's command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "runners.lab", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip


def test_command_runs_on_every_host(cluster_file):
    """Every host gets its rank, its name and the master's address; lines carry the host; a failure is status 1."""
    script = "echo $RANK/$WORLD_SIZE $POLYGON_REGION {host} $MASTER_ADDR {address} $GLOO_SOCKET_IFNAME; exit $RANK"
    done = lab_command(cluster_file, "--no-measure", "--", "sh", "-c", script)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [
        "[berlin-0] 1/2 Berlin berlin-0 10.88.0.1 10.88.1.1 wan0",
        "[tokyo-0] 0/2 Tokyo tokyo-0 10.88.0.1 10.88.0.1 wan0",
    ]
    assert "berlin-0: ended with status 1" in done.stderr
    missing = lab_command(cluster_file, "--no-measure", "--", "no-such-program")
    assert missing.returncode == 2 and "no-such-program" in missing.stderr and "Traceback" not in missing.stderr


def start_lab(cluster_file):
    """A lab whose hosts sleep (with a child each), running in the background; its process and its name."""
    script = "echo up; sleep 100000 & sleep 100001"
    process = subprocess.Popen(
        [sys.executable, "-m", "runners.lab", cluster_file, "--no-measure", "--", "sh", "-c", script],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [process.stdout.readline() for _ in range(2)]
    assert all("up" in line for line in lines), process.stderr.read()
    name = next(record.name for record in registry.labs() if record.pid == process.pid)
    return process, name


def gone(name):
    """Whether all processes of a lab and its folder vanish."""
    return eventually(lambda: not processes_of_lab(name) and not (registry.labs_folder() / name).exists())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_lab_is_swept(cluster_file, number):
    """However the lab's process ends, its hosts' processes end and its folder goes, without anybody's help."""
    process, name = start_lab(cluster_file)
    try:
        assert eventually(lambda: len(processes_of_lab(name)) >= 4)
        process.send_signal(number)
        assert gone(name)
        assert process.wait(PATIENCE_S) == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


def test_forked_ranks_do_not_keep_a_dead_lab_alive(tmp_path):
    """A process killed while its forked child is on a host: child, relay and folder go."""
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    process = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    name, child = process.stdout.readline().split()
    process.kill()
    process.communicate()
    assert gone(name)
    assert eventually(lambda: not Path(f"/proc/{child}").exists())


def test_a_running_lab_can_be_entered_and_changed(cluster_file):
    """--list names it, --enter runs a command on a host, --change moves a latency; wrong words are refused."""
    process, name = start_lab(cluster_file)
    try:
        assert re.search(rf"{name}\s+running\s+two\s+tokyo-0 berlin-0", lab_command("--list").stdout)
        entered = lab_command("--lab", name, "--enter", "berlin-0", "--", "cat", "/proc/net/dev")
        assert entered.returncode == 0 and "wan0:" in entered.stdout
        assert lab_command("--lab", name, "--change", "tokyo-0", "all", "latency_ms=1").returncode == 0
        wrong = lab_command("--lab", name, "--change", "tokyo-0", "oslo", "latency_ms=1")
        assert wrong.returncode == 2 and "expected one of tokyo-0, berlin-0" in wrong.stderr
        wrong = lab_command("--lab", name, "--change", "tokyo-0", "all", "latency_ms=-1")
        assert wrong.returncode == 2 and "latency_ms >= 0" in wrong.stderr
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert gone(name)


def test_cleanup_removes_dead_folders_and_no_living_lab(tmp_path):
    """The folder of a lab whose process is gone is swept; the record of a living process stays."""
    dead = registry.LabRecord(
        name=f"lab-dead-{os.getpid()}", pid=2**22 - 1, started_ticks=1, cluster="c", hosts=["h"], namespaces=[3]
    )
    living = registry.LabRecord(
        name=f"lab-living-{os.getpid()}",
        pid=os.getpid(),
        started_ticks=registry.start_ticks(os.getpid()),
        cluster="c",
        hosts=["h"],
        namespaces=[3],
    )
    try:
        registry.register(dead)
        registry.register(living)
        names, _ = registry.clean_up()
        assert dead.name in names and living.name not in names
        assert not dead.folder.exists() and living.folder.exists()
    finally:
        registry.unregister(dead.name)
        registry.unregister(living.name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "CLUSTER: found nothing"),
        (["absent.yaml"], "absent.yaml: found no such file"),
        (["{cluster}", "--hosts-per-region", "0"], "--hosts-per-region: found '0'"),
        (["{cluster}", "--streams", "0"], "--streams: found '0'"),
        (["{cluster}", "--time-limit", "-1"], "--time-limit: found '-1'"),
        (["{cluster}", "--master-port", "99999"], "--master-port: found '99999'"),
        (["{cluster}", "--backend", "magic"], "backend: found 'magic'"),
        (["{cluster}", "--congestion", "magic"], "congestion: found 'magic'"),
        (["{cluster}", "--tcp-window", "none"], "--tcp-window: found 'none'"),
        (["--enter", "tokyo-0", "--lab", "none"], "--lab: found none running"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, message, cluster_file, status_of):
    """Every wrong word is named in one line."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        status = status_of(main, [word.replace("{cluster}", cluster_file) for word in words])
    assert status == 2 and message in error.getvalue()
    assert [line for line in error.getvalue().splitlines() if message in line]
    assert "Traceback" not in error.getvalue()


@pytest.mark.parametrize("program", ["lab", "lab_launch"])
def test_a_user_becomes_root_of_a_namespace_before_threads_start(program):
    """With numpy or torch imported there are threads (unless OMP_NUM_THREADS is 1), and Linux then refuses it."""
    tried = (
        "import runpy, sys; from runners.lab_net import linux\n"
        "linux.become_root = lambda: sys.exit(7 + ('numpy' in sys.modules))\n"
        f"sys.argv = ['{program}', 'cluster.yaml']; runpy.run_module('runners.{program}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", tried], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
