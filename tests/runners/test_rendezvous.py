"""What keeps ranks from meeting is one line that says what to do."""

import os
import signal
import socket
import threading
from contextlib import ExitStack

import pytest
from torch.distributed import PrefixStore

from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats.files import write_plan
from runners.dist_runner import main as dist_runner
from runners.engine import rendezvous as meeting
from runners.engine.rendezvous import RunFailedError, agree, open_store, own_address, unreachable
from tests.free_ports import free_port
from tests.patience import PATIENCE_S, eventually
from tests.real_programs import Program, ran
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan


def has_ipv6():
    """Whether this machine has a loopback of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "kind", "message"),
    [
        ("127.0.0.1", RunFailedError, "rank 1: no meeting point at tcp://127.0.0.1:{port} in 0.3 s "
         "(Connection refused: rank 0 does not run there)"),
        ("no-such-host.invalid", InputError, "--dist-url: found host 'no-such-host.invalid'"),
    ],
)  # fmt: skip
def test_a_meeting_point_that_is_not_there_is_named(host, kind, message, capfd):
    """In one line, where torch writes thirty to stderr."""
    port = free_port()
    with pytest.raises(kind) as caught:
        open_store(host, port, 1, 0.3)
    assert str(caught.value).startswith(message.format(port=port)) and "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_rank_0_that_starts_late_is_waited_for(monkeypatch, capfd):
    """And after a while one line says what is waited for."""
    monkeypatch.setattr(meeting, "QUIET_S", 0.1)
    port, found, said = free_port(), [], []
    thread = threading.Thread(target=lambda: found.append(open_store("127.0.0.1", port, 1, PATIENCE_S)))
    thread.start()

    def has_spoken():
        said.append(capfd.readouterr().err)
        return any(said)

    assert eventually(has_spoken)
    first = open_store("127.0.0.1", port, 0, PATIENCE_S)
    thread.join()
    first.set("key", "value")
    assert found[0].get("key") == b"value"
    assert "".join([*said, capfd.readouterr().err]) == (
        f"rank 1: waiting for tcp://127.0.0.1:{port} (Connection refused: rank 0 does not run there)\n"
    )


def test_a_port_in_use_is_named():
    """Rank 0 cannot listen where somebody else does."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"--dist-url: found port {port} in use by another program"):
            open_store("127.0.0.1", port, 0, 1)


def test_another_program_at_the_meeting_point_is_named():
    """It takes the connection and says nothing that torch could read: the rank does not wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"found a program at tcp://127\.0\.0\.1:{port} that does not answer as rank 0"
        ):
            open_store("127.0.0.1", port, 1, 0.5)


def test_a_host_name_that_nobody_knows_is_named_by_rank_0_too():
    """As by the others, and not as a connection that timed out."""
    with pytest.raises(InputError, match=r"--dist-url: found host 'no-such-host.invalid'"):
        open_store("no-such-host.invalid", free_port(), 0, PATIENCE_S)


def test_all_ranks_that_did_not_come_are_named():
    """With how long they were waited for, how many are here, and the first few where they are many."""
    store = open_store("127.0.0.1", free_port(), 0, 0.5)
    for world_size, named in ((2, "rank 1"), (3, "ranks 1, 2"), (12, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more")):
        others = PrefixStore(str(world_size), store)
        with pytest.raises(
            InputError, match=rf"^{named} did not come in 0.5 s \(--timeout\): 1 of {world_size} are here"
        ):
            agree(others, 0, world_size, "run", "code", "data", "127.0.0.1")


def test_who_interrupts_a_rank_that_waits_for_the_others_reads_a_line(tmp_path):
    """No traceback, and the exit code says the signal."""
    write_plan(tmp_path / "plan.json", *routed_problem(2))
    port = free_port()
    words = ["--plan", "plan.json", "--dist-url", f"tcp://127.0.0.1:{port}", "--world-size", 2, "--rank", 0]

    def listens():
        with socket.socket() as mine:
            return mine.connect_ex(("127.0.0.1", port)) == 0

    with Program(dist_runner, words, tmp_path) as rank:
        assert eventually(listens)
        rank.send_signal(signal.SIGINT)
        assert (rank.said(), rank.returncode) == ("interrupted\n", 130)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback")
def test_ranks_meet_over_ipv6(tmp_path):
    """Messages and beats too."""
    write_plan(tmp_path / "plan.json", *routed_problem(2))
    words = ["--plan", "plan.json", "--steps", "2", "--dist-url", f"tcp://[::1]:{free_port()}", "--world-size", 2]
    with ExitStack() as stack:
        ranks = [stack.enter_context(Program(dist_runner, [*words, "--rank", rank], tmp_path)) for rank in (0, 1)]
        said = [rank.said() for rank in ranks]
    assert "step     1  loss" in said[0], said
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_the_interface_that_is_named_gives_the_address(monkeypatch):
    """Also for what is not gloo's; one that is not there is answered by those that are."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address("192.0.2.1", 1) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wan7")
    with pytest.raises(InputError, match=r"found 'wan7', expected an interface with an IPv4 address: .*lo \(127"):
        own_address("127.0.0.1", 1)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert own_address("127.0.0.1", 1) == "127.0.0.1"


def test_a_loopback_address_is_refused_only_where_others_are_on_other_machines():
    """A host name that stands for the loopback works as long as all ranks are on one machine."""
    assert unreachable({0: ("127.0.1.1", "a"), 1: ("127.0.0.1", "a")}) is None
    assert unreachable({0: ("10.0.0.1", "a"), 1: ("10.0.0.2", "b")}) is None
    fault = unreachable({0: ("10.0.0.1", "a"), 1: ("127.0.1.1", "b")})
    assert fault.startswith("rank 1: found its address 127.0.1.1") and "GLOO_SOCKET_IFNAME" in fault


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_there_twice_is_named(world_size, tmp_path):
    """In one line and with exit 2: by the second, and by all where a rank is missing instead."""
    problem, plan = routed_problem(2) if world_size == 2 else three_ranks()
    write_plan(tmp_path / "plan.json", problem, plan)
    words = ["--plan", "plan.json", "--steps", "3", "--dist-url", f"tcp://127.0.0.1:{free_port()}"]
    words += ["--world-size", world_size]
    with ExitStack() as stack:
        ranks = [stack.enter_context(Program(dist_runner, [*words, "--rank", rank], tmp_path)) for rank in (0, 1, 1)]
        said = [rank.said() for rank in ranks]
        codes = [rank.returncode for rank in ranks]
    line = "dist_runner: --rank: found 1 twice (again on 127.0.0.1), expected every rank once\n"
    if world_size == 3:
        assert codes == [2, 2, 2] and said == [line] * 3
    else:
        assert codes[0] == 0 and sorted(codes[1:]) == [0, 2], said
        assert line in said[1:] and not any("Traceback" in text for text in said)


def test_rank_0_stays_until_all_who_came_have_read_the_verdict():
    """Also a rank that has come, and not yet said what it runs, when another one of its number makes the verdict."""
    port = free_port()
    first, second = (open_store("127.0.0.1", port, rank, PATIENCE_S) for rank in (0, 1))
    assert second.add("came/1", 1) == 1
    with pytest.raises(InputError, match="found 1 twice") as again:
        agree(second, 1, 3, "run", "code", "data", "127.0.0.1")
    said = []

    def stay():
        with pytest.raises(InputError) as caught:
            agree(first, 0, 3, "run", "code", "data", "127.0.0.1")
        said.append(str(caught.value))

    thread = threading.Thread(target=stay)
    thread.start()
    assert second.get("verdict").decode() == str(again.value)
    thread.join(0.2)
    assert thread.is_alive()
    second.set("seen/1", "1")
    thread.join()
    assert said == [str(again.value)]


def three_ranks():
    """A plan of three stages of one rank each."""
    cluster = small_cluster(1, 2)
    problem = Problem(cluster=cluster, model=small_model(), batch=Batch(global_batch=4, seq_len=16, precision="fp32"))
    return problem, small_plan(cluster, [(0, 2), (2, 4), (4, 6)], [[0], [1], [2]], [[0, 0, 0]] * 2)


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {"GLOO_SOCKET_IFNAME": "wan7"}, "GLOO_SOCKET_IFNAME: found 'wan7', expected an interface"),
        (["--checkpoint-dir", "/proc/nowhere"], {}, "/proc/nowhere: cannot be made: No such file or directory"),
    ],
)
def test_what_a_rank_cannot_use_is_one_line_and_exit_2(words, environment, message, tmp_path):
    """Before any step, without a traceback."""
    write_plan(tmp_path / "plan.json", *routed_problem(1))
    place = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "1", "--rank", "0"]
    options = ["--plan", "plan.json", "--steps", "1", *place, *words]
    code, _, said = ran(dist_runner, options, tmp_path, os.environ | environment)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"dist_runner: {message}")
