"""Laws of the memory model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.compute import layer_times
from polygon.cost.estimate import estimate
from polygon.cost.memory import layer_memory, stage_memory, stage_rows
from polygon.domain.cluster import Link
from polygon.domain.model import Batch, Model
from polygon.domain.runtime import Runtime
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from tests.nightly import cases
from tests.uniform_splits import equal_nodes, held_bytes, lane


def gpt(**changes: object) -> Model:
    shape: dict[str, object] = {
        "name": "g",
        "blocks": 4,
        "hidden_size": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "ffn_size": 4096,
        "vocab_size": 51200,
        "max_seq_len": 2048,
    }
    return Model(**{**shape, **changes})  # type: ignore[arg-type]


BATCH = Batch(global_batch=64, seq_len=1024)


@settings(deadline=None, max_examples=cases(40))
@given(size=st.integers(1, 8), in_flight=st.integers(1, 8), zero=st.integers(0, 3), shards=st.integers(1, 16))
def test_memory_grows_with_the_micro_batch_and_falls_with_zero(size: int, in_flight: int, zero: int, shards: int):
    """Never less memory for a larger micro-batch or more in flight; never more for a higher ZeRO stage's states."""
    model = gpt()
    small, large = (layer_memory(model, BATCH, micro_batch_size=s) for s in (size, size + 1))

    def total(layers, flight, stage):
        return stage_memory(layers, 0, 6, in_flight=flight, zero=stage, shards=shards, batch=BATCH)

    assert total(small, in_flight, zero).total_bytes <= total(large, in_flight, zero).total_bytes
    assert total(small, in_flight, zero).total_bytes <= total(small, in_flight + 1, zero).total_bytes
    lower, higher = total(small, in_flight, 0), total(small, in_flight, zero)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(higher, part) <= getattr(lower, part)


def test_states_of_mixed_precision_adam():
    """bf16 weights (2), fp32 gradients (4), master and moments (12): 18 bytes a parameter without sharding."""
    model = gpt()
    layers = layer_memory(model, BATCH)
    stage = stage_memory(layers, 0, 6, in_flight=0, zero=0, shards=1, batch=BATCH, context_bytes=0)
    states = stage.weights + stage.gradients + stage.optimizer
    assert states == pytest.approx(18 * model.parameters)
    # A tied head on another stage than the embedding holds its own copy.
    first = stage_memory(layers, 0, 3, in_flight=0, zero=0, shards=1, batch=BATCH)
    last = stage_memory(layers, 3, 6, in_flight=0, zero=0, shards=1, batch=BATCH)
    assert (first.weights + last.weights) / 2 == pytest.approx(model.parameters + 51200 * 1024)


@pytest.mark.parametrize("shards", [1, 4])
def test_muon_has_one_moment_in_blocks_and_adamws_two_outside(shards: int):
    """A master weight and a moment, 8 bytes, of what lies in blocks; 12 of embedding, positions and head."""
    model, batch = gpt(), replace(BATCH, optimizer="muon")
    stage = stage_memory(layer_memory(model, batch), 0, 6, in_flight=0, zero=1, shards=shards, batch=batch)
    inside = sum(model.layer_parameters(layer) for layer in range(1, 5))
    assert stage.optimizer * shards == pytest.approx(8 * inside + 12 * (model.parameters - inside), rel=1e-4)


def test_split_weights_are_gathered_for_two_layers_at_once():
    """ZeRO-3: the largest layer in use and the next one (2 bytes a number each), and a gradient before it is scattered
    (4); nobody divides alone."""
    model = gpt()
    layers = layer_memory(model, BATCH)
    largest = 51200 * 1024 + 2048 * 1024  # the embedding and its positions

    def transient(zero, shards):
        return stage_memory(layers, 0, 6, in_flight=1, zero=zero, shards=shards, batch=BATCH).transient

    assert transient(3, 2) - transient(0, 2) == pytest.approx(8 * largest)
    assert transient(2, 2) == transient(3, 1) == transient(0, 1) > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_experts_are_sharded_over_what_expert_parallelism_leaves(zero):
    """A device's share of optimizer state is the same for every ep: fewer experts, shared by as many fewer workers."""
    model = catalogue.model("mixtral-8x7b")
    batch = Batch(global_batch=8, seq_len=128)
    for ep in (1, 2, 8):
        layers = layer_memory(model, batch, ep=ep)
        part = stage_memory(layers, 0, model.layers, in_flight=0, zero=zero, shards=8, batch=batch)
        assert part.optimizer == pytest.approx(12 * model.parameters / 8)


def test_lanes_and_plans_agree_on_experts():
    """A lane and the workers of its plan count sharded experts alike."""
    model = catalogue.model("mixtral-8x7b")
    batch = Batch(global_batch=64, seq_len=2048)
    link = catalogue.link("infiniband-hdr-x8")
    asked = equal_nodes(model, batch, catalogue.device("a100-80gb"), nodes=2, between=link)
    for config in (ParallelConfig(dp=8, pp=2, ep=ep, zero=zero) for ep in (1, 2, 8) for zero in range(4)):
        workers = estimate(asked, uniform_plan(asked, config)).workers
        assert held_bytes(asked, config) == pytest.approx(max(worker.peak_bytes for worker in workers))


def test_context_and_expert_parallelism_divide_activations_and_experts():
    """Twice the context-parallel degree halves activations; experts spread over ep devices."""
    one, two = (layer_memory(gpt(), BATCH, cp=cp) for cp in (1, 2))
    assert two.activation_bytes[1] == pytest.approx(one.activation_bytes[1] / 2)
    moe = gpt(experts=8, experts_per_token=2, expert_ffn_size=2048)
    whole, spread = (layer_memory(moe, BATCH, ep=ep).parameters[1] for ep in (1, 8))
    expert = 2 * 1024 * 2048
    assert whole - spread == pytest.approx(7 * expert)
    device, link = catalogue.device("a100-80gb"), catalogue.usual_link("a100-80gb")
    assert layer_times(moe, BATCH, device, link, ep=8).communication_s[1] > 0


def test_heads_that_parts_of_a_sequence_cannot_share_out_gather_keys_and_values():
    """Six heads on four parts: each of them holds, of 256 tokens, the other three's two keys and values of 64 too."""
    model = gpt(heads=6, kv_heads=2)
    ring, gathered = (
        layer_memory(model, BATCH, cp=4, runtime=Runtime(context=how)).activation_bytes[1] for how in ("ring", "heads")
    )
    assert gathered - ring == 2 * 3 * 2 * (64 + 64) * 256
    shared = [layer_memory(gpt(), BATCH, cp=4, runtime=Runtime(context=how)) for how in ("ring", "heads")]
    assert shared[0].activation_bytes[1] == shared[1].activation_bytes[1]


def test_logits_are_held_as_the_loss_needs_them():
    """One fused kernel holds 6 bytes per 16-bit logit, torch's cross entropy 14."""
    fused, torch = (
        layer_memory(gpt(), BATCH, runtime=Runtime(loss=loss)).transient_bytes[-1] for loss in ("fused", "torch")
    )
    assert fused == 1024 * 51200 * 6 and torch == 1024 * 51200 * 14


def test_gathered_inputs_are_kept_or_gathered_again():
    """Sequence parallelism under autograd holds two inputs a block whole, and spends one gathering fewer on each."""
    model, tp = gpt(), 4
    split = {"tp": tp, "sequence_parallel": True}
    let_go, keeps = (Runtime(keeps_gathered=kept) for kept in (False, True))
    shares, whole = (layer_memory(model, BATCH, **split, runtime=runtime) for runtime in (let_go, keeps))
    assert whole.activation_bytes[1] - shares.activation_bytes[1] == 2 * BATCH.seq_len * 1024 * 2
    assert whole.transient_bytes[-1] - shares.transient_bytes[-1] == 2 * BATCH.seq_len * 1024 * 2
    alone = [layer_memory(model, BATCH, tp=tp, runtime=runtime).activation_bytes[1] for runtime in (let_go, keeps)]
    assert alone[0] == alone[1]
    device, link = catalogue.device("a100-80gb"), catalogue.usual_link("a100-80gb")
    again, kept = (layer_times(model, BATCH, device, link, **split, runtime=runtime) for runtime in (let_go, keeps))
    assert kept.backward_s[1] < again.backward_s[1] and kept.forward_s[1] == again.forward_s[1]


@pytest.mark.parametrize("tp", [1, 4])
def test_products_in_8_bits_keep_a_byte_of_each_input_where_the_program_does(tp: int):
    """TransformerEngine: both norms' outputs and what the activation gives as they were multiplied; what attention
    gives beside its 16 bits once more. In 16 bits, and in programs that keep 16, nothing changes."""
    batch, ours, theirs = replace(BATCH, precision="fp8"), Runtime(), Runtime(keeps_8_bit=True)
    wide, narrow = (
        layer_memory(gpt(), batch, tp=tp, runtime=runtime).activation_bytes[1] for runtime in (ours, theirs)
    )
    assert wide - narrow == BATCH.seq_len * (2 * 1024 + (4096 - 1024) / tp)
    same = [layer_memory(gpt(), BATCH, tp=tp, runtime=runtime).activation_bytes[1] for runtime in (ours, theirs)]
    assert same == [wide, wide]
    again = replace(theirs, selective="norms")
    less = layer_memory(gpt(), batch, tp=tp, recompute="selective", runtime=again).activation_bytes[1]
    assert narrow - less == BATCH.seq_len * 2 * 1024


def test_experts_keep_a_byte_of_each_token_that_they_were_sent():
    """And two of what they give, before it is weighted."""
    model, batch = catalogue.model("mixtral-8x7b"), replace(BATCH, precision="fp8")
    wide, narrow = (
        layer_memory(model, batch, ep=8, runtime=Runtime(keeps_8_bit=kept)).activation_bytes[1]
        for kept in (False, True)
    )
    h, f = 4096, 14336
    assert wide - narrow == BATCH.seq_len * (2 * h + 2 * f - h + 2 * h)


def test_a_stage_that_keeps_what_it_sent_holds_one_tensor_more_for_each_micro_batch():
    """DeepSpeed: sequence x width x 2 bytes for the first stage's four micro-batches in flight; the last sends none."""
    device, link = catalogue.device("a100-80gb"), catalogue.usual_link("a100-80gb")
    freed, kept = (
        lane(
            equal_nodes(gpt(), BATCH, device, nodes=1, between=link, runtime=Runtime(keeps_outputs=keeps)),
            ParallelConfig(pp=4),
        ).memory
        for keeps in (False, True)
    )
    assert kept[0].activations - freed[0].activations == pytest.approx(4 * 1024 * 1024 * 2)
    assert kept[-1] == freed[-1]


@pytest.mark.parametrize("size", [1, 3])
def test_the_head_keeps_its_input_before_and_after_the_norm(size: int):
    """In 16 bits 4 bytes a token and hidden number; a transform before the logits keeps two tensors more."""
    plain, transformed = (
        layer_memory(gpt(head_transform=transform), BATCH, micro_batch_size=size).activation_bytes[-1]
        for transform in (False, True)
    )
    assert plain == 4 * size * BATCH.seq_len * 1024
    assert transformed == 2 * plain


@pytest.mark.parametrize(("first", "last"), [(0, 6), (0, 3), (1, 5), (3, 6)])
def test_what_is_outside_of_blocks_is_embedding_and_head(first: int, last: int):
    """Of a stage those that it has, and not the blocks: Muon's states differ there."""
    layers = layer_memory(gpt(blocks=4, tied_embeddings=False), Batch(global_batch=1, seq_len=128))
    expected = sum(layers.parameters[i] for i in (0, 5) if i in range(first, last))
    assert stage_rows(layers, first, last)[5] == pytest.approx(expected)


def test_kernels_apart_keep_what_norms_and_gates_make():
    """Of RMS norms and a gate 6 h a norm and the activation's output more, in 16 bits; of GPT-2's block nothing."""
    batch = Batch(global_batch=1, seq_len=1024)
    llama = gpt(gated_mlp=True, rms_norm=True)
    for model, more in ((gpt(), 0.0), (llama, 1024 * (2 * 6 * 1024 + 2 * 4096))):
        fused, apart = (layer_memory(model, batch, runtime=Runtime(fused=fused)) for fused in (True, False))
        assert apart.activation_bytes[1] - fused.activation_bytes[1] == pytest.approx(more)


def test_a_runtime_may_say_what_it_holds_of_a_logit():
    """Beside the kind of its loss, whose passes are another matter."""
    batch = Batch(global_batch=1, seq_len=1024)
    torch, own = (layer_memory(gpt(), batch, runtime=Runtime(logit_bytes=held)) for held in (0.0, 4.0))
    assert torch.transient_bytes[-1] - own.transient_bytes[-1] == pytest.approx(1024 * 51200 * 8)


@pytest.mark.parametrize(("runtime", "divides"), [("megatron-core", False), ("polygon", True)])
def test_gradients_that_are_summed_once_a_step_are_whole_until_then(runtime: str, divides: bool):
    """ZeRO-2 of a program that does not scatter them after every micro-batch holds what ZeRO-1 does."""
    link, device = Link(latency_s=1e-5, bytes_per_s=1e10), catalogue.device("a100-80gb")
    problem = equal_nodes(gpt(), BATCH, device, nodes=1, between=link, runtime=catalogue.runtime(runtime))
    peaks = [lane(problem, ParallelConfig(dp=8, micro_batch_size=1, zero=zero)).peak for zero in (1, 2, 3)]
    first, second, third = (peak.gradients for peak in peaks)
    assert first == pytest.approx(8 * third)
    assert second == pytest.approx(third if divides else first)
