"""Measured layer times and links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.compute import layer_times
from polygon.cost.link_curves import LinkCurve, link_curves
from polygon.cost.memory import layer_memory
from polygon.cost.profiles import _seq_len, kind_profile, model_profiles
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, NodeGroup, Region
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.formats.catalogue import device
from tests.nightly import cases
from tests.small_problems import routed_problem

MEASURED = Path(__file__).parents[2] / "instances" / "measured"
PROFILES = model_profiles(json.loads((MEASURED / "sailor_profiles.json").read_text()))
OPT = Model(
    name="OPT-350",
    blocks=24,
    hidden_size=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_size=4096,
    vocab_size=50272,
    max_seq_len=2048,
)
BATCH = Batch(global_batch=64, seq_len=2048, precision="tf32")
NVLINK = Link(latency_s=2e-6, bytes_per_s=450e9)


@settings(deadline=None, max_examples=cases(60))
@given(
    size=st.integers(1, 60),
    tp=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["gh200", "a100-80gb", "rtx-3090", "v100-16gb"]),
)
def test_a_larger_micro_batch_is_never_faster(size, tp, name):
    """Interpolated (and extrapolated) times grow with the micro-batch, in every layer."""
    small, large = (
        layer_times(OPT, BATCH, device(name), NVLINK, tp=tp, micro_batch_size=s, profile=PROFILES["OPT-350"])
        for s in (size, size + 1)
    )
    assert small.source == "profile"
    assert (small.forward_s <= large.forward_s + 1e-12).all()
    assert (small.backward_s <= large.backward_s + 1e-12).all()


MILLISECONDS = st.floats(1, 100)


@settings(deadline=None, max_examples=cases(60))
@given(
    measured=st.dictionaries(st.sampled_from([1, 2, 4, 8]), MILLISECONDS, min_size=1),
    size=st.integers(1, 64),
)
def test_no_sequence_takes_less_than_at_the_outermost_measured_size(measured, size):
    """However two sizes differ by noise, because the host was waited for, or because the memory was nearly full."""
    rows = [{"kind": "block", "micro_batch_size": m, "forward_s": t, "backward_s": t} for m, t in measured.items()]
    data = {"format": "polygon-layer-profile", "device": "a100-80gb", "seq_len": 2048, "precision": "tf32"}
    profile = kind_profile({**data, "layers": rows})

    def block_s(m: int) -> float:
        return layer_times(OPT, BATCH, device("a100-80gb"), NVLINK, micro_batch_size=m, profile=profile).forward_s[1]

    outermost = max(min(measured), min(size, max(measured)))
    assert block_s(size) >= min(1, size / outermost) * block_s(outermost) * (1 - 1e-9) > 0
    if size > outermost:
        assert block_s(size) >= size / outermost * block_s(outermost) * (1 - 1e-9)
    assert block_s(size) <= block_s(size + 1) * (1 + 1e-9)


def test_measured_points_are_returned_as_they_are():
    """At a measured size and degree the profile is the measurement (where it is monotone)."""
    times = layer_times(
        OPT, BATCH, device("gh200"), NVLINK, tp=4, micro_batch_size=8, profile=PROFILES["OPT-350"], recompute="full"
    )
    assert times.forward_s[1] == pytest.approx(0.003021)
    assert times.backward_s[1] == pytest.approx(0.006469 + 0.003021)
    # Embedding and head are recomputed by nobody.
    whole = layer_times(OPT, BATCH, device("gh200"), NVLINK, tp=4, micro_batch_size=8, profile=PROFILES["OPT-350"])
    assert (times.backward_s[[0, -1]] == whole.backward_s[[0, -1]]).all()


def test_tokens_of_a_sequence_are_those_of_the_first_block_s_output():
    """Not of the embedding's, nor of the logits: 2048 x 1024 numbers of four bytes; None where nothing says it."""
    described = {
        "info": {"hidden_size": 1024},
        "by_tensor_parallel": {"1": {"output_activation_bytes_per_layer_per_sequence": [7, 2048 * 1024 * 4, 9]}},
    }
    assert _seq_len(described) == 2048
    assert _seq_len(described | {"info": {"hidden_size": 1024, "sequence_length_tokens": 512}}) == 512
    assert _seq_len(described | {"info": {}}) is None


def test_one_measured_size_is_enough_for_the_update():
    """The optimizer does not depend on the micro-batch: its seconds for all parameters, of the least size and degree
    measured; of another device type nothing is known."""
    profile = PROFILES["OPT-350"]
    alone = replace(profile, points={key: sizes[:1] for key, sizes in profile.points.items()})
    update_s = profile.points["gh200", 1][0].update_s.sum()
    assert alone.update_rate_s("gh200") * profile.memory_by_tp[1]["parameters"].sum() == pytest.approx(update_s)
    assert alone.update_rate_s("gh200") == profile.update_rate_s("gh200")
    assert alone.update_rate_s("b200") is None


def test_a_degree_between_two_measured_ones_lies_between_them():
    """tp = 3 was not measured; its time lies between tp = 2 and tp = 4."""
    profile = PROFILES["OPT-350"]
    two, three, four = (profile.measurement("gh200", tp, 16) for tp in (2, 3, 4))
    assert (np.minimum(two.forward_s, four.forward_s) <= three.forward_s + 1e-12).all()
    assert (three.forward_s <= np.maximum(two.forward_s, four.forward_s) + 1e-12).all()


def test_a_profile_of_another_model_or_device_is_not_used():
    """The model's own times stand where nothing was measured."""
    other = Model(**{**{s: getattr(OPT, s) for s in OPT.__slots__}, "blocks": 12})
    assert layer_times(other, BATCH, device("gh200"), NVLINK, profile=PROFILES["OPT-350"]).source != "profile"
    assert layer_times(OPT, BATCH, device("h200"), NVLINK, profile=PROFILES["OPT-350"]).source != "profile"


@settings(deadline=None)
@given(size=st.floats(1, 1e11), factor=st.floats(1, 100))
def test_link_curves_are_clamped(size, factor):
    """Whatever the fit says: time is positive, grows with the message, and never beats the best measured rate."""
    curves = link_curves(json.loads((MEASURED / "sailor_network.json").read_text()))
    between = [curve for by_count in list(curves.between.values())[:5] for curve in by_count.values()]
    for curve in between + list(curves.inside.values()):
        assert curve.transfer_s(size) >= size / curve.most_bytes_per_s * (1 - 1e-12)
        assert curve.transfer_s(size * factor) >= curve.transfer_s(size) * (1 - 1e-9)
    assert LinkCurve(coefficients=(-1.0, 2.0, -5.0), most_bytes_per_s=1e9).transfer_s(1e6) > 0


LAYER = {"kind": "block", "micro_batch_size": 1, "forward_s": 0.01, "backward_s": 0.03, "spread": 0.1}


def test_own_format_replaces_only_what_was_measured():
    """A profile of the block leaves embedding and head to the model."""
    data = {
        "format": "polygon-layer-profile",
        "device": "a100-80gb",
        "seq_len": 2048,
        "precision": "tf32",
        "layers": [
            {"kind": "block", "tp": 1, "micro_batch_size": 1, "forward_s": 0.01, "backward_s": 0.03},
            {"kind": "block", "tp": 1, "micro_batch_size": 3, "forward_s": 0.03, "backward_s": 0.07},
        ],
    }
    args = (OPT, BATCH, device("a100-80gb"), NVLINK)
    measured = layer_times(*args, micro_batch_size=2, profile=kind_profile(data))
    spec = layer_times(*args, micro_batch_size=2)
    assert measured.forward_s[1:-1] == pytest.approx(0.02)
    assert measured.backward_s[1:-1] == pytest.approx(0.05)
    assert measured.forward_s[0] == spec.forward_s[0]
    assert measured.backward_s[-1] == spec.backward_s[-1]
    assert (measured.source, measured.relative_error) == ("profile+calibrated", spec.relative_error)
    experts = kind_profile({**data, "layers": [{**row, "kind": "moe"} for row in data["layers"]]})
    assert layer_times(*args, micro_batch_size=2, profile=experts).source == spec.source
    whole = [{**row, "kind": kind} for row in data["layers"] for kind in ("embedding", "block", "head")]
    assert layer_times(*args, micro_batch_size=2, profile=kind_profile({**data, "layers": whole})).source == "profile"
    with pytest.raises(InputError, match=r"layers\[0\].*forward_s"):
        kind_profile({**data, "layers": [{"kind": "block", "micro_batch_size": 1}]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": None}, "seq_len: found nothing, expected a whole number >= 1"),
        ({"layers": []}, "layers: found an empty list, expected a list that is not empty"),
        ({"layers": 5}, "layers: found 5, expected a list that is not empty"),
        ({"layers": [{**LAYER, "tp": "x"}]}, "layers[0].tp: found 'x', expected a whole number >= 1"),
        ({"layers": [LAYER, {**LAYER, "forward_s": 0}]}, "layers[1].forward_s: found 0, expected a number > 0"),
        ({"layers": [LAYER, {**LAYER, "backward_s": -1}]}, "layers[1].backward_s: found -1, expected a number >= 0"),
        (
            {"layers": [{**LAYER, "kind": "blok"}]},
            "layers[0].kind: found 'blok', expected 'block' (nearest) or another of block, embedding, head, moe",
        ),
        ({"layers": [LAYER, LAYER]}, "layers[1]: block, tp 1, micro_batch_size 1: found 2 entries, expected one"),
        ({"layers": [{**LAYER, "update_s": []}]}, "layers[0].update_s: found an empty list, expected a number >= 0"),
        ({"format": "polygon-bench"}, "format: found 'polygon-bench', expected 'polygon-layer-profile'"),
    ],
)
def test_a_profile_that_is_none_is_told_in_one_line(changes, message):
    """Where, what was found, what is allowed; what the program wrote beside it is not looked at."""
    good = {"format": "polygon-layer-profile", "device": "t4", "seq_len": 64, "layers": [LAYER], "torch": "2"}
    assert kind_profile(good).device == "t4"
    with pytest.raises(InputError) as refused:
        kind_profile({**good, **changes})
    assert str(refused.value) == message


def whole_model(device_name: str, **changes) -> dict:
    """A file of the `sailor_profiles` format with one model of four layers."""
    times = ("forward_s_per_layer", "backward_s_per_layer", "optimizer_update_s_per_layer")
    row = {"model": "own", "gpu_type": device_name, "tensor_parallel": 1, "micro_batch_size_sequences": 1}
    memory = ("parameters_count_per_gpu_per_layer", "activation_memory_bytes_per_gpu_per_layer_per_sequence")
    by_degree = {"1": {key: [1e6] * 4 for key in memory}}
    described = {"info": {"profiled_layers": 4}, "by_tensor_parallel": by_degree}
    return {"models": {"own": described}, "compute": [row | {key: [0.01] * 4 for key in times} | changes]}


def test_whole_models_may_be_measured_on_a_card_of_one_s_own():
    """As layers may; one of the catalogue is known by all of its names."""
    assert model_profiles(whole_model("edge-card"))["own"].devices == {"edge-card"}
    assert model_profiles(whole_model("A100-80GB-SXM"))["own"].devices == {"a100-80gb"}


def test_a_measured_model_has_a_time_for_every_layer():
    """A list that is too short is named, and so is a layer that takes nothing, or a size that comes twice."""
    twice = whole_model("t4")
    with pytest.raises(
        InputError, match=r"^compute\[1\]: own, t4, tp 1, micro_batch_size_sequences 1: found 2 entries"
    ):
        model_profiles(twice | {"compute": twice["compute"] * 2})
    with pytest.raises(InputError, match=r"^compute\[0\]\.forward_s_per_layer: found 3 entries, expected 4$"):
        model_profiles(whole_model("t4", forward_s_per_layer=[0.01] * 3))
    assert model_profiles(whole_model("t4", forward_s_per_layer=[0.01, 0.0, 0.01, 0.01]))
    with pytest.raises(InputError, match=r"^compute\[0\]\.forward_s_per_layer: found 0, expected a number > 0 among"):
        model_profiles(whole_model("t4", forward_s_per_layer=[0.0] * 4))


def test_a_profile_takes_the_device_model_s_place_in_a_plan_s_estimate():
    """Compute and update of the device type that was measured come from the profile; another model's is not used."""
    problem, plan = routed_problem(2)
    data = {
        "format": "polygon-layer-profile",
        "device": "cpu",
        "hidden_size": problem.model.hidden_size,
        "seq_len": problem.batch.seq_len,
        "precision": "fp32",
        "layers": [
            {
                "kind": kind,
                "micro_batch_size": 2,
                "forward_s": 1.0,
                "backward_s": 2.0,
                "update_s": 5.0,
                "parameters": 10,
            }
            for kind in ("embedding", "block", "head")
        ],
    }
    profile = replace(kind_profile(data), device="cpu")  # the tests' own device, not the catalogue's
    times = step_times(plan, CostTables(problem, [profile]))
    assert times.schedule.forward_s == pytest.approx([2.0, 4.0])
    assert times.schedule.backward_s == pytest.approx([4.0, 8.0])
    held = problem.model.layer_parameters(0) + problem.model.layer_parameters(1)
    assert times.update_s[0] == pytest.approx(0.5 * held)
    wrong = replace(profile, hidden_size=64)
    assert step_times(plan, CostTables(problem, [wrong])).schedule.forward_s[0] < 0.1


def test_devices_that_share_a_card_wait_for_each_other():
    """Four devices of a GH200 node have a card each; eight Titan RTX of a node share one."""
    curves = link_curves(json.loads((MEASURED / "sailor_network.json").read_text()))
    zone = "us-central1-a"
    for device_name, together, factor in (("gh200", 4, 1.0), ("titan-rtx", 8, 8.0)):
        one, all_of_them = (
            curves.transfer_s(256e6, zone, device_name, zone, device_name, senders=k) for k in (1, together)
        )
        assert all_of_them / one == pytest.approx(factor, rel=0.1), device_name


def setup_problem(devices=("a100-40gb", "v100-16gb"), **changes):
    """OPT-350 in 32 bits on one node of four of each type."""
    groups = tuple(
        NodeGroup(device=name, nodes=1, devices_per_node=4, intra_node=NVLINK, inter_node=NVLINK) for name in devices
    )
    cluster = Cluster(
        name="one-zone",
        regions=(Region(name="zone", node_groups=groups, intra_region=NVLINK),),
        latency_s=np.zeros((1, 1)),
        bytes_per_s=np.zeros((1, 1)),
        capacity_bytes_per_s=np.full((1, 1), np.inf),
        catalogue={name: device(name) for name in devices},
    )
    batch = {"global_batch": 64, "seq_len": 2048, "precision": "fp32"} | changes
    return Problem(cluster=cluster, model=replace(OPT, tied_embeddings=False), batch=Batch(**batch))


def test_tables_hold_the_numbers_of_a_profile_of_a_whole_model():
    """Times of every layer by type, degree and micro-batch, parameters and activations: those of the file."""
    document = json.loads((MEASURED / "sailor_profiles.json").read_text())
    tables = CostTables(setup_problem(), list(PROFILES.values()))
    pools = {"A100-40": 0, "V100-16": 1}
    looked_at = 0
    for entry in document["compute"]:
        tp, size = entry["tensor_parallel"], entry["micro_batch_size_sequences"]
        if entry["model"] != "OPT-350" or entry["gpu_type"] not in pools:
            continue
        if tp not in tables.tensor_degrees(pools[entry["gpu_type"]]):
            assert tp == 8  # more than a node has
            continue
        times = tables.times(pools[entry["gpu_type"]], tp, size, "none")
        assert times.source == "profile"
        assert np.diff(times.forward_s) == pytest.approx(np.array(entry["forward_s_per_layer"]), rel=0.05)
        assert times.backward_s[-1] == pytest.approx(sum(entry["backward_s_per_layer"]), rel=0.01)
        described = document["models"]["OPT-350"]["by_tensor_parallel"][str(tp)]
        memory = tables.memory(tp, size, "none")
        assert np.diff(memory.parameters) == pytest.approx(described["parameters_count_per_gpu_per_layer"])
        assert np.diff(memory.activation_bytes) == pytest.approx(
            size * np.array(described["activation_memory_bytes_per_gpu_per_layer_per_sequence"])
        )
        looked_at += 1
    assert looked_at == 12 + 11
    entry = next(e for e in document["compute"] if (e["model"], e["gpu_type"]) == ("OPT-350", "A100-40"))
    assert entry["tensor_parallel"] == 1
    held = float(tables.memory(1, 1, "none").parameters[-1])
    assert tables.update_s(0, held) == pytest.approx(sum(entry["optimizer_update_s_per_layer"]), rel=0.05)


def test_full_recomputation_of_a_profiled_model_keeps_the_inputs_of_blocks():
    """A block then holds one activation of the hidden size, and its whole activations while it is repeated."""
    tables = CostTables(setup_problem(), [PROFILES["OPT-350"]])
    none, full = (tables.memory(1, 2, recompute) for recompute in ("none", "full"))
    assert np.diff(full.activation_bytes)[1:-1] == pytest.approx(2 * 2048 * 1024 * 4)
    assert np.diff(full.activation_bytes)[-1] == np.diff(none.activation_bytes)[-1]
    assert full.layers.transient_bytes[5] == pytest.approx(
        none.layers.transient_bytes[5] + np.diff(none.activation_bytes)[5]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"precision": "bf16"}, "precision.*fp32 or tf32"), ({"seq_len": 1024}, "seq_len.*2048")],
)
def test_a_profile_of_a_whole_model_is_not_used_for_another_batch(changes, message):
    """Precision and sequence length must be what was measured, and one of the models the problem's."""
    with pytest.raises(InputError, match=message):
        CostTables(setup_problem(**changes), list(PROFILES.values()))
    problem = setup_problem()
    with pytest.raises(InputError, match="profile of OPT-350: found 12 blocks of width 1024, expected 24 blocks"):
        CostTables(replace(problem, model=replace(problem.model, blocks=12)), list(PROFILES.values()))


def test_a_link_curve_becomes_a_line_that_is_near_it():
    """Latency and bandwidth give the curve's times to 40 % from 1 MB to 512 MB on every link of more than one GPU."""
    curves = link_curves(json.loads((MEASURED / "sailor_network.json").read_text()))
    for (zone, name, other, far), by_count in curves.between.items():
        line = curves.link(zone, name, other, far, 4)
        curve = by_count[max(count for count in by_count if count <= 4)]
        for n_bytes in (1e6, 8e6, 64e6, 512e6):
            assert line.transfer_s(n_bytes) == pytest.approx(curve.transfer_s(n_bytes), rel=0.4)
    assert curves.link("nowhere", "gh200", "nowhere", "gh200", 4) is None


def test_only_unnamed_zones_stand_for_any_zone():
    """What was measured within a zone stands for a place without a name, not for one that is called otherwise."""
    curves = link_curves(json.loads((MEASURED / "sailor_network.json").read_text()))
    zone, device, _, _ = next(names for names in curves.between if names[0] == names[2] and names[1] == names[3])
    assert curves.transfer_s(1e8, zone, device, zone, device) == curves.transfer_s(1e8, "", device, "", device) > 0
    assert curves.transfer_s(1e8, "elsewhere", device, "elsewhere", device) is None


@pytest.mark.parametrize(
    "profiled, name", [("OPT-350", "opt-350m"), ("GPT-Neo-2.7", "gpt-neo-2.7b"), ("OPT-30", "opt-30b")]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_blocks_keep_what_the_catalogues_program_says_without_a_profile(profiled: str, name: str, tp: int):
    """Sailor's layers in 32 bits: a number a score and no mask, and no cast beside what it was made of."""
    ours = catalogue.model(name)
    said = layer_memory(ours, BATCH, tp=tp, runtime=catalogue.runtime("sailor"))
    measured = PROFILES[profiled].memory(ours, BATCH, tp, 1, "none")
    assert measured is not None
    assert said.activation_bytes[1] == pytest.approx(measured.activation_bytes[1], rel=0.25)


def test_a_profile_without_a_width_is_not_of_every_model_of_as_many_blocks():
    """Sailor's Llama has 32 blocks, as GPT-Neo 2.7B has, and its profile says no width: what a block puts out does."""
    llama = PROFILES["LLAMA-3-8"]
    assert llama.hidden_size is None and llama.fits(catalogue.model("llama3-8b"))
    neo = catalogue.model("gpt-neo-2.7b")
    assert neo.blocks == llama.blocks and not llama.fits(neo)
    fits = [name for name, profile in PROFILES.items() if profile.fits(neo)]
    assert fits == ["GPT-Neo-2.7"]
    # Taken for GPT-Neo's, a block of Llama's would have made it eight times as long.
    of_neo, of_llama = (PROFILES[name].measurement("gh200", 4, 4) for name in ("GPT-Neo-2.7", "LLAMA-3-8"))
    assert of_llama.forward_s[1] > 5 * of_neo.forward_s[1]
