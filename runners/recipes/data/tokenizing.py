"""Chats as tokens: by a tokenizer of Hugging Face, with its own chat template, or by one trained on the data.

The template where a tokenizer has none, and of the trained one, is ChatML, which Qwen2.5 uses too: every turn is
``<|im_start|>`` with who speaks, a line break, the text and ``<|im_end|>``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polygon.domain.errors import InputError, located
from runners.data.documents import load_tokenizer, require_tokenizers, tokenizer_file
from runners.recipes.models import beside
from runners.recipes.recipe_schema import DataPart

START, END, FILL = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SYSTEM = "You are a helpful assistant."
BATCH = 1000
"""Chats that are tokenized together."""


@dataclass(frozen=True)
class Tokenizing:
    """A tokenizer and how it renders a chat."""

    tokenizer: Any
    """`tokenizers.Tokenizer`."""
    template: Any = None
    """A tokenizer of transformers whose chat template is used; None: ChatML."""

    @property
    def size(self) -> int:
        """Tokens that it knows."""
        return int(self.tokenizer.get_vocab_size())

    @property
    def digest(self) -> str:
        """A name of tokenizer and template."""
        template = str(getattr(self.template, "chat_template", None)) + SYSTEM
        return hashlib.sha256((self.tokenizer.to_str() + template).encode()).hexdigest()[:16]

    def render(self, question: str, answer: str) -> tuple[str, str]:
        """A chat's text up to the answer, and the answer with its end."""
        if self.template is None:
            asked = "".join(f"{START}{who}\n{text}{END}\n" for who, text in (("system", SYSTEM), ("user", question)))
            return f"{asked}{START}assistant\n", f"{answer}{END}"
        chat = [{"role": "user", "content": question}]
        asked = self.template.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        chat.append({"role": "assistant", "content": answer})
        whole = self.template.apply_chat_template(chat, tokenize=False)
        if not whole.startswith(asked):
            raise InputError("data.tokenizer: found a chat template that changes the question once it is answered")
        return asked, whole.removeprefix(asked).rstrip("\n")

    def encode_all(self, examples: Sequence[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
        """Tokens of every chat up to the answer, and of the answer."""
        for first in range(0, len(examples), BATCH):
            texts = [self.render(*example) for example in examples[first : first + BATCH]]
            asked = self.tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
            answered = self.tokenizer.encode_batch([text for _, text in texts], add_special_tokens=False)
            yield from ((a.ids, b.ids) for a, b in zip(asked, answered, strict=True))


def tokenizing_for(
    part: DataPart, folder: Path, cache: Path, digest: str, examples: Sequence[tuple[str, str]], vocab_size: int
) -> Tokenizing:
    """The tokenizer that a recipe names, or one trained on its examples (kept in the cache under their digest)."""
    if part.tokenizer is not None:
        return _named(beside(folder, part.tokenizer))
    path = cache / f"tokenizer-{digest[:16]}-{vocab_size}.json"
    if not path.exists():
        trained = _trained(examples, vocab_size)
        temporary = path.with_suffix(".part")
        trained.save(str(temporary))
        temporary.replace(path)
    return Tokenizing(load_tokenizer(path))


def _named(path: Path) -> Tokenizing:
    """A folder of Hugging Face with tokenizer.json and its template, or a tokenizer.json alone."""
    with located("data."):
        file = tokenizer_file(path)
    template = None
    if (file.parent / "tokenizer_config.json").exists():
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InputError(f"data.tokenizer: {path}: expected transformers installed for its chat template") from None
        loaded = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
        template = loaded if loaded.chat_template else None
    return Tokenizing(load_tokenizer(file), template)


def _trained(examples: Sequence[tuple[str, str]], vocab_size: int) -> Any:
    """Byte-level BPE of at most `vocab_size` tokens; raises `InputError` where that is too few for all bytes."""
    require_tokenizers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + 3
    if vocab_size < least:
        raise InputError(f"model.vocab_size: found {vocab_size}, expected at least {least} (bytes and chat marks)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[FILL, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"system\n{SYSTEM}user\n{question}\nassistant\n{answer}" for question, answer in examples)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
