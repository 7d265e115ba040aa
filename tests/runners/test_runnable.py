"""The runner refuses what it cannot execute, before it starts, in a line that names the field."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.domain.block import LatentAttention
from polygon.domain.errors import InputError
from polygon.domain.model import SPECIAL, Batch, Model
from polygon.domain.plan import RECOMPUTE, LinkUse, Problem, Worker
from polygon.domain.uniform import SCHEDULES, ParallelConfig, uniform_plan
from polygon.formats import catalogue, files
from polygon.planning.checker import violations
from polygon.planning.decode import can_take_local_steps
from polygon.planning.rehearsal import rehearsal_problem
from runners.engine.layers import empty_layer
from runners.engine.runnable import _check_worker, check_runnable, require_plain
from tests.nightly import cases
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

BUILT = {
    "name", "family", "blocks", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_size", "vocab_size",
    "max_seq_len", "gated_mlp", "tied_embeddings", "learned_positions", "rms_norm", "norm_eps", "rope_theta",
    "rope_scaling", "linear_bias", "qkv_bias", "causal", "experts", "experts_per_token", "expert_ffn_size",
    "shared_experts", "dense_blocks", "image_size", "patch_size", "channels", "source", "notes",
}  # fmt: skip
"""Fields that the engine reads (runners/engine/layers.py), and names, sizes and counts."""


def test_a_plan_for_this_engine_is_runnable():
    """The same plan without what is refused below."""
    check_runnable(*routed_problem(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 2}, r"plan\.stages\[0\]\.workers\[1\]\.cp: found 1, expected 2, as in all stages"),
        (
            {"runtime": "megatron-core"},
            r"problem\.runtime: found megatron-core, expected polygon, polygon-compiled, polygon-ring or polygon-whole",
        ),
    ],
)
def test_what_is_not_done_yet_is_refused(changes, message):
    """Each field of a plan that the engine does not read yet."""
    problem, plan = routed_problem(8)
    stages = plan.stages
    for name, value in changes.items():
        if name == "runtime":
            problem = replace(problem, runtime=catalogue.runtime(value))
        else:
            worker = replace(stages[0].workers[0], devices=(0, 1), cp=value)
            plan = replace(plan, stages=(replace(stages[0], workers=(worker, *stages[0].workers[1:])), *stages[1:]))
    with pytest.raises(InputError, match=message):
        check_runnable(problem, plan)


def test_an_image_is_not_cut_and_a_text_into_equal_parts():
    """A sequence over two devices: refused for images and odd lengths alone, not where every worker has a whole one."""
    problem, plan = routed_problem(8)
    image = small_model(family="vit", image_size=32, patch_size=8)
    whole = replace(problem, model=image, batch=replace(problem.batch, seq_len=17))
    cut = tuple(replace(s, workers=(Worker(pool=0, devices=(0, 1), cp=2),)) for s in plan.stages[:1])
    odd = replace(problem, batch=replace(problem.batch, seq_len=15))
    for case, message in ((whole, "a cp degree of 2 with an image model"), (odd, "seq_len: found 15, expected a mult")):
        _check_worker(case, plan.stages[0], plan.stages[0].workers[0], "here")
        with pytest.raises(InputError, match=message):
            _check_worker(case, cut[0], cut[0].workers[0], "here")


@pytest.mark.parametrize("changes", [{"local_steps": 2}, {"reduction": "sharded-server"}])
def test_a_shared_embedding_is_cut_alike_with_local_steps_and_servers(changes):
    """Pipelines of two regions whose first stage has tp 2 and whose last has 1: their owners hold no equal slices."""
    cluster = small_cluster(3, 3)
    plan = small_plan(cluster, [(0, 3), (3, 6)], [[0, 3], [2, 5]], [[w, w] for w in (0, 1, 0, 1)])
    wide = tuple(Worker(pool=pool, devices=(3 * pool, 3 * pool + 1)) for pool in (0, 1))
    plan = replace(plan, stages=(replace(plan.stages[0], workers=wide), plan.stages[1]))
    problem = Problem(cluster=cluster, model=small_model(), batch=Batch(global_batch=8, seq_len=16, precision="fp32"))
    check_runnable(problem, plan)
    apart = replace(problem, model=small_model(tied_embeddings=False))
    check_runnable(apart, replace(plan, **changes))
    assert can_take_local_steps(apart, plan) and not can_take_local_steps(problem, plan)
    with pytest.raises(
        InputError, match=r"plan\.stages: found tp 2 in the first and 1 in the last, which share the emb"
    ):
        check_runnable(problem, replace(plan, **changes))


@pytest.mark.parametrize(
    ("changes", "stage", "message"),
    [
        ({}, {"first_layer": 3}, r"plan: stage 1: layers \[3, 6\)"),
        ({}, {"last_layer": 5}, "plan: stages end at layer 5, the model has 6"),
        ({"micro_batch_size": 3}, {}, "plan: 8 micro-batches"),
        ({}, {"zero": 7}, "plan: stage 1: .*7"),
        ({}, {"recompute": "half"}, "plan: stage 1: .*half"),
        ({"reduction": "gossip"}, {}, "plan: .*gossip"),
        ({"local_steps": 0}, {}, "plan: .*0"),
        ({"local_steps": 2}, {}, "plan: local_steps 2: not every region holds a whole pipeline"),
        (
            {"links": (LinkUse(source=0, target=1, activations="zip"),)},
            {},
            r"plan\.links\[0\]\.activations: found 'zip', ",
        ),
        (
            {"links": (LinkUse(source=0, target=1, streams=0),)},
            {},
            r"plan\.links\[0\]\.streams: found 0, expected a whole",
        ),
    ],
)
def test_what_is_no_plan_for_the_model_and_batch_is_refused(changes, stage, message):
    """Layers that are left out or there twice, another batch, words that mean nothing: none is trained in silence."""
    problem, plan = routed_problem(2)
    check_runnable(problem, plan)
    broken = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], **stage)), **changes)
    with pytest.raises(InputError, match=message):
        check_runnable(problem, broken)


def test_a_model_of_ones_own_has_no_8_bit_products():
    """Which of its products could have them is not known."""
    problem, plan = routed_problem(8, precision="fp8")
    check_runnable(problem, plan)
    with pytest.raises(InputError, match=r"batch\.precision: found 'fp8', expected .* \(with --model-file\)"):
        check_runnable(problem, plan, own_model=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "other"}, r"model\.family: found 'other', expected gpt, llama or vit, to be run here"),
        ({"norms": 4}, r"model\.norms: found 4, expected 2, to be run here"),
        ({"window": 2}, ""),
        ({"window": 2, "attention_pattern": ("window", "full")}, ""),
        (
            {"window": 2, "attention_pattern": ("chunk", "full")},
            r"model\.window: found 2, expected none, to be run here",
        ),
        (
            {"latent": LatentAttention(kv_rank=8, rope_dim=2)},
            r"model\.latent: found LatentAttention\(.*, expected none",
        ),
    ],
)
def test_blocks_that_the_engine_does_not_have_are_refused(changes, message):
    """Each in one line with its field; a window that holds the sequence is none; the plain shape always runs."""
    problem, plan = routed_problem(8)
    strange = replace(problem, model=replace(problem.model, **changes))
    check_runnable(replace(problem, model=strange.model.plain()), plan)
    check_runnable(strange, plan, own_model=True)
    if not message:
        check_runnable(strange, plan)
        return
    with pytest.raises(InputError, match=message):
        check_runnable(strange, plan)


def test_no_layer_is_built_of_a_model_that_is_not_plain():
    """Whoever builds layers (recipes, profiles) meets the same refusal."""
    qwen3 = files.read_model("polygon/domain/catalogue/configs/qwen3-8b.json")
    require_plain(qwen3, 4096)
    with pytest.raises(InputError, match=r"model\.query_key_norm: found 'width', expected none, to be run here"):
        empty_layer(replace(qwen3, query_key_norm="width"), 1)
    require_plain(files.read_model("polygon/domain/catalogue/configs/mistral-7b-v0.1.json"), 8192)


def test_every_field_of_a_model_is_built_or_refused():
    """A field that is added to the model must go to one or the other."""
    assert {field.name for field in fields(Model)} == {*BUILT, *SPECIAL}


@st.composite
def splits(draw):
    """Any degrees together, of dense models and of such with experts."""
    pp, tp, cp, dp = (draw(st.sampled_from(degrees)) for degrees in ((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if (dp * cp) % n == 0]))
    return ParallelConfig(
        pp=pp, tp=tp, cp=cp, dp=dp, ep=ep,
        chunks=draw(st.sampled_from((1, 2))) if pp > 1 else 1,
        zero=draw(st.integers(0, 3)),
        shards=draw(st.sampled_from([n for n in (0, 2, 4) if n == 0 or (dp * cp) % n == 0])),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        sequence_parallel=draw(st.booleans()),
        schedule=draw(st.sampled_from(SCHEDULES)),
    )  # fmt: skip


@settings(max_examples=cases(50))
@given(config=splits(), max_ranks=st.none() | st.integers(1, 16))
def test_rehearsals_of_all_dimensions_are_runnable(config, max_ranks):
    """What a plan says of parallelism is kept as far as small models and few ranks allow; never what cannot be run."""
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 64} if config.ep > 1 else {}
    model = small_model(blocks=16, heads=16, kv_heads=8, head_dim=4, ffn_size=128, max_seq_len=64, **experts)
    batch = Batch(global_batch=8 * config.dp, seq_len=64, precision="bf16")
    problem = Problem(cluster=small_cluster(config.devices), model=model, batch=batch)
    small, short = rehearsal_problem(problem, uniform_plan(problem, config), max_ranks=max_ranks)
    check_runnable(small, short)
    assert {fault.kind for fault in violations(small, short)} <= {"plan.memory"}  # a GPU's context on a small device
    assert max_ranks is None or short.world_size <= max(max_ranks, 1)
    if max_ranks is None:
        tp, members = math.gcd(config.tp, 2), config.dp * math.gcd(config.cp, 4 // math.gcd(config.tp, 2))
        assert (short.groups, short.chunks) == (config.pp, config.chunks)
        for stage in short.stages:
            assert stage.width == config.dp and {worker.tp for worker in stage.workers} == {tp}
            assert sum(worker.cp for worker in stage.workers) == members
            assert stage.ep == math.gcd(config.ep, members)
