"""Where uniform splits cut a model."""

from __future__ import annotations

import pytest

from polygon.domain.errors import InputError
from polygon.domain.uniform import ParallelConfig, stage_bounds
from tests.small_problems import small_model


def test_stages_have_the_layers_that_are_asked_for():
    """Eight layers, embedding and head included, as 1 + 4 + 3."""
    config = ParallelConfig(pp=3, stage_layers=(1, 4, 3))
    assert stage_bounds(small_model(blocks=6), config) == [0, 1, 5, 8]


@pytest.mark.parametrize("layers", [(2, 6), (2, 4, 1), (2, 2, 2, 2)])
def test_stages_that_are_asked_for_hold_all_layers(layers: tuple[int, ...]):
    """As many numbers as stages, and no layer left over."""
    config = ParallelConfig(pp=3, stage_layers=layers)
    with pytest.raises(InputError, match=r"stage_layers: found .* expected 3 numbers with the sum 8"):
        stage_bounds(small_model(blocks=6), config)


@pytest.mark.parametrize(
    ("blocks", "pp", "chunks", "bounds"),
    [
        (6, 1, 1, [0, 8]),
        (6, 3, 1, [0, 3, 5, 8]),  # two blocks each, the embedding with the first, the head with the last
        (6, 4, 1, [0, 2, 4, 6, 8]),  # six blocks are not dealt evenly to four, eight layers are
        (6, 8, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (8, 2, 2, [0, 3, 5, 7, 10]),
        (7, 2, 1, [0, 5, 9]),  # neither is even
    ],
)
def test_blocks_are_dealt_evenly_or_else_layers(blocks: int, pp: int, chunks: int, bounds: list[int]):
    """Nothing asked for: as many blocks a stage, or, where that cannot be, as many layers."""
    assert stage_bounds(small_model(blocks=blocks), ParallelConfig(pp=pp, chunks=chunks)) == bounds
