"""From measured transfers to a link."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polygon
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.errors import InputError
from runners.probe import iperf3_report, main, measured_cluster
from runners.probe_net.fit import WINDOW_SHARE, fit_message, fit_streams, read_iperf3


@given(rtt_s=st.floats(1e-3, 0.4), link=st.floats(1e5, 1e10), window=st.floats(1e5, 1e8))
def test_fit_recovers_the_formula_it_fits(rtt_s, link, window):
    """Rates made by min(link, n * 0.82 * W / RTT) give back link and window wherever these can be seen."""
    rates = {n: min(link, n * WINDOW_SHARE * window / rtt_s) for n in (1, 2, 4, 8)}
    fit = fit_streams(rtt_s, rates)
    assert fit.link_bytes_per_s == max(rates.values())
    one, eight = WINDOW_SHARE * window / rtt_s, 8 * WINDOW_SHARE * window / rtt_s
    if one < 0.9 * max(rates.values()):
        assert fit.window_bytes == pytest.approx(window)
        for n, rate in rates.items():
            assert fit.bytes_per_s(n, rtt_s) == pytest.approx(rate)
    else:
        assert fit.window_bytes is None and fit.streams_needed == 1
    if eight > 1.2 * link:
        assert fit.saturated and fit.bytes_per_s(fit.streams_needed, rtt_s) >= 0.899 * link
    if eight < link:
        assert not fit.saturated


def test_fit_of_measured_streams():
    """80 ms, tcp_wmem 4 MiB, 2 Gbit/s: 345, 673, 1264, 1998 Mbit/s with 1, 2, 4, 8 streams (measured, Linux 6.18)."""
    fit = fit_streams(0.08, {n: mbit * 1e6 / 8 for n, mbit in {1: 345, 2: 673, 4: 1264, 8: 1998}.items()})
    assert fit.window_bytes / 2**20 == pytest.approx(4.0, rel=0.05)
    assert fit.streams_needed == 6


def test_more_streams_that_bring_less_have_no_small_windows():
    """2 Mbit/s at 20 us: the best rate is one stream's, so that no window is seen; nor in noise at such round trips."""
    fit = fit_streams(2e-5, {n: mbit * 1e6 / 8 for n, mbit in {1: 2.2, 2: 1.9, 4: 1.6, 8: 1.7}.items()})
    assert fit.window_bytes is None and fit.streams_needed == 1 and fit.saturated
    fit = fit_streams(2e-5, {1: 38.8e6 / 8, 2: 47.8e6 / 8})
    assert fit.window_bytes is None and fit.streams_needed == 1


@given(latency_s=st.floats(1e-4, 0.2), rate=st.floats(1e5, 1e9))
def test_message_fit_recovers_latency_and_rate(latency_s, rate):
    """t = latency + bytes / rate, without noise, comes back."""
    sizes = [2**12, 2**20, 2**27]
    found_s, found_rate = fit_message(sizes, [latency_s + n / rate for n in sizes])
    assert found_s == pytest.approx(latency_s, rel=1e-3) and found_rate == pytest.approx(rate, rel=1e-3)


def test_message_fit_wants_sizes_that_differ():
    """One size says nothing about latency and rate."""
    with pytest.raises(InputError, match="at least two"):
        fit_message([100.0, 100.0], [1.0, 1.0])


def iperf3_file(path, streams, mbit_per_s, rtt_us):
    """The parts of an `iperf3 -J` report that are read, as iperf3 3.16 writes them."""
    rate = mbit_per_s * 1e6
    sender = {"socket": 5, "bits_per_second": rate / streams, "max_snd_cwnd": 4_000_000, "max_rtt": rtt_us + 900}
    report = {
        "start": {"test_start": {"protocol": "TCP", "num_streams": streams}},
        "end": {
            "streams": [{"sender": {**sender, "min_rtt": rtt_us + 7 * n}, "receiver": {}} for n in range(streams)],
            "sum_sent": {"bits_per_second": rate * 1.1, "retransmits": 0},
            "sum_received": {"bits_per_second": rate},
            "sender_tcp_congestion": "cubic",
        },
    }
    path.write_text(json.dumps(report))
    return str(path)


def test_iperf3_files_become_links(tmp_path):
    """Several runs of one pair are one link: rate by streams from what was received, round trip the least."""
    words = [f"A:B={iperf3_file(tmp_path / f'{n}.json', n, mbit, 80_000)}" for n, mbit in ((1, 345), (8, 1990))]
    report = iperf3_report([*words, f"B:A={iperf3_file(tmp_path / 'back.json', 4, 500, 80_100)}"])
    there, back = report["links"]
    assert (there["source_region"], there["target_region"], there["rtt_s"]) == ("A", "B", pytest.approx(0.08))
    assert there["bytes_per_s_by_streams"] == {"1": 345e6 / 8, "8": 1990e6 / 8}
    assert back["link_bytes_per_s"] == 500e6 / 8 and not back["saturated"]


def test_failed_or_foreign_iperf3_files_are_named():
    """A failed run quotes iperf3; anything else is no report."""
    with pytest.raises(InputError, match=r"x.json: found a failed run \(unable to connect"):
        read_iperf3({"start": {}, "error": "unable to connect to server"}, "x.json")
    for key, said in (("reverse", "--reverse"), ("bidir", "--bidir")):
        with pytest.raises(InputError, match=f"x.json: found a run with {said}"):
            read_iperf3({"start": {"test_start": {"protocol": "TCP", key: 1}}, "end": {}}, "x.json")
    with pytest.raises(InputError, match="found a run over UDP, expected TCP"):
        read_iperf3({"start": {"test_start": {"protocol": "UDP"}}, "end": {}}, "x.json")
    for data in ({}, [], {"end": {"streams": []}}, {"end": {"sum_received": 3, "streams": []}}):
        with pytest.raises(InputError, match=r"x.json: found"):
            read_iperf3(data, "x.json")


def test_command_line_writes_the_measured_cluster(tmp_path, capsys, status_of):
    """--iperf3 and --cluster give a cluster file whose links are the measured ones."""
    from polygon.formats.files import read_cluster

    source, out = tmp_path / "c.yaml", tmp_path / "measured.json"
    source.write_text(
        "regions:\n  - {name: A, nodes: [{device: T4, count: 1}]}\n  - {name: B, nodes: [{device: T4, count: 1}]}\n"
        "links:\n  - {between: [A, B], latency_ms: 5, bandwidth_gbps: 7}\n"
    )
    run = iperf3_file(tmp_path / "r.json", 8, 300, 60_000)
    assert main(["--iperf3", f"A:B={run}", "--cluster", str(source), "-o", str(out)]) == 0
    assert "A -> B: round trip 60.00 ms" in capsys.readouterr().out
    cluster = read_cluster(out)
    assert cluster.latency_s[0, 1] == pytest.approx(0.03) and cluster.bytes_per_s[0, 1] == pytest.approx(300e6 / 8)
    assert cluster.latency_s[1, 0] == pytest.approx(0.005) and cluster.bytes_per_s[1, 0] == pytest.approx(7e9 / 8)
    assert status_of(main, ["--iperf3", f"A:Nowhere={run}", "--cluster", str(source)]) == 2
    assert "found 'Nowhere', expected one of A, B" in capsys.readouterr().err
    assert status_of(main, ["--iperf3", "A-B", "--cluster", str(source)]) == 2
    assert "expected REGION:REGION=FILE" in capsys.readouterr().err


def test_a_report_of_before_goes_into_a_cluster(tmp_path, capsys, status_of):
    """Nobody measures twice for having left --cluster out; what is no report, or no measured link, is told."""
    from polygon.formats.files import read_cluster

    source, out, report = tmp_path / "c.yaml", tmp_path / "measured.json", tmp_path / "report.json"
    source.write_text(
        "regions:\n  - {name: A, nodes: [{device: T4, count: 1}]}\n  - {name: B, nodes: [{device: T4, count: 1}]}\n"
        "links:\n  - {between: [A, B], latency_ms: 5, bandwidth_gbps: 7}\n"
    )
    run = iperf3_file(tmp_path / "r.json", 8, 300, 60_000)
    assert main(["--iperf3", f"A:B={run}", "-o", str(report)]) == 0
    words = ["--report", str(report), "--cluster", str(source), "-o", str(out)]
    assert main(words) == 0
    assert capsys.readouterr().err == f"not measured, as {source} says: B -> A\n"
    cluster = read_cluster(out)
    assert cluster.latency_s[0, 1] == pytest.approx(0.03) and cluster.bytes_per_s[0, 1] == pytest.approx(300e6 / 8)
    assert status_of(main, words[:2]) == 2 and "expected --cluster FILE" in capsys.readouterr().err
    assert status_of(main, ["--report", str(out), *words[2:]]) == 2
    assert f"{out}: found no polygon-probe, expected a report" in capsys.readouterr().err
    found = json.loads(report.read_text())
    for name, value, allowed in (("link_bytes_per_s", 0, "> 0"), ("rtt_s", float("nan"), ">= 0")):
        report.write_text(json.dumps(found | {"links": [found["links"][0] | {name: value}]}))
        assert status_of(main, words) == 2
        told = f"{report}: links[0].{name}: found {float(value)}, expected a number {allowed}"
        assert told in capsys.readouterr().err
    report.write_text(json.dumps(found | {"links": []}))
    assert status_of(main, words) == 2
    assert "found no link that could be measured" in capsys.readouterr().err


def test_a_link_inside_a_region_goes_to_its_nodes():
    """One node group: its inter-node link; several: the region's."""
    device = Device(name="D", memory_bytes=1e9, flops={"fp32": 1e12}, memory_bytes_per_s=1e11, power_w=10.0)
    link = Link(latency_s=1e-4, bytes_per_s=1e9)
    group = NodeGroup(device="D", nodes=2, devices_per_node=1, intra_node=link, inter_node=link)
    regions = (
        Region(name="one", node_groups=(group,), intra_region=link),
        Region(name="two", node_groups=(group, group), intra_region=link),
    )
    cluster = Cluster(
        name="c", regions=regions, latency_s=np.zeros((2, 2)), bytes_per_s=np.zeros((2, 2)),
        capacity_bytes_per_s=np.full((2, 2), np.inf), catalogue={"D": device},
    )  # fmt: skip
    measured = {"rtt_s": 0.002, "link_bytes_per_s": 3e8}
    links = [{"source_region": name, "target_region": name, **measured} for name in ("one", "two")]
    found = measured_cluster(cluster, {"links": links})
    assert found.regions[0].node_groups[0].inter_node == Link(latency_s=0.001, bytes_per_s=3e8)
    assert found.regions[1].intra_region == Link(latency_s=0.001, bytes_per_s=3e8)
    assert found.regions[1].node_groups[0].inter_node == link


def test_a_probe_does_not_see_rdma():
    """InfiniBand between nodes stays what it was given as, whatever sockets reach there."""
    hall = {"name": "hall", "nodes": [{"device": "h100-sxm", "count": 2, "inter_node": "infiniband-ndr-x8"}]}
    cluster = polygon.Cluster.from_dict({"regions": [hall]}).data
    links = [{"source_region": "hall", "target_region": "hall", "rtt_s": 1e-4, "link_bytes_per_s": 2e9}]
    assert measured_cluster(cluster, {"links": links}).regions == cluster.regions
