"""What the lab's command line does: play a cluster, change or enter a running lab, clean up, write the tc script."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from polygon.commands.cli import handled_signals
from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError
from polygon.domain.plan import Plan
from polygon.export.tc import ShapedTarget, check_address, tc_script
from polygon.formats.files import read_cluster, read_plan, read_text, write_text
from runners.lab_net import linux, registry
from runners.lab_net.measuring import measure, measurement_text
from runners.lab_net.running import Lab
from runners.lab_net.topology import LabHost, LabNetwork, host_label, lab_network


def _say(text: str) -> None:
    sys.stderr.write(f"lab: {text}\n")


class _Stopped(BaseException):
    """A signal asked the lab to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)  # the lab is being taken down; it takes at most a few seconds
    raise _Stopped(number)


def play(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Build the lab, measure it, run the command on every host (or wait until interrupted), take it down."""
    cluster, plan = _cluster_and_plan(args)
    network = lab_network(cluster, hosts_per_region=args.hosts_per_region, plan=plan)
    try:
        window_bytes = int(float(args.tcp_window) * 2**20)
    except ValueError:
        window_bytes = 0
    if window_bytes < 65_536:
        raise InputError(f"--tcp-window: found {args.tcp_window!r}, expected a number >= 0.0625 [MiB]")
    tcp = linux.TcpSettings(
        window_bytes=window_bytes, congestion=args.congestion, slow_start_after_idle=not args.no_idle_slow_start
    )
    try:
        with (
            handled_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), _stop),
            Lab(network, tcp=tcp, backend=args.backend, cluster_name=cluster.name) as lab,
        ):
            _say(f"{lab.name}: {len(network.hosts)} hosts, {lab.backend}")
            if not lab.real_time:
                _say("no real-time priority (needs root or CAP_SYS_NICE): delays grow when the cores are busy")
            if not args.no_measure:
                rows = measure(lab, streams=args.streams)
                sys.stdout.write(json.dumps(rows) + "\n" if args.json else measurement_text(rows))
                sys.stdout.flush()
            if command:
                return _run_everywhere(lab, _assignments(lab.network, plan), command, args)
            if sys.stdin.isatty() or args.no_measure:
                _say("running; end it with Ctrl-C, enter a host with: python -m runners.lab --enter HOST -- COMMAND")
                while True:
                    signal.pause()
            _say("measured; it stays only where somebody can end it with Ctrl-C (a terminal), or with --no-measure")
            return 0
    except linux.LabUnavailableError as error:
        raise linux.unavailable(error) from None
    except _Stopped as stopped:
        return 128 + stopped.number


def _cluster_and_plan(args: argparse.Namespace) -> tuple[Cluster, Plan | None]:
    cluster = read_cluster(args.cluster)
    if not args.plan:
        return cluster, None
    file = read_plan(args.plan)
    theirs = file.problem.cluster
    if [(p.device.name, p.nodes, p.devices_per_node) for p in theirs.pools] != [
        (p.device.name, p.nodes, p.devices_per_node) for p in cluster.pools
    ]:
        raise InputError(
            f"{args.plan}: found a plan for other devices than {args.cluster} has, expected the same cluster"
        )
    return cluster, file.plan


def _assignments(network: LabNetwork, plan: Plan | None) -> list[tuple[LabHost, int]]:
    """(host, local rank) of every rank: one per host, or the ranks of the plan."""
    if plan is None:
        return [(host, 0) for host in network.hosts]
    hosts = [network.host_of_device(device) for device in sorted(plan.device_ranks, key=plan.device_ranks.__getitem__)]
    return [(host, hosts[:rank].count(host)) for rank, host in enumerate(hosts)]


def _run_everywhere(
    lab: Lab, assignments: Sequence[tuple[LabHost, int]], command: Sequence[str], args: argparse.Namespace
) -> int:
    master = assignments[0][0].address
    labels: dict[int, str] = {}
    processes: list[subprocess.Popen] = []
    for rank, (host, local_rank) in enumerate(assignments):
        values = {
            "rank": str(rank),
            "world_size": str(len(assignments)),
            "host": host.name,
            "region": host.region_name,
            "address": host.address,
            "master": master,
        }
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(len(assignments)),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(args.master_port),
        }
        words = [_filled(word, values) for word in command]
        try:
            process = lab.popen(
                host, words, environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise InputError(f"COMMAND: {words[0]!r} cannot be run ({error.strerror})") from None
        labels[len(processes)] = host.name if len(assignments) == len(lab.network.hosts) else f"{host.name} {rank}"
        processes.append(process)
    return _follow(lab, processes, labels, args.time_limit)


def _filled(word: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        word = word.replace("{" + key + "}", value)
    return word


def _follow(lab: Lab, processes: list[subprocess.Popen], labels: dict[int, str], time_limit_s: float | None) -> int:
    """Pass the processes' output on, each line with its host; 0 when all ended well, else 1."""
    selector = selectors.DefaultSelector()
    parts: dict[int, bytes] = {}
    for place, process in enumerate(processes):
        for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, (place, sink))
    deadline_s = time.monotonic() + time_limit_s if time_limit_s else float("inf")
    while selector.get_map():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            _say(f"time limit of {time_limit_s:g} s reached, ending the command")
            lab.stop()
            deadline_s = float("inf")
            continue
        for key, _ in selector.select(min(left_s, 3600.0)):
            place, sink = key.data
            block = os.read(key.fd, 1 << 16)
            lines = (parts.pop(key.fd, b"") + block).split(b"\n")
            if block:
                parts[key.fd] = lines.pop()
            else:
                selector.unregister(key.fileobj)
                lines = [line for line in lines if line]
            for line in lines:
                sink.write(f"[{labels[place]}] {line.decode(errors='replace')}\n")
            sink.flush()
    failed = [(labels[place], p.wait()) for place, p in enumerate(processes) if p.wait() != 0]
    for label, status in failed:
        _say(f"{label}: ended with {f'signal {-status}' if status < 0 else f'status {status}'}")
    return 1 if failed else 0


def _running(name: str) -> registry.LabRecord:
    alive = [record for record in registry.labs() if record.alive and name in ("", record.name)]
    if len(alive) != 1:
        found = ", ".join(record.name for record in alive) or "none"
        raise InputError(f"--lab: found {found} running, expected exactly one (name it with --lab)")
    return alive[0]


def list_labs() -> int:
    """Print the labs of this user, running or dead."""
    for record in registry.labs():
        state = "running" if record.alive else "dead (sweep with --cleanup)"
        sys.stdout.write(f"{record.name}  {state}  {record.cluster}  {' '.join(record.hosts)}\n")
    return 0


def clean_up() -> int:
    """Sweep away what dead labs left."""
    names, ended = registry.clean_up()
    sys.stdout.write(f"{len(names)} dead labs swept, {ended} processes ended\n")
    return 0


def _host_index(record: registry.LabRecord, name: str) -> int:
    if name in record.hosts:
        return record.hosts.index(name)
    raise InputError(f"host: found {name!r}, expected one of {', '.join(record.hosts)}")


def enter(lab_name: str, host: str, command: Sequence[str]) -> int:
    """Run a command (default: a shell) on a host of a running lab, as root of the lab."""
    record = _running(lab_name)
    namespace = f"/proc/{record.pid}/fd/{record.namespaces[_host_index(record, host)]}"
    words = list(command) or [os.environ.get("SHELL", "/bin/sh")]
    options = [f"--net={namespace}"]
    if os.geteuid() != 0:
        options = [f"--user=/proc/{record.pid}/ns/user", "--preserve-credentials", *options]
    try:
        return subprocess.run(["nsenter", *options, "--", *words], check=False).returncode
    except FileNotFoundError:
        raise InputError("--enter: found no nsenter, expected the package util-linux") from None


def change(lab_name: str, words: Sequence[str]) -> int:
    """Change links of a running lab: SOURCE TARGET KEY=VALUE ...; `all` stands for every host."""
    record = _running(lab_name)
    if len(words) < 3:
        raise InputError("--change: found too little, expected SOURCE TARGET KEY=VALUE ...")

    def chosen(name: str) -> list[int]:
        return list(range(len(record.hosts))) if name == "all" else [_host_index(record, name)]

    pairs = [(a, b) for a in chosen(words[0]) for b in chosen(words[1]) if a != b]
    request = {"verb": "change", "pairs": pairs, "values": change_values(words[2:])}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(str(record.folder / "control"))
        except OSError as error:
            raise InputError(
                f"--change: {record.name} takes no changes ({error.strerror}; only the relay does)"
            ) from None
        sock.send(json.dumps(request).encode())
        sock.recv(1 << 16)
    return 0


def change_values(words: Sequence[str]) -> dict[str, Any]:
    """What KEY=VALUE words ask for, in SI units.

    Raises
    ------
    InputError
        For an unknown key or a value out of range.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key == "connected" and text in ("yes", "no"):
            values["connected"] = text == "yes"
            continue
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if key == "latency_ms" and 0 <= number < 1e7:
            values["latency_s"] = number * 1e-3
        elif key == "mbit_per_s" and 0 < number < 1e9:
            values["bytes_per_s"] = number * 1e6 / 8
        elif key == "loss" and 0 <= number <= 1:
            values["loss"] = number
        else:
            allowed = "latency_ms >= 0, mbit_per_s > 0, loss in [0, 1] or connected=yes|no"
            raise InputError(f"--change: found {word!r}, expected {allowed}")
    return values


def read_addresses(path: str) -> list[tuple[str, str, str]]:
    """(region, host, address) of every line of an addresses file; `#` begins a comment."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 3:
            raise InputError(f"{path}:{number}: found {line.strip()!r}, expected REGION HOST IPV4")
        check_address(words[2], f"{path}:{number}: address")
        rows.append((words[0], words[1], words[2]))
    if not rows:
        raise InputError(f"{path}: found no host, expected lines REGION HOST IPV4")
    return rows


def write_tc_script(cluster_path: str, out: str, addresses: str | None, interface: str) -> int:
    """Write the script that gives real hosts the cluster's links."""
    if not addresses:
        raise InputError("--addresses: found nothing, expected a file of lines REGION HOST IPV4")
    cluster = read_cluster(cluster_path)
    rows = read_addresses(addresses)
    by_label = {host_label(region.name): index for index, region in enumerate(cluster.regions)}
    places = []
    for region, host, address in rows:
        index = by_label.get(host_label(region))
        if index is None:
            raise InputError(f"{addresses}: found region {region!r}, expected one of {', '.join(by_label)}")
        places.append((index, host, address))
    hosts: dict[str, list[ShapedTarget]] = {}
    first_pool = {pool.region: pool.index for pool in reversed(cluster.pools)}
    for a, host, _ in places:
        if host in hosts:
            raise InputError(f"{addresses}: found host {host!r} twice, expected every host once")
        targets = []
        for b, other, address in places:
            link = cluster.node_link(first_pool[a], first_pool[b])
            if other != host and link is not None:
                targets.append(ShapedTarget(address=address, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s))
        hosts[host] = targets
    name = Path(out).name if out != "-" else "shape.sh"
    write_text(out, tc_script(cluster.name, hosts, interface=interface, file_name=name))
    if out != "-":
        _say(f"{out}: run it as root on every host: bash {name} apply")
    return 0
