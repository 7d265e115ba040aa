"""What layers cost on this device, measured: what is counted exactly is checked exactly, times only for their order."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polygon.cost.profiles import kind_profile
from polygon.domain.errors import InputError
from polygon.domain.model import Model
from polygon.formats.files import read_model
from runners.profile_layers import LayerBench, kept_bytes, main, shard

TINY = {
    "name": "tiny", "blocks": 2, "hidden_size": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn_size": 64,
    "vocab_size": 100, "max_seq_len": 16,
}  # fmt: skip


def test_a_shard_is_what_one_rank_of_the_group_holds():
    """Heads, feed-forward width and vocabulary are divided; key-value heads are repeated when there are too few."""
    model = Model(**(TINY | {"kv_heads": 2}))
    part = shard(model, 4)
    assert (part.heads, part.kv_heads, part.ffn_size, part.vocab_size, part.head_dim) == (1, 1, 16, 25, 8)
    assert shard(model, 1) == model
    with pytest.raises(InputError, match="--tp: found 3, expected a divisor of heads = 4"):
        shard(model, 3)


def test_kept_bytes_counts_what_backward_needs_once():
    """exp keeps its output; the two factors of a product are kept, the same one twice counts once; weights never."""
    x = torch.randn(1000, requires_grad=True)
    weight = torch.randn(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp(), []) == 4000
    assert kept_bytes(lambda: x.exp() * weight, [weight]) == 4000
    assert kept_bytes(lambda: x.exp() * weight.exp(), [weight]) == 8000


@pytest.fixture
def model_file(tmp_path):
    """A GPT of 2 blocks."""
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_profile_holds_every_kind_size_and_degree(model_file, tmp_path):
    """Rows of all kinds, parameters as the model counts them, halved by tp 2; larger micro-batches keep more."""
    out = tmp_path / "profile.json"
    words = [model_file, "--precision", "fp32", "--micro-batch-sizes", "1,4", "--tp", "1,2", "--device", "cpu"]
    threads = torch.get_num_threads()
    try:
        assert main([*words, "--seconds", "0.01", "-o", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    profile = json.loads(out.read_text())
    assert (profile["format"], profile["device"], profile["seq_len"]) == ("polygon-layer-profile", "cpu-core", 16)
    rows = {(row["kind"], row["micro_batch_size"], row["tp"]): row for row in profile["layers"]}
    assert set(rows) == {(k, b, tp) for k in ("embedding", "block", "head") for b in (1, 4) for tp in (1, 2)}
    assert all(row[key] > 0 for row in rows.values() for key in ("forward_s", "backward_s", "update_s"))
    model = Model(**TINY)
    assert rows["block", 1, 1]["parameters"] == model.layer_parameters(1)
    # Of a block only norms and output biases are whole on both ranks.
    whole = 4 * model.hidden_size + 2 * model.hidden_size
    assert rows["block", 1, 2]["parameters"] == (model.layer_parameters(1) - whole) // 2 + whole
    for kind in ("block", "head"):
        assert rows[kind, 4, 1]["activation_bytes"] == pytest.approx(4 * rows[kind, 1, 1]["activation_bytes"], rel=0.02)
    assert rows["block", 1, 2]["activation_bytes"] < rows["block", 1, 1]["activation_bytes"]
    read = kind_profile(profile)
    # None is read as slower than a larger micro-batch was: on a busy machine the smaller one may be.
    forward_s = min(rows["block", size, 2]["forward_s"] for size in (1, 4))
    assert read.hidden_size == 32 and read.points["block", 2][0].forward_s[0] == forward_s


def test_a_pause_lies_before_every_pass_and_not_in_its_time(model_file, tmp_path, monkeypatch):
    """As often as there are passes; what is measured is far less than the pause."""
    pauses = []
    monkeypatch.setattr("runners.profile_layers.time.sleep", lambda seconds: pauses.append(seconds))
    words = [model_file, "--micro-batch-sizes", "1", "--precision", "fp32", "--device", "cpu", "--seconds", "0.01"]
    assert main([*words, "-o", str(tmp_path / "warm.json")]) == 0
    assert pauses == []
    assert main([*words, "--pause", "30", "-o", str(tmp_path / "cold.json")]) == 0
    # Three kinds with and without recomputation, seven passes each at least, all in two halves.
    assert set(pauses) == {30.0} and len(pauses) >= 3 * 2 * 7 * 2
    profile = json.loads((tmp_path / "cold.json").read_text())
    assert profile["pause_s"] == 30
    assert all(row["forward_s"] < 30 and row["backward_s"] < 30 for row in profile["layers"])


def test_several_models_are_profiled_by_one_command(model_file, tmp_path):
    """A folder gets one file a model, each as the planner reads it: GPT-like, and Llama-like with fewer key heads."""
    llama = TINY | {
        "name": "tiny-llama", "family": "llama", "kv_heads": 2, "gated_mlp": True, "tied_embeddings": False,
        "learned_positions": False, "rms_norm": True, "linear_bias": False,
    }  # fmt: skip
    (tmp_path / "llama.yaml").write_text(json.dumps(llama))
    words = [model_file, str(tmp_path / "llama.yaml"), "--seq-len", "8", "--micro-batch-sizes", "1", "--device", "cpu"]
    assert main([*words, "--precision", "bf16", "--seconds", "0.01", "-o", str(tmp_path / "out")]) == 0
    for name in ("tiny", "tiny-llama"):
        profile = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert (profile["model"], profile["seq_len"], profile["precision"]) == (name, 8, "bf16")
        assert kind_profile(profile).hidden_size == 32


def test_ctrl_c_keeps_what_was_measured(model_file, tmp_path, monkeypatch, capsys):
    """The rows until then, which planners use beside the device model; nothing where there is nothing yet."""
    measured = LayerBench.measure
    calls = []

    def measure(self, *words):
        calls.append(self.kind)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(self, *words)

    monkeypatch.setattr(LayerBench, "measure", measure)
    out = tmp_path / "profile.json"
    words = [model_file, "--precision", "fp32", "--seq-len", "16", "--micro-batch-sizes", "1", "--seconds", "0.001"]
    assert main([*words, "-o", str(out)]) == 130
    found = json.loads(out.read_text())
    assert [row["kind"] for row in found["layers"]] == calls[:2] and not found["complete"]
    assert kind_profile(found).points and "interrupted: the file holds" in capsys.readouterr().err
    out.unlink()
    calls[:] = ["", ""]
    assert main([*words, "-o", str(out)]) == 130 and not out.exists()


def test_the_catalogue_s_larger_models_can_be_cut():
    """What a GPU session profiles: every degree of the documented command divides these models."""
    for name in ("gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "llama3-8b", "qwen2.5-3b"):
        model = read_model(name)
        assert [shard(model, tp).heads for tp in (1, 2, 4, 8)] == [model.heads // tp for tp in (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "--tp: found 3"),
        (["--seq-len", "17"], "--seq-len: found 17, expected at most 16"),
        (["--micro-batch-sizes", "0"], "--micro-batch-sizes: found '0'"),
        (["--micro-batch-sizes", "x"], "--micro-batch-sizes: found 'x'"),
        (["--seconds", "0"], "--seconds: found '0'"),
        (["--pause", "-1"], "--pause: found '-1', expected a number >= 0"),
        (["--device", "cuda"], "--device: found 'cuda'"),
    ],
)
def test_bad_words_are_one_line_and_status_2(words, message, model_file, capsys, status_of):
    """Every wrong word is named."""
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert status_of(main, [model_file, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


class Casts(TorchDispatchMode):
    """Counts how often tensors of some shapes are cast."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.count += tuple(args[0].shape) in self.shapes
        return func(*args, **(kwargs or {}))


def test_weights_have_16_bits_once_for_several_micro_batches():
    """As in the engine's steps: the vector of each block is cast, no pass casts a matrix."""
    bench = LayerBench(Model(**TINY), "block", 1, torch.device("cpu"), "bf16")
    vectors = {(sum(p.numel() for p in module.parameters()),) for module in bench.modules}
    matrices = {tuple(p.shape) for p in bench.parameters if p.ndim == 2}
    with Casts(vectors | matrices) as casts:
        forward_s, backward_s = bench.launches(1, 8, 0.0)
        bench.measure(1, 8, 0.0)
    assert casts.count == len(bench.modules) and forward_s > 0 and backward_s > 0
