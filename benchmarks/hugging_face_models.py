"""Parameters of models read from Hugging Face's config.json, beside those that its library counts.

    python benchmarks/hugging_face_models.py [path/to/config.json ...] [--update docs/models.md] [--json]

The library builds each model without memory for its weights (torch's meta device). Blocks that predict further tokens
are left out on both sides: the library does not build them. `internlm2` is not in the library; its blocks are Llama's.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from polygon.formats.files import read_json, read_model, write_text

FOLDER = Path("polygon/domain/catalogue/configs")
BEGIN, END = "<!-- models -->\n", "<!-- /models -->\n"
STAND_INS = {"internlm2": "llama", "kimi_k2": "deepseek_v3"}
"""Types whose code is beside their checkpoints: what the library has of the same shape."""


@dataclass(frozen=True)
class Row:
    """One config."""

    name: str
    model_type: str
    parameters: int
    """As polygon counts them."""
    library_parameters: int
    active_parameters: int
    notes: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Ours over the library's, less one."""
        return self.parameters / self.library_parameters - 1


def library_config(config: Mapping[str, Any]) -> Any:
    """The library's own object of a config."""
    model_type = config["model_type"]
    rest = copy.deepcopy({key: config[key] for key in config if key not in ("model_type", "architectures")})
    return transformers.AutoConfig.for_model(STAND_INS.get(model_type, model_type), **rest)


def library_parameters(config: Mapping[str, Any]) -> int:
    """What the library counts in the model that it builds from a config; a tied weight once."""
    architecture = "LlamaForCausalLM" if config["model_type"] == "internlm2" else config["architectures"][0]
    with torch.device("meta"):
        return int(getattr(transformers, architecture)(library_config(config)).num_parameters())


def row_of(path: Path) -> Row:
    """A config file, counted by both."""
    config = read_json(path)
    model = read_model(path)
    return Row(
        name=path.stem,
        model_type=config["model_type"],
        parameters=model.parameters - model.prediction_parameters(),
        library_parameters=library_parameters(config),
        active_parameters=model.active_parameters,
        notes=model.notes,
    )


def table(rows: Sequence[Row]) -> str:
    """Rows in Markdown."""
    lines = [
        "| config | `model_type` | parameters | transformers | difference | met by a token | notes |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.model_type, row.name)):
        lines.append(
            f"| {row.name} | {row.model_type} | {row.parameters:,} | {row.library_parameters:,} | "
            f"{100 * row.difference:+.3f} % | {row.active_parameters / 1e9:.3g}e9 | {'; '.join(row.notes)} |"
        )
    return "\n".join(lines) + "\n"


def updated(text: str, rows: Sequence[Row]) -> str:
    """A text with the table between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(rows) + END + rest.split(END)[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("configs", nargs="*", type=Path, help=f"config.json files (default: those of {FOLDER})")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks of this file")
    parser.add_argument("--json", action="store_true", help="machine-readable, on standard output")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()  # left-out token numbers mean nothing here
    rows = [row_of(path) for path in args.configs or sorted(FOLDER.glob("*.json"))]
    if args.update is not None:
        write_text(args.update, updated(args.update.read_text("utf-8"), rows))
    if args.json:
        print(json.dumps([{**vars(row), "difference": row.difference} for row in rows], indent=1))
    else:
        print(table(rows), end="")


if __name__ == "__main__":
    main()
