"""Play a cluster's hosts and links on one machine: `python -m runners.lab CLUSTER [-- COMMAND ...]`.

Every node becomes a network namespace; between each two of them packets are given the link's rate and latency. The
lab measures what the links really give, then runs COMMAND on every host (with --plan: once per rank of the plan, on
the host of its device). In COMMAND, {rank} {world_size} {host} {region} {address} {master} are replaced; the
environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, POLYGON_HOST, POLYGON_REGION, POLYGON_ADDRESS,
GLOO_SOCKET_IFNAME. Needs root, or a kernel that lets users have namespaces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from polygon.commands import cli  # no numpy in it
from polygon.domain.errors import InputError, PolygonError
from runners.lab_net.linux import become_root


def _parser() -> argparse.ArgumentParser:
    text = __doc__ or ""
    parser = cli.CommandParser(
        prog="python -m runners.lab",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m runners.lab CLUSTER [options] [-- COMMAND ...]",
    )
    parser.add_argument("cluster", nargs="?", help="cluster file")
    parser.add_argument("--hosts-per-region", type=cli.whole(1), metavar="K", help="take only K nodes of each region")
    parser.add_argument("--plan", help="plan file: hosts that it uses, COMMAND once per rank")
    parser.add_argument("--backend", default="auto", help="auto, relay or netem")
    parser.add_argument("--congestion", default="", help="TCP congestion control (default: the kernel's)")
    parser.add_argument(
        "--tcp-window", default="4", metavar="MIB", help="largest TCP buffer [MiB] (default: 4, as Linux)"
    )
    parser.add_argument("--no-idle-slow-start", action="store_true", help="sysctl tcp_slow_start_after_idle=0")
    parser.add_argument("--no-measure", action="store_true", help="do not measure the links first")
    parser.add_argument("--streams", type=cli.whole(1), default=8, help="streams of the measurement (default: 8)")
    parser.add_argument("--time-limit", type=cli.number(above=0), metavar="S", help="end COMMAND after so many seconds")
    parser.add_argument("--master-port", type=cli.whole(1, 65535), default=29500)
    parser.add_argument("--json", action="store_true", help="the measurement as JSON on stdout")
    others = parser.add_argument_group("beside a running lab")
    others.add_argument("--list", action="store_true", help="running labs and their hosts")
    others.add_argument("--cleanup", action="store_true", help="sweep away what dead labs left")
    others.add_argument("--enter", metavar="HOST", help="run COMMAND on a host of the running lab")
    others.add_argument(
        "--change",
        nargs="+",
        metavar="WHAT",
        help="SOURCE TARGET KEY=VALUE ...: latency_ms, mbit_per_s, loss, connected",
    )
    others.add_argument("--lab", default="", help="name of the running lab, where there are several")
    script = parser.add_argument_group("real hosts")
    script.add_argument("--tc-script", metavar="FILE", help="write the tc script that shapes real hosts, and exit")
    script.add_argument("--addresses", metavar="FILE", help="lines REGION HOST IPV4: the real hosts")
    script.add_argument("--interface", default="eth0", help="of the real hosts (default: eth0)")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" in words:
        cut = words.index("--")
        return words[:cut], words[cut + 1 :]
    return words, []


def run(argv: Sequence[str]) -> int:
    """The command; returns the exit status and raises `InputError` for anything the user can mend."""
    words, command = _split(argv)
    args = _parser().parse_args(words)
    playing = args.cluster and not (args.list or args.cleanup or args.enter or args.change or args.tc_script)
    if playing:
        become_root()
    from runners.lab_net import commands  # brings numpy, and with it threads

    if args.list:
        return commands.list_labs()
    if args.cleanup:
        return commands.clean_up()
    if args.enter:
        return commands.enter(args.lab, args.enter, command)
    if args.change:
        return commands.change(args.lab, args.change)
    if not args.cluster:
        raise InputError("CLUSTER: found nothing, expected a cluster file (or --list, --cleanup, --enter, --change)")
    if args.tc_script:
        return commands.write_tc_script(args.cluster, args.tc_script, args.addresses, args.interface)
    return commands.play(args, command)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 fine, 1 a command failed, 2 bad input or a machine that cannot have a lab."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except PolygonError as error:
        sys.stderr.write(f"lab: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(cli.run(main))
