"""Vision transformers on replicas: every recipe trains as one process does, and memory is what the formula says."""

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from polygon.domain.model import Batch
from runners.recipes.backends import Job, Place, backend_of
from runners.recipes.models import batch_of, model_of
from runners.recipes.replicas.state import StateBytes, predicted_state
from runners.recipes.replicas.whole import WholeModel, adapter, add_lora
from runners.recipes.replicas.zero import ZeroReplica, config_of
from runners.recipes.schema import LoraPart, read_recipe
from runners.recipes.table import on_one_process
from runners.recipes.weights import load_weights
from runners.train import main
from tests.deepspeed_parser import read_by_deepspeed
from tests.real_ranks import run_ranks

RECIPES = Path("instances/recipes")
STEPS = 3
TINY = ("vit-tiny-lora", "vit-tiny-ddp", "vit-tiny-zero2", "vit-tiny-zero3", "vit-tiny-zeropp")


def need_deepspeed():
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (DS_BUILD_OPS=0 pip install -e .[deepspeed]): its recipes are not run")


def losses(path):
    return [json.loads(line)["loss"] for line in Path(path).read_text().splitlines()]


def alone(rank, port, recipe, out):
    """The recipe's training on one process; its losses."""
    job = Job(on_one_process(recipe), RECIPES, Path(out), "cpu")
    backend = backend_of(job)
    assert backend.run_rank(job, Place(0, 1, 0, "127.0.0.1", port)) == 0
    return losses(backend.summary(job)["log"])


@cache
def reference(name, folder):
    return run_ranks(alone, 1, read_recipe(RECIPES / f"{name}.yaml", [f"steps={STEPS}"]), f"{folder}/{name}")[0]


def test_every_tiny_vision_recipe_is_tried():
    """No recipe is left out of the test below."""
    assert {path.stem for path in RECIPES.glob("vit-tiny-*.yaml")} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_recipes_train_as_one_process_does(name, tmp_path, tmp_path_factory):
    """Losses are those of one process, and every rank holds the weights, gradients and state that are predicted."""
    recipe = read_recipe(RECIPES / f"{name}.yaml")
    if recipe.backend == "deepspeed":
        need_deepspeed()
    command = [sys.executable, "-m", "runners.train", f"{RECIPES}/{name}.yaml", "--steps", str(STEPS)]
    ran = subprocess.run([*command, "-o", str(tmp_path), "--json"], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    summary = json.loads(ran.stdout)
    # 16-bit weights round their update, autocast does not: the replicas of one process keep 32-bit weights.
    tolerance = 1e-5 if recipe.memory.precision == "fp32" else 0.02
    expected = reference(name, str(tmp_path_factory.getbasetemp()))
    assert losses(summary["log"]) == pytest.approx(expected, rel=tolerance)
    assert summary["ranks"] == recipe.parallel.world_size
    # Of the parameter that the border between two partitions cuts, ZeRO-2 keeps the whole gradient.
    model = model_of(recipe.model, RECIPES)
    cut = 4 * model.hidden_size * model.ffn_size if recipe.parallel.zero == 2 else 0
    for part, n_bytes in summary["predicted_state_bytes"].items():
        assert summary["state_bytes"][part] == pytest.approx(n_bytes, rel=0.01, abs=cut), part


def zero_states(rank, port, _):
    """What a rank holds under ZeRO-1, 2 and 3: measured, and padding-free sizes of the model."""
    from torch import distributed

    recipe = read_recipe(RECIPES / "vit-tiny-zero3.yaml")
    model, batch = model_of(recipe.model, RECIPES), batch_of(recipe, model_of(recipe.model, RECIPES))
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = []
    for stage in (1, 2, 3):
        part = recipe.parallel.model_copy(update={"zero": stage})
        staged = recipe.model_copy(update={"parallel": part})
        replica = ZeroReplica(WholeModel(model, 0, reentrant=stage == 3), batch, staged, torch.device("cpu"))
        images, classes = torch.randn(16, 1, 8, 8), torch.zeros(16, dtype=torch.int64)
        for micro_step in range(2):
            loss = replica.forward(images, classes, last=micro_step == 1)
            replica.backward(loss, 1 / 16)
        found.append(replica.update(1e-3)[1].to_dict())
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def test_memory_falls_with_the_zero_stage_as_the_formula_says():
    """Weights 2, gradients 2, optimizer 12 bytes a parameter; ZeRO-1, 2, 3 halve one more of them on two ranks."""
    need_deepspeed()
    recipe = read_recipe(RECIPES / "vit-tiny-zero3.yaml")
    model = model_of(recipe.model, RECIPES)
    batch = batch_of(recipe, model)
    n = model.parameters
    by_hand = [
        StateBytes(weights=2 * n, gradients=2 * n, optimizer=6 * n),
        StateBytes(weights=2 * n, gradients=n, optimizer=6 * n),
        StateBytes(weights=n, gradients=n, optimizer=6 * n),
    ]
    for stage, expected in enumerate(by_hand, start=1):
        assert predicted_state(model, batch, zero=stage, shards=2).to_dict() == pytest.approx(expected.to_dict())
    for measured in run_ranks(zero_states, 2, None, timeout_s=600):
        for stage, (found, expected) in enumerate(zip(measured, by_hand, strict=True), start=1):
            # Of the parameter that the border between two partitions cuts, ZeRO-2 keeps the whole gradient.
            cut = 2 * model.hidden_size * model.ffn_size if stage == 2 else 0
            assert found == pytest.approx(expected.to_dict(), rel=0.01, abs=cut)
        totals = [found["total"] for found in measured]
        assert totals[0] > totals[1] > totals[2]


def tiny_model():
    return model_of(read_recipe(RECIPES / "vit-tiny-lora.yaml").model, RECIPES)


def test_lora_starts_as_the_model_and_trains_nothing_else():
    """Additions of rank x (in + out) begin at zero; updates leave frozen weights the same bit by bit."""
    pytest.importorskip("peft", reason="peft is not installed: LoRA is not tried")
    model = tiny_model()
    images, classes = torch.randn(8, 1, 8, 8), torch.arange(8)
    whole = WholeModel(model, 0)
    before = whole(images, classes)
    names = add_lora(whole, LoraPart(rank=4), seed=0)
    assert len(names) == 2 * model.blocks
    assert torch.equal(whole(images, classes), before)
    frozen = {name: p.detach().clone() for name, p in whole.named_parameters() if not p.requires_grad}
    trained = [p for p in whole.parameters() if p.requires_grad]
    head = model.hidden_size * model.vocab_size + model.vocab_size
    assert sum(p.numel() for p in trained) == 2 * model.blocks * 4 * 2 * model.hidden_size + head
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = whole(images, classes)
        loss.backward()
        optimizer.step()
    assert whole(images, classes) < before
    assert all(torch.equal(p, frozen[name]) for name, p in whole.named_parameters() if name in frozen)
    assert sum(tensor.numel() for tensor in adapter(whole).values()) == sum(p.numel() for p in trained)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_gradient(recompute):
    """Activations that are computed again give the same gradients."""
    model, images, classes = tiny_model(), torch.randn(4, 1, 8, 8), torch.arange(4)
    gradients = []
    for way in ("none", recompute):
        whole = WholeModel(model, 0, way)
        whole(images, classes).backward()
        gradients.append([p.grad for p in whole.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_weights_of_transformers_give_its_loss(tmp_path):
    """A checkpoint of transformers' ViT, read by our names, computes what transformers computes."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: its files are not read")
    model = tiny_model()
    config = transformers.ViTConfig(
        num_hidden_layers=model.blocks, hidden_size=64, num_attention_heads=4, intermediate_size=256, image_size=8,
        patch_size=2, num_channels=1, num_labels=10, layer_norm_eps=1e-6, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    whole = WholeModel(model, 1)
    assert load_weights(whole.layers, model, tmp_path) == []
    images, classes = torch.randn(4, 1, 8, 8), torch.arange(4)
    with torch.no_grad():
        expected = functional.cross_entropy(theirs(images).logits, classes, reduction="sum")
        assert float(whole(images, classes)) == pytest.approx(float(expected), rel=1e-4)


def test_deepspeeds_parser_takes_the_large_recipes():
    """Configurations of the ViT-Huge recipes for GPUs say to DeepSpeed what the recipes say to us."""
    configs = []
    for name in ("vit-huge-zero2", "vit-huge-zero3", "vit-huge-zeropp"):
        recipe = read_recipe(RECIPES / f"{name}.yaml")
        model = model_of(recipe.model, RECIPES)
        configs.append((recipe.parallel.dp, config_of(recipe, batch_of(recipe, model), on_gpu=True)))
    keys = ("stage", "hierarchical", "quantized_weights", "quantized_gradients")
    read = [tuple(parsed[key] for key in keys) for parsed in read_by_deepspeed(configs)]
    assert read == [(2, 1, False, False), (3, 1, False, False), (3, 8, True, True)]


@pytest.mark.parametrize(
    "name, setting, message",
    [
        ("vit-tiny-zeropp", "zero_plus.quantized_weights=true", "expected false on CPUs"),
        ("vit-tiny-zeropp", "zero_plus.quantized_gradients=true", "expected false on CPUs"),
        ("vit-tiny-zeropp", "zero_plus.hierarchical=3", "expected a divisor of 4 ranks"),
        ("vit-tiny-zero2", "memory.precision=fp16", "DeepSpeed has no fp16 on CPUs"),
        ("vit-tiny-zero2", "memory.offload=optimizer", "none on CPUs"),
        ("vit-tiny-zero2", "parallel.zero=0", "backend ddp"),
        ("vit-tiny-ddp", "parallel.zero=2", "else backend deepspeed"),
        ("vit-tiny-ddp", "parallel.tp=2", "else backend engine"),
        ("vit-tiny-lora", "lora.targets=[keys]", "expected names of linear layers"),
        ("vit-tiny-lora", "model.weights=/nowhere", "a folder with *.safetensors"),
    ],
)
def test_what_cannot_be_run_is_said(name, setting, message, tmp_path):
    """Exit code 2, with the recipe's field and what else would do."""
    if name.startswith("vit-tiny-zero"):
        need_deepspeed()
    command = [sys.executable, "-m", "runners.train", f"{RECIPES}/{name}.yaml", "--set", setting, "-o", str(tmp_path)]
    if name == "vit-tiny-lora":  # found out by the rank, which a process of its own is
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 2 and message in ran.stderr
        return
    assert main([*command[3:], "--device", "cpu"]) == 2


@pytest.mark.parametrize("precision, optimizer", [("fp32", 12), ("bf16", 12), ("fp32", 8)])
def test_predicted_state_by_hand(precision, optimizer):
    """Eight bytes of Adam's state; DeepSpeed's 32-bit copy makes twelve; DDP has none."""
    model = tiny_model()
    batch = Batch(global_batch=4, seq_len=model.tokens_per_image, precision=precision, gradient_precision=precision)
    zero = 1 if optimizer == 12 else 0
    state = predicted_state(model, batch, zero=zero, shards=4)
    assert state.optimizer == pytest.approx(model.parameters * optimizer / (4 if zero else 1))
