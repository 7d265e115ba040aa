"""Cluster and model, from what people have: files, dictionaries, catalogues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polygon.api.html import html_table
from polygon.domain import cluster as domain_cluster
from polygon.domain import model as domain_model
from polygon.domain.errors import located, require
from polygon.domain.message import Message
from polygon.formats import catalogue, convert, files, hugging_face, import_formats, recognition
from polygon.formats.files import PathLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cluster:
    """Devices in regions, and the links between them.

    Parameters
    ----------
    data : polygon.domain.cluster.Cluster
        The planner's record; `from_yaml`, `from_dict` and `from_hostfile` make one.

    Examples
    --------
    >>> from polygon import Cluster
    >>> lab = Cluster.from_dict({
    ...     "name": "lab",
    ...     "regions": [
    ...         {"name": "berlin", "nodes": [{"device": "a100-40gb", "count": 2, "devices_per_node": 4}]},
    ...         {"name": "tokyo", "nodes": [{"device": "t4", "count": 3, "devices_per_node": 4}]},
    ...     ],
    ...     "links": [{"between": ["berlin", "tokyo"], "latency_ms": 120, "bandwidth_gbps": 0.8}],
    ... })
    >>> lab
    Cluster('lab': 20 devices in berlin, tokyo)
    """

    data: domain_cluster.Cluster

    @classmethod
    def from_yaml(cls, path: PathLike) -> Cluster:
        """The cluster of a file: polygon's YAML or JSON, PTAFM's text or a hostfile, told apart by content.

        Parameters
        ----------
        path : path

        Raises
        ------
        InputError
            With the file, the place in it, what was found and what is allowed.
        """
        return cls(files.read_cluster(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster of plain data, with the keys of a cluster file (docs/file-formats.md).

        Parameters
        ----------
        data : mapping
            In the units of files: ms, Gbit/s, GiB.

        Raises
        ------
        InputError
            With the place in the data.
        """
        with located("cluster: "):
            return cls(recognition.cluster_from_data(dict(data), "cluster"))

    @classmethod
    def from_hostfile(cls, path: PathLike, *, device: str | None = None) -> Cluster:
        """The cluster of a hostfile, lines ``HOST slots=N type=DEVICE``: one region with the usual links.

        Parameters
        ----------
        path : path
            Hosts with equally many devices of one type become one group of nodes.
        device : str, optional
            Name in the catalogue of what the hosts have whose line names no type, as those of DeepSpeed's hostfiles.

        Raises
        ------
        InputError
            For a file of another kind, a host twice, or a line without a type where `device` names none either.
        """
        text = files.read_text(path)
        with located(f"{path}: "):
            require(import_formats.is_hostfile(text), "line 1", text.split("\n", 1)[0], "HOST slots=N type=DEVICE")
            return cls(recognition.cluster_from_data(import_formats.hostfile_cluster(text, device), files.stem(path)))

    @property
    def name(self) -> str:
        """What the cluster is called."""
        return self.data.name

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return tuple(region.name for region in self.data.regions)

    @property
    def devices(self) -> int:
        """Devices in all regions."""
        return self.data.devices

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, every device type and link spelt out."""
        return convert.cluster_data(self.data)

    def save(self, path: PathLike) -> None:
        """Write the cluster as YAML, or as JSON where the name ends so.

        Parameters
        ----------
        path : path

        Raises
        ------
        InputError
            Where the file cannot be written.
        """
        files.write_cluster(path, self.data)

    def plot_map(self) -> Figure:
        """Picture of the regions by their devices (needs matplotlib, and says so)."""
        from polygon.api.plots import plot_map

        return plot_map(self.data)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}: {self.devices} devices in {', '.join(self.regions)})"

    def _repr_html_(self) -> str:
        regions = self.data.regions
        rows = [
            [regions[pool.region].name, f"{pool.nodes} x {pool.devices_per_node} {pool.device.name}"]
            for pool in self.data.pools
        ]
        return html_table(repr(self), ["region", "nodes x devices"], rows)


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """A decoder-only language model or a vision transformer, by its shape.

    Parameters
    ----------
    data : polygon.domain.model.Model
        The planner's record; `from_catalogue`, `from_hf` and `from_yaml` make one.

    Examples
    --------
    >>> from polygon import Model
    >>> Model.from_catalogue("gpt3-1.3b")
    Model('gpt3-1.3b': 1.32e+09 parameters)
    >>> Model.from_catalogue("gpt3-1.3b") == Model.from_catalogue("GPT3 1.3B")
    True
    """

    data: domain_model.Model

    @classmethod
    def from_catalogue(cls, name: str) -> Model:
        """A model of the catalogue (``polygon show models``), by name or alias.

        Parameters
        ----------
        name : str
            Such as ``'llama2-7b'``.

        Raises
        ------
        InputError
            Naming the nearest known ones.
        """
        with located("model: "):
            return cls(catalogue.model(name))

    @classmethod
    def from_hf(cls, config: PathLike | Mapping[str, Any]) -> Model:
        """The model of a Hugging Face ``config.json``.

        Parameters
        ----------
        config : path or mapping
            The file, the folder that it lies in, or its parsed content (such as ``AutoConfig(...).to_dict()``).

        Raises
        ------
        InputError
            For a `model_type` that is not supported, and for sizes that are none.
        """
        if isinstance(config, Mapping):
            with located("config: "):
                return cls(hugging_face.hugging_face_model(config, str(config.get("_name_or_path") or "model")))
        path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        data = files.read_json(path)
        with located(f"{path}: "):
            known = hugging_face.is_hugging_face(data)
            require(known, "config", keys_of(data), "Hugging Face's config.json, with model_type")
            return cls(hugging_face.hugging_face_model(data, files.model_name(path)))

    @classmethod
    def from_yaml(cls, path: PathLike) -> Model:
        """The model that a file of polygon's own format spells out.

        Parameters
        ----------
        path : path

        Raises
        ------
        InputError
            With the place in the file.
        """
        text = files.read_text(path)
        with located(f"{path}: "):
            return cls(recognition.model_from_text(text, files.model_name(path)))

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.data.name

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied head counted once."""
        return self.data.parameters

    @property
    def layers(self) -> int:
        """Layers that a plan distributes: embedding, blocks, head."""
        return self.data.layers

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the keys of a model file."""
        return convert.model_data(self.data)

    def __repr__(self) -> str:
        return f"Model({self.name!r}: {self.parameters:.3g} parameters)"


def keys_of(data: object) -> Message:
    """What a file has in place of what is looked for."""
    if isinstance(data, Mapping):
        return Message("found.keys", keys=tuple(map(str, data)))
    return Message("found.type", name=type(data).__name__)
