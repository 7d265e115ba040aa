"""Vision transformers on replicas: every recipe trains as one process does, and memory is what the formula says."""

import json
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from runners.engine.additions import add_lora
from runners.engine.checkpoint import read_file, write_file
from runners.recipes.backends import Job, Place, backend_of
from runners.recipes.models import batch_of, model_of
from runners.recipes.predicted_memory import measured_peaks
from runners.recipes.recipe_schema import LoraPart, read_recipe
from runners.recipes.replicas.adapter import read_adapter, trained
from runners.recipes.replicas.saving import WHOLE, EngineFiles, Home
from runners.recipes.replicas.state import StateBytes, predicted_state
from runners.recipes.replicas.whole import WholeModel
from runners.recipes.replicas.zero import ZeroReplica, config_of
from runners.recipes.table import on_one_process
from runners.recipes.weights import load_weights
from runners.train import be_rank, main
from tests.deepspeed_parser import read_by_deepspeed
from tests.real_programs import Program
from tests.real_ranks import preload, run_ranks

for module in ("sklearn.datasets", "peft", "deepspeed"):
    if find_spec(module.partition(".")[0]) is not None:
        preload(module)

RECIPES = Path("instances/recipes")
STEPS = 4
VALIDATION = "validation={every: 2, fraction: 0.04}"
"""72 of 1,797 digits: some of the last batch are blank."""
VALIDATED = ("validation_loss", "validation_accuracy")
TINY = ("vit-tiny-lora", "vit-tiny-ddp", "vit-tiny-zero2", "vit-tiny-zero3", "vit-tiny-zeropp")


def need_deepspeed():
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (DS_BUILD_OPS=0 pip install -e .[deepspeed]): its recipes are not run")


def job_of(name, out, *settings, steps=STEPS):
    """A recipe that validates on samples that its batches do not divide."""
    recipe = read_recipe(RECIPES / f"{name}.yaml", [f"steps={steps}", VALIDATION, *settings])
    return Job(recipe, RECIPES, Path(out), "cpu")


def run_rank(rank, port, job, ranks):
    """A rank of the recipe's backend."""
    assert be_rank(job, Place(rank, ranks, rank, "127.0.0.1", port)) == 0


def ran(job):
    """Summary and steps of a recipe that was run on its ranks."""
    ranks = backend_of(job).world_size(job)
    run_ranks(run_rank, ranks, job, ranks)
    summary = backend_of(job).summary(job)
    return summary, [json.loads(line) for line in Path(summary["log"]).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a recipe's training on one process measures; recipes alike but for their degrees share it."""
    found = {}

    def steps_of(job):
        single = on_one_process(job.recipe).model_copy(update={"checkpoint": None, "name": ""})
        key = single.model_dump_json()
        if key not in found:
            found[key] = ran(replace(job, recipe=single, out=tmp_path_factory.mktemp("alone")))[1]
        return found[key]

    return steps_of


def test_every_tiny_vision_recipe_is_tried():
    """No recipe is left out of the test below."""
    assert {path.stem for path in RECIPES.glob("vit-tiny-*.yaml")} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_recipes_train_as_one_process_does(name, tmp_path, alone):
    """Losses, of training and validation, are those of one process; ranks hold what is predicted.

    A run that goes on from a checkpoint has the same losses to the last bit.
    """
    if name.startswith("vit-tiny-zero"):
        need_deepspeed()
    saved = f"checkpoint={{folder: {tmp_path}/saved, every: 2}}"
    job = job_of(name, tmp_path / "whole", saved)
    recipe, (summary, steps) = job.recipe, ran(job)
    # 16-bit weights round their update, autocast does not: the replicas of one process keep 32-bit weights.
    tolerance = 1e-5 if recipe.memory.precision == "fp32" else 0.02
    expected = alone(job)
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], rel=tolerance)
    validated = [[step[key] for step in run if key in step] for run in (steps, expected) for key in VALIDATED]
    assert validated[0] == pytest.approx(validated[2], rel=tolerance) and len(validated[0]) == 2
    # An image of many more or less may turn with the rounding of 16 bits.
    assert validated[1] == pytest.approx(validated[3], abs=0.0 if tolerance < 0.02 else 0.02)
    assert summary["validation_loss"] == validated[0][-1]
    assert [step["mfu"] * step["seconds"] for step in steps] == pytest.approx(
        [steps[0]["mfu"] * steps[0]["seconds"]] * STEPS
    )
    model = model_of(recipe.model, RECIPES)
    if recipe.lora is not None:
        left = read_adapter(model, recipe.lora, job.out / "adapter")
        assert sum(tensor.numel() for tensor in left.values()) == summary["trained_parameters"]
    # Of the parameter that the border between two partitions cuts, ZeRO-2 keeps the whole gradient.
    cut = 4 * model.hidden_size * model.ffn_size if recipe.parallel.zero == 2 else 0
    for part, n_bytes in summary["predicted_state_bytes"].items():
        assert summary["state_bytes"][part] == pytest.approx(n_bytes, rel=0.01, abs=cut), part
    if name != "vit-tiny-zeropp":
        newest = max((tmp_path / "saved").glob("*-0000000*"), key=lambda path: path.name)
        shutil.rmtree(newest)
        followed = "metrics={tensor_bytes: true}"
        again = job_of(name, tmp_path / "again", f"checkpoint={{folder: {tmp_path}/saved, resume: true}}", followed)
        _, rest = ran(again)
        assert [(step["step"], step["loss"]) for step in rest] == [(step["step"], step["loss"]) for step in steps[2:]]
        # DeepSpeed's buckets are sized for large models.
        if recipe.backend == "ddp":
            peak = max(measured_peaks(again.out, recipe.parallel.world_size).values())
            assert summary["predicted_peak_bytes"] == pytest.approx(peak, rel=0.25)


def test_the_engine_goes_on_from_torchs_checkpoint(tmp_path, alone):
    """Saved by DDP's replicas, resumed by the engine's pipeline stages: losses go on, and so does the accuracy."""
    saved = f"checkpoint={{folder: {tmp_path}/saved}}"
    ran(job_of("vit-tiny-ddp", tmp_path / "ddp", saved, steps=2))
    settings = ("backend=engine", "parallel={pp: 2}", saved, "checkpoint.resume=true")
    _, rest = ran(job_of("vit-tiny-ddp", tmp_path / "engine", *settings))
    expected = alone(job_of("vit-tiny-ddp", tmp_path))
    assert [step["loss"] for step in rest] == pytest.approx([step["loss"] for step in expected[2:]], rel=1e-5)
    assert rest[-1]["validation_accuracy"] == expected[-1]["validation_accuracy"]


def test_the_loss_scale_is_saved_and_goes_on(tmp_path):
    """In fp16: one of 2**40, put into the files of step 1, is halved by step 2, and not begun anew with 2**16."""
    settings = f"checkpoint={{folder: {tmp_path}/saved, resume: true}}", "memory.precision=fp16", "parallel.dp=1"
    ran(job_of("vit-tiny-ddp", tmp_path / "first", *settings, steps=1))
    for path in (tmp_path / "saved/step-00000001").iterdir():
        content = read_file(path)
        assert (content["progress"]["loss_scale"], content["progress"]["good_steps"]) == (2.0**16, 1)
        content["progress"]["loss_scale"] = 2.0**40
        write_file(path, content)
    ran(job_of("vit-tiny-ddp", tmp_path / "second", *settings, steps=2))
    found = read_file(tmp_path / "saved/step-00000002/head.layer")["progress"]
    assert (found["loss_scale"], found["good_steps"]) == (2.0**39, 0)


def test_an_interrupted_run_saves_and_goes_on(tmp_path):
    """Ctrl-C ends all ranks after their step with a checkpoint and exit code 130; resumed, steps go on from it."""
    saved = f"checkpoint={{folder: {tmp_path}/saved, resume: true}}"
    words = [
        RECIPES / "vit-tiny-ddp.yaml",
        "--set",
        saved,
        "--device",
        "cpu",
        "-o",
        tmp_path / "a",
        "--steps",
        "100000",
    ]
    with Program(main, words, Path.cwd()) as program:
        assert any("step     1" in line for line in program.stderr)
        program.send_signal(signal.SIGINT)
        told = program.said()
    assert program.returncode == 130, told
    [at] = (tmp_path / "saved").glob("step-*")
    done = int(at.name.removeprefix("step-"))
    _, steps = ran(job_of("vit-tiny-ddp", tmp_path / "b", saved, steps=done + 1))
    assert [step["step"] for step in steps] == [done]
    # Asked for again, as by a job that is started anew whatever happened: there is nothing left, and that is no fault.
    summary, steps = ran(job_of("vit-tiny-ddp", tmp_path / "c", saved, steps=done + 1))
    assert (summary["steps"], steps) == (0, [])


def test_a_run_that_diverges_ends_without_saving(tmp_path):
    """Weights that are no numbers never take the place of good ones."""
    settings = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=0", f"checkpoint.folder={tmp_path / 'saved'}")
    job = job_of("vit-tiny-ddp", tmp_path, *settings, "checkpoint.every=1")
    with pytest.raises(RuntimeError, match="step 1: found loss nan"):
        ran(job)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000001"]


def test_checkpoints_of_other_ranks_are_refused(tmp_path):
    """DeepSpeed's files fit the ranks that wrote them; who resumes with others, or not at all, is told so in a line."""
    need_deepspeed()
    (tmp_path / "deepspeed-00000002").mkdir()
    said = {"step": 2, "samples": 128, "seed": 0, "ranks": 4, "zero": 2}
    (tmp_path / "deepspeed-00000002" / WHOLE).write_text(json.dumps(said))
    recipe = job_of("vit-tiny-zero2", tmp_path, f"checkpoint={{folder: {tmp_path}, resume: true}}").recipe
    home = Home(tmp_path, recipe.checkpoint, tiny_model(), seed=0, rank=0, ranks=2, store=None)
    anew = replace(home, part=recipe.checkpoint.model_copy(update={"resume": False}))
    with pytest.raises(InputError, match=r"found '.*deepspeed-00000002', expected checkpoint\.resume"):
        EngineFiles(anew, engine=None, zero=2)
    with pytest.raises(InputError, match=r"deepspeed-00000002: ranks: found 4, expected 2"):
        EngineFiles(home, engine=None, zero=2).resume()
    home = replace(home, folder=tmp_path / "none")
    assert EngineFiles(home, engine=None, zero=2).resume() is None


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
    for measured in run_ranks(zero_states, 2, None):
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
    names = add_lora(whole.layers, whole.model, LoraPart(rank=4), seed=0)
    assert len(names) == 2 * model.blocks
    assert torch.equal(whole(images, classes), before)
    frozen = {name: p.detach().clone() for name, p in whole.named_parameters() if not p.requires_grad}
    parameters = [p for p in whole.parameters() if p.requires_grad]
    head = model.hidden_size * model.vocab_size + model.vocab_size
    assert sum(p.numel() for p in parameters) == 2 * model.blocks * 4 * 2 * model.hidden_size + head
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = whole(images, classes)
        loss.backward()
        optimizer.step()
    assert whole(images, classes) < before
    assert all(torch.equal(p, frozen[name]) for name, p in whole.named_parameters() if name in frozen)
    assert sum(tensor.numel() for tensor in trained(whole).values()) == sum(p.numel() for p in parameters)


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
        ("vit-tiny-ddp", "memory.precision=fp8", "else backend engine"),
        ("vit-tiny-lora", "lora.targets=[keys]", "found 'keys', expected names of linear layers: down, key, output"),
        ("vit-tiny-lora", "model.weights=.", "a folder with *.safetensors"),
    ],
)
def test_what_cannot_be_run_is_said(name, setting, message, tmp_path, capsys):
    """Exit code 2, with the recipe's field and what else would do."""
    if name.startswith("vit-tiny-zero"):
        need_deepspeed()
    command = [f"{RECIPES}/{name}.yaml", "--set", setting, "-o", str(tmp_path)]
    assert main([*command, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("precision, optimizer", [("fp32", 12), ("bf16", 12), ("fp32", 8)])
def test_predicted_state_by_hand(precision, optimizer):
    """Eight bytes of Adam's state; DeepSpeed's 32-bit copy makes twelve; DDP has none."""
    model = tiny_model()
    batch = Batch(global_batch=4, seq_len=model.tokens_per_image, precision=precision, gradient_precision=precision)
    zero = 1 if optimizer == 12 else 0
    state = predicted_state(model, batch, zero=zero, shards=4)
    assert state.optimizer == pytest.approx(model.parameters * optimizer / (4 if zero else 1))
