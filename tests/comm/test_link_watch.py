"""Laws of looking after connections, on real ones; the clock is handed in."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from polygon_comm import link_watch
from polygon_comm.link_watch import (
    LATEST_RESTART_S,
    LEAST_WAITING,
    RESTART_S,
    WINDOW_S,
    WINDOWS,
    LinkWatch,
    WatchedLink,
    reason,
)
from polygon_comm.pacing import NEAR, PREFERRED, Seen, congestion_control, prefer, prefer_near, restart, seen

from tests.patience import eventually

CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
pytestmark = pytest.mark.skipif(not CONTROLS.exists(), reason="what TCP says of connections is Linux'")
STEP_S = WINDOW_S / (2 * LEAST_WAITING)


@pytest.fixture
def pair():
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours, theirs:
            yield ours, theirs


def state(**values):
    """What TCP might say of a connection."""
    return Seen(
        **dict.fromkeys(Seen._fields, 0)
        | {"recovering": False, "little": False, "round_trip_us": 50, "least_round_trip_us": 40}
        | values
    )


def looks(link, from_s, seconds):
    """All that is said of a link in so many seconds of looking."""
    said = [link.look(from_s + i * STEP_S) for i in range(int(seconds / STEP_S) + 1)]
    return [text for text in said if text is not None]


def fill(ours):
    """Send until nothing more is taken, to one that reads nothing: something then waits to be sent."""
    ours.setblocking(False)
    try:
        while ours.send(bytes(1 << 16)):
            pass
    except BlockingIOError:
        return


def test_a_link_on_which_bytes_wait_is_named_once_with_the_reason(pair):
    """The other end reads nothing: after two windows one line says so, and none for the same thing afterwards."""
    ours, _ = pair
    fill(ours)
    assert eventually(lambda: seen(ours.fileno()).unsent_bytes and seen(ours.fileno()).receiver_us > 0)
    link = WatchedLink("rank 3 (region dc2)", [ours.fileno()], 1e9)
    assert looks(link, 0.0, (WINDOWS - 0.5) * WINDOW_S) == []
    said = looks(link, (WINDOWS - 0.5) * WINDOW_S, 3 * WINDOW_S)
    assert len(said) == 1
    assert said[0].startswith("link to rank 3 (region dc2): 0.0 Mbit/s where 8000.0 were expected: ")


def test_nothing_is_said_of_a_link_on_which_nothing_waits(pair):
    """However little is sent; and a connection that was closed is passed over."""
    ours, theirs = pair
    link = WatchedLink("rank 1", [ours.fileno()], 1e12)
    ours.sendall(b"little")
    assert theirs.recv(6) == b"little" and looks(link, 0.0, 3 * WINDOW_S) == []
    ours.close()
    assert looks(link, 3 * WINDOW_S, WINDOW_S) == []


@pytest.mark.parametrize(
    ("now", "control", "words"),
    [
        ({"resent": 5, "segments": 100}, "bbr", "5 % of the segments were sent again"),
        ({"resent": 5, "segments": 100}, "reno", "bbr would not"),
        ({"receiver_us": 80, "busy_us": 100}, "bbr", "tcp_rmem"),
        ({"buffer_us": 80, "busy_us": 100}, "bbr", "tcp_wmem"),
        ({"round_trip_us": 400}, "bbr", "10.0 times as long"),
        ({"segments": 100}, "bbr", "carries no more"),
    ],
)
def test_the_reason_is_what_tcp_counted_between_two_looks(now, control, words):
    """Losses before windows before round trips; earlier counts do not matter."""
    early = {"resent": 1000, "segments": 1000, "busy_us": 7, "receiver_us": 7, "buffer_us": 7}
    later = {key: early.get(key, 0) + value if key in early else value for key, value in now.items()}
    assert words in reason([state(**early)], [state(**early | later)], control)


def test_bbr_begins_anew_and_keeps_its_window(pair):
    """Where nothing is under way, once it is old enough; other controls are left alone."""
    ours, theirs = pair
    restart(theirs.fileno() if congestion_control(theirs.fileno()) != "bbr" else 0)
    prefer([ours.fileno()])
    if congestion_control(ours.fileno()) != PREFERRED:
        pytest.skip("this host has no bbr")
    ours.sendall(bytes(1 << 20))
    got = 0
    while got < 1 << 20:
        got += len(theirs.recv(1 << 20))
    assert eventually(lambda: seen(ours.fileno()).idle)
    before = seen(ours.fileno())
    link = WatchedLink("rank 1", [ours.fileno()], 1e9)
    assert link.look(0.0) is None and link.look(RESTART_S) is None
    assert congestion_control(ours.fileno()) == "bbr"
    assert seen(ours.fileno()).window == before.window


@pytest.mark.parametrize(("recovering", "window", "whole"), [(False, 100, True), (True, 100, False), (False, 4, False)])
def test_a_narrowed_window_is_left_alone(recovering, window, whole):
    """bbr widens it again by itself, unless it begins anew meanwhile."""
    assert state(recovering=recovering, window=window).whole_window == whole


@pytest.mark.parametrize(
    ("idle", "whole", "ages_s"),
    [(True, True, [0, RESTART_S, 2 * RESTART_S]), (False, True, [LATEST_RESTART_S - RESTART_S]), (True, False, [])],
)
def test_controls_begin_anew_sooner_where_nothing_is_under_way(monkeypatch, idle, whole, ages_s):
    """At the first look and every 3 s; every 8 s where something is; a narrowed window is left as it is."""
    begun, now = [], 0.0
    monkeypatch.setattr(link_watch, "restart", lambda descriptor: begun.append(now))
    monkeypatch.setattr(
        link_watch, "seen", lambda descriptor: SimpleNamespace(idle=idle, whole_window=whole, unsent_bytes=0)
    )
    link = WatchedLink("rank 1", [7], 1e9)
    for second in range(int(2 * RESTART_S) + 1):
        now = float(second)
        link.look(now)
    assert begun == ages_s


def test_a_watch_ends_when_it_is_closed(pair):
    """Its thread looks until then, and there is none where there is nothing to look at."""
    ours, _ = pair
    looked = []
    link = WatchedLink("rank 1", [ours.fileno()], 1e9)
    link.look = lambda now_s: looked.append(now_s)
    watch = LinkWatch([link], looked.append)
    assert eventually(lambda: looked)
    watch.close(), LinkWatch([], looked.append).close()
    assert not watch._thread.is_alive()


def test_inside_a_region_no_connection_keeps_bbr(pair):
    """Beside a queue that others fill it would get nothing; what the host has chosen otherwise stays."""
    ours, _ = pair
    before = congestion_control(ours.fileno())
    if before != PREFERRED:
        prefer_near([ours.fileno()])
        assert congestion_control(ours.fileno()) == before
    prefer([ours.fileno()])
    if congestion_control(ours.fileno()) != PREFERRED:
        pytest.skip("this host has no bbr")
    prefer_near([ours.fileno()])
    assert congestion_control(ours.fileno()) in NEAR
