"""Laws of senders that are told how fast a link is, on real connections."""

import array
import fcntl
import socket
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from polygon_comm.pacing import (
    HEADROOM,
    NEAR_BYTES,
    connections,
    listening_ports,
    open_descriptors,
    opened_since,
    pace,
    prefer_near,
    seen_bytes_per_s,
)

from tests.patience import eventually

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="pacing by socket option is Linux'")


@pytest.fixture
def pair():
    """Two ends of a connection between two addresses of this machine, as between two machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0))
        theirs, _ = server.accept()
        with ours, theirs:
            yield ours, theirs


def send_s(ours, theirs, n_bytes):
    """Seconds until so many bytes have arrived."""
    start_s = time.monotonic()
    sender = threading.Thread(target=ours.sendall, args=(bytes(n_bytes),))
    sender.start()
    left = n_bytes
    while left:
        left -= len(theirs.recv(1 << 20))
    sender.join()
    return time.monotonic() - start_s


def all_is_confirmed(connection):
    """Whether nothing of what was sent is still to be confirmed: then what TCP has seen stays."""
    left = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, left)
    return left[0] == 0


def test_nothing_is_sent_much_faster_than_the_link(pair):
    """3 MB over 4 MB/s take what link and headroom ask for; Linux lets the first ten segments (of 64 KiB) go."""
    ours, theirs = pair
    pace([ours.fileno()], 4e6)
    assert send_s(ours, theirs, 3_000_000) > 0.8 * (3_000_000 - 10 * 65536) / (HEADROOM * 4e6)


def test_a_link_that_was_faster_than_it_is_said_to_be_is_not_held_back(pair):
    """A connection that has carried 8 MB at memory's speed goes on so, though its link be said to carry 1 byte/s."""
    ours, theirs = pair
    send_s(ours, theirs, 8_000_000)
    assert eventually(lambda: all_is_confirmed(ours))
    seen = seen_bytes_per_s(ours.fileno())
    pace([ours.fileno()], 1.0)
    most = int.from_bytes(ours.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder)
    assert seen > 1
    assert most == pytest.approx(HEADROOM * seen, rel=1e-6)


def test_little_is_under_way_within_a_region(pair):
    """Who does not read holds up a sender after the buffers of both; the sender's is what it was given."""
    ours, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR_BYTES)
    prefer_near([ours.fileno()])
    ours.setblocking(False)
    sent = 0
    try:
        while sent < 100 * NEAR_BYTES:
            sent += ours.send(bytes(NEAR_BYTES))
    except BlockingIOError:
        pass
    assert sent <= 10 * NEAR_BYTES


def test_only_connections_to_other_machines_are_found(pair):
    """Not files, listeners, connections within one address, nor those that were taken at a foreign port."""
    ours, theirs = pair
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as inside:
        everything = open_descriptors()
        assert {ours.fileno(), theirs.fileno(), server.fileno(), inside.fileno(), 0} <= everything.keys()
        assert server.getsockname()[1] in listening_ports(everything)
        mine = [ours.fileno(), theirs.fileno(), server.fileno(), inside.fileno(), 0]
        assert connections(mine) == sorted([ours.fileno(), theirs.fileno()])
        assert connections(mine, {theirs.getsockname()[1]}) == [ours.fileno()]
        listening_ports(everything), connections(everything), pace(everything, 1e12)
        assert open_descriptors() == everything, "looking at descriptors leaves none open"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system lists no descriptors")
def test_a_descriptor_used_again_is_a_new_one():
    """A connection may get the number of one that was closed since: it is another, and is found."""
    first = socket.socket()
    number, before = first.fileno(), open_descriptors()
    first.close()
    with socket.socket() as second:
        assert second.fileno() == number
        assert number in opened_since(before) and opened_since(open_descriptors()) == set()
