"""The watch over neighbours, over real connections: strangers at its port neither stop nor enter it."""

import json
import socket
import threading

import pytest
from torch.distributed import HashStore

from runners.engine import failure_detector
from runners.engine.failure_detector import Watch
from runners.engine.rendezvous import RunFailedError

STRANGERS = {
    "closes at once": None,
    "closes within a line": b'["hel',
    "talks HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "says no greeting": b'["beat", "1", 0, null]\n',
    "says a list of nothing": b"[]\n",
    "is a rank that nobody waits for": b'["hello", "7", 0, null]\n',
    "has no end": b"x" * 1000,
}


def watch(rank, neighbours, store):
    return Watch(
        rank, neighbours, store, address="127.0.0.1", dead_after_s=20, describe=lambda r: f"rank {r}",
        on_loss=lambda message: None,
    )  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_sent_away_and_the_neighbour_let_in(stranger):
    """Whatever it says or leaves unsaid, and though it comes first."""
    store, met = HashStore(), []
    thread = threading.Thread(target=lambda: met.append(watch(0, [1], store)))
    thread.start()
    host, port = json.loads(store.get("watch/0"))
    with socket.create_connection((host, port)) as connection:
        if STRANGERS[stranger] is not None:
            connection.sendall(STRANGERS[stranger])
        if stranger.startswith("closes"):
            connection.close()
        other = watch(1, [0], store)
        thread.join()
    for one in (other, *met):
        one.close()
    assert len(met) == 1


def test_a_neighbour_that_does_not_come_is_named(monkeypatch):
    """After a while, in one line."""
    monkeypatch.setattr(failure_detector, "MEET_S", 0.2)
    with pytest.raises(RunFailedError, match=r"^rank 0: rank 1, rank 2 did not connect in 0\.2 s$"):
        watch(0, [1, 2], HashStore())


def test_clocks_are_compared_by_the_quickest_exchange(monkeypatch):
    """Of a clock 100 s behind ours: an answer that took 5 s of way says 101.5, one of 20 ms says 100, however long rank
    0 kept it; a slower one after it changes nothing."""
    ours = watch(1, [], HashStore())
    ours.close()
    with socket.socket() as connection:
        first = failure_detector._Neighbour(0, connection)
        exchanges = (1000.0, 901.0, 901.5, 1005.5), (1010.0, 910.01, 915.01, 1015.02), (1020.0, 923.0, 923.0, 1023.1)
        offsets_s = []
        for asked_s, reached_s, sent_s, heard_s in exchanges:
            monkeypatch.setattr(failure_detector.time, "time", lambda heard_s=heard_s: heard_s)
            ours._compare_clocks(first, sent_s, (asked_s, reached_s))
            offsets_s.append(ours.clock_offset_s)
        monkeypatch.undo()
    assert offsets_s == pytest.approx([101.5, 100.0, 100.0])
