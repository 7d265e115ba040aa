"""A probe session between real processes, on this host and between the lab's hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polygon.formats.files import read_cluster
from runners.probe import main
from runners.probe_net.wire import steady_rate
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
