"""Hugging Face configs: every parameter that its library counts, and what differs from layer to layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.hugging_face_models import FOLDER, STAND_INS, Row, library_config, library_parameters, row_of, updated
from polygon.domain.errors import InputError
from polygon.formats import files
from polygon.formats.convert import model_data
from polygon.formats.hugging_face import AHEAD, ENCODER, NARROW, NO_TOWER, TEXT, VISION, hugging_face_model
from polygon.formats.hugging_face_types import TYPES
from polygon.formats.serialization import format_json

CONFIGS = sorted(FOLDER.glob("*.json"))
ASKED = """deepseek_v2 deepseek_v3 gemma2 gemma3 gemma3_text phi phi3 gpt_oss llama llama4 olmo2 glm4 granite smollm3
starcoder2 cohere internlm2 qwen2 qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next mistral mixtral falcon bloom mpt gptj
gpt_neox opt bert roberta modernbert t5 vit dinov2 siglip gemma glm4_moe olmo3 cohere2"""
"""Types whose published configs must be read as they are."""
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mt5": "MT5ForConditionalGeneration",
    "xlm-roberta": "XLMRobertaForMaskedLM",
}
"""Of types without a config in polygon/domain/catalogue/configs."""
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}, "internlm2": {"vocab_size": 32000, "bias": False},
          "nemotron": {"num_key_value_heads": 8}}  # fmt: skip
"""Keys whose defaults the library does not have."""
VARIANTS = [
    ("gpt2", {"vocab_size": 1000, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 4}),
    (
        "opt",
        {
            "vocab_size": 500,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
            "ffn_dim": 256,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "enable_bias": False,
        },
    ),
    (
        "gpt_neo",
        {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    ),
    (
        "gpt_neox",
        {
            "vocab_size": 1000,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 512,
        },
    ),
    ("llama", {"num_hidden_layers": 2}),
    (
        "llama",
        {
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 48,
            "tie_word_embeddings": True,
        },
    ),
    (
        "llama",
        {
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
    ),
    ("qwen2", {"num_hidden_layers": 2}),
    (
        "qwen2",
        {
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    ("qwen3", {"num_hidden_layers": 2}),
    ("mistral", {"num_hidden_layers": 2}),
    ("mixtral", {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16}),
    ("qwen2_moe", {"num_hidden_layers": 2, "num_experts": 8}),
    ("qwen3_moe", {"num_hidden_layers": 2, "num_experts": 8}),
    (
        "vit",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 32,
            "patch_size": 8,
            "id2label": {
                "0": None,
                "1": None,
                "2": None,
                "3": None,
                "4": None,
                "5": None,
                "6": None,
                "7": None,
                "8": None,
                "9": None,
            },
        },
    ),
    ("qwen3_moe", {"num_hidden_layers": 4, "num_experts": 8, "decoder_sparse_step": 2}),
    ("qwen3_moe", {"num_hidden_layers": 4, "num_experts": 8, "mlp_only_layers": [0, 1]}),
    (
        "qwen3_next",
        {
            "num_hidden_layers": 3,
            "num_experts": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    ("deepseek_v3", {"num_hidden_layers": 3, "n_routed_experts": 8, "first_k_dense_replace": 1, "q_lora_rank": None}),
    ("falcon", {"num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 71, "bias": True}),
    (
        "falcon",
        {"num_hidden_layers": 2, "multi_query": False, "parallel_attn": False, "alibi": True, "num_kv_heads": 71},
    ),
    ("phi", {"num_hidden_layers": 2, "qk_layernorm": True}),
    ("cohere", {"num_hidden_layers": 2, "use_qk_norm": True}),
    ("glm4_moe", {"num_hidden_layers": 3, "n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True}),
    ("olmoe", {"num_hidden_layers": 2, "num_experts": 16, "num_key_value_heads": 4}),
    ("gpt_neox", {"num_hidden_layers": 2, "attention_bias": False}),
    ("starcoder2", {"num_hidden_layers": 2, "use_bias": False}),
    ("t5", {"num_layers": 2, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"}),
    ("dinov2", {"num_hidden_layers": 2, "use_swiglu_ffn": True}),
    (
        "llama4",
        {
            "text_config": {
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {"num_hidden_layers": 2},
        },
    ),
    (
        "gemma3",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2, "vision_use_head": False}},
    ),
    (
        "siglip",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 3, "intermediate_size": 1024}},
    ),
]
"""Options of some types, of few layers and experts so that what they change counts."""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """The published configs, counted by both."""
    return [row_of(path) for path in CONFIGS]


def test_published_models_have_the_parameters_of_the_library(rows):
    """All types that are asked for, each to a thousandth (1 % is asked)."""
    assert {row.model_type for row in rows} >= set(ASKED.split())
    assert {row.name: row.difference for row in rows if abs(row.difference) > 1e-3} == {}


def test_the_documented_table_is_what_the_command_prints(rows):
    """docs/models.md holds the counts of this version."""
    text = Path("docs/models.md").read_text("utf-8")
    assert updated(text, rows) == text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_as_the_library_writes_it_is_the_same_model(path):
    """transformers 5 has other keys (`layer_types`, `rope_parameters`, both spellings of a name) and every default."""
    config = json.loads(path.read_text("utf-8"))
    if config["model_type"] not in STAND_INS:
        written = json.loads(library_config(config).to_json_string(use_diff=False))
        assert hugging_face_model(written, "name") == hugging_face_model(config, "name")


def architectures() -> dict[str, str]:
    """Class of the library by type."""
    configs = [json.loads(path.read_text("utf-8")) for path in CONFIGS]
    return {config["model_type"]: config["architectures"][0] for config in configs} | ARCHITECTURES


@pytest.mark.parametrize(
    ("model_type", "config"), [*((name, NEEDED.get(name, {})) for name in TYPES), *VARIANTS], ids=str
)
def test_keys_that_are_left_out_have_the_librarys_defaults(model_type, config):
    """A type alone, and options of some, to a thousandth."""
    whole = {"model_type": model_type, **config}
    model = hugging_face_model(whole, "name")
    found = model.parameters - model.prediction_parameters()
    assert found == pytest.approx(
        library_parameters({**whole, "architectures": [architectures()[model_type]]}), rel=1e-3
    )


def published(name):
    return files.read_model(FOLDER / f"{name}.json")


def test_attention_differs_from_layer_to_layer():
    """Patterns of the papers: Gemma 3 five windows to one, gpt-oss in turns, Qwen3-Next three linear to one."""
    gemma, oss, linear = published("gemma-3-27b"), published("gpt-oss-20b"), published("qwen3-next-80b-a3b")
    assert [gemma.attention_of(layer) for layer in range(1, 63)] == (["window"] * 5 + ["full"]) * 10 + ["window"] * 2
    assert gemma.block(1).window == 1024 and gemma.block(6).window == 0
    assert [oss.attention_of(layer) for layer in range(1, 25)] == ["window", "full"] * 12
    assert [linear.layer_kind(layer) for layer in (1, 2, 3, 4)] == ["moe, linear"] * 3 + ["moe, full"]
    assert linear.block(4).linear is None and linear.block(1).linear == linear.linear
    bert = published("modernbert-base")
    assert [bert.attention_of(layer) for layer in range(1, 5)] == ["full", "window", "window", "full"]
    assert (bert.window, bert.causal) == (128, False)
    scout = published("llama-4-scout")
    assert [scout.attention_of(layer) for layer in range(1, 5)] == ["chunk", "chunk", "chunk", "full"]


def test_windows_that_are_switched_off_or_hold_all_are_none():
    """Qwen's `use_sliding_window`, Mistral's null, a window of the longest sequence; Qwen's first layers are whole."""
    assert published("qwen2.5-7b").window == published("mixtral-8x7b").window == 0
    assert published("mistral-7b-v0.1").window == 4096
    assert hugging_face_model({"model_type": "mistral", "sliding_window": None}, "m").window == 0
    assert hugging_face_model({"model_type": "mistral", "sliding_window": 131072}, "m").window == 0
    asked = {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 4, "sliding_window": 64}
    partly = hugging_face_model({"model_type": "qwen2", **asked}, "m")
    assert partly.attention_pattern == ("full", "full", "full", "window") and partly.window == 64


def test_experts_in_some_layers():
    """DeepSeek-V3's first three blocks are dense, Llama 4 Maverick's every second one."""
    deepseek, maverick = published("deepseek-v3"), published("llama-4-maverick")
    assert [deepseek.is_sparse(layer) for layer in range(63)] == [False] * 4 + [True] * 58 + [False]
    assert [maverick.is_sparse(layer) for layer in range(5)] == [False, False, True, False, True]
    assert maverick.block(1).ffn_size == 16384 and maverick.block(2).width == 2 * 8192


def test_deepseek_v3_is_what_its_report_says():
    """arXiv:2412.19437: 671e9 parameters, 37e9 for each token, section 4.2; 14e9 more for the second token (README of
    the weights, which hold embedding and head a second time)."""
    model = published("deepseek-v3")
    ahead = model.prediction_parameters()
    assert model.parameters - ahead == pytest.approx(671e9, rel=1e-3)
    assert ahead + 2 * model.head_weight_parameters() == pytest.approx(14e9, rel=0.05)
    alone = hugging_face_model(
        {**json.loads((FOLDER / "deepseek-v3.json").read_text()), "num_nextn_predict_layers": 0}, "m"
    )
    assert alone.active_parameters == pytest.approx(37e9, rel=0.02)
    assert (model.head_dim, model.value_dim, model.latent.kv_rank, model.latent.rope_dim) == (192, 128, 512, 64)


def test_what_a_shape_does_not_say_is_said():
    """Towers, encoders with decoders and further tokens are noted; so is a tower that cannot be counted."""
    assert published("gemma-3-4b").notes == published("qwen2-vl-7b").notes == (VISION,)
    assert published("siglip-base-patch16-224").notes == (TEXT,)
    assert published("t5-large").notes == (ENCODER,)
    assert published("deepseek-v3").notes == published("glm-4.5-air").notes == (AHEAD,)
    assert hugging_face_model({"model_type": "opt", "word_embed_proj_dim": 512}, "opt").notes == (NARROW,)
    inner = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    strange = hugging_face_model({"model_type": "odd", "text_config": inner, "vision_config": {"depth": 3}}, "name")
    assert strange.notes == (NO_TOWER,) and strange.tower is None
    assert (strange.blocks, strange.hidden_size, strange.heads, strange.kv_heads) == (3, 64, 4, 4)


def test_pictures_may_have_a_height_and_a_width():
    """Written as a list of two (InternVL's tower) where they are equal."""
    square = {"model_type": "vit", "image_size": 448, "patch_size": 14}
    listed = {**square, "image_size": [448, 448], "patch_size": [14, 14]}
    assert hugging_face_model(listed, "m") == hugging_face_model(square, "m")


def test_a_tower_of_pixtral_is_counted():
    """Mistral Small 3.1's gated blocks without biases and what joins them: 24.01e9 with its text, as is published."""
    text = {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "intermediate_size": 32768}
    text |= {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072}
    vision = {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "patch_size": 14}
    model = hugging_face_model({"model_type": "mistral3", "text_config": text, "vision_config": vision}, "m")
    assert model.parameters == pytest.approx(24.01e9, rel=1e-3)
    assert model.notes == (VISION,)


def test_a_model_with_everything_survives_its_file(tmp_path):
    """Towers, latent and linear attention and patterns are written and read again as they were."""
    for path in CONFIGS:
        model = files.read_model(path)
        file = tmp_path / "model.json"
        file.write_text(format_json(model_data(model)), "utf-8")
        assert files.read_model(file) == model


def test_folder_file_and_name_of_a_model(tmp_path, monkeypatch):
    """--model takes a folder with config.json, the file itself, or a catalogue name; the name wins over a folder."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}), encoding="utf-8")
    assert files.read_model(folder) == files.read_model(folder / "config.json")
    assert files.read_model(folder).blocks == 3
    assert files.read_model(folder).name == "gpt2"
    monkeypatch.chdir(tmp_path)
    assert files.read_model("gpt2").blocks == 12
    assert files.read_model("./gpt2").blocks == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type: found 'mamba', expected one of bert,"),
        (
            {"model_type": "gpt2", "tie_word_embeddings": "false"},
            "tie_word_embeddings: found 'false', expected true or",
        ),
        ({"model_type": "qwen2", "use_sliding_window": 0.0}, "use_sliding_window: found 0.0, expected true or false"),
        ({"model_type": "falcon", "alibi": "no"}, "alibi: found 'no', expected true or false"),
        ({"model_type": "vit", "image_size": [224, 160]}, "image_size: found [224, 160], expected a whole number >= 1"),
        ({"architectures": ["X"]}, "model_type: found nothing, expected one of bert,"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer: found 0, expected a whole number >= 1"),
        ({"model_type": "gpt2", "n_layer": 2.5}, "n_layer: found 2.5, expected a whole number >= 1"),
        (
            {"model_type": "mixtral", "num_hidden_layers": 10**30},
            "num_hidden_layers: found 1e+30, expected at most 10000",
        ),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 10**30},
            "num_hidden_layers: found 1e+30, expected at most",
        ),
        ({"model_type": "t5", "num_decoder_layers": 10**30}, "num_decoder_layers: found 1e+30, expected at most 10000"),
        ({"model_type": "deepseek_v3", "v_head_dim": None}, "v_head_dim: found nothing, expected a whole number >= 1"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok: found nothing, expected a whole number >= 1"),
        ({"model_type": "gemma2", "layer_types": ["mamba"] * 26}, "layer_types: found 'mamba', expected one of"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types: found ['full_attention'], expected",
        ),
        (
            {"model_type": "llama", "num_key_value_heads": 5},
            "model.kv_heads: found 5, expected a divisor of heads = 32",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [3]},
            "mlp_only_layers: found [0, 1, 2, 4, 5, 6, 7, 8,",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "x"}, "mlp_only_layers: found 'x', expected a list"),
        ({"model_type": "llama4_text", "moe_layers": [3, 3, 9]}, "mlp_only_layers: found [3, 9], expected layers with"),
        ({"model_type": "gemma2", "layer_types": [[]] * 26}, "layer_types: found [], expected one of"),
        ({"model_type": "gpt_neo", "attention_types": 5}, "attention_types: found 5, expected a list"),
        ({"text_config": 3}, "text_config: found 'int', expected a mapping"),
    ],
)
def test_configs_that_cannot_be_read(config, message):
    """The message names the key, what was found and what is allowed."""
    with pytest.raises(InputError) as error:
        hugging_face_model(config, "name")
    assert str(error.value).startswith(message)
