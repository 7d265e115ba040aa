"""List what the catalogues know: `python -m polygon show devices`, `models`, `links`, `parity` or `runtimes`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from polygon.commands import cli
from polygon.cost import convergence as parity
from polygon.formats import catalogue
from polygon.formats.catalogue import GB, GBPS, GIB, MS, TFLOP

Row = dict[str, Any]


def devices() -> list[Row]:
    """Every device type: memory, dense peak, memory bandwidth, power, price, usual link inside a node, source."""
    return [
        {
            "name": device.name,
            "memory_gib": device.memory_bytes / GIB,
            "fp32_tflops": device.flops["fp32"] / TFLOP,
            "bf16_tflops": device.peak_flops("bf16") / TFLOP,
            "memory_bandwidth_gb_per_s": device.memory_bytes_per_s / GB,
            "power_w": device.power_w,
            "price_usd_per_hour": device.price_usd_per_hour,
            "intra_node_gbps": catalogue.usual_link(device.name).bytes_per_s / GBPS,
            "source": device.source,
        }
        for device in catalogue.devices().values()
    ]


def models() -> list[Row]:
    """Every model: its parameters, those that a token meets, and shape, source."""
    return [
        {
            "name": name,
            "parameters_1e9": model.parameters / 1e9,
            "active_parameters_1e9": model.active_parameters / 1e9,
            "blocks": model.blocks,
            "hidden_size": model.hidden_size,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "max_seq_len": model.max_seq_len,
            "experts": model.experts,
            "source": model.source,
        }
        for name, model in catalogue.models().items()
    ]


def links() -> list[Row]:
    """Every link: latency and bandwidth one way."""
    return [
        {
            "name": name,
            "latency_us": link.latency_s * MS * 1e3,
            "bandwidth_gbps": link.bytes_per_s / GBPS,
            "rdma": link.rdma,
        }
        for name, link in catalogue.links().items()
    ]


def parity_rows() -> list[Row]:
    """What may travel between regions in place of the numbers, and what is known of the loss."""
    return [
        {
            "traffic": traffic,
            "kind": str(kind),
            "level": row.level,
            "ratio": row.ratio,
            "least_parameters_1e9": row.parameters[0] / 1e9,
            "most_parameters_1e9": row.parameters[1] / 1e9 if row.parameters[1] < float("inf") else None,
            "shown": row.shown,
            "caveat": row.caveat,
            "source": row.source,
        }
        for traffic in (*parity.TRAFFIC, "local_steps")
        for kind, row in parity.rows(traffic).items()
    ]


def runtimes() -> list[Row]:
    """Every runtime: its version, and the switches that the catalogue sets, each with its source."""
    return [
        {
            "name": name,
            "version": runtime.version,
            "switches": {
                switch: {"value": getattr(runtime, switch), "source": source}
                for switch, source in sorted(runtime.sources.items())
            },
        }
        for name, runtime in catalogue.runtimes().items()
    ]


CATALOGUES: dict[str, Callable[[], list[Row]]] = {
    "devices": devices,
    "models": models,
    "links": links,
    "parity": parity_rows,
    "runtimes": runtimes,
}


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned columns, numbers with four digits, of mappings the keys with their values."""

    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {cell(entry['value'])}" for key, entry in value.items())
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [list(rows[0])] + [[cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(argv: list[str] | None = None) -> int:
    """Print one catalogue."""
    parser = cli.CommandParser(prog="polygon show", description="List what the catalogues know.")
    parser.add_argument("catalogue", choices=list(CATALOGUES))
    parser.add_argument("--json", action="store_true", help="machine-readable, on standard output")
    args = parser.parse_args(argv)
    rows = CATALOGUES[args.catalogue]()
    cli.emit(rows, table(rows), as_json=args.json)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
