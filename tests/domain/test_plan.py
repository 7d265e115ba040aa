"""Stages of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polygon.domain.plan import Stage, Worker

STAGE = Stage(first_layer=0, last_layer=6, workers=(Worker(pool=0, devices=(0,)),), recompute="full", zero=1)


@pytest.mark.parametrize(("blocks", "recomputed"), [(None, 6), (5, 6), (3, 4), (0, 1)])
def test_a_layer_by_itself_is_executed_as_in_its_stage(blocks, recomputed):
    """The first so many blocks are recomputed, behind the embedding; none where the stage recomputes nothing."""
    stage = replace(STAGE, recompute_blocks=blocks)
    for layer in range(1, 6):
        alone = stage.only(layer)
        assert alone.layers == (layer, layer + 1)
        assert alone.recompute == ("full" if layer < recomputed else "none")
        assert alone.recomputed_until == (layer + 1 if layer < recomputed else layer)
        assert (alone.workers, alone.zero) == (stage.workers, 1)
        assert replace(stage, recompute="none").only(layer).recomputed_until == layer
