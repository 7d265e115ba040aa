"""The catalogue's numbers agree with each other and with what is published."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext

import pytest

from polygon.domain.cluster import PRECISIONS
from polygon.domain.errors import InputError
from polygon.domain.runtime import POLYGON, Runtime
from polygon.formats import catalogue
from polygon.formats.schema import DeviceSpec, check

ROUNDING = {"opt-350m": 0.02, "gpt3-350m": 0.02, "gpt3-2.7b": 0.02, "gpt3-1.3b": 0.015, "opt-1.3b": 0.015}
"""Names that round more than half of their last digit, or padded vocabularies."""


@pytest.mark.parametrize("name", sorted(catalogue.models()))
def test_parameters_are_the_published_ones(name):
    """A model's shape gives the parameter count that its authors state, within its rounding."""
    published = catalogue.published_parameters()[name]
    digits = f"{published:.4e}".split("e")[0].rstrip("0").replace(".", "")
    rounding = 0.5 * 10.0 ** (math.floor(math.log10(published)) - len(digits) + 1) / published
    allowed = ROUNDING.get(name, max(rounding, 2e-4) + 0.008 * name.startswith("gpt3"))
    model = catalogue.model(name)
    allowed = max(allowed, 1e-3 * (model.source.endswith("head") or name == "modernbert-base"))
    assert model.parameters - model.prediction_parameters() == pytest.approx(published, rel=allowed)


@pytest.mark.parametrize("name", sorted(catalogue.devices()))
def test_device_numbers_are_dense_and_in_step(name):
    """Each narrower precision is at least as fast, twice its neighbour where no maker says otherwise; sources are
    given."""
    device = catalogue.device(name)
    assert device.source and device.architecture
    speeds = [device.flops[precision] for precision in PRECISIONS if precision in device.flops and precision != "bf16"]
    if name != "cpu-core":
        assert speeds == sorted(speeds)
    if "fp8" in device.flops and name not in ("gaudi3", "trainium2"):
        assert device.flops["fp8"] == pytest.approx(2 * device.flops["bf16"], rel=0.02)
    if {"tf32", "fp16"} <= device.flops.keys() and name != "trainium2":
        assert device.flops["fp16"] / device.flops["tf32"] == pytest.approx(2, rel=0.05)
    assert 1 <= device.memory_bytes / 2**30 <= 288
    assert catalogue.usual_link(name).bytes_per_s > 1e9


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "a100-40gb"),
        ("A100-40", "a100-40gb"),
        ("a100_80gb", "a100-80gb"),
        ("A100-80GB-SXM", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("V100-16", "v100-16gb"),
        ("V100-32GB-SXM", "v100-32gb"),
        ("H100-80GB-SXM", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("GH-96", "gh200"),
        ("GH200-96GB", "gh200"),
        ("Titan-RTX", "titan-rtx"),
        ("RTX-2080", "rtx-2080ti"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("Tesla T4", "t4"),
    ],
)
def test_names_as_others_write_them(written, name):
    """Data sets, drivers and papers name devices differently."""
    assert catalogue.device(written).name == name


def test_first_words_of_a_name_are_enough_where_only_one_begins_so():
    """`qwen3-next` and `rtx-pro` are found; of several the message lists those alone; half a word is none."""
    assert catalogue.model("qwen3-next").name == "qwen3-next-80b-a3b"
    assert catalogue.model("mixtral").name == "mixtral-8x7b"
    assert catalogue.device("rtx-pro").name == "rtx-pro-6000"
    with pytest.raises(InputError, match=r"^found model 'gpt-oss', expected one of gpt-oss-120b, gpt-oss-20b$"):
        catalogue.model("gpt-oss")
    with pytest.raises(InputError, match=r"^found model 'qwen3-n', expected"):
        catalogue.model("qwen3-n")


def test_unknown_names_give_the_nearest():
    """The message alone lets the user mend it."""
    with pytest.raises(InputError, match=r"^found device 'A1000', expected 'a100-40gb' \(nearest\) or another of a10"):
        catalogue.device("A1000")
    with pytest.raises(InputError, match=r"^found model 'lama3-8b', expected 'llama3-8b' \(nearest\)"):
        catalogue.model("lama3-8b")
    with pytest.raises(InputError, match=r"^found runtime 'torchtitn', expected 'torchtitan' \(nearest\)"):
        catalogue.runtime("torchtitn")
    with pytest.raises(InputError, match=r"^found link 'zzz', expected one of efa-100g"):
        catalogue.link("zzz")


def test_aliases_are_unambiguous():
    """No alias names two entries, and none hides an entry's own name."""
    for file in ("devices.yaml", "models.yaml", "runtimes.yaml"):
        entries = catalogue._load(file)
        names = [catalogue._normal(alias) for name in entries for alias in (name, *entries[name].get("aliases", []))]
        assert len(names) == len(set(names))


def test_our_own_runtime_is_in_the_catalogue():
    """The entry and the constant that problems have by default are one."""
    assert catalogue.runtime("polygon") == POLYGON


@pytest.mark.parametrize("name", sorted(catalogue.runtimes()))
def test_every_switch_of_a_runtime_has_a_source(name):
    """What differs from the plain runtime names where it is from; versions name a program of the catalogue."""
    runtime, plain = catalogue.runtimes()[name], Runtime()
    switches = {field.name for field in dataclasses.fields(Runtime)} - {"name", "version", "sources"}
    differing = {switch for switch in switches if getattr(runtime, switch) != getattr(plain, switch)}
    assert differing <= runtime.sources.keys() <= switches
    assert runtime.version
    assert catalogue._runtime_entries()[name].program in ("", *catalogue.runtimes())


def test_an_unknown_program_has_the_widest_interval():
    """Nothing that the catalogue knows is less sure."""
    widest = catalogue.runtime("unknown").time_error
    assert all(runtime.time_error < widest for name, runtime in catalogue.runtimes().items() if name != "unknown")


@pytest.mark.parametrize(
    ("program", "date", "name"),
    [
        ("Megatron-LM", "", "megatron-core"),
        ("Megatron-LM 2022", "2022-05", "megatron-2022"),
        ("Megatron-LM 6985e589", "2021-04", "megatron-2021"),
        ("Megatron-LM", "2019", "megatron-2020"),
        ("Megatron-LM (vTrain)", "2022", "vtrain"),
        ("Megatron-DeepSpeed (BigScience)", "2021", "megatron-deepspeed-bigscience"),
        ("Megatron-DeepSpeed", "2022-03", "megatron-deepspeed-bigscience"),
        ("AMP (Megatron-DeepSpeed)", "2022", "megatron-deepspeed-2022"),
        ("Sailor Megatron-DeepSpeed", "2025", "sailor"),
        ("DeepSpeed ZeRO-3 (Megatron-LM model)", "2021-04", "deepspeed-2021"),
        ("DeepSpeed", "2022-06", "deepspeed"),
        ("DeepSpeed", "", "deepspeed"),
        ("OneFlow (static graph; Megatron shapes)", "2021-08", "oneflow"),
        ("NeMo Megatron 22.08", "2022-09", "nemo-22"),
        ("NVIDIA NeMo 24.07", "2024", "nemo-24"),
        ("NeMo 25.04", "2025-04", "nemo-25"),
        ("NeMo 25.11 Megatron-Bridge", "2025-11", "nemo"),
        ("NeMo 26.06", "2026-06", "nemo"),
        ("TorchTitan FSDP2", "2024-12", "torchtitan-2024"),
        ("torchtitan", "2025-06", "torchtitan"),
        ("PyTorch FSDP (fms-fsdp)", "2024-02", "fsdp"),
        ("llm-foundry v0.0.4-era / composer FSDP", "2023", "llm-foundry"),
        ("Nemotron trainer", "2024", "unknown"),
    ],
)
def test_programs_as_tables_name_them(program, date, name):
    """Whole words decide, the first of them, and the date picks the version."""
    assert catalogue.runtime_of_program(program, date).name == name


@pytest.mark.parametrize(
    ("date", "architecture", "precision", "name"),
    [
        ("2026-06", "blackwell", "fp8", "nemo-blackwell"),
        ("", "blackwell", "fp8", "nemo"),
        ("2026-04", "blackwell", "fp8", "nemo"),
        ("2026-06", "blackwell", "bf16", "nemo"),
        ("2026-06", "hopper", "fp8", "nemo"),
    ],
)
def test_a_version_of_some_devices_or_a_precision_is_meant_with_these_alone(date, architecture, precision, name):
    """NeMo's recipes of June 2026 hold a step in one graph in 8 bits on Blackwell."""
    assert catalogue.runtime_of_program("NeMo", date, architecture, precision).name == name


def test_published_files_of_plan_runs_call_amps_program_by_its_own_entry():
    """They say `megatron-deepspeed-2022` and mean the program without fused kernels; files of old say 2020."""
    published = catalogue.runtime("megatron-deepspeed-2022")
    assert not published.fused and catalogue.runtime("megatron-deepspeed-bigscience").fused
    assert catalogue.runtime("megatron-deepspeed-2020") == catalogue.runtime("amp") == published


def test_links_are_one_way_figures():
    """NVLink's advertised figure counts both directions; 8 cards of HDR are 1.6 Tbit/s a node."""
    assert catalogue.link("nvlink3").bytes_per_s == 300e9
    assert catalogue.link("nvlink4").bytes_per_s == 450e9
    assert catalogue.link("infiniband-hdr-x8").bytes_per_s == 200e9


def test_cloud_regions_form_whole_pairs():
    """Every pair names two known regions, once."""
    table = catalogue.cloud_regions()
    pairs = [frozenset(pair["between"]) for pair in table["pairs"]]
    assert len(set(pairs)) == len(pairs) == 48
    assert frozenset().union(*pairs) == set(table["regions"])
    assert json.dumps(table)


@pytest.mark.parametrize(("given", "refused"), [({"gemm": 50}, True), ({"gemm": 2, "launch_s": 1e-5}, False)])
def test_percentages_are_no_fractions(given, refused):
    """Products at fifty times the data sheet's peak made a step of next to nothing."""
    card = {"memory_gib": 16, "tflops": {"fp32": 10, "bf16": 40}, "memory_bandwidth_gb_per_s": 300}
    card |= {"power_w": 100, "efficiency": given}
    told = pytest.raises(InputError, match=r"efficiency.gemm: found 50.0, expected a number > 0 and at most 4")
    with told if refused else nullcontext():
        catalogue.device_from_spec("own", check(DeviceSpec, card))
