"""Word problems with worked answers, made up: a small set in the form of MetaMathQA, for trying things out."""

from __future__ import annotations

import numpy as np

NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lena")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps", "shells", "tickets")
SEED = 20230921
"""Of the numbers and names; the set is always the same."""


def made_up(count: int) -> list[tuple[str, str]]:
    """Questions and answers; each answer ends as MetaMathQA's do (`The answer is: 7`)."""
    rng = np.random.default_rng(SEED)
    makers = (_sum, _product, _rest, _unknown)
    return [makers[int(rng.integers(len(makers)))](rng) for _ in range(count)]


def _words(rng: np.random.Generator) -> tuple[str, str, str]:
    first, second = rng.choice(len(NAMES), size=2, replace=False)
    return NAMES[first], NAMES[second], THINGS[int(rng.integers(len(THINGS)))]


def _ended(work: str, answer: int) -> str:
    return f"{work}\n#### {answer}\nThe answer is: {answer}"


def _sum(rng: np.random.Generator) -> tuple[str, str]:
    name, other, things = _words(rng)
    a, b = map(int, rng.integers(2, 100, size=2))
    question = f"{name} has {a} {things} and {other} gives {name} {b} more. How many {things} does {name} have now?"
    return question, _ended(f"{name} starts with {a} {things}.\n{other} adds {b}: {a} + {b} = {a + b}.", a + b)


def _product(rng: np.random.Generator) -> tuple[str, str]:
    name, _, things = _words(rng)
    boxes, each = map(int, rng.integers(2, 13, size=2))
    question = f"{name} fills {boxes} boxes with {each} {things} each. How many {things} are in the boxes?"
    return question, _ended(f"Each of the {boxes} boxes holds {each}: {boxes} * {each} = {boxes * each}.", boxes * each)


def _rest(rng: np.random.Generator) -> tuple[str, str]:
    name, other, things = _words(rng)
    whole = int(rng.integers(20, 200))
    gone, lost = map(int, rng.integers(1, 10, size=2))
    question = f"Of {whole} {things}, {name} gives {gone} to {other} and loses {lost}. How many {things} are left?"
    first, left = whole - gone, whole - gone - lost
    return question, _ended(
        f"After giving {gone}, {whole} - {gone} = {first} are left.\nThen {first} - {lost} = {left}.", left
    )


def _unknown(rng: np.random.Generator) -> tuple[str, str]:
    name, _, things = _words(rng)
    factor, answer = map(int, rng.integers(2, 13, size=2))
    shift = int(rng.integers(1, 30))
    total = factor * answer + shift
    question = (
        f"{name} buys {factor} packs of x {things} and {shift} single ones, {total} in all. "
        "What is the value of the unknown variable x?"
    )
    return question, _ended(
        f"We have {factor} x + {shift} = {total}.\nSo {factor} x = {total - shift} and x = {answer}.", answer
    )
