"""Low-rank additions in peft's files: the real peft reads ours beside transformers' models, and we read its own."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from polygon.domain.errors import InputError
from polygon.domain.model import Model
from polygon.formats.schema import check
from runners.engine.additions import add_lora
from runners.engine.pretrained import Pretrained
from runners.recipes.backends import Job
from runners.recipes.recipe_schema import LoraPart, Recipe
from runners.recipes.replicas.adapter import CONFIG, TENSORS, load_adapter, read_adapter, save_adapter, trained
from runners.recipes.replicas.loop import check_replicated
from runners.recipes.replicas.whole import WholeModel
from runners.recipes.weights import load_weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed: its models are not tried")
# peft 0.21 calls what transformers 5.23 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PART = LoraPart(rank=4, alpha=6.0, targets=("query", "value", "down"))
SIZES = {"blocks": 2, "hidden_size": 32, "heads": 4, "head_dim": 8, "ffn_size": 64}
VIT = Model(
    name="vit", family="vit", kv_heads=4, vocab_size=10, max_seq_len=17, image_size=8, patch_size=2, channels=1,
    causal=False, tied_embeddings=False, **SIZES,
)  # fmt: skip
QWEN = Model(
    name="qwen", family="llama", kv_heads=2, vocab_size=64, max_seq_len=64, gated_mlp=True, rms_norm=True,
    learned_positions=False, qkv_bias=True, linear_bias=False, norm_eps=1e-6, **SIZES,
)  # fmt: skip


def theirs_of(model):
    """transformers' model of the same shape, with large enough weights that every part counts."""
    shape = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    if model.family == "vit":
        images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "layer_norm_eps": 1e-6}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, **images)).eval()
    text = {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, **text)).eval()


def drawn(model):
    """Inputs and targets."""
    torch.manual_seed(1)
    if model.family == "vit":
        return torch.randn(4, 1, 8, 8), torch.arange(4)
    ids = torch.randint(64, (2, 9))
    return ids[:, :-1], ids[:, 1:]


def loss_of(theirs, model):
    """Summed cross-entropy as transformers computes it."""
    inputs, targets = drawn(model)
    with torch.no_grad():
        logits = theirs(inputs).logits
        return float(functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"))


def ours_of(model, folder):
    """The whole model with transformers' weights and additions."""
    if model.family == "vit":
        whole = WholeModel(model, 0)
        load_weights(whole.layers, model, folder)
    else:
        whole = WholeModel(model, 0, pretrained=Pretrained(folder, model))
    add_lora(whole.layers, whole.model, PART, seed=0)
    return whole


@pytest.fixture(params=[VIT, QWEN], ids=lambda model: model.name)
def model(request):
    return request.param


@pytest.fixture
def peft():
    """Seconds to import: not for every worker that collects the tests."""
    return pytest.importorskip("peft", reason="peft is not installed: its files are not tried")


def test_peft_loads_what_was_trained_here(model, peft, tmp_path):
    """Beside the same base, peft's own loader gives our loss to 1e-4, which training has moved from the base's."""
    theirs = theirs_of(model)
    theirs.save_pretrained(tmp_path / "base")
    whole = ours_of(model, tmp_path / "base")
    inputs, targets = drawn(model)
    before = float(whole(inputs, targets).detach())
    assert before == pytest.approx(loss_of(theirs, model), rel=1e-4)
    optimizer = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        whole(inputs, targets).backward()
        optimizer.step()
    after = float(whole(inputs, targets).detach())
    assert after < 0.95 * before
    save_adapter(whole.model, PART, trained(whole), tmp_path / "adapter", tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
    assert loss_of(loaded, model) == pytest.approx(after, rel=1e-4)
    again = ours_of(model, tmp_path / "base")
    load_adapter(again, PART, tmp_path / "adapter")
    assert float(again(inputs, targets).detach()) == after


def test_an_adapter_of_peft_is_read(model, peft, tmp_path):
    """What peft saved beside transformers' model gives the same loss here; a head that it leaves out stays as it is."""
    theirs = theirs_of(model)
    theirs.save_pretrained(tmp_path / "base")
    names = ["q_proj", "v_proj", "fc2"] if model.family == "vit" else ["q_proj", "v_proj", "down_proj"]
    settings = {"r": PART.rank, "lora_alpha": PART.alpha, "init_lora_weights": False}
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**settings, target_modules=names)).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    whole = ours_of(model, tmp_path / "base")
    load_adapter(whole, PART, tmp_path / "adapter")
    assert float(whole(*drawn(model)).detach()) == pytest.approx(loss_of(adapted, model), rel=1e-4)


def test_names_of_transformers_4_are_read(tmp_path):
    """Vision transformers had other names there."""
    whole = WholeModel(VIT, 0)
    add_lora(whole.layers, whole.model, PART, seed=0)
    save_adapter(whole.model, PART, trained(whole), tmp_path, None)
    from safetensors.torch import load_file, save_file

    renamed = {
        "vit.layers": "vit.encoder.layer", "attention.q_proj": "attention.attention.query",
        "attention.v_proj": "attention.attention.value", "mlp.fc2": "output.dense",
    }  # fmt: skip
    older = {}
    for name, tensor in load_file(tmp_path / TENSORS).items():
        for new, old in renamed.items():
            name = name.replace(new, old)
        older[name] = tensor
    save_file(older, tmp_path / TENSORS)
    found, expected = read_adapter(VIT, PART, tmp_path), trained(whole)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("lora", "said", "message"),
    [
        ({"rank": 8}, {}, "adapter_config.json: r: found 4, expected 8"),
        ({"alpha": 16.0}, {}, "lora_alpha: found 6.0, expected 16.0"),
        ({"targets": ["query"]}, {}, "found base_model.model.vit.layers.0.attention.v_proj.lora_A.weight"),
        ({"targets": ["query", "value", "down", "up"]}, {}, "found no base_model.model.vit.layers.0.mlp.fc1.lora_A"),
        ({}, {"use_dora": True}, "use_dora: found True, expected None"),
        ({}, {"peft_type": "IA3"}, "peft_type: found 'IA3', expected 'LORA'"),
        ({}, None, "expected peft's settings"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(lora, said, message, tmp_path):
    """Before any rank starts, with the setting or the tensor that differs."""
    whole = WholeModel(VIT, 0)
    add_lora(whole.layers, whole.model, PART, seed=0)
    save_adapter(whole.model, PART, trained(whole), tmp_path, None)
    text = (tmp_path / CONFIG).read_text()
    (tmp_path / CONFIG).write_text("{" if said is None else json.dumps(json.loads(text) | said))
    change = {key: getattr(VIT, key) for key in (*SIZES, "kv_heads", "vocab_size", "image_size", "patch_size")}
    data = {
        "name": "adapted", "model": {"source": "vit-base", "change": change | {"channels": 1, "max_seq_len": 17}},
        "batch": {"global_batch": 4}, "backend": "ddp",
        "lora": {"rank": 4, "alpha": 6.0, "targets": list(PART.targets), "adapter": str(tmp_path)} | lora,
    }  # fmt: skip
    with pytest.raises(InputError) as error:
        check_replicated(Job(check(Recipe, data), Path(), tmp_path, "cpu"))
    assert message in str(error.value)
