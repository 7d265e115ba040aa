"""Named tuples that kernels read by a pointer."""

import pickle
from typing import NamedTuple

import numpy as np
import pytest

from polygon.jit.by_pointer import Pointed, gives_pointed, pointed
from polygon.jit.compilation import inner, kernel


class Numbers(NamedTuple):
    """Every kind of number."""

    whole: int
    real: float
    yes: bool
    no: bool
    pair: tuple[float, float]


class Room(NamedTuple):
    """Arrays beside a tuple of its own."""

    row: np.ndarray
    numbers: Numbers
    table: np.ndarray
    flags: np.ndarray


class Word(NamedTuple):
    """What no kernel reads."""

    text: str


@inner
def weighed(room: Room, i: int) -> float:
    """Of a row, what a function that is called reads."""
    of = room.numbers
    return room.row[i] * of.real + of.pair[1] if of.yes and not of.no else of.pair[0]


@kernel
def total(room: Room) -> float:
    """Reads all, and writes to an array."""
    found = 1.0 * room.numbers.whole
    for i in range(room.table.shape[0]):
        for j in range(room.table.shape[1]):
            found += room.table[i, j] * weighed(room, i)
    room.row[0] = found
    room.flags[1] = True
    return found


def room_of(table, **numbers):
    """A room of three rows."""
    own = Numbers(**{"whole": 7, "real": 0.5, "yes": True, "no": False, "pair": (100.0, 0.25)} | numbers)
    return pointed(Room(np.array([1.0, 2.0, 3.0]), own, table, np.zeros(2, dtype=np.bool_)))


@pytest.mark.parametrize("table", [np.arange(6).reshape(3, 2), np.arange(12.0).reshape(3, 4)[:, ::2]])
def test_kernels_read_and_write_what_the_tuple_holds(table):
    """Whole numbers and others, contiguous or not; another tuple of the same kind has its own values."""
    rows = table.sum(axis=1)
    room = room_of(table)
    expected = 7 + float(rows @ [0.75, 1.25, 1.75])
    assert total(room) == expected
    assert room.row.tolist() == [expected, 2, 3] and room.flags.tolist() == [False, True]
    assert total(room_of(table, whole=-3, no=True)) == -3 + 100 * rows.sum()
    assert total(room_of(table, yes=False, pair=(2.0, 0.0))) == 7 + 2 * rows.sum()


@pytest.mark.parametrize("table", [np.arange(6.0).reshape(3, 2), np.arange(8.0).reshape(4, 2), np.ones((2, 4))[:, ::2]])
def test_with_fields_replaced_it_is_one_of_these(table):
    """Arrays of the same and of another layout, a tuple of its own; what it was made of stays."""
    old = room_of(np.ones((3, 2)))
    before = total(room_of(np.ones((3, 2))))
    rows = [np.array([4.0, 5.0, 6.0, 7.0]) for _ in range(2)]
    new = old._replace(table=table, row=rows[0])
    fresh = pointed(Room(rows[1], old.numbers, table, old.flags))
    assert new.table is table and total(new) == total(fresh) == rows[0][0]
    assert before == total(old) != total(fresh)


def test_it_reads_as_the_tuple_does():
    """Fields, order, changes, a copy in another process; what is pointed to stays the same."""
    room = room_of(np.ones((3, 1)))
    assert isinstance(room, Pointed) and pointed(room) is room and room.numbers.whole == 7
    assert [type(part) for part in room] == [np.ndarray, Pointed, np.ndarray, np.ndarray]
    with pytest.raises(AttributeError, match="rows"):
        _ = room.rows
    copy = pickle.loads(pickle.dumps(room))
    changed = room._replace(numbers=room.numbers._replace(whole=0))
    assert total(copy) - total(changed) == 7
    written = total(changed)
    assert room.row[0] == written != copy.row[0]
    made = gives_pointed(lambda **numbers: Numbers(**numbers))(whole=1, real=2.0, yes=True, no=True, pair=(0.0, 0.0))
    assert isinstance(made, Pointed) and made.real == 2.0


def test_what_kernels_cannot_read_is_refused():
    """Text."""
    with pytest.raises(TypeError, match="cannot read str by a pointer"):
        pointed(Word("a"))
