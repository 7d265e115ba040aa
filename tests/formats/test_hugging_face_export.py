"""A model written as Hugging Face's `config.json` is read again as itself."""

from dataclasses import replace

import pytest

from polygon.domain.errors import InputError
from polygon.formats import catalogue
from polygon.formats.hugging_face import hugging_face_model
from polygon.formats.hugging_face_export import hugging_face_config

UNSAID = ("name", "source", "notes")


def written(model):
    """The config of a model, or None where no kind is computed as it is."""
    try:
        return hugging_face_config(model)
    except InputError:
        return None


MODELS = {name: config for name, model in catalogue.models().items() if (config := written(model)) is not None}


def test_the_usual_models_have_a_config():
    """Llama, Mixtral, Qwen and GPT-2 do; vision models do not, nor do towers, and are refused in words."""
    assert {config["model_type"] for config in MODELS.values()} >= {"llama", "mixtral", "gpt2", "qwen2"}
    assert len(MODELS) > 10
    for name, said in (("vit-base", "family vit"), ("qwen2-vl-7b", "a tower of another modality")):
        with pytest.raises(InputError, match=said):
            hugging_face_config(catalogue.model(name))


@pytest.mark.parametrize(("name", "kind"), [("qwen3-8b", "qwen3"), ("qwen3-30b-a3b", "qwen3_moe")])
def test_qwen3_is_no_llama_and_no_mixtral(name, kind):
    """Its heads have norms of their own, in the catalogue too."""
    assert MODELS[name]["model_type"] == kind


@pytest.mark.parametrize("name", MODELS)
def test_it_is_read_as_the_same_model(name):
    """With as many parameters and the same sizes; name, notes and the MLP of blocks that are none aside."""
    model = catalogue.model(name)
    again = hugging_face_model(MODELS[name], name)
    assert again.parameters == model.parameters
    aside = (*UNSAID, "ffn_size") if model.experts and not model.dense_blocks else UNSAID
    assert replace(again, **{key: getattr(model, key) for key in aside}) == model
