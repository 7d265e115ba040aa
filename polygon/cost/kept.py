"""What was worked out of objects, kept for the next question about the same ones.

By identity: to compare the stages of plans takes as long as to price them. A search changes one thing at a time, and
what it leaves alone stays the same object.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Kept(Generic[Answer]):
    """Answers by the objects (and plain values) that they were worked out of; of so many at most, then all are dropped.

    Keeps the objects alive, so that no other one can take their place in memory.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Answer]] = {}

    def get(self, objects: tuple[object, ...], *values: Hashable) -> Answer | None:
        """The answer kept for these; None if there is none."""
        found = self._answers.get((*map(id, objects), *values))
        return None if found is None else found[1]

    def put(self, answer: Answer, objects: tuple[object, ...], *values: Hashable) -> Answer:
        """Keep an answer, and give it back."""
        if len(self._answers) >= self._most:
            self._answers.clear()
        self._answers[(*map(id, objects), *values)] = objects, answer
        return answer

    def clear(self) -> None:
        """Forget all."""
        self._answers.clear()
