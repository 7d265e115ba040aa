"""Write a checkpoint as a folder of Hugging Face, which transformers loads.

    python -m runners.export_hf CHECKPOINTS -o DIR [--base DIR]

Any plan's checkpoint will do, also while the run goes on: the newest step that is whole is taken. Weights are read
layer by layer and written file by file, so that memory holds one file's part of them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if __package__ in (None, ""):
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands import cli
from polygon.domain.errors import InputError, PolygonError
from polygon.domain.model import Model
from polygon.formats.files import read_json, read_model
from polygon.formats.hugging_face_export import config_of
from runners.engine.architectures import KINDS, Place, architecture_of, check_config
from runners.engine.arguments import require_torch

if TYPE_CHECKING:
    import torch

    from runners.engine.saved_weights import MergedWeights, SavedWeights

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a tokenizer, copied where they are."""
T = TypeVar("T")


def make_parser() -> cli.ProgramParser:
    """The command line."""
    parser = cli.ProgramParser("export_hf", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of --checkpoint-dir, or of one step in it")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="new or empty folder")
    parser.add_argument("--step", type=int, help="default: the newest that is whole")
    parser.add_argument(
        "--base", type=Path, metavar="DIR",
        help="folder of Hugging Face that the run began with: its settings and tokenizer are kept",
    )  # fmt: skip
    parser.add_argument(
        "--merge", action="store_true", help="add LoRA's additions to the weights of --base (default: peft's files)"
    )
    parser.add_argument("--average", action="store_true", help="the moving average of a run with --average")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, or a folder with it")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (default %(default)s)")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="most of one file (default %(default)s)")
    return parser


def require_transformers() -> None:
    """Raise `InputError` where transformers is not installed."""
    for name in ("transformers", "safetensors"):
        if find_spec(name) is None:
            raise InputError(f"{name}: found none installed, expected it (pip install 'polygon-train[recipes]')")


def newest_whole(path: Path, step: int | None, work: Callable[[SavedWeights], T], *, average: bool = False) -> T:
    """What `work` makes of the newest step whose files are whole, as it finds on reading them.

    Raises
    ------
    InputError
        There is no such step.
    """
    from runners.engine.checkpoint import DamagedError
    from runners.engine.saved_weights import SavedWeights, candidates

    faults: list[str] = []
    for folder in candidates(path, step):
        try:
            return work(SavedWeights(folder, average=average))
        except DamagedError as fault:
            faults.append(str(fault))
            print(f"checkpoint not used: {fault}", file=sys.stderr, flush=True)  # noqa: T201
    raise InputError(f"{path}: found no whole checkpoint ({faults[-1]}), expected one")


def tensors_of(model: Model, shapes: Mapping[str, Any], kind: str) -> dict[str, list[tuple[Place, str]]]:
    """By the names of a file's tensors in models of this `model_type`: the parameters that each is made of, one below
    the other."""
    names = architecture_of(model, kind)
    found: dict[str, list[tuple[Place, str]]] = {}
    for name in shapes:
        if name == "head.output.weight" and model.tied_embeddings:
            continue
        place = names.place(name, model)
        found.setdefault(place.name, []).append((place, name))
    return {name: sorted(parts, key=lambda part: part[0].first) for name, parts in found.items()}


def put_together(parts: Sequence[tuple[Place, str]], get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A file's tensor from our parameters."""
    import torch

    whole = torch.cat([get(name) for _, name in parts]) if len(parts) > 1 else get(parts[0][1])
    return whole.T.contiguous() if parts[0][0].transposed else whole.contiguous()


def check_base(base: Path, model: Model) -> Mapping[str, Any]:
    """The settings of the folder that a run began with; `InputError` where that is another model's."""
    from runners.engine.pretrained import CONFIG, check_same

    if not (base / CONFIG).exists():
        raise InputError(f"--base {base}: found no {CONFIG}")
    check_same(read_model(base), model, str(base / CONFIG))
    settings: Mapping[str, Any] = read_json(base / CONFIG)
    check_config(settings, model, str(base / CONFIG))
    return settings


def config_for(model: Model, base: Path | None, dtype: str) -> Any:
    """transformers' configuration: the base's, or one made from the sizes.

    Raises
    ------
    InputError
        The base is another model, or transformers has none that is computed as this one.
    """
    require_transformers()
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if base is None:
        config = AutoConfig.for_model(**config_of(model), bos_token_id=None, eos_token_id=None, pad_token_id=None)
        config.architectures = [CLASSES[config.model_type]]
    else:
        check_base(base, model)
        config = AutoConfig.from_pretrained(base, local_files_only=True)
    config.dtype = DTYPES[dtype]
    return config


def write_weights(weights: SavedWeights | MergedWeights, kind: str, folder: Path, dtype: str, shard_size: str) -> int:
    """Write safetensors of a `model_type`, and their index where there are several files; how many there are."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from polygon.formats.files import usual_mode, write_json

    to, model = getattr(torch, DTYPES[dtype]), weights.model
    wanted = tensors_of(model, weights.shapes, kind)
    blank = {
        name: put_together(parts, lambda part: torch.empty(weights.shapes[part], dtype=to, device="meta"))
        for name, parts in wanted.items()
    }
    try:
        split = split_torch_state_dict_into_shards(blank, max_shard_size=shard_size)
    except ValueError as error:
        raise InputError(f"--shard-size: found {shard_size!r}, expected a size like 5GB ({error})") from None
    for file, names in split.filename_to_tensors.items():
        held = {name: put_together(wanted[name], lambda part: weights.tensor(part).to(to)) for name in names}
        save_file(held, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(usual_mode())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return len(split.filename_to_tensors)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into that becomes `target` once all is written, or nothing.

    Raises
    ------
    InputError
        The target holds something, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"-o {target}: found something in it, expected a new or empty folder")
    from safetensors import SafetensorError

    partial = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"-o {target}: {why}, expected a folder that can be written") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files, or wrap a tokenizer.json for transformers."""
    from runners.data.documents import load_tokenizer, tokenizer_file

    if source.is_dir():
        tokenizer_file(source)
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(tokenizer_file(source))).save_pretrained(folder)


def write_generation(config: Any, base: Path | None, folder: Path) -> None:
    """Settings of generation: the base's, or those that follow from the model's."""
    from transformers import GenerationConfig

    name = "generation_config.json"
    if base is not None and (base / name).is_file():
        shutil.copyfile(base / name, folder / name)
        return
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def export(
    checkpoint: Path,
    out: Path,
    *,
    step: int | None = None,
    base: Path | None = None,
    tokenizer: Path | None = None,
    dtype: str = "fp32",
    shard_size: str = "5GB",
    merge: bool = False,
    average: bool = False,
) -> str:
    """Write a checkpoint as transformers reads it; what was written, in a line.

    Raises
    ------
    InputError
        No whole checkpoint, a model that transformers does not have, or a folder that cannot be written.
    """
    if tokenizer is None and base is not None and (base / "tokenizer.json").is_file():
        tokenizer = base

    def write(saved: SavedWeights) -> str:
        if saved.lora is not None and not merge:
            return write_adapter(saved, out, base)
        weights, model = merged(saved, base), saved.model
        config = config_for(model, base, dtype)
        with whole_folder(out) as folder:
            files = write_weights(weights, config.model_type, folder, dtype, shard_size)
            config.save_pretrained(folder)
            write_generation(config, base, folder)
            if tokenizer is not None:
                write_tokenizer(tokenizer, folder)
        size = f"{model.parameters / 1e6:,.1f} M parameters in {dtype}, {files} file{'s' if files > 1 else ''}"
        return f"{out}: {config.model_type}, step {weights.progress.step}, {size}"

    return newest_whole(checkpoint, step, write, average=average)


def merged(saved: SavedWeights, base: Path | None) -> SavedWeights | MergedWeights:
    """The weights of a checkpoint: where additions were trained, those of the base with these added."""
    from runners.engine.saved_weights import MergedWeights

    if saved.lora is None:
        return saved
    if base is None:
        raise InputError("--base: found none, expected the folder that the run began with, to add LoRA's additions to")
    return MergedWeights(saved, base)


def write_adapter(saved: SavedWeights, out: Path, base: Path | None) -> str:
    """Write additions as peft's files; what was written, in a line."""
    from runners.recipes.replicas.adapter import save_adapter

    assert saved.lora is not None
    require_transformers()
    kind = "" if base is None else str(check_base(base, saved.model)["model_type"])
    if saved.model.family == "gpt" or (kind and KINDS[kind].fused):
        raise InputError("--merge: found without it, expected it: fused projections take none of our additions")
    # By the names that they have in a whole model: layer 3 is block 2.
    held = {}
    for name in saved.shapes:
        _, block, part = name.split(".", maxsplit=2)
        held[f"layers.{int(block) + 1}.{part}"] = saved.tensor(name)
    with whole_folder(out) as folder:
        save_adapter(saved.model, saved.lora, held, folder, base)
    return f"{out}: additions of rank {saved.lora.rank}, step {saved.progress.step}, {len(held)} tensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 fine, 2 bad input."""
    arguments = make_parser().parse_args(argv)
    try:
        require_torch()
        print(  # noqa: T201
            export(
                arguments.checkpoint, arguments.out, step=arguments.step, base=arguments.base,
                tokenizer=arguments.tokenizer, dtype=arguments.dtype, shard_size=arguments.shard_size,
                merge=arguments.merge,
                average=arguments.average,
            )
        )  # fmt: skip
    except PolygonError as error:
        print(f"export_hf: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
