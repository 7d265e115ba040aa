"""Sums on their way: the order of their parts, how many there may be, what happens to one that fails."""

import threading
import weakref

import pytest
import torch
from polygon_comm import line as sums
from polygon_comm.accelerator import Accelerator
from polygon_comm.line import BYTES_UNDER_WAY, SUMS_UNDER_WAY, Pending, SumLine

from tests.patience import PATIENCE_S, eventually


@pytest.fixture
def line():
    """A line whose threads are ended."""
    made = SumLine(Accelerator())
    yield made
    made.close()


def noting(notes, name, arrive=lambda: None):
    """Begins a sum that notes what is done with it."""

    def begin():
        notes.append(f"begin {name}")
        return Pending(
            arrive, rounds=[lambda: notes.append(f"advance {name}")], finish=lambda: notes.append(f"end {name}")
        )

    return begin


def test_each_part_keeps_its_order_and_none_waits_for_another(line):
    """While the first sum has not arrived, the second begins and advances; ends come in the order of begins."""
    notes, arrived, second = [], threading.Event(), threading.Event()
    line.add(noting(notes, "a", lambda: arrived.wait(PATIENCE_S)))
    line.add(noting(notes, "b"))
    # What is submitted waits for all sums: an exchange begins after both, and says that they have.
    end = line.exchange(lambda: second.set() or Pending(lambda: None))
    assert second.wait(PATIENCE_S)
    assert "begin b" in notes and "end a" not in notes and "end b" not in notes
    arrived.set()
    line.wait()
    end()
    for part in ("begin", "advance", "end"):
        assert [note for note in notes if note.startswith(part)] == [f"{part} a", f"{part} b"]


@pytest.mark.parametrize("way", ["add", "exchange"])
def test_a_sum_is_handed_out_while_an_earlier_one_is_still_coming(line, way):
    """And in the order of begins."""
    notes, arrived, handed_out = [], threading.Event(), threading.Event()
    first = Pending(lambda: arrived.wait(PATIENCE_S), share=lambda: notes.append("a"))
    second = Pending(lambda: None, share=lambda: notes.append("b") or handed_out.set())
    ends = [getattr(line, way)(lambda sum_=sum_: sum_.then(lambda: notes.append("end"))) for sum_ in (first, second)]
    assert handed_out.wait(PATIENCE_S)
    assert notes == ["a", "b"]
    arrived.set()
    line.wait()
    for end in ends if way == "exchange" else ():
        end()
    assert notes == ["a", "b", "end", "end"]


def test_large_sums_wait_until_there_is_room(monkeypatch):
    """Of sums as large as all that may be under way, so many begin as always may; the next one when one has ended."""
    notes, arrived, waiting = [], threading.Event(), threading.Event()

    class Telling(threading.Condition):
        """Says when somebody waits for it."""

        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    monkeypatch.setattr(sums, "Condition", Telling)
    line = SumLine(Accelerator())
    for number in range(SUMS_UNDER_WAY):
        line.add(noting(notes, number, lambda: arrived.wait(PATIENCE_S)), BYTES_UNDER_WAY)
    begun = threading.Event()
    line.add(lambda: begun.set() or Pending(lambda: None), BYTES_UNDER_WAY)
    assert eventually(lambda: waiting.is_set() or begun.is_set())
    assert not begun.is_set() and [note for note in notes if "begin" in note] == [
        f"begin {number}" for number in range(SUMS_UNDER_WAY)
    ]
    arrived.set()
    line.wait()
    assert begun.is_set()
    line.close()


def test_what_goes_wrong_is_raised_where_it_is_waited_for(line):
    """Of a begin, an arrival and an exchange; later sums still come."""
    notes = []

    def fail():
        raise RuntimeError("lost")

    line.add(fail)
    line.add(noting(notes, "b"))
    with pytest.raises(RuntimeError, match="lost"):
        line.wait()
    line.add(lambda: Pending(fail))
    with pytest.raises(RuntimeError, match="lost"):
        line.submit(lambda: notes.append("after")).result()
    with pytest.raises(RuntimeError, match="lost"):
        line.exchange(fail)()
    assert "end b" in notes and "after" not in notes


def test_an_exchange_that_has_not_arrived_holds_no_other_up(line):
    """The second one's next round is sent while the first is still under way; a sum passes both."""
    arrived, advanced, summed = threading.Event(), threading.Event(), threading.Event()
    first = line.exchange(lambda: Pending(lambda: arrived.wait(PATIENCE_S)))
    second = line.exchange(lambda: Pending(lambda: None, rounds=[advanced.set]))
    line.add(lambda: Pending(summed.set))
    line.wait()
    assert advanced.wait(PATIENCE_S) and summed.is_set() and not arrived.is_set()
    arrived.set()
    first()
    second()


def test_an_exchange_takes_no_room_from_sums(line):
    """Those that fill it to the byte are all under way beside one that has not arrived."""
    arrived, begun = threading.Event(), []
    exchanged = line.exchange(lambda: Pending(lambda: arrived.wait(PATIENCE_S)))
    for number in range(SUMS_UNDER_WAY):
        size = BYTES_UNDER_WAY // SUMS_UNDER_WAY
        line.add(lambda number=number: begun.append(number) or Pending(lambda: arrived.wait(PATIENCE_S)), size)
    assert eventually(lambda: len(begun) == SUMS_UNDER_WAY)
    arrived.set()
    line.wait()
    exchanged()


def test_as_many_small_sums_may_be_under_way_as_there_are_tags_for(monkeypatch):
    """However small; and the bytes of those that have ended make room for others."""
    monkeypatch.setattr(sums, "MOST_UNDER_WAY", SUMS_UNDER_WAY + 2)
    line, arrived, begun = SumLine(Accelerator()), threading.Event(), []
    for number in range(SUMS_UNDER_WAY + 3):
        line.add(lambda number=number: begun.append(number) or Pending(lambda: arrived.wait(PATIENCE_S)), 1)
    assert eventually(lambda: len(begun) >= SUMS_UNDER_WAY + 2)
    assert begun == list(range(SUMS_UNDER_WAY + 2))
    arrived.set()
    line.wait()
    assert begun == list(range(SUMS_UNDER_WAY + 3))
    for number in range(SUMS_UNDER_WAY + 1):
        line.add(lambda number=number: begun.append(number) or Pending(lambda: None), BYTES_UNDER_WAY // 4)
    line.wait()
    assert line._under_way == line._bytes == 0
    line.close()


class Remembering(Accelerator):
    """Says at every end of work which tensors are still held."""

    def __init__(self):
        self.tensor, self.held = None, []

    def finish(self):
        self.held.append(self.tensor is not None and self.tensor() is not None)


@pytest.mark.parametrize("way", ["add", "exchange"])
def test_what_a_sum_works_on_is_held_until_the_device_has_done_it(way):
    """Its memory belongs to the stream of the thread that began the sum: dropped before, it would be used anew."""
    device = Remembering()
    line = SumLine(device)

    def begin():
        tensor, received = torch.zeros(8), torch.ones(8)
        device.tensor = weakref.ref(tensor)
        inner = Pending(lambda: tensor.add_(received))
        return Pending(inner.arrive, rounds=inner.rounds)

    end = getattr(line, way)(begin)
    line.wait() if way == "add" else end()
    del end
    line.close()
    assert len(device.held) == (1 if way == "add" else 2) and all(device.held)
    assert device.tensor() is None
