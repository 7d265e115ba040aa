"""Foreign formats: Hugging Face shapes against the real library's counts, PTAFM's file against our own form of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from polygon import files
from polygon.domain.errors import InputError
from polygon.foreign import FAMILIES, hugging_face_model

COUNTS = [
    ("gpt2", {}, 124439808),
    ("gpt2", {"vocab_size": 1000, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 4}, 731264),
    ("opt", {}, 125239296),
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
        262144,
    ),
    ("gpt_neo", {"hidden_size": 128, "num_layers": 4, "num_heads": 4}, 7486848),
    (
        "gpt_neox",
        {
            "vocab_size": 1000,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 512,
        },
        652800,
    ),
    ("llama", {"num_hidden_layers": 2}, 666914816),
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
        792448,
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
        895872,
    ),
    ("qwen2", {"num_hidden_layers": 2}, 1919987712),
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
        847488,
    ),
    ("qwen3", {"num_hidden_layers": 2}, 1919963648),
    ("mistral", {"num_hidden_layers": 2}, 698372096),
    (
        "mixtral",
        {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16},
        40643072,
    ),
    ("qwen2_moe", {"num_hidden_layers": 2, "num_experts": 8}, 863561728),
    ("qwen3_moe", {"num_hidden_layers": 2, "num_experts": 8}, 716744960),
    ("vit", {}, 85800194),
    (
        "vit",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 32,
            "patch_size": 8,
            "id2label": dict.fromkeys("0123456789"),
        },
        81226,
    ),
]
"""(model_type, keys of config.json, parameters that transformers 4.57.1 counts in the model it builds from it)."""


def left_out(model_type, model):
    """Parameters that polygon's shapes do not have, by design."""
    return {
        "opt": 2 * model.hidden_size,  # two positions that are never used
        "qwen3": 2 * model.head_dim * model.blocks,  # norms of queries and keys
        "qwen3_moe": 2 * model.head_dim * model.blocks,
        "qwen2_moe": model.hidden_size * model.blocks,  # gate of the shared expert
    }.get(model_type, 0)


@pytest.mark.parametrize(("model_type", "config", "parameters"), COUNTS)
def test_parameters_are_those_of_the_real_library(model_type, config, parameters):
    """A config read with its model_type's defaults has exactly the parameters that transformers gives it."""
    model = hugging_face_model({"model_type": model_type, **config}, "name")
    assert model.parameters + left_out(model_type, model) == parameters


def test_every_supported_type_is_held_against_the_library():
    """No family without a count from the real library."""
    assert {model_type for model_type, _, _ in COUNTS} == set(FAMILIES)


def test_text_part_of_a_multi_modal_config():
    """The language model nested in text_config is read; keys beside it are not mixed in."""
    inner = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    model = hugging_face_model({"model_type": "qwen2_vl", "text_config": inner, "vision_config": {}}, "name")
    assert (model.blocks, model.hidden_size, model.heads, model.kv_heads) == (3, 64, 4, 4)


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
        ({"model_type": "llma"}, "model_type: found 'llma', expected 'llama' (nearest) or another of gpt2,"),
        ({"architectures": ["X"]}, "model_type: found nothing, expected one of gpt2,"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer: found 0, expected a whole number >= 1"),
        ({"model_type": "gpt2", "n_layer": 2.5}, "n_layer: found 2.5, expected a whole number >= 1"),
        ({"model_type": "llama", "kv_lora_rank": 512}, "kv_lora_rank: found 512, expected nothing: latent attention"),
        (
            {"model_type": "llama", "num_key_value_heads": 5},
            "model.kv_heads: found 5, expected a divisor of heads = 32",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step: found 2, expected 1"),
        ({"text_config": 3}, "text_config: found 'int', expected a mapping"),
    ],
)
def test_configs_that_cannot_be_read(config, message):
    """The message names the key, what was found and what is allowed."""
    with pytest.raises(InputError) as error:
        hugging_face_model(config, "name")
    assert str(error.value).startswith(message)


def test_ptafm_file_and_our_own_form_of_it_are_one_cluster():
    """The ancestor's text file, unchanged, gives the shipped YAML; but for one slip in its data."""
    text, yaml = files.read_cluster("instances/ptafm-7dc.txt"), files.read_cluster("instances/ptafm-7dc.yaml")
    assert (text.stages, text.devices) == (yaml.stages, yaml.devices) == (5, 96)
    assert text.name == yaml.name == "ptafm-7dc"
    assert text.regions[:5] == yaml.regions[:5] and text.regions[6] == yaml.regions[6]
    np.testing.assert_array_equal(text.latency_s, yaml.latency_s)
    assert np.argwhere(text.bytes_per_s != yaml.bytes_per_s).tolist() == [[5, 5]]


PTAFM = """NUM_STAGE:2
POWER_SECTION
1 [1,2]
2 [0,3]
end
LATENCY_SECTION
1 1 0.1
1 2 30
2 2 0.1
end
BANDWIDTH_SECTION
1 1 200
2 1 0.5
2 2 200
end
"""


def test_ptafm_units(tmp_path):
    """Milliseconds one way, Gbit/s, and pairs of centers in either order."""
    file = tmp_path / "two.txt"
    file.write_text(PTAFM, encoding="utf-8")
    cluster = files.read_cluster(file)
    assert [region.name for region in cluster.regions] == ["dc1", "dc2"]
    assert [(pool.device.name, pool.devices) for pool in cluster.pools] == [("a100-40gb", 1), ("t4", 2), ("t4", 3)]
    assert cluster.latency_s[0, 1] == cluster.latency_s[1, 0] == 0.030
    assert cluster.bytes_per_s[0, 1] == cluster.bytes_per_s[1, 0] == 0.5e9 / 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1 [1,2]", "1 [1;2]", "line 3: found '1 [1;2]', expected 'CENTER [A100s,T4s]'"),
        ("1 [1,2]", "1 [0,0]", "line 3: POWER_SECTION: found '1 [0,0]', expected at least one device"),
        ("2 [0,3]", "1 [0,3]", "line 4: POWER_SECTION: found 1, expected a center that no earlier line gives"),
        ("1 2 30", "1 3 30", "line 8: LATENCY_SECTION: found 3, expected a center of POWER_SECTION"),
        ("1 2 30", "1 2 x", "line 8: found '1 2 x', expected 'CENTER CENTER NUMBER'"),
        ("2 1 0.5", "2 1 0", "line 13: BANDWIDTH_SECTION: found 0.0, expected a number > 0"),
        ("2 1 0.5\n", "", "BANDWIDTH_SECTION: found no line for centers 1 2, expected one a pair"),
        ("2 1 0.5", "2 1 0.5\n1 2 0.6", "line 14: BANDWIDTH_SECTION: found 0.6, expected 0.5, which an earlier line"),
        ("NUM_STAGE:2", "NUM_STAGE:two", "line 1: NUM_STAGE: found 'two', expected a number >= 1"),
        ("NUM_STAGE:2", "", "NUM_STAGE: found nothing, expected a line NUM_STAGE:n"),
        ("2 2 200\nend\n", "2 2 200\n", "BANDWIDTH_SECTION: found the end of the file, expected a line 'end'"),
        ("2 2 0.1\nend\n", "", "line 9: found 'BANDWIDTH_SECTION', expected 'end' of LATENCY_SECTION before it"),
        ("POWER_SECTION", "POWER", "line 2: found 'POWER', expected NUM_STAGE:n or POWER_SECTION, LATENCY_SECTION"),
    ],
)
def test_ptafm_faults_name_the_line(old, new, message, tmp_path):
    """Every fault says in which line or section, what was found and what is allowed."""
    assert old in PTAFM
    file = tmp_path / "bad.txt"
    file.write_text(PTAFM.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as error:
        files.read_cluster(file)
    assert str(error.value).startswith(f"{file}: {message}")


def test_hostfile(tmp_path):
    """Hosts of one type and size form a group of nodes; comments and blank lines are skipped."""
    file = tmp_path / "hostfile"
    file.write_text("# ours\nn1 slots=8 type=A100\n\nn2 slots=8 type=A100  # new\nn3 slots=4 type=T4\n", "utf-8")
    cluster = files.read_cluster(file)
    shape = [(pool.device.name, pool.nodes, pool.devices_per_node) for pool in cluster.pools]
    assert shape == [("a100-40gb", 2, 8), ("t4", 1, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2 type=t4\na slots=2 type=t4\n", "line 2: found 'a', expected each host once"),
        ("a slots=2\n", "line 1: found 'a slots=2' without a type, expected type=DEVICE at the end of the line"),
        ("a slots=2 type=t4\nb slot=2\n", "line 2: found 'b slot=2', expected 'HOST slots=N type=DEVICE' with N >= 1"),
        ("a slots=0 type=t4\n", "line 1: found 'a slots=0 type=t4', expected 'HOST slots=N type=DEVICE' with N >= 1"),
        ("a slots=2 type=t44\n", "regions[0].nodes[0].device: found device 't44', expected 't4' (nearest)"),
    ],
)
def test_hostfile_faults(text, message, tmp_path):
    """Every fault names its line."""
    file = tmp_path / "hostfile"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        files.read_cluster(file)
    assert str(error.value).startswith(f"{file}: {message}")
