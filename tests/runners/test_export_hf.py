"""Hugging Face in and out: a plan trains what a plain loop of transformers trains, and transformers loads it."""

import json
import re
import resource
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats.files import read_model
from polygon.formats.schema import check
from runners.data.choice import DataChoice
from runners.data.sources import english_text, training_and_held_out
from runners.dist_runner import end_process
from runners.engine.additions import check_lora
from runners.engine.checkpoint import SUFFIX, canonical, file_of, step_directory, write_file
from runners.engine.layers import build_layers, check_weights, layer_name
from runners.engine.options import Lora, Options
from runners.engine.pretrained import Pretrained
from runners.engine.run import train
from runners.export_hf import export
from runners.export_hf import main as export_hf
from runners.generate import load, tokenizer_for
from runners.generate import main as generate
from runners.recipes.backends import Job
from runners.recipes.backends.engine_backend import options_of, problem_and_plan
from runners.recipes.recipe_schema import Recipe
from tests.patience import PATIENCE_S
from tests.real_ranks import preload, run_ranks
from tests.small_problems import small_cluster, small_model, small_plan
from tests.transformers_models import LLAMA3, YARN, saved

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
if find_spec("peft"):
    preload("peft")
STEPS, SEED = 6, 3
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "mlp_only_layers": [0], "vocab_size": 256}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small Qwen3-MoE, as transformers saves it in several files."""
    folder = tmp_path_factory.mktemp("base")
    saved(folder, "Qwen3Moe", shard_size="40KB", **QWEN3_MOE)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Tokens as nanoGPT keeps them."""
    path = tmp_path_factory.mktemp("data") / "train.bin"
    np.frombuffer(english_text()[:40_000], dtype=np.uint8).astype("<u2").tofile(path)
    return path


def job_of(base, corpus, parallel, steps, folder, **more):
    """A recipe that starts from the base and saves into a folder."""
    data = {
        "name": "small", "model": {"source": str(base), "weights": str(base)},
        "batch": {"global_batch": 8, "micro_batch": 2, "seq_len": 16}, "parallel": parallel, "seed": SEED,
        "data": {"path": str(corpus), "token_type": "uint16"}, "steps": steps,
        "optimizer": {"learning_rate": 0.003, "rate_schedule": "cosine", "warmup_steps": 2},
        "checkpoint": {"folder": str(folder), "resume": True}, **more,
    }  # fmt: skip
    return Job(check(Recipe, data), Path(), folder, "cpu")


def run_rank(rank, port, job):
    """Losses of this rank, and the bytes of weights that it holds and that it read."""
    problem, plan = problem_and_plan(job)
    options = replace(options_of(job, job.out / "log"), schedule_steps=STEPS)
    losses, held = [], []
    train(
        problem, plan, rank, "127.0.0.1", port, replace(options, data=data_of(job)), on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
        on_start=lambda training: held.append(4 * sum(b.size for b in training.buckets)),
    )  # fmt: skip
    lines = map(json.loads, (job.out / "log" / f"rank-{rank}.jsonl").read_text().splitlines())
    return losses, held[0], [line["read_bytes"] for line in lines if line["type"] == "weights"][-1]


def data_of(job):
    return DataChoice(paths=(Path(job.recipe.data.path),), token_type="uint16")


def transformers_loop(folder, job):
    """The same training as one would write it with transformers and torch alone."""
    problem, _ = problem_and_plan(job)
    batch, options = problem.batch, options_of(job)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").train()
    samples, _ = training_and_held_out(problem.model, batch.seq_len, SEED, data_of(job))
    decayed = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    groups = [{"params": decayed[0], "weight_decay": options.weight_decay}, {"params": decayed[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        ids, targets = samples.batch(range(step * batch.global_batch, (step + 1) * batch.global_batch))
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = replace(options, schedule_steps=STEPS).rate.at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.eval()


def assert_readable(folder):
    """By whomever a new file is: safetensors gives its own to their writer alone."""
    (folder / "new").touch()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    (folder / "new").unlink()


def test_a_run_from_hugging_face_and_back(base, corpus, tmp_path, capsys):
    """Tensor, context, expert and pipeline degrees, ZeRO-3, stopped and resumed under another plan: the losses of
    transformers and, exported, its logits, to 1e-4. Each rank reads no more weights than it holds; a folder and a
    checkpoint generate the same.
    """
    found = []
    for steps, parallel in ((3, {"tp": 2, "cp": 2, "ep": 2}), (STEPS, {"pp": 2, "dp": 2, "zero": 3})):
        job = job_of(base, corpus, parallel, steps, tmp_path)
        ranks = run_ranks(run_rank, 4, job)
        assert all(read == held for _, held, read in ranks)
        found += ranks[0][0]
    whole = 4 * read_model(base).parameters
    assert max(held for _, held, _ in ranks) < 0.7 * whole
    losses, theirs = transformers_loop(base, job)
    assert losses[-1] < 0.95 * losses[0]
    assert found == pytest.approx(losses, rel=1e-4)
    assert export_hf([str(tmp_path), "-o", str(tmp_path / "out"), "--base", str(base), "--shard-size", "40KB"]) == 0
    assert "step 6" in capsys.readouterr().out
    check_weights(tmp_path / "out", read_model(base))
    assert_readable(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, 256, (2, 24))
    with torch.no_grad():
        expected, logits = theirs(ids).logits, again(ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        torch.testing.assert_close(load(tmp_path)(ids).logits, logits, rtol=0, atol=1e-6)
    texts = []
    for path in (tmp_path / "out", tmp_path):
        assert generate([str(path), "--prompt", "The", "--tokens", "5", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) >= 2


def checkpoint_of(folder, step, model, layers):
    """The files that a run would have written of these layers."""
    head = {
        "progress": {"step": step},
        "model": {k: v for k, v in asdict(model).items() if k not in ("name", "source")},
    }
    files = {}
    for layer, module in layers.items():
        for name, parameter in module.named_parameters():
            full = f"{layer_name(model, int(layer))}.{name}"
            files.setdefault(file_of(model, full), {})[canonical(model, full)] = {"value": parameter.detach()}
    for stem, parameters in files.items():
        write_file(step_directory(folder, step) / f"{stem}{SUFFIX}", head | {"parameters": parameters})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Llama", {"head_dim": 16, "vocab_size": 70}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Qwen2", {"head_dim": 32, "rope_parameters": YARN}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
        ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
        ("Mistral", {"sliding_window": 6}),
        ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 6}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("GPT2", {"n_inner": 40}),
    ],
)
def test_every_kind_of_model_comes_out_as_it_went_in(tmp_path, kind, fields):
    """Without the folder that a run began with: the settings follow from the sizes, and the logits are the same."""
    theirs = saved(tmp_path / "in", kind, **fields)
    model = read_model(tmp_path / "in")
    layers = build_layers(model, range(model.layers), 0, pretrained=Pretrained(tmp_path / "in", model))
    checkpoint_of(tmp_path, 1, model, layers)
    export(tmp_path, tmp_path / "out", shard_size="30KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(theirs)
    assert again.config.bos_token_id is None and again.generation_config.eos_token_id is None
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    ids = torch.randint(0, 70, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)
    assert read_model(tmp_path / "out") == replace(model, name="out")


def test_fused_projections_come_out_fused_again(tmp_path):
    """Phi-3 keeps queries, keys and values in one matrix: its folder as the base says so, and without it is Llama's."""
    theirs = saved(tmp_path / "in", "Phi3", num_key_value_heads=1, sliding_window=6, pad_token_id=0)
    model = read_model(tmp_path / "in")
    assert (model.kv_heads, model.window) == (1, 6)
    layers = build_layers(model, range(model.layers), 0, pretrained=Pretrained(tmp_path / "in", model))
    checkpoint_of(tmp_path, 1, model, layers)
    ids = torch.randint(0, 96, (2, 20))
    with torch.no_grad():
        for folder, base, kind in (("fused", tmp_path / "in", "phi3"), ("plain", None, "mistral")):
            export(tmp_path, tmp_path / folder, base=base)
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert again.config.model_type == kind
            torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.fixture
def two_steps(tmp_path):
    """Checkpoints of two steps with other weights, in half precision exactly."""
    model = small_model(blocks=1)
    for step in (2, 7):
        layers = build_layers(model, range(model.layers), step)
        for parameter in layers.parameters():
            parameter.data = parameter.data.bfloat16().float()
        checkpoint_of(tmp_path / "saved", step, model, layers)
    return tmp_path / "saved", layers


def test_the_newest_whole_step_is_taken(two_steps, tmp_path, capsys):
    """One that is still written, or damaged, is passed over and named; nothing whole: exit 2, and no folder."""
    folder, layers = two_steps
    newest = step_directory(folder, 7)
    assert "step 7" in export(folder, tmp_path / "newest", dtype="bf16")
    held = load_file(tmp_path / "newest" / "model.safetensors")
    weight = held["transformer.h.0.attn.c_attn.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight[:, :32].T.float(), layers["1"].attention.query.weight)
    assert "step 2" in export(folder, tmp_path / "asked", step=2)
    (newest / f"head{SUFFIX}").rename(tmp_path / "later")
    assert "step 2" in export(folder, tmp_path / "unfinished")
    (newest / f"head{SUFFIX}").write_bytes((tmp_path / "later").read_bytes()[:-1])
    assert "step 2" in export(folder, tmp_path / "damaged")
    assert "head.layer: checksum differs" in capsys.readouterr().err
    (step_directory(folder, 2) / f"tied{SUFFIX}").unlink()
    assert export_hf([str(folder), "-o", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "found no whole checkpoint" in said and "found no tied.layer" in said
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".*"))


def test_what_cannot_be_exported_is_one_line(two_steps, base, tmp_path, capsys):
    """No checkpoint, no such step, a folder that is not empty, another base, a size that is none, a full disk."""
    folder, _ = two_steps
    out = tmp_path / "out"

    def said(*words):
        assert export_hf([*map(str, words), "-o", str(out)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "found no checkpoint" in said(tmp_path / "saved" / "none")
    assert "--step: found 3, expected one of [2, 7]" in said(folder, "--step", "3")
    assert "family: found 'llama', expected 'gpt'" in said(folder, "--base", base)
    assert "--shard-size: found 'big'" in said(folder, "--shard-size", "big")
    assert "tokenizer: found no" in said(folder, "--tokenizer", tmp_path)
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    assert "latin.json: stream did not contain valid UTF-8" in said(folder, "--tokenizer", tmp_path / "latin.json")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # as on a disk that is full
    try:
        assert "File too large" in said(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists() and not list(tmp_path.glob(".*"))
    out.mkdir()
    (out / "mine").touch()
    assert "found something in it" in said(folder)
    assert generate([str(tmp_path), "--prompt", "x"]) == 2
    assert generate([str(folder), "--prompt", ""]) == 2
    assert "found no checkpoint" in capsys.readouterr().err
    assert generate([str(folder), "--prompt", "x", "--seed", str(2**64)]) == 2
    ours = saved(tmp_path / "base", "Llama", vocab_size=256)
    with torch.no_grad():
        ours.model.norm.weight[0] = float("nan")
    ours.save_pretrained(tmp_path / "base")
    assert generate([str(tmp_path / "base"), "--prompt", "x"]) == 2
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    assert generate([str(tmp_path / "base"), "--prompt", "x"]) == 2
    seed, numbers, cut = (line for line in capsys.readouterr().err.splitlines() if line.startswith("generate: "))
    assert "--seed: found" in seed and "found weights that are no numbers" in numbers and "expected a model" in cut


def test_a_text_is_no_longer_than_learned_positions(two_steps, capsys):
    """GPT-2's kind has a vector for each and none further on; a prompt of bytes that are no text is named, too."""
    folder, most = two_steps[0], small_model().max_seq_len
    for words, fault in (
        (["--tokens", most + 1], f"--tokens: found {most + 1}, expected at most {most}, as {most} positions less"),
        (["--prompt", "x" * (most + 1)], f"--prompt: tokens: found {most + 1}, expected at most {most}"),
        (["--prompt", "x\udcff"], "--prompt: found '\\udcff'"),
    ):
        assert generate([str(word) for word in (folder, "--prompt", "x", *words)]) == 2
        assert fault in capsys.readouterr().err
    assert generate([str(folder), "--prompt", "x", "--tokens", str(most)]) == 0


def test_a_checkpoint_is_read_with_the_tokenizer_of_its_base(tmp_path):
    """The option's, else the model folder's, else the base's, else bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    for name, number in (("a", 1), ("b", 2), ("c", 3), ("none", 0)):
        (tmp_path / name).mkdir()
        words = tokenizers.models.WordLevel({"?": 0, "x": number}, unk_token="?")
        if number:
            tokenizers.Tokenizer(words).save(str(tmp_path / name / "tokenizer.json"))

    def first(named, *folders):
        encoded = tokenizer_for(named, folders, 256).encode("x")
        return next(iter(getattr(encoded, "ids", encoded)))

    a, b, c, none = (tmp_path / name for name in ("a", "b", "c", "none"))
    assert first(c, a, b) == 3 and first(None, a, b) == 1 and first(None, none, b) == 2
    assert first(None, none, None) == ord("x")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_additions_are_trained_by_plans_and_read_by_peft(corpus, tmp_path, capsys):
    """LoRA under data parallelism with ZeRO-1, then under a pipeline: peft computes the next loss from what was
    exported, merged additions give its logits, and nothing but additions is trained.
    """
    peft = pytest.importorskip("peft")
    theirs = saved(tmp_path / "base", "Llama", vocab_size=256)
    lora = {"rank": 4, "alpha": 24.0, "targets": ["query", "value", "down"]}
    losses = []
    for steps, parallel in ((3, {"dp": 2, "zero": 1}), (STEPS, {"pp": 2})):
        job = job_of(tmp_path / "base", corpus, parallel, steps, tmp_path, lora=lora)
        found, held, _ = run_ranks(run_rank, 2, job)[0]
        losses += found
    assert held == 4 * (4 * (32 + 32) + 4 * (32 + 16) + 4 * (48 + 32))  # of one of the two blocks
    arguments = [str(tmp_path), "--base", str(tmp_path / "base")]
    assert export_hf([*arguments, "-o", str(tmp_path / "early"), "--step", "3"]) == 0
    assert export_hf([*arguments, "-o", str(tmp_path / "adapter")]) == 0
    assert_readable(tmp_path / "adapter")
    assert export_hf([*arguments, "-o", str(tmp_path / "merged"), "--merge"]) == 0
    problem, _ = problem_and_plan(job)
    samples, _ = training_and_held_out(problem.model, 16, SEED, data_of(job))
    ids, targets = samples.batch(range(3 * 8, 4 * 8))
    with torch.no_grad():
        before = theirs(ids).logits
        early = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "early")).eval()
        loss = torch.nn.functional.cross_entropy(early(ids).logits.flatten(0, 1), targets.flatten())
        assert losses[3] == pytest.approx(loss.item(), rel=1e-5)
        late = peft.PeftModel.from_pretrained(early.unload(), str(tmp_path / "adapter")).eval()(ids).logits
        assert (late - before).abs().max() > 0.1
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(ids).logits, late, rtol=0, atol=1e-4)
        torch.testing.assert_close(load(tmp_path, base=tmp_path / "base")(ids).logits, late, rtol=0, atol=1e-4)
    assert export_hf([str(tmp_path), "-o", str(tmp_path / "none"), "--merge"]) == 2
    assert "--base: found none" in capsys.readouterr().err
    saved(tmp_path / "other", "Llama", vocab_size=512)
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    capsys.readouterr()
    for base, message in (("other", "vocab_size: found 512, expected 256"), ("mamba", "model_type: found 'mamba'")):
        assert export_hf([str(tmp_path), "--base", str(tmp_path / base), "-o", str(tmp_path / "none")]) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1 and not (tmp_path / "none").exists()
    for other, message in (({"alpha": 8.0}, "alpha: found 24.0"), ({"targets": ["query"]}, "targets: found .*'down'")):
        with pytest.raises(RuntimeError, match=f"lora.{message}"):
            run_ranks(run_rank, 2, job_of(tmp_path / "base", corpus, parallel, STEPS, tmp_path, lora=lora | other))


def losses_with_additions(rank, port, problem, plan, options):
    """Losses of a rank, and the names of what it trains."""
    losses, names = [], []
    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
        on_start=lambda training: names.extend(training.worker.parameters()),
    )
    return losses, names


def uniform(problem, **config):
    """A plan that splits all evenly."""
    return uniform_plan(problem, ParallelConfig(micro_batch_size=2, **config))


ADDED_UNDER = {
    "tensor parallel": ("Llama", lambda problem: uniform(problem, tp=2)),
    "split by tokens": ("Llama", lambda problem: uniform(problem, tp=2, sequence_parallel=True)),
    "more devices than key heads": ("Llama", lambda problem: uniform(problem, tp=4)),
    "more devices than key heads, by tokens": ("Llama", lambda problem: uniform(problem, tp=4, sequence_parallel=True)),
    "embedding and head alone": (
        "Llama",
        lambda problem: small_plan(problem.cluster, [(0, 1), (1, 3), (3, 4)], [[0], [1], [2]], [[0, 0, 0]] * 4),
    ),
    "ZeRO-3": ("Llama", lambda problem: uniform(problem, dp=2, zero=3)),
    "experts apart, ZeRO-2": ("Qwen3Moe", lambda problem: uniform(problem, dp=2, ep=2, zero=2)),
}


@pytest.mark.parametrize("name", ADDED_UNDER)
def test_additions_are_the_same_under_any_plan(name, corpus, tmp_path):
    """Losses of additions to attention (and to the MLP) equal those of one process to 1e-5, resumed ones too: where
    layers are cut, where a stage has nothing to train, where ZeRO would split what is fixed.
    """
    pytest.importorskip("peft")
    kind, plan_of = ADDED_UNDER[name]
    saved(tmp_path / "base", kind, **({"vocab_size": 256} | (QWEN3_MOE if kind == "Qwen3Moe" else {})))
    problem = Problem(
        cluster=small_cluster(4),
        model=read_model(tmp_path / "base"),
        batch=Batch(global_batch=8, seq_len=16, precision="fp32"),
    )
    targets = ("query", "key", "value", "output", *(("up", "down") if kind == "Llama" else ()))
    data = DataChoice(paths=(corpus,), token_type="uint16")
    options = Options(
        steps=6, learning_rate=3e-2, data=data, weights=tmp_path / "base", timeout_s=PATIENCE_S,
        lora=Lora(rank=4, alpha=16.0, targets=targets), checkpoint_dir=tmp_path / "saved", resume=True,
    )  # fmt: skip
    plan = plan_of(problem)
    found = run_ranks(losses_with_additions, plan.world_size, problem, plan, replace(options, steps=4))
    names = {name for _, trained in found for name in trained}
    assert names and all("lora" in name for name in names)
    more = run_ranks(losses_with_additions, plan.world_size, problem, plan, options)
    alone = replace(options, checkpoint_dir=None, resume=False)
    [(expected, _)] = run_ranks(losses_with_additions, 1, problem, uniform(problem), alone)
    assert expected[-1] < 0.99 * expected[0]
    for (first, _), (last, _) in zip(found, more, strict=True):
        assert first + last == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("first", [None, Lora(rank=2)])
def test_additions_and_weights_do_not_go_on_from_one_another(first, base, corpus, tmp_path):
    """Without `--lora` most layers have no file among additions: such a run began anew, and wrote over them."""
    problem = Problem(
        cluster=small_cluster(1),
        model=read_model(base),
        batch=Batch(global_batch=2, seq_len=16, precision="fp32"),
    )
    options = Options(
        steps=1, data=DataChoice(paths=(corpus,), token_type="uint16"), weights=base, lora=first,
        checkpoint_dir=tmp_path / "saved",
    )  # fmt: skip
    run_ranks(losses_with_additions, 1, problem, uniform(problem), options)
    kept = sorted(tmp_path.glob("saved/*/*"))
    other = Lora(rank=2) if first is None else None
    message = "none (all weights), expected rank 2" if first is None else "rank 2, expected none (all weights)"
    with pytest.raises(RuntimeError, match=re.escape(f"saved: lora: found {message}, as this run trains")):
        run_ranks(
            losses_with_additions, 1, problem, uniform(problem), replace(options, steps=2, lora=other, resume=True)
        )
    assert sorted(tmp_path.glob("saved/*/*")) == kept


def test_additions_to_routed_experts_are_refused(base):
    """In a line, before anything starts."""
    with pytest.raises(InputError, match="'up', expected none that routed experts have"):
        check_lora(read_model(base), Lora(targets=("query", "up")))
