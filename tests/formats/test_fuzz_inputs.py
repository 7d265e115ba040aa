"""No input whatever gives a traceback: readers return domain data or raise InputError with one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polygon.domain.errors import InputError
from polygon.formats import catalogue, convert, convert_plan, files
from polygon.formats.hugging_face import hugging_face_model
from polygon.formats.schema import ClusterSpec, GroupsSpec, ModelSpec, PlanSpec, ProblemSpec, check
from tests.nightly import cases

PLAN = json.loads((Path("tests/bad") / "plan-layers.json").read_text("utf-8"))
PLAN["stages"][1]["layers"] = [2, 4]
GROUPS = json.loads((Path("tests/bad") / "groups-zero.json").read_text("utf-8"))
GROUPS["stages"][1]["members"][0]["devices"] = 2
CLUSTER = yaml.safe_load(Path("instances/ptafm-7dc.yaml").read_text("utf-8"))
CONFIG = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}
CONFIG |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 99, "num_local_experts": 4}
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, "id2label": {"0": "a"}, "qkv_bias": False}
LATENT = json.loads(Path("polygon/domain/catalogue/configs/deepseek-v3.json").read_text("utf-8")) | {
    "moe_layers": [3],
    "attn_config": {},
}
LINEAR = json.loads(Path("polygon/domain/catalogue/configs/qwen3-next-80b-a3b.json").read_text("utf-8"))
TOWERS = json.loads(Path("polygon/domain/catalogue/configs/qwen2.5-vl-7b.json").read_text("utf-8"))
TOWERS |= {"text_config": {"model_type": "llama4", "num_hidden_layers": 2, "no_rope_layers": [1, 0]}}

READERS = {
    "cluster": (CLUSTER, lambda data: convert.cluster_from_spec(check(ClusterSpec, data))),
    "problem": (PLAN["problem"], lambda data: convert.problem_from_spec(check(ProblemSpec, data))),
    "model": (PLAN["problem"]["model"], lambda data: catalogue.model_from_spec(check(ModelSpec, data))),
    "groups": (GROUPS, lambda data: convert_plan.groups_from_spec(check(GroupsSpec, data))),
    "plan": (PLAN, lambda data: convert_plan.plan_from_spec(check(PlanSpec, data))),
    "config": (CONFIG, lambda data: hugging_face_model(data, "name")),
    "latent": (LATENT, lambda data: hugging_face_model(data, "name")),
    "linear": (LINEAR, lambda data: hugging_face_model(data, "name")),
    "towers": (TOWERS, lambda data: hugging_face_model(data, "name")),
    "vit": (VIT, lambda data: hugging_face_model(data, "name")),
}

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([10**30, -(10**30), 2**63, 1e308, 5e-324, float("nan"), float("inf"), "", "x", "north", "1", "\n"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-1, 3), max_size=3),
    st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=2),
    st.dictionaries(st.sampled_from(["name", "x", "link"]), st.integers(), max_size=2),
)


def places(data, path=()):
    """Every place in nested data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=cases(100), deadline=None)
def test_damaged_data(kind, data):
    """Whatever is put, added or left out anywhere in good data, the reader gives a result or a one-line error."""
    good, read = READERS[kind]
    read(good)
    damaged = copy.deepcopy(good)
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from([path for path in places(damaged) if path]))
        inner = damaged
        for key in parents:
            inner = inner[key]
        action = data.draw(st.sampled_from(["put", "drop", "add"]))
        if action == "put":
            inner[last] = data.draw(junk)
        elif action == "drop":
            del inner[last]
        elif isinstance(inner, dict):
            inner[data.draw(st.sampled_from(["x", "name", "count", "devices"]))] = data.draw(junk)
        else:
            inner.append(data.draw(junk))
        if not any(places(damaged)):
            break
    try:
        read(damaged)
    except InputError as error:
        assert "\n" not in str(error) and str(error)


@given(text=st.text(alphabet="aA1 \t\n:-[]{},\"'#&*!|>%@`?.eE\x00\x85\ufeff", max_size=60))
@example(text="&a [*a]")
@example(text="a: &a [1]\nb: *a")
@example(text="? [1, 2]\n: 3")
@example(text="<<: 3")
@example(text="{1: 2, [3]: 4}")
@example(text="a: !!binary xx")
@example(text="a: 2001-13-45")
@settings(max_examples=cases(200), deadline=None)
def test_any_text_as_a_cluster(text, tmp_path_factory):
    """Any text in a file gives a cluster or a one-line error that names the file."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        files.read_cluster_or_problem(file)
    except InputError as error:
        assert str(error).startswith(f"{file}: ")


@given(data=st.binary(max_size=60))
@settings(max_examples=cases(100), deadline=None)
def test_any_bytes_as_a_plan(data, tmp_path_factory):
    """Any bytes in a file give a one-line error that names the file."""
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(data)
    with pytest.raises(InputError) as error:
        files.read_plan(file)
    assert str(error.value).startswith(f"{file}: ")
