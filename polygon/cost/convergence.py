"""The parity ledger: what may be sent between regions in place of the numbers, and what is known of the loss under it.

The rows and their sources are in `polygon/domain/catalogue/parity.yaml`. A user's tolerance (`Constraints.parity`) is a
level; the search chooses among the kinds of that level and of those before it. A list of packings or of local steps in
the constraints takes the ledger's place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.plan import PARITY_LEVELS, Constraints, Plan, Problem
from polygon.domain.runnable import runnable
from polygon.formats.serialization import parse_yaml

TRAFFIC = ("activations", "activation_gradients", "weight_gradients")
"""Classes of messages, as in `LinkUse`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """What is known of one kind for one class of messages."""

    level: str
    ratio: float
    """Bytes of bf16 activations or fp32 weight gradients over bytes packed; steps between reductions."""
    shown: str
    source: str
    caveat: str = ""
    parameters: tuple[float, float] = (0.0, float("inf"))
    """Least and most parameters of the models for which it was shown."""

    def level_for(self, model: Model) -> str:
        """Level of the kind for a model: that of the row within the sizes shown, else `any`."""
        low, high = self.parameters
        if (low, high) == (0.0, float("inf")):  # counting a model's parameters takes a while
            return self.level
        return self.level if low <= model.parameters <= high else PARITY_LEVELS[-1]


NOTHING_SHOWN = QualityRow(
    level=PARITY_LEVELS[-1], ratio=1.0, shown="nobody has shown that it keeps the loss", source="no source"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecQuality:
    """Memory traffic of a packing, bytes per number."""

    pack: float
    pack_with_feedback: float
    unpack: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the search may choose from, gentlest first."""

    activations: tuple[str, ...]
    activation_gradients: tuple[str, ...]
    weight_gradients: tuple[str, ...]
    local_steps: tuple[int, ...]


@cache
def _ledger() -> dict[str, Any]:
    text = resources.files("polygon.domain.catalogue").joinpath("parity.yaml").read_text("utf-8")
    ledger: dict[str, Any] = parse_yaml(text)
    return ledger


@cache
def rows(traffic: str) -> dict[Any, QualityRow]:
    """The ledger's rows for a class of messages (`TRAFFIC`) by packing, or for `local_steps` by number of steps."""

    def row(fields: dict[str, Any]) -> QualityRow:
        low, high = fields.get("parameters", (0.0, float("inf")))
        return QualityRow(**{**fields, "parameters": (low, high)})

    return {kind: row(fields) for kind, fields in _ledger()[traffic].items()}


@cache
def codec(mode: str) -> CodecQuality:
    """Memory traffic of a packing."""
    return CodecQuality(**_ledger()["codecs"][mode])


def allowed(problem: Problem, level: str | None = None, *, by_any_program: bool = False) -> Allowed:
    """Kinds that a problem's constraints let the search choose, of those that its program runs.

    Parameters
    ----------
    level : str, optional
        In place of the constraints' own, their lists aside.
    by_any_program : bool
        Whether kinds that its program lacks are among them: plans that have these can be priced all the same.
    """
    limits: Constraints = problem.constraints
    most = PARITY_LEVELS.index(limits.parity if level is None else level)

    def kinds(traffic: str) -> list[Any]:
        known = rows(traffic)
        return [kind for kind in known if PARITY_LEVELS.index(known[kind].level_for(problem.model)) <= most]

    chosen: dict[str, tuple[str, ...]] = {}
    for traffic in TRAFFIC:
        listed = [mode for mode in rows(traffic) if mode in limits.compressions]
        chosen[traffic] = tuple(listed or ["none"]) if limits.compressions and level is None else tuple(kinds(traffic))
    steps = limits.local_steps if limits.local_steps and level is None else tuple(kinds("local_steps"))
    if not by_any_program and (runs := runnable(problem)) is not None:
        packings = tuple(mode for mode in chosen["weight_gradients"] if mode in runs.gradient_packings)
        return Allowed(
            activations=("none",), activation_gradients=("none",), weight_gradients=packings or ("none",),
            local_steps=(1,),
        )  # fmt: skip
    return Allowed(**chosen, local_steps=tuple(sorted(steps)))


def at_parity(problem: Problem, level: str) -> Problem:
    """The problem at another level of parity, without lists of its own."""
    limits = replace(problem.constraints, parity=level, compressions=(), local_steps=())
    return replace(problem, constraints=limits)


def level_needed(problem: Problem, traffic: str, kind: Any) -> str:
    """The first level that allows a kind for a problem's model; local steps take the row of as many steps or more.

    A kind without a row (powersgd of activations) has nothing to show and needs the last level.
    """
    known = rows(traffic)
    if traffic == "local_steps":
        if kind > max(known):
            return PARITY_LEVELS[-1]
        kind = min(steps for steps in known if steps >= kind)
    return known[kind].level_for(problem.model) if kind in known else PARITY_LEVELS[-1]


def assumptions(problem: Problem, plan: Plan) -> list[Message]:
    """What is taken for granted of the loss under a plan, a line for every lossy kind that it uses, with the source."""
    lines = []
    for traffic in TRAFFIC:
        for kind in plan.packings[traffic][0]:
            if kind != "none":
                what = Message(f"loss.{traffic}", mode=kind)
                row = rows(traffic).get(kind, NOTHING_SHOWN)
                lines.append(_evidence(what, level_needed(problem, traffic, kind), row))
    if plan.local_steps > 1:
        known = rows("local_steps")
        nearest = min((steps for steps in known if steps >= plan.local_steps), default=max(known))
        level = level_needed(problem, "local_steps", plan.local_steps)
        what = Message("loss.local_steps", steps=plan.local_steps)
        lines.append(Message("loss.equal_tokens", evidence=_evidence(what, level, known[nearest])))
    return lines


def packings_inside(problem: Problem, plan: Plan) -> list[Message]:
    """What nodes of a region send one another packed, a line a region."""
    regions, lines = problem.cluster.regions, []
    for use in plan.links:
        if use.source == use.target:
            kinds = ((traffic, getattr(use, traffic)) for traffic in TRAFFIC)
            what = tuple(Message(f"loss.{traffic}", mode=kind) for traffic, kind in kinds if kind != "none")
            if what:
                lines.append(Message("packing.inside", region=regions[use.source].name, what=what))
    return lines


def _evidence(what: Message, level: str, row: QualityRow) -> Message:
    if not row.caveat:
        return Message("loss.evidence", what=what, level=level, shown=row.shown, source=row.source)
    return Message(
        "loss.evidence_with_caveat", what=what, level=level, shown=row.shown, caveat=row.caveat, source=row.source
    )
