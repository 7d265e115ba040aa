"""Texts in every format that polygon reads, recognised by their content: what files and uploads have in common."""

from __future__ import annotations

from typing import Any

from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError, Phrase, fault
from polygon.domain.model import Model
from polygon.formats import catalogue, convert, hugging_face
from polygon.formats import import_formats as foreign
from polygon.formats.schema import ClusterSpec, ModelSpec, check
from polygon.formats.serialization import MOST_VALUES, check_text, parse_json, parse_yaml


def parse(text: str, most_values: int = MOST_VALUES) -> Any:
    """Plain data of YAML (with at most so many values) or JSON, whichever the text looks like."""
    try:
        return parse_json(text) if text.lstrip()[:1] in ("{", "[") else parse_yaml(text, most_values=most_values)
    except InputError:
        if "\ufffd" in text:  # what a browser makes of other bytes
            raise fault("", Phrase("bytes that are not UTF-8"), "UTF-8 text") from None
        raise


def parse_cluster(text: str, most_values: int = MOST_VALUES) -> Any:
    """Plain data in the form of polygon's own cluster files, from that or from PTAFM's text or a hostfile."""
    if foreign.is_ptafm(text):
        return foreign.ptafm_cluster(text)
    return foreign.hostfile_cluster(text) if foreign.is_hostfile(text) else parse(text, most_values)


def cluster_from_text(text: str, name: str, most_values: int = MOST_VALUES) -> Cluster:
    """The cluster that a text describes; `name` is what it is called if it does not say.

    Raises
    ------
    InputError
        With the place inside the text.
    """
    check_text(text, ClusterSpec.wanted)
    return cluster_from_data(parse_cluster(text, most_values), name)


def cluster_from_data(data: Any, name: str) -> Cluster:
    """The cluster of plain data."""
    return convert.cluster_from_spec(check(ClusterSpec, data), default_name=name)


def model_from_text(text: str, name: str, most_values: int = MOST_VALUES) -> Model:
    """The model that a text describes: polygon's own YAML or Hugging Face's `config.json`.

    Raises
    ------
    InputError
        With the place inside the text.
    """
    check_text(text, ModelSpec.wanted)
    data = parse(text, most_values)
    if hugging_face.is_hugging_face(data):
        return hugging_face.hugging_face_model(data, name)
    return catalogue.model_from_spec(check(ModelSpec, {"name": name, **data} if isinstance(data, dict) else data))
