"""Shell scripts that start ranks: torchrun on every host, and one script that starts all hosts over ssh."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from polygon.export.launch_hosts import Seat

PORT = 29500
FORWARDED: tuple[str, ...] = ("POLYGON_ROOT", "POLYGON_MASTER", "POLYGON_PORT", "MEGATRON_ROOT", "TORCHTITAN_ROOT")
FORWARDED += ("TITAN_MODULE", "TITAN_CONFIG")
"""Variables that reach the other hosts."""

STRICT = "#!/usr/bin/env bash\nset -euo pipefail\n"


def quoted(words: Sequence[str]) -> str:
    """Arguments as one shell line, each quoted where it must be."""
    return " ".join(shlex.quote(word) for word in words)


def pairs(words: Sequence[str]) -> list[str]:
    """Arguments as lines: an option and its values on each."""
    return [" ".join(line) for line in _options(words)]


def folded(words: Sequence[str]) -> str:
    """Arguments as a command over several lines: an option and its values on each."""
    return " \\\n    ".join(quoted(line) for line in _options(words))


def _options(words: Sequence[str]) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return lines


def torchrun_script(
    comment: str,
    rows: Sequence[Seat],
    index: int,
    program: Sequence[str],
    root: str = "",
    *,
    last: str = "",
    exported: Sequence[str] = (),
) -> str:
    """What starts one host's ranks by torchrun, with static rendezvous so that ranks follow the order of hosts.

    Parameters
    ----------
    program : sequence of str
        Script and its arguments, seen from the folder of the script.
    root : str
        Environment variable that names the folder to run in; empty: the script's own.
    last : str
        A word that must follow whatever else is given to the program.
    exported : sequence of str
        Further variables for the program, `NAME=value`.
    """
    seat = rows[index]
    words = ["torchrun", "--nnodes", str(len(rows)), "--node-rank", str(index), "--nproc-per-node"]
    words += [str(len(seat.devices)), "--master-addr"]
    lines = [STRICT + f"# {comment}", f"# Host {seat.host.name}: {len(seat.devices)} of {_total(rows)} ranks."]
    lines.append("# Extra arguments go to the program; POLYGON_MASTER and POLYGON_PORT say where rank 0 listens.")
    lines.append('here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"')
    lines.append(f'cd "${{{root}:-$here}}"' if root else 'cd "$here"')
    lines.append(f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES-{",".join(map(str, seat.devices))}}}"')
    lines += [f"export {setting}" for setting in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *exported)]
    master = rows[0].host.address or rows[0].host.name
    command = (
        folded(words) + f' "${{POLYGON_MASTER:-{master}}}" \\\n    --master-port "${{POLYGON_PORT:-{PORT}}}" \\\n    '
    )
    lines.append(f'exec {command}{program[0]} \\\n    {folded(program[1:])} "$@"{" " * bool(last)}{last}')
    return "\n".join(lines) + "\n"


def _total(rows: Sequence[Seat]) -> int:
    return sum(len(seat.devices) for seat in rows)


def start_all_script(rows: Sequence[Seat]) -> str:
    """What starts every host's script over ssh, from the same folder on each, and ends all when one fails."""
    lines = [
        STRICT + "# Starts all hosts over ssh; this folder must be at the same place on each of them.",
        'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        "pids=()",
        "trap 'kill \"${pids[@]}\" 2>/dev/null || true' EXIT INT TERM",
        "settings=()",
        f"for name in {' '.join(FORWARDED)}; do",
        '    if [[ -v $name ]]; then settings+=("$name=${!name}"); fi',
        "done",
        "start() {",
        "    local host=$1 script=$2",
        "    shift 2",
        "    # The remote shell reads one string: each word is quoted for it.",
        '    ssh -o BatchMode=yes "$host" "env $(printf \'%q \' "${settings[@]}" bash "$here/$script" "$@")" &',
        "    pids+=($!)",
        "}",
    ]
    lines += [f'start {shlex.quote(seat.host.name)} {shlex.quote(run_name(seat))} "$@"' for seat in rows]
    lines.append('for _ in "${pids[@]}"; do wait -n; done')
    return "\n".join(lines) + "\n"


def run_name(seat: Seat) -> str:
    """File name of a host's script."""
    return f"run-{seat.host.name}.sh"
