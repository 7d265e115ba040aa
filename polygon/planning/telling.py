"""What a search tells of itself as it goes on."""

from __future__ import annotations

from collections.abc import Callable

from polygon.domain.message import Message

Tell = Callable[[Message, float, float], None]
"""Phase, part of everything that is done (0 to 1), best value so far. May raise KeyboardInterrupt: the search then ends
with the best so far."""

STARTS, MEMETIC = Message("phase.starts"), Message("phase.memetic")
EXACT, IN_PARTS, POLISH = Message("phase.exact"), Message("phase.in_parts"), Message("phase.polish")
ENDS = {STARTS.kind: 0.25, MEMETIC.kind: 0.45, EXACT.kind: 0.65, IN_PARTS.kind: 0.8, POLISH.kind: 1.0}
"""Part of a search that is done at the end of a phase, about what takes its time on clusters of all sizes."""


def share(tell: Tell | None, first: float, last: float, of: Callable[[Message], Message] | None = None) -> Tell | None:
    """What tells of a part of something larger, from `first` to `last` of it, and says `of` which part it is."""
    if tell is None:
        return None
    told: Tell = tell
    return lambda phase, part, best: told(of(phase) if of else phase, first + part * (last - first), best)


def phase_of(tell: Tell | None, phase: Message) -> Callable[[float, float], None]:
    """What tells of one phase of a search: the part of it that is done, and the best value so far."""
    first = max((end for end in ENDS.values() if end < ENDS[phase.kind]), default=0.0)
    told = share(tell, first, ENDS[phase.kind])
    return lambda part, best: told(phase, min(1.0, part), best) if told else None


def in_round(phase: Message, index: int, rounds: int) -> Message:
    """A phase of one of several rounds."""
    return phase if rounds == 1 else Message("phase.round", round=index + 1, phase=phase)
