"""Instruction data: chats as the template says, answers alone as targets, prepared once, the same for every split."""

import json
import re

import numpy as np
import pytest
import torch

from polygon.domain.errors import InputError
from polygon.formats.schema import check
from runners.recipes.data import make_samples, training_and_validation
from runners.recipes.data.instructions import IGNORED, read_examples
from runners.recipes.data.questions import made_up
from runners.recipes.data.tokenizing import END, START, Tokenizing
from runners.recipes.recipe_schema import DataPart, Recipe
from tests.small_problems import small_model

MODEL = small_model(vocab_size=400, max_seq_len=512)


def part(**fields):
    """Instruction data of a recipe."""
    return check(DataPart, {"kind": "instructions", **fields})


def samples_in(cache, folder, seq_len=192, model=MODEL, **fields):
    """Samples prepared in a cache."""
    return make_samples(part(cache=str(cache), **fields), model, seq_len, 0, folder)


def test_made_up_answers_are_right():
    """The generated set is arithmetic that is true, ends as MetaMathQA's does, and is always the same."""
    examples = made_up(200)
    assert examples == made_up(200) and len(set(examples)) > 190
    for _, answer in examples:
        *_, marked, last = answer.splitlines()
        assert marked == f"#### {last.removeprefix('The answer is: ')}"
        for term, result in re.findall(r"(\d+ [-+*] \d+(?: - \d+)?) = (\d+)", answer):
            assert eval(term) == int(result)


def test_only_answers_are_targets(tmp_path):
    """Inputs are the chat, targets its answer shifted by one, the count says how many; the rest is ignored."""
    samples = samples_in(tmp_path, tmp_path, samples=30)
    tokenizing = Tokenizing(_tokenizer(tmp_path))
    known = dict(made_up(30))
    inputs, targets = samples.batch(range(30))
    for row in range(30):
        text = tokenizing.tokenizer.decode(inputs[row].tolist(), skip_special_tokens=False)
        question = text.split(f"{START}user\n")[1].split(END)[0]
        learned = targets[row][targets[row] != IGNORED]
        answer = tokenizing.tokenizer.decode(learned.tolist(), skip_special_tokens=False)
        assert answer == known.pop(question) + END
        place = int((targets[row] != IGNORED).nonzero()[0])
        assert torch.equal(inputs[row, place + 1 : place + len(learned)], learned[:-1])
    assert not known
    assert samples.targets(range(30)) == int((targets != IGNORED).sum())


def _tokenizer(cache):
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(next(cache.glob("tokenizer-*.json"))))


def test_long_chats_are_cut(tmp_path):
    """With short sequences a question may fill all: such a chat is no sample, and who trains is told; the others are
    as they were.
    """
    samples, whole = (samples_in(tmp_path, tmp_path, seq_len=length, samples=40) for length in (60, 192))
    count = len(samples)
    assert 0 < count < 40 and samples.left_out == 40 - count and whole.left_out == 0
    inputs, targets = samples.batch(range(count))
    assert targets.shape == (count, 60) and (targets != IGNORED).any(dim=1).all()
    assert samples.targets(range(count)) == int((targets != IGNORED).sum())
    long = {tuple(row[:60].tolist()) for row in whole.batch(range(40))[0]}
    assert {tuple(row.tolist()) for row in inputs} < long
    told = []
    data = {"kind": "instructions", "cache": str(tmp_path), "samples": 40}
    batch = {"global_batch": 2, "micro_batch": 1, "seq_len": 60}
    recipe = check(Recipe, {"name": "x", "steps": 1, "model": {"source": "gpt2"}, "data": data, "batch": batch})
    training_and_validation(recipe, MODEL, 60, tmp_path, told.append)
    assert told == [f"data: left out {40 - count} chats whose question alone fills batch.seq_len = 60 tokens"]
    with pytest.raises(InputError, match=r"batch\.seq_len: found 8, expected at least"):
        samples_in(tmp_path, tmp_path, seq_len=8, samples=40)


def test_samples_depend_on_their_number_alone(tmp_path):
    """Micro-batches of one or four, in any order, are the same samples; another epoch is another order of all."""
    samples = samples_in(tmp_path, tmp_path, samples=12)
    whole = samples.batch(range(24))[0]
    assert torch.equal(torch.cat([samples.batch(range(i, i + 1))[0] for i in reversed(range(12))]).flip(0), whole[:12])
    first, second = (sorted(map(tuple, half.tolist())) for half in (whole[:12], whole[12:]))
    assert first == second and not torch.equal(whole[:12], whole[12:])


def test_prepared_once_and_mapped(tmp_path):
    """The second time nothing is written; ranks map the arrays; other examples are prepared apart."""
    samples_in(tmp_path, tmp_path, samples=20)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    again = samples_in(tmp_path, tmp_path, samples=20)
    assert isinstance(again.tokens, np.memmap)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    samples_in(tmp_path, tmp_path, samples=21)
    assert len(list(tmp_path.glob("chats-*"))) == 2


def test_a_damaged_cache_is_prepared_anew(tmp_path):
    """Arrays that a full disk cut, or that are missing, are written again."""
    whole = samples_in(tmp_path / "cache", tmp_path)
    expected = whole.batch(range(3))[0]
    [place] = (tmp_path / "cache").glob("chats-*")
    for spoil in (lambda p: p.write_bytes(p.read_bytes()[:-100]), lambda p: p.write_bytes(b""), lambda p: p.unlink()):
        spoil(place / "tokens.npy")
        again = samples_in(tmp_path / "cache", tmp_path)
        assert (again.batch(range(3))[0] == expected).all()


def test_files_of_examples(tmp_path):
    """JSON, JSON lines and folders of them are read, in MetaMathQA's names and the usual others."""
    rows = [{"query": "1 + 1?", "response": "2", "type": "GSM_SV"}, {"query": "2 + 2?", "response": "4", "type": "x"}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "MetaMathQA-395K.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "more.jsonl").write_text('{"question": "3?", "answer": "3"}\n\n')
    rows = [{"instruction": "Sum it.", "input": "1, 2", "output": 3}, {"instruction": "Hi", "input": "", "output": "."}]
    (tmp_path / "data" / "z.json").write_text(json.dumps(rows))
    expected = [("1 + 1?", "2"), ("2 + 2?", "4"), ("3?", "3"), ("Sum it.\n\n1, 2", "3"), ("Hi", ".")]
    assert read_examples(part(path="data"), tmp_path) == expected
    assert read_examples(part(path="data", samples=1), tmp_path) == expected[:1]
    samples = samples_in(tmp_path / "cache", tmp_path, path="data")
    assert len(samples) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"query": "a"}', "expected a list of examples"),
        ('[{"query": "a"}]', "expected query and response"),
        ("[", "expected a readable file"),
        ("[]", "expected at least one example"),
        (
            '[{"query": "a", "response": "b"}, {"query": null, "response": "b"}]',
            "example 1: query: found None, expected",
        ),
        (r'[{"query": "a\ud83d", "response": "b"}]', r"example 0: query: found '\\ud83d', half a character"),
        ('[{"instruction": "a", "input": ["b"], "output": "c"}]', r"example 0: input: found \['b'\], expected a text"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    """A file that holds no examples is an input error that says what is expected."""
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_examples(part(path="bad.json"), tmp_path)


def test_a_model_with_too_few_tokens_is_refused(tmp_path):
    """Bytes and chat marks need 259 tokens; a named tokenizer must not have more than the model."""
    with pytest.raises(InputError, match="expected at least 259"):
        samples_in(tmp_path, tmp_path, model=small_model(), samples=5)
    samples_in(tmp_path, tmp_path, samples=20)
    name = str(next(tmp_path.glob("tokenizer-*.json")))
    with pytest.raises(InputError, match="largest token"):
        samples_in(tmp_path, tmp_path, model=small_model(vocab_size=300), samples=20, tokenizer=name)


def test_weights_bring_their_tokenizer(tmp_path):
    """A recipe with weights trains none of its own: the same samples as where it is named."""
    samples_in(tmp_path, tmp_path, samples=20)
    (tmp_path / "weights").mkdir()
    _tokenizer(tmp_path).save(str(tmp_path / "weights" / "tokenizer.json"))
    data = {"kind": "instructions", "cache": str(tmp_path / "own"), "samples": 20}
    batch = {"global_batch": 2, "micro_batch": 1, "seq_len": 192}
    model = {"source": "gpt2", "weights": "weights"}
    recipe = check(Recipe, {"name": "x", "steps": 1, "model": model, "data": data, "batch": batch})
    samples, _ = training_and_validation(recipe, MODEL, 192, tmp_path)
    named = samples_in(tmp_path / "own", tmp_path, samples=20, tokenizer="weights")
    assert torch.equal(samples.batch(range(20))[0], named.batch(range(20))[0])
    assert not list((tmp_path / "own").glob("tokenizer-*.json"))


def test_chat_template_of_a_named_tokenizer(tmp_path):
    """A folder of Hugging Face brings its own template; the rendered chats follow it."""
    transformers = pytest.importorskip("transformers")
    samples_in(tmp_path, tmp_path, samples=20)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(tmp_path))
    fast.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(tmp_path / "named")
    samples = samples_in(tmp_path, tmp_path, samples=20, tokenizer="named")
    text = _tokenizer(tmp_path).decode(samples.batch(range(1))[0][0].tolist())
    question = text.removeprefix("<user>").split("</s>")[0]
    assert question in dict(made_up(20)) and f"<assistant>{dict(made_up(20))[question]}" in text
