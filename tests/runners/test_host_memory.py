"""What new processes could have: what is free, and no more than a container's limit leaves."""

import pytest

from runners import launch
from runners.host_memory import Available, available_memory

GB = 1_000_000_000
MEMINFO = (
    f"MemTotal: {64 * GB // 1024} kB\nMemFree: 1000 kB\nMemAvailable:   {24 * GB // 1024} kB\nHugePages_Total: 0\n"
)
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), (
    "memory.max", "memory.current", "inactive_file",
)  # fmt: skip


@pytest.fixture
def machine(tmp_path):
    """Writes files below a root of a machine's own, where 24 GB of 64 are available."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", MEMINFO)
    return tmp_path, write


def limited(write, folder, names, limit, used, droppable=0):
    """A control group of version 1 or 2."""
    most, taken, field = names
    write(f"{folder}/{most}", f"{limit}\n")
    write(f"{folder}/{taken}", f"{used}\n")
    write(f"{folder}/memory.stat", f"anon {used - droppable}\n{field} {droppable}\n")


def test_what_is_free_counts_not_what_the_machine_has(machine):
    """Of 64 GB others hold 40; what only caches files counts as free, as the kernel says."""
    root, write = machine
    assert available_memory(root).n_bytes == pytest.approx(24 * GB, rel=1e-6)
    assert available_memory(root).where == "available on this machine"
    write("proc/self/cgroup", "0::/user/session\n")
    limited(write, "sys/fs/cgroup/user/session", V2, "max", 5 * GB)
    assert available_memory(root).where == "available on this machine"


@pytest.mark.parametrize(
    ("cgroup", "folder", "names"),
    [
        ("0::/", "sys/fs/cgroup", V2),
        ("0::/jobs/7/step", "sys/fs/cgroup/jobs/7/step", V2),
        ("0::/jobs/7/step", "sys/fs/cgroup/jobs/7", V2),
        ("9:name=systemd:/\n4:cpu,memory:/docker/7", "sys/fs/cgroup/memory/docker/7", V1),
        ("4:memory:/docker/7", "sys/fs/cgroup/memory", V1),
    ],
)
def test_a_containers_limit_counts_where_it_leaves_less(machine, cgroup, folder, names):
    """Of its own group or of one above, at the place where it is outside of the container or at the top inside."""
    root, write = machine
    write("proc/self/cgroup", cgroup + "\n")
    limited(write, folder, names, 8 * GB, 3 * GB, droppable=1 * GB)
    assert available_memory(root) == Available(6.0 * GB, "available within this container's limit")
    limited(write, folder, names, 900 * GB, 3 * GB)
    assert available_memory(root).where == "available on this machine"


def test_without_linux_all_memory_counts(tmp_path):
    """macOS has no /proc: then a plan is refused that no machine of this size could hold."""
    found = available_memory(tmp_path)
    assert found.n_bytes > 1e8 and found.where == "on this machine"


def test_ranks_that_fit_the_machine_but_not_what_is_free_are_refused(monkeypatch):
    """The message says what there is and where; on GPUs the host's memory is not asked."""
    monkeypatch.setattr(launch, "available_memory", lambda: Available(5.5e9, "available on this machine"))
    with pytest.raises(launch.InputError, match=r"found 5\.50 GB available on this machine, expected the 6 GB that 2"):
        launch.check_memory_here(6e9, 2, "cpu", "fewer ranks")
    launch.check_memory_here(5e9, 2, "cpu", "fewer ranks")
    launch.check_memory_here(6e9, 2, "cuda", "fewer ranks")
