"""What the lab's links really give, measured from inside its hosts by the probe's own sockets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from runners.lab_net.running import Lab
from runners.probe_net.wire import DataServer, measure_rate, measure_rtt_s


def _on_host(lab: Lab, index: int, action: Any) -> Any:
    """Run a function in a thread of its own on a host and return its result."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            with lab.inside(lab.network.hosts[index]):
                result.append(action())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def measure(
    lab: Lab,
    pairs: Sequence[tuple[int, int]] | None = None,
    *,
    streams: int = 8,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Round trip and rate of ordered host pairs (default: one of every pair of pools), beside what was asked for.

    Returns
    -------
    list of dict
        `source`, `target` (host names), `asked_rtt_s`, `rtt_s`, `asked_bytes_per_s`, `bytes_per_s`, `streams`. The rate
        is what `streams` TCP streams deliver together; it stays below what was asked where their windows are too small.
    """
    network = lab.network
    chosen = network.representative_pairs() if pairs is None else list(pairs)
    servers: dict[int, DataServer] = {}
    rows = []
    try:
        for _, target in chosen:
            if target not in servers:
                servers[target] = _on_host(lab, target, DataServer)
        for a, b in chosen:
            address = (network.hosts[b].address, servers[b].port)
            rtt_s, _ = _on_host(lab, a, lambda address=address: measure_rtt_s(address))
            rate = _on_host(
                lab,
                a,
                lambda address=address, rtt_s=rtt_s: measure_rate(address, streams, rtt_s=rtt_s, seconds=seconds),
            )
            asked_rtt_s = float(network.latency_s[a, b] + network.latency_s[b, a])
            rows.append(
                {
                    "source": network.hosts[a].name,
                    "target": network.hosts[b].name,
                    "asked_rtt_s": asked_rtt_s,
                    "rtt_s": rtt_s,
                    "asked_bytes_per_s": float(network.bytes_per_s[a, b]),
                    "bytes_per_s": rate,
                    "streams": streams,
                }
            )
    finally:
        for server in servers.values():
            server.close()
    return rows


def measurement_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [f"{'from':<24}{'to':<24}{'round trip ms: asked':>20}{'given':>9}{'Mbit/s: asked':>16}{'given':>10}"]
    for row in rows:
        lines.append(
            f"{row['source']:<24}{row['target']:<24}{1e3 * row['asked_rtt_s']:>20.2f}{1e3 * row['rtt_s']:>9.2f}"
            f"{8e-6 * row['asked_bytes_per_s']:>16.1f}{8e-6 * row['bytes_per_s']:>10.1f}"
        )
    return "\n".join(lines) + "\n"
