"""What torch keeps of layers for their backward, counted by hand."""

from dataclasses import replace

import pytest

from polygon.cost.autograd_memory import Way, _norm, autograd_memory
from polygon.domain.model import Batch
from polygon.formats import catalogue


@pytest.mark.parametrize(
    ("way", "rms", "expected"),
    [
        # An input of 100 numbers in 16 bits; mean and factor, or the factor alone.
        ({}, False, 2 * 100 + 8),
        ({}, True, 2 * 100 + 4),
        # Without one kernel for it, an RMS norm's values before their weight too, unless the weight has no gradient.
        ({"fused_norms": False}, True, 2 * 4 * 100 + 4),
        ({"fused_norms": False}, False, 2 * 100 + 8),
        ({"fused_norms": False, "trained": ("query",)}, True, 4 * 100 + 4),
        # In 32 bits where autocast has them cast it, but for what makes the cast again.
        ({"norms_in_32_bits": True}, True, 4 * 100 + 4),
        ({"norms_in_32_bits": True}, False, 4 * 100 + 8),
        ({"norms_in_32_bits": True, "compiled": True}, False, 2 * 100 + 8),
    ],
)
def test_a_norm_keeps_its_input_and_what_it_divided_by(way, rms, expected):
    """Bytes a token of 100 numbers."""
    assert _norm(100, Way(micro_batch=1, **way), 2, rms=rms) == expected


def test_grouped_experts_get_the_gradients_of_one_matrix_at_a_time():
    """All of a device's, in 16 bits; those of experts that run one after another never lie beside one another."""
    mixtral, batch = catalogue.model("mixtral-8x7b"), Batch(global_batch=8, seq_len=64)

    def passing_bytes(model, **way):
        return autograd_memory(model, batch, Way(micro_batch=1, ep=2, **way)).transient_bytes[1]

    more = passing_bytes(mixtral, grouped_experts=True) - passing_bytes(mixtral)
    assert more == 2 * 4 * mixtral.hidden_size * mixtral.expert_ffn_size
    # Cut by tensor parallelism they are no one product; whole on its devices each has its part of them.
    assert passing_bytes(mixtral, tp=2, grouped_experts=True) == passing_bytes(mixtral, tp=2)
    folded = {"tp": 2, "sequence": True, "whole_experts": True}
    assert passing_bytes(mixtral, grouped_experts=True, **folded) - passing_bytes(mixtral, **folded) == more / 2
    biased = replace(mixtral, linear_bias=True)
    assert passing_bytes(biased, grouped_experts=True) == passing_bytes(biased)
