"""Models in Hugging Face's words: what is written is read again as the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polygon.formats import catalogue
from polygon.formats.hugging_face import hugging_face_model
from polygon.formats.hugging_face_export import config_of


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama3-8b", "qwen2.5-3b", "mixtral-8x7b"])
def test_a_configuration_is_read_as_the_model_it_was_written_of(name):
    """Sizes, attention, experts and positions; each kind under its own name in transformers."""
    model = catalogue.model(name)
    written = config_of(model)
    read = hugging_face_model(written, name)
    assert replace(read, source=model.source, notes=model.notes) == model
    assert written["model_type"] == {"gpt3": "gpt2", "llam": "llama", "qwen": "qwen2", "mixt": "mixtral"}[name[:4]]
