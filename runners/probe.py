"""Measure the links between hosts and name what is wrong with them: `python -m runners.probe`.

Start it on every host like a rank; plain sockets, no torch:

    python -m runners.probe --dist-url tcp://HOST0:29400 --world-size 4 --rank 2 --region tokyo

Rank 0 prints the report; with `--cluster FILE -o OUT` it writes the cluster with its links replaced by what was
measured. `--iperf3 A:B=FILE` takes finished `iperf3 -J` runs instead (from a client in A to a server in B, one file per
number of streams).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from polygon.commands import cli
from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError, located
from polygon.formats import files
from polygon.formats.probe_file import FORMAT, measured_cluster
from runners.probe_net.diagnose import HostFacts
from runners.probe_net.fit import fit_message, fit_streams, read_iperf3
from runners.probe_net.session import ProbeOptions, describe, name_of, run_rank


def _parser() -> argparse.ArgumentParser:
    parser = cli.ProgramParser("probe", __doc__)
    environment = os.environ
    session = parser.add_argument_group("a session between hosts")
    session.add_argument("--dist-url", help="tcp://HOST:PORT of rank 0 (default: MASTER_ADDR and MASTER_PORT)")
    session.add_argument("--world-size", type=int, default=int(environment.get("WORLD_SIZE", 0)))
    session.add_argument("--rank", type=int, default=int(environment.get("RANK", -1)))
    session.add_argument("--region", default=environment.get("POLYGON_REGION", ""), help="this host's region")
    session.add_argument(
        "--interface", default=environment.get("POLYGON_INTERFACE", ""), help="network interface to use"
    )
    session.add_argument(
        "--data-port", type=cli.whole(0, 65535), default=0, help="port that the others connect to (default: any)"
    )
    session.add_argument(
        "--streams", type=cli.whole_numbers(1), default=[1, 2, 4, 8], help="numbers of parallel streams to measure"
    )
    session.add_argument(
        "--sizes", type=cli.whole_numbers(0), default=[65536, 1048576, 8388608], help="message sizes [bytes]; 0: none"
    )
    session.add_argument(
        "--seconds", type=cli.number(above=0), help="per stream count (default: 1 s and 14 round trips)"
    )
    session.add_argument("--pairs", choices=("regions", "all"), default="regions")
    session.add_argument("--timeout", type=cli.number(above=0), default=60.0, help="to wait for all ranks [s]")
    parser.add_argument(
        "--iperf3", action="append", metavar="REGION:REGION=FILE", default=[], help="a finished iperf3 -J run"
    )
    parser.add_argument("--report", metavar="FILE", help="what a session found before (its -o), for --cluster")
    parser.add_argument("--cluster", help="cluster file whose links are replaced by the measured ones")
    parser.add_argument("-o", "--out", type=cli.out_file, help="the cluster (or, without --cluster, the report)")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    return parser


def iperf3_report(arguments: Sequence[str]) -> dict[str, Any]:
    """A report made of iperf3 files, given as REGION:REGION=FILE, several files (stream counts) per pair.

    Raises
    ------
    InputError
        For an argument of another form, a file that is no iperf3 report, or a pair without any round-trip time.
    """
    rates: dict[tuple[str, str], dict[int, float]] = {}
    rtts: dict[tuple[str, str], list[float]] = {}
    for argument in arguments:
        pair, equals, file = argument.partition("=")
        source, colon, target = pair.partition(":")
        if not (equals and colon and source and target and file):
            raise InputError(f"--iperf3: found {argument!r}, expected REGION:REGION=FILE")
        streams, rate, rtt_s = read_iperf3(files.read_json(file), file)
        rates.setdefault((source, target), {})[streams] = rate
        rtts.setdefault((source, target), []).extend([rtt_s] if rtt_s is not None else [])
    links = []
    for (source, target), by_streams in rates.items():
        seen = rtts[source, target] or rtts.get((target, source), [])
        if not seen:
            raise InputError(
                f"--iperf3 {source}:{target}: found no min_rtt, expected a run with TCP_INFO (iperf3 >= 3.1 on Linux)"
            )
        fit = fit_streams(min(seen), by_streams)
        links.append(
            {
                "source_region": source,
                "target_region": target,
                "rtt_s": min(seen),
                "bytes_per_s_by_streams": {str(n): rate for n, rate in sorted(by_streams.items())},
                **dataclasses.asdict(fit),
            }
        )
    return {"format": FORMAT, "version": 1, "complete": True, "ranks": [], "links": links, "problems": []}


def _not_measured(report: dict[str, Any]) -> list[str]:
    """Ordered pairs of the session's regions, or of those that links name, of which nothing is known."""
    named = (link[end] for link in report["links"] for end in ("source_region", "target_region"))
    ranks = [facts for facts in report.get("ranks") or () if isinstance(facts, dict) and "region" in facts]
    regions = list(dict.fromkeys([*(str(facts["region"]) for facts in ranks), *named]))
    known = {(link["source_region"], link["target_region"]) for link in report["links"]}
    return [f"{a} -> {b}" for a in regions for b in regions if a != b and (a, b) not in known]


def _put_into_cluster(args: argparse.Namespace) -> int:
    """The links of a report of before, put into a cluster."""
    if args.iperf3 or not args.cluster:
        raise InputError("--report: found no --cluster or an --iperf3 beside it, expected --cluster FILE alone")
    data = files.read_json(args.report)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("links"), list):
        raise InputError(f"{args.report}: found no {FORMAT}, expected a report that the probe wrote (-o, or --json)")
    with located(f"{args.report}: "):
        measured = measured_cluster(files.read_cluster(args.cluster), data)
    if data["links"]:
        files.write_cluster(args.out or "-", measured)
        _say_not_measured(data, args.cluster)
    return _verdict(data)


def _say_not_measured(report: dict[str, Any], cluster: str) -> None:
    """Which links stay as the cluster's file has them."""
    if missing := _not_measured(report):
        _say(f"not measured, as {cluster} says: {', '.join(missing)}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _message_line(link: dict[str, Any]) -> str:
    by_bytes = link.get("message_s_by_bytes") or {}
    if len(by_bytes) < 2:
        return ""
    latency_s, rate = fit_message([float(n) for n in by_bytes], list(by_bytes.values()))
    return f"; one message: {1e3 * latency_s:.2f} ms + bytes / {8e-6 * rate:.1f} Mbit/s"


def _streams_note(link: dict[str, Any]) -> str:
    """What is not known of the link's rate."""
    if link["saturated"]:
        return ""
    one = len(link["bytes_per_s_by_streams"]) < 2
    return "; what more streams bring was not measured" if one else "; more streams would still bring more"


def report_text(report: dict[str, Any]) -> str:
    """The report for people: a line per link, a line per problem."""
    hosts = {facts["rank"]: name_of(HostFacts(**facts)) for facts in report["ranks"]}
    lines = []
    for link in report["links"]:
        source = hosts.get(link.get("source", -1), link["source_region"])
        target = hosts.get(link.get("target", -1), link["target_region"])
        lines.append(f"{source} -> {target}: {describe(link)}{_message_line(link)}{_streams_note(link)}")
    for problem in report["problems"]:
        lines.append(f"rank {problem['rank']}: {problem['kind']}: {problem['found']}\n    remedy: {problem['remedy']}")
    return "\n".join(lines) + "\n"


def _session(args: argparse.Namespace, cluster: Cluster | None) -> dict[str, Any]:
    url = args.dist_url
    if not url and os.environ.get("MASTER_ADDR"):
        url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29400')}"
    if not url:
        raise InputError("--dist-url: found nothing, expected tcp://HOST:PORT of rank 0")
    if args.world_size < 2 or not 0 <= args.rank < args.world_size:
        raise InputError(
            f"--rank, --world-size: found {args.rank} of {args.world_size}, expected 0 <= rank < world size, at least 2"
        )
    options = ProbeOptions(
        streams=tuple(args.streams),
        sizes_bytes=tuple(size for size in args.sizes if size),
        seconds=args.seconds,
        pairs=args.pairs,
        timeout_s=args.timeout,
        data_port=args.data_port,
        interface=args.interface,
        regions=tuple(region.name for region in cluster.regions) if cluster else (),
    )
    return run_rank(args.rank, args.world_size, url, args.region, options, _say)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; raises `InputError` for anything the user can mend."""
    args = _parser().parse_args(argv)
    if args.report:
        return _put_into_cluster(args)
    cluster = files.read_cluster(args.cluster) if args.cluster and (args.iperf3 or args.rank == 0) else None
    with cli.interrupted_by_signals() as asked:
        report = iperf3_report(args.iperf3) if args.iperf3 else _session(args, cluster)
    if args.rank > 0 and not args.iperf3:
        for problem in report["problems"]:
            if problem["rank"] == args.rank:
                _say(f"{problem['kind']}: {problem['found']}; {problem['remedy']}")
        return _verdict(report)
    stopped = not report["complete"]
    if stopped and not report["links"]:
        return cli.interrupted(asked)
    if stopped:
        _say(f"interrupted: these {len(report['links'])} links were measured, the others were not")
    if cluster and report["links"]:
        files.write_cluster(args.out or "-", measured_cluster(cluster, report))
        _say_not_measured(report, args.cluster)
    elif args.out and not cluster:
        files.write_json(args.out, report)
    if args.json and not (cluster and not args.out):
        sys.stdout.write(json.dumps(report) + "\n")
    elif args.out or not cluster:
        sys.stdout.write(report_text(report))
    else:
        _say(report_text(report).rstrip())
    return asked.exit_code if stopped else _verdict(report)


def _verdict(report: dict[str, Any]) -> int:
    """The exit code of a session that came to its end: bad input where nothing could be measured."""
    if report["links"]:
        return cli.EXIT_OK
    _say("probe: found no link that could be measured, expected one at least")
    return cli.EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(cli.run(main))
