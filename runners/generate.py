"""Let a model go on with a text: a folder of Hugging Face, or a checkpoint of any plan.

    python -m runners.generate DIR|CHECKPOINTS --prompt 'Once upon a time'

transformers generates. Without a tokenizer text is read and written by bytes, as in training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands import cli
from polygon.domain.errors import InputError, Phrase, PolygonError, require
from runners.data.choice import tokenizer_of
from runners.data.token_rows import require_unicode
from runners.engine.arguments import require_torch
from runners.export_hf import config_for, merged, newest_whole, put_together, require_transformers, tensors_of

if TYPE_CHECKING:
    from runners.engine.saved_weights import SavedWeights


def make_parser() -> cli.ProgramParser:
    """The command line."""
    parser = cli.ProgramParser("generate", __doc__)
    parser.add_argument("model", type=Path, help="folder of Hugging Face, of --checkpoint-dir, or of one step in it")
    parser.add_argument("--prompt", required=True, help="text to go on with")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="at most (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws, with --temperature")
    parser.add_argument("--step", type=int, help="of a checkpoint (default: the newest that is whole)")
    parser.add_argument("--base", type=Path, metavar="DIR", help="folder that the run began with (--weights)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="tokenizer.json, or a folder with it (default: that of the model or --base; without these bytes)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: %(default)s")
    return parser


def load(path: Path, step: int | None = None, base: Path | None = None) -> Any:
    """A model of transformers with the weights of a folder or checkpoint, in fp32.

    Raises
    ------
    InputError
        Neither is there.
    """
    require_transformers()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if not (path / "config.json").exists():
        return newest_whole(path, step, lambda saved: _from_checkpoint(saved, base))
    try:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="float32").eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}, expected a model that transformers loads") from None


def _from_checkpoint(saved: SavedWeights, base: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    weights, config = merged(saved, base), config_for(saved.model, base, "fp32")
    wanted = tensors_of(weights.model, weights.shapes, config.model_type)
    held = {name: put_together(parts, weights.tensor) for name, parts in wanted.items()}
    kinds: Any = AutoModelForCausalLM._model_mapping
    return kinds[type(config)].from_pretrained(None, config=config, state_dict=held, dtype="float32").eval()


class _Bytes:
    """Text by bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")


def tokenizer_for(named: Path | None, folders: Sequence[Path | None], vocab_size: int) -> Any:
    """What turns text into numbers and back: that of the option, of a folder that has one, or bytes.

    Raises
    ------
    InputError
        None is there, and the model does not know all bytes.
    """
    from runners.data.documents import load_tokenizer, require_bytes, tokenizer_file

    named = named or next(filter(None, map(tokenizer_of, folders)), None)
    if named is None:
        require_bytes(vocab_size)
        return _Bytes()
    return load_tokenizer(tokenizer_file(named))


def _learned_positions(model: Any) -> int:
    """Positions of a model that has learned a vector for each, as GPT-2's kind has; 0: another kind, without an end."""
    from torch.nn import Embedding

    known: int = getattr(model.config, "max_position_embeddings", 0)
    tokens = model.get_input_embeddings()
    tables = [part for part in model.modules() if isinstance(part, Embedding) and part is not tokens]
    return known if any(part.num_embeddings >= known for part in tables) else 0


def generate(arguments: Any) -> str:
    """The text that follows the prompt."""
    import torch
    from transformers import GenerationConfig

    from runners.engine.device import check_devices

    check_devices(arguments.device, 1)
    model = load(arguments.model, arguments.step, arguments.base)
    finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
    require(finite, str(arguments.model), Phrase("weights that are no numbers"), "finite ones")
    tokenizer = tokenizer_for(arguments.tokenizer, [arguments.model, arguments.base], model.config.vocab_size)
    require_unicode(arguments.prompt, "--prompt")
    encoded = tokenizer.encode(arguments.prompt)
    ids = list(getattr(encoded, "ids", encoded))
    require(bool(ids), "--prompt", arguments.prompt, "some text")
    worst = max(ids)
    require(worst < model.config.vocab_size, "--prompt: token", worst, f"< {model.config.vocab_size}, the vocabulary")
    if known := _learned_positions(model):
        most = known + 1 - len(ids)  # the last token is not read again
        require(most >= 1, "--prompt: tokens", len(ids), f"at most {known}, the model's positions")
        expected = f"at most {most}, as {known} positions less the prompt's allow"
        require(arguments.tokens <= most, "--tokens", arguments.tokens, expected)
    on_gpu = arguments.device == "cuda" or (arguments.device == "auto" and torch.cuda.is_available())
    model = model.to("cuda" if on_gpu else "cpu")
    drawn = arguments.temperature > 0
    torch.manual_seed(arguments.seed)
    settings = GenerationConfig(
        max_new_tokens=arguments.tokens, do_sample=drawn, temperature=arguments.temperature if drawn else None,
        eos_token_id=model.generation_config.eos_token_id, pad_token_id=model.generation_config.pad_token_id or 0,
    )  # fmt: skip
    inputs = torch.tensor([ids], device=model.device)
    found = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    return tokenizer.decode(found[0, len(ids) :].tolist())


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 fine, 2 bad input."""
    arguments = make_parser().parse_args(argv)
    try:
        require_torch()
        require(arguments.tokens >= 1, "--tokens", arguments.tokens, "a whole number >= 1")
        require(arguments.temperature >= 0, "--temperature", arguments.temperature, "a number >= 0")
        require(0 <= arguments.seed < 2**63, "--seed", arguments.seed, "a whole number >= 0, of 63 bits")
        print(generate(arguments))  # noqa: T201
    except PolygonError as error:
        print(f"generate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
