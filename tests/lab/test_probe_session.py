"""A probe session between real processes, on this host and between the lab's hosts."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polygon.formats.files import read_cluster
from runners.probe import main
from runners.probe_net.diagnose import as_message, host_facts
from runners.probe_net.wire import DataServer, measure_rate, message_sizes, receive_line, send_line, steady_rate
from tests.free_ports import free_port
from tests.patience import PATIENCE_S, eventually

ROOT = Path(__file__).resolve().parents[2]


def start(words, **environment):
    """A probe rank as a process."""
    clean = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "runners.probe", *words], cwd=ROOT, env={**clean, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_ranks_of_one_host_measure_each_other():
    """All ordered pairs, a report with rates and messages of every link; only rank 0 prints it."""
    url = f"tcp://127.0.0.1:{free_port()}"
    common = ["--dist-url", url, "--world-size", "2", "--streams", "1,2", "--sizes", "1000,100000", "--seconds", "0.25"]
    ranks = [start([*common, "--rank", str(rank), "--json"]) for rank in range(2)]
    outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    report = json.loads(outputs[0][0])
    assert {(link["source"], link["target"]) for link in report["links"]} == {(0, 1), (1, 0)}
    for link in report["links"]:
        assert set(link["bytes_per_s_by_streams"]) == {"1", "2"} and min(link["bytes_per_s_by_streams"].values()) > 0
        assert set(link["message_s_by_bytes"]) == {"1000", "100000"} and link["rtt_s"] > 0
    assert outputs[1][0] == ""


def test_a_missing_rank_is_named():
    """Rank 0 does not wait for ever, and says who is missing."""
    words = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "3", "--rank", "0", "--timeout", "1"]
    rank = start(words)
    _, error = rank.communicate(timeout=PATIENCE_S)
    assert rank.returncode == 2 and "found 1 of 3 ranks after 1 s, expected rank 1, 2 too" in error


def test_an_unreachable_coordinator_is_named(capsys, status_of):
    """The others say what they could not reach, why, and what to try."""
    port = free_port()
    words = ["--dist-url", f"tcp://127.0.0.1:{port}", "--world-size", "2", "--rank", "1", "--timeout", "0.5"]
    assert status_of(main, words) == 2
    error = capsys.readouterr().err
    assert f"tcp://127.0.0.1:{port} not reached in 0.5 s" in error and f"nc -vz 127.0.0.1 {port}" in error
    assert "rank 0 does not run there" in error and error.count("\n") == 1


FAST = ["--streams", "1", "--sizes", "0", "--seconds", "0.2"]


@contextlib.contextmanager
def played_rank(port, rank, region):
    """A rank that this test plays: its connection to rank 0, joined, and its data server behind it."""
    server = DataServer()
    try:
        control = eventually(lambda: reached(port))
        with control:
            control.settimeout(PATIENCE_S)
            send_line(control, as_message(host_facts(rank, region, server.port, "127.0.0.1")))
            assert receive_line(control) == {"do": "joined"}
            yield control
    finally:
        server.close()


def reached(port):
    """A connection to rank 0, once it listens."""
    try:
        return socket.create_connection(("127.0.0.1", port))
    except OSError:
        return None


def test_what_was_measured_outlives_a_rank_that_leaves(tmp_path):
    """A rank leaves when it is asked to measure: the links of the others are measured, and its going is told."""
    port, out = free_port(), tmp_path / "report.json"
    common = ["--dist-url", f"tcp://127.0.0.1:{port}", "--world-size", "3", *FAST]
    first = start([*common, "--rank", "0", "--region", "A", "-o", str(out)])
    with played_rank(port, 1, "B") as leaves:
        last = start([*common, "--rank", "2", "--region", "C"])
        assert receive_line(leaves)["do"] == "measure"
    told = [rank.communicate(timeout=PATIENCE_S) for rank in (first, last)]
    assert [first.returncode, last.returncode] == [0, 0], told
    report = json.loads(out.read_text())
    measured = {(link["source_region"], link["target_region"]) for link in report["links"]}
    assert measured == {("A", "B"), ("A", "C"), ("C", "A")} and report["complete"]
    (problem,) = (problem for problem in report["problems"] if problem["kind"] == "left")
    assert problem["rank"] == 1 and "rank 1" in problem["found"]


@pytest.mark.parametrize("with_cluster", [False, True])
def test_a_session_that_could_measure_nothing_has_failed(with_cluster, tmp_path):
    """Nobody reaches the other's port: the report is written, a cluster is not, and the exit code says so."""
    port, out, cluster = free_port(), tmp_path / "out.json", tmp_path / "c.yaml"
    cluster.write_text("regions:\n  - {name: A, nodes: [{device: T4, count: 2}]}\n")
    words = ["--dist-url", f"tcp://127.0.0.1:{port}", "--world-size", "2", "--rank", "0", "--region", "A", *FAST]
    first = start([*words, "-o", str(out), *(["--cluster", str(cluster)] if with_cluster else [])])
    control = eventually(lambda: reached(port))
    with control:
        send_line(control, as_message(host_facts(1, "A", free_port(), "127.0.0.1")))  # where nobody listens
        assert receive_line(control) == {"do": "joined"}
        task = receive_line(control)
        while task["do"] == "measure":
            send_line(control, {"error": "connection refused", "reached": False})
            task = receive_line(control)
    _, error = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 2 and task["report"]["links"] == []
    assert error.endswith("probe: found no link that could be measured, expected one at least\n")
    assert with_cluster != out.exists()


def test_ctrl_c_keeps_the_links_that_were_measured(tmp_path):
    """The second link is never measured to its end: the first is in the cluster, the other stays, and that is said."""
    port, out, cluster = free_port(), tmp_path / "measured.json", tmp_path / "c.yaml"
    cluster.write_text(
        "regions:\n  - {name: A, nodes: [{device: T4, count: 1}]}\n  - {name: B, nodes: [{device: T4, count: 1}]}\n"
        "links:\n  - {between: [A, B], latency_ms: 5, bandwidth_gbps: 7000}\n"
    )
    first = start(
        ["--dist-url", f"tcp://127.0.0.1:{port}", "--world-size", "2", "--rank", "0", "--region", "A", *FAST,
         "--cluster", str(cluster), "-o", str(out)]
    )  # fmt: skip
    with played_rank(port, 1, "B") as silent:
        assert receive_line(silent)["do"] == "measure"
        first.send_signal(signal.SIGINT)
        _, error = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, error
    found = read_cluster(out)
    assert found.bytes_per_s[0, 1] < 7e12 / 8 and found.bytes_per_s[1, 0] == 7e12 / 8
    assert "interrupted: these 1 links were measured" in error and f"not measured, as {cluster} says: B -> A" in error


def test_a_region_that_the_cluster_has_not_is_told_before_anything_is_measured(tmp_path, capsys, status_of):
    """Its links could go nowhere; the ranks are named, and so is a cluster file that cannot be read."""
    cluster = tmp_path / "c.yaml"
    cluster.write_text("regions:\n  - {name: tokyo, nodes: [{device: T4, count: 1}]}\n")
    words = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2", "--rank", "0", "--region", "tokio"]
    assert status_of(main, [*words, "--cluster", str(cluster)]) == 2
    error = capsys.readouterr().err
    assert "--region: found 'tokio', expected 'tokyo'" in error and "Mbit/s" not in error
    assert status_of(main, [*words, "--timeout", "0.1", "--cluster", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: found no such file" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"[1]\n", b""])
def test_another_program_at_the_address_of_rank_0_is_told(answer, capsys, status_of):
    """It answers something else, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ["--dist-url", f"tcp://127.0.0.1:{server.getsockname()[1]}", "--world-size", "2", "--rank", "1"]
        rank = start([*words, "--timeout", "60" if answer else "0.2"])
        connection, _ = server.accept()
        with connection:
            connection.sendall(answer)
            _, error = rank.communicate(timeout=PATIENCE_S)
    assert rank.returncode == 2 and "is the port another program's?" in error and error.count("\n") == 1


def test_a_data_port_that_is_taken_is_told(capsys, status_of):
    """One line, of the system's word."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        words = ["--dist-url", "tcp://127.0.0.1:1", "--world-size", "2", "--rank", "1", "--data-port", str(port)]
        assert status_of(main, words) == 2
    error = capsys.readouterr().err
    assert f"--data-port: port {port} cannot be opened here (Address already in use), expected a free port" in error


def test_a_time_too_short_to_count_is_made_longer():
    """A rate of nothing would be a link that is not there."""
    server = DataServer()
    try:
        assert measure_rate(("127.0.0.1", server.port), 1, rtt_s=1e-4, seconds=1e-3) > 0
    finally:
        server.close()


def test_messages_that_a_slow_link_would_carry_for_minutes_are_left_out():
    """1 Mbit/s brings 1 MB in 8 s; the smallest is measured on any link."""
    assert message_sizes([65536, 10**6, 10**6 + 1, 8 << 20], 125e3) == [65536, 10**6]
    assert message_sizes([65536], 1.0) == [65536]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rank", "1", "--world-size", "2", "--dist-url", "tcp://[fd00::1]:29400"],
            "found the IPv6 address fd00::1, expected an IPv4 one",
        ),
        (["--rank", "1", "--world-size", "2", "--dist-url", "tcp://h:1", "--data-port", "70000"], "in 0..65535"),
        (["--rank", "0", "--world-size", "2"], "--dist-url: found nothing"),
        (["--rank", "2", "--world-size", "2", "--dist-url", "tcp://h:1"], "found 2 of 2"),
        (["--rank", "1", "--world-size", "2", "--dist-url", "h:1"], "expected tcp://HOST:PORT"),
        (["--rank", "1", "--world-size", "2", "--dist-url", "tcp://h:1", "--streams", "0"], "--streams: found '0'"),
        (["--rank", "1", "--world-size", "2", "--dist-url", "tcp://h:1", "--seconds", "0"], "--seconds: found '0'"),
        (
            ["--rank", "1", "--world-size", "2", "--dist-url", "tcp://h:1", "--interface", "nope"],
            "--interface: found 'nope', expected one of lo (127.0.0.1)",
        ),
    ],
)
def test_bad_words_are_one_line_and_status_2(words, message, capsys, monkeypatch, status_of):
    """Every wrong word is named."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    assert status_of(main, words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_steady_rate_leaves_the_start_out():
    """Slow for ten bins, then 1000 bytes per 50 ms: 20000 bytes/s, and the unfinished last bin does not count."""
    bins = dict.fromkeys(range(10), 10) | dict.fromkeys(range(10, 20), 1000) | {20: 3}
    assert steady_rate(bins) == pytest.approx(20_000)
    assert steady_rate({1: 5}) == 0.0


def test_hosts_of_a_lab_find_link_window_and_small_buffer(alone, tmp_path):
    """60 ms, 200 Mbit/s, TCP buffers of 0.5 MiB: the probe finds the link, the window, and says what mends it."""
    cluster, measured = tmp_path / "c.yaml", tmp_path / "measured.json"
    cluster.write_text(
        "regions:\n  - {name: A, nodes: [{device: T4, count: 1}]}\n  - {name: B, nodes: [{device: T4, count: 1}]}\n"
        "links:\n  - {from: A, to: B, latency_ms: 30, bandwidth_gbps: 0.2}\n"
        "  - {from: B, to: A, latency_ms: 30, bandwidth_gbps: 0.2}\n"
    )
    command = [sys.executable, "-m", "runners.probe", "--streams", "1,8", "--sizes", "0", "--seconds", "0.7", "--json",
               "--cluster", str(cluster), "-o", str(measured)]  # fmt: skip
    lab = [
        sys.executable,
        "-m",
        "runners.lab",
        str(cluster),
        "--no-measure",
        "--tcp-window",
        "0.5",
        "--backend",
        "relay",
    ]

    def finds_what_is_there():
        done = subprocess.run(
            [*lab, "--", *command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.removeprefix("[a-0] "))
        found = read_cluster(measured)
        links = {(link["source_region"], link["target_region"]): link for link in report["links"]}
        assert found.latency_s[0, 1] == pytest.approx(links["A", "B"]["rtt_s"] / 2)
        assert found.bytes_per_s[1, 0] == pytest.approx(links["B", "A"]["link_bytes_per_s"])
        assert all(link["rtt_s"] >= 0.060 for link in links.values())
        problems = report["problems"]
        assert all("sysctl -w" in problem["remedy"] for problem in problems if problem["kind"] == "small TCP window")
        small = {problem["kind"] for problem in problems} == {"small TCP window"}
        return small and "8 streams" not in problems[0]["found"] and all(map(is_as_shaped, links.values()))

    # What other load makes late is measured again.
    assert eventually(finds_what_is_there)


def is_as_shaped(link):
    """Whether one stream has at most its buffer under way, and more streams bring more, up to the link."""
    rates = link["bytes_per_s_by_streams"]
    return (
        link["rtt_s"] < 0.260
        and rates["1"] < 1.1 * 2**19 / 0.060
        and rates["1"] < rates["8"] < 1.05 * 25e6
        and link["window_bytes"] < 1.2 * 2**19 * link["rtt_s"] / 0.060 / 0.82
    )


def test_a_host_without_torch_can_be_probed():
    """Plain sockets: as a program of its own, and as `polygon probe`."""
    tried = (
        "import sys; from polygon.__main__ import main; from polygon.commands import cli\n"
        "cli.find_spec = lambda name: None\n"
        "import runners.probe; assert 'torch' not in sys.modules; del sys.modules['runners.probe']\n"
        "sys.argv = ['polygon']; main(['probe', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", tried], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--dist-url" in done.stdout, done.stderr
