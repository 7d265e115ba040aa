"""How much memory this machine has left for new processes, a container's limit counted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTROLLERS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers in a line of /proc/self/cgroup (none: version 2): folder, files of the limit and of what is used,
and the field of memory.stat of what the kernel would drop first (Linux, admin-guide/cgroup-v2 and cgroup-v1/memory)."""


class Available(NamedTuple):
    """Bytes, and where they are left."""

    n_bytes: float
    where: str


def available_memory(root: Path = Path("/")) -> Available:
    """What new processes could have without swapping: MemAvailable, or what a control group leaves if that is less.

    Where there is no /proc/meminfo (not Linux) all of the machine's memory.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
        free = Available(1024.0 * int(fields["MemAvailable"]), "available on this machine")
    except (OSError, KeyError):
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Available(float(here), "on this machine")
    within = min(_left_in_groups(root), default=math.inf)
    return Available(within, "available within this container's limit") if within < free.n_bytes else free


def _left_in_groups(root: Path) -> Iterator[float]:
    """Bytes left in every control group that this process is in and that limits memory, its parents among them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & CONTROLLERS.keys():
            folder, limit, used, droppable = CONTROLLERS[controller]
            top = root / "sys/fs/cgroup" / folder
            own = top / path.lstrip("/")
            # Seen from inside a container the group may be the top itself, whatever its path outside.
            for group in dict.fromkeys((own, *(p for p in own.parents if p.is_relative_to(top)), top)):
                try:
                    most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
                    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                except OSError:
                    continue
                if most != "max":
                    yield max(0.0, float(int(most) - taken + int(stat.get(droppable, 0))))
