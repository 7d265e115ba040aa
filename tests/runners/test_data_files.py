"""Files of tokens and documents: the same tokens give the same samples and losses whatever file they come in."""

import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from polygon.domain.errors import InputError
from polygon.formats.files import write_plan
from runners.data.choice import DataChoice
from runners.data.documents import open_documents
from runners.data.mixture import Mixture
from runners.data.sources import english_text, open_corpus, samples_for, training_and_held_out
from runners.data.token_files import TokenWriter, open_tokens
from runners.data.token_rows import column_of
from runners.dist_runner import end_process
from runners.dist_runner import main as dist_runner
from runners.engine.arguments import options_from
from runners.engine.options import Options
from runners.engine.run import train
from runners.launch import main as launch
from runners.launch import make_parser
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.real_programs import ran
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem, small_model

ROOT = Path(__file__).resolve().parents[2]
needs_arrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
needs_tokenizers = pytest.mark.skipif(find_spec("tokenizers") is None, reason="needs tokenizers")
LENGTHS = (700, 1, 40, 2500, 300, 900)
TOKENS = np.frombuffer(english_text()[: sum(LENGTHS)], dtype=np.uint8).astype(np.int64)
DOCUMENTS = np.split(TOKENS, np.cumsum(LENGTHS)[:-1])


def megatron(folder):
    with TokenWriter(folder / "corpus", 255) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    return {"paths": (folder / "corpus",)}


def raw(folder):
    TOKENS.astype("<u2").tofile(folder / "train.bin")
    return {"paths": (folder / "train.bin",), "token_type": "uint16"}


def raw_with_sidecar(folder):
    TOKENS.astype("<u4").tofile(folder / "train.bin")
    (folder / "train.bin.json").write_text('{"token_type": "uint32"}')
    return {"paths": (folder / "train.bin",)}


def shards(folder):
    """Two files of llm.c in a folder."""
    for number, part in enumerate(np.split(TOKENS, [1000])):
        head = np.zeros(256, dtype="<i4")
        head[:3] = 20240520, 1, len(part)
        (folder / f"train_{number:06}.bin").write_bytes(head.tobytes() + part.astype("<u2").tobytes())
    return {"paths": (folder,)}


def npy(folder):
    np.save(folder / "tokens.npy", TOKENS)
    return {"paths": (folder / "tokens.npy",)}


def json_lines(folder):
    rows = "".join(json.dumps({"id": k, "input_ids": tokens.tolist()}) + "\n" for k, tokens in enumerate(DOCUMENTS))
    with gzip.open(folder / "tokens.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(rows)
    return {"paths": (folder / "tokens.jsonl.gz",)}


def text_lines(folder):
    """As text, which without a tokenizer is read by bytes."""
    texts = [bytes(document.astype(np.uint8)).decode() for document in DOCUMENTS]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"paths": (folder / "texts.jsonl",)}


def text(folder):
    """Also where the type of other files is given."""
    (folder / "corpus.txt").write_bytes(TOKENS.astype(np.uint8).tobytes())
    return {"paths": (folder / "corpus.txt",), "token_type": "uint16"}


def table():
    import pyarrow as pa

    return pa.table({"input_ids": pa.array([d.tolist() for d in DOCUMENTS], type=pa.list_(pa.int32()))})


def arrow(folder):
    """As `datasets` saves it: two shards of several batches each, of a set with a part for testing."""
    import pyarrow as pa

    for number, part in enumerate((table()[:2], table()[2:])):
        (folder / "set" / "train").mkdir(parents=True, exist_ok=True)
        path = folder / "set" / "train" / f"data-{number:05}-of-00002.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part, max_chunksize=2)
    (folder / "set" / "train" / "state.json").write_text('{"_data_files": []}')
    (folder / "set" / "test").mkdir()
    (folder / "set" / "test" / "data-00000-of-00001.arrow").write_bytes(b"not read")
    return {"paths": (folder / "set",)}


def arrow_file(folder):
    from pyarrow import feather

    feather.write_feather(table(), folder / "tokens.arrow", compression="uncompressed")
    return {"paths": (folder / "tokens.arrow",)}


def parquet(folder):
    """As on the hub."""
    from pyarrow import parquet

    (folder / "data").mkdir()
    parquet.write_table(table(), folder / "data" / "train-00000-of-00001.parquet", row_group_size=4)
    parquet.write_table(table()[:1], folder / "data" / "validation-00000-of-00001.parquet")
    return {"paths": (folder,)}


PLAIN = (megatron, raw, raw_with_sidecar, shards, npy, json_lines, text_lines, text)
ARROW = tuple(pytest.param(make, marks=needs_arrow) for make in (arrow, arrow_file, parquet))
WITH_DOCUMENTS = (megatron, json_lines, text_lines, *ARROW)


def choice(make, tmp_path, **more):
    """The data as a file of some kind, with a cache of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    return DataChoice(cache=tmp_path / "cache", **make(folder), **more)


@pytest.mark.parametrize("make", [*PLAIN, *ARROW])
def test_every_kind_of_file_gives_the_same_samples(make, tmp_path):
    """All tokens in their order; and all ranks after the first find what it prepared."""
    data = choice(make, tmp_path)
    expected = samples_for(small_model(), 16, 0, DataChoice(**npy(tmp_path)))
    for _ in range(2):
        samples = samples_for(small_model(), 16, 0, data)
        assert len(samples) == len(expected) == (len(TOKENS) - 1) // 16
        assert samples.digest() == expected.digest()
        for found, wanted in zip(samples.batch(range(300)), expected.batch(range(300)), strict=True):
            assert found.equal(wanted)


@pytest.mark.parametrize("make", WITH_DOCUMENTS)
def test_documents_keep_their_borders(make, tmp_path):
    """Packed samples are the same from every kind of file that knows documents."""
    expected = samples_for(small_model(), 16, 0, DataChoice(**megatron(tmp_path), packing="documents"))
    samples = samples_for(small_model(), 16, 0, choice(make, tmp_path, packing="documents"))
    assert samples.digest() == expected.digest()
    assert samples.documents.tolist() == np.cumsum([0, *LENGTHS]).tolist()


def losses_of(rank, port, problem, plan, options):
    """Losses of a run, as this rank sees them."""
    losses = []
    train(
        problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=lambda r: losses.append(r["loss"])
    )
    return losses


@needs_arrow
def test_the_same_tokens_give_the_same_losses(tmp_path):
    """uint16 .bin, .npy, arrow and JSON lines under a plan of four ranks: equal to the last bit."""
    problem, plan = routed_problem(4)
    found = []
    for make in (raw, npy, arrow, json_lines):
        folder = tmp_path / make.__name__
        folder.mkdir()
        data = DataChoice(cache=tmp_path / "cache", **make(folder))
        found.append(run_ranks(losses_of, 4, problem, plan, Options(steps=4, learning_rate=3e-3, data=data))[0])
    assert found[0][-1] < found[0][0]
    assert all(losses == found[0] for losses in found)


def test_a_mixture_goes_on_under_another_plan(tmp_path):
    """Two sets by weights, packed: stopped under one plan and resumed under another, the losses of a whole run."""
    write = (megatron, json_lines)
    for make in write:
        (tmp_path / make.__name__).mkdir()
    paths = tuple(make(tmp_path / make.__name__)["paths"][0] for make in write)
    data = DataChoice(paths=paths, weights=(1, 2), packing="documents", cache=tmp_path / "cache")
    whole = run_ranks(losses_of, 1, *routed_problem(1), Options(steps=6, learning_rate=3e-3, data=data))[0]
    first = Options(steps=3, learning_rate=3e-3, data=data, checkpoint_dir=tmp_path / "saved")
    begun = run_ranks(losses_of, 2, *routed_problem(2), first)[0]
    rest = replace(first, steps=6, resume=True)
    assert begun + run_ranks(losses_of, 4, *routed_problem(4), rest)[0] == pytest.approx(whole, rel=1e-5)


def test_ranks_that_read_other_data_refuse_to_start(tmp_path):
    """The same name on two hosts, with other content."""
    np.save(tmp_path / "a.npy", TOKENS)
    np.save(tmp_path / "b.npy", np.roll(TOKENS, 1))
    with pytest.raises(RuntimeError, match=r"data of rank 1: found digest \w+, expected \w+ as on rank 0"):
        run_ranks(other_data, 2, *routed_problem(2), tmp_path)


def other_data(rank, port, problem, plan, folder):
    data = DataChoice(paths=(folder / f"{'ab'[rank]}.npy",))
    return losses_of(rank, port, problem, plan, Options(steps=1, data=data))


def test_what_is_kept_is_prepared_anew_when_the_data_changes(tmp_path):
    """A cache never shows yesterday's data."""
    path = tmp_path / "rows.jsonl"
    for rows in (["abc", "de"], ["abc", "dee"]):
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        corpus = open_documents(path, 256, None, None, tmp_path / "cache")
        assert bytes(corpus.tokens[:].astype(np.uint8)).decode() == "".join(rows)


@needs_tokenizers
@pytest.mark.parametrize("folder", [False, True])
def test_text_goes_through_the_tokenizer(folder, tmp_path):
    """Every document ends with the tokenizer's mark; a text file is one document without it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "?": 1, "one": 2, "two": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = tmp_path if folder else tmp_path / "tokenizer.json"
    (tmp_path / "x.jsonl").write_text('{"content": "one two"}\n{"content": "two"}\n')
    corpus = open_documents(tmp_path / "x.jsonl", 4, named, None, tmp_path / "cache")
    assert corpus.tokens[:].tolist() == [2, 3, 0, 3, 0]
    assert corpus.documents().tolist() == [0, 3, 5]
    (tmp_path / "x.txt").write_text("one\ntwo one\n" * 3)
    corpus = open_documents(tmp_path / "x.txt", 4, named, None, tmp_path / "cache")
    assert corpus.tokens[:].tolist() == [2, 3, 2] * 3
    with pytest.raises(InputError, match=r"tokenizer\.json: tokens: found 4, expected at most 3, the model's"):
        open_documents(tmp_path / "x.jsonl", 3, named, "content", tmp_path / "cache2")


@pytest.mark.parametrize("tokenized", [False, pytest.param(True, marks=needs_tokenizers)])
def test_a_folder_of_texts_is_a_document_a_file(tokenized, tmp_path, monkeypatch):
    """By name, folders below it too, read in stretches, with the tokenizer's mark behind each; others are left."""
    folder, mark = tmp_path / "texts", [0] if tokenized else []
    (folder / "sub").mkdir(parents=True)
    for name, text in (("b.txt", "one\none\none\n"), ("a.txt", ""), ("sub/c.txt", "two"), ("readme.md", "three")):
        (folder / name).write_text(text)
    tokenizer = None
    if tokenized:
        from tokenizers import Tokenizer, models, pre_tokenizers

        made = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "?": 1, "one": 2, "two": 3}, unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = tmp_path / "tokenizer.json"
        made.save(str(tokenizer))
    monkeypatch.setattr("runners.data.documents.STRETCH", 3)
    data = DataChoice(paths=(folder,), tokenizer=tokenizer, cache=tmp_path / "cache", packing="documents")
    corpus = open_corpus(folder, small_model(), data, "train")
    first, second = ([2, 2, 2], [3]) if tokenized else (list(b"one\none\none\n"), list(b"two"))
    assert corpus.tokens[:].tolist() == [*first, *mark, *second, *mark]
    assert corpus.documents().tolist() == [0, len(first + mark), len(first + second + 2 * mark)]
    if not tokenized:
        assert samples_for(small_model(), 8, 0, data).items == 2
    (folder / "rows.jsonl").write_text('{"text": "rows"}\n')
    if not tokenized:
        assert bytes(open_corpus(folder, small_model(), data, "train").tokens[:].astype(np.uint8)) == b"rows"


@needs_tokenizers
def test_text_for_weights_goes_through_their_tokenizer(tmp_path):
    """That of --weights, unless another one is named; weights without one take text by bytes only where they know no
    other tokens, also where another model's run has read the same file so. Tokens need none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plan, weights = tmp_path / "plan.json", tmp_path / "weights"
    weights.mkdir()
    (tmp_path / "x.jsonl").write_text('{"text": "one two"}\n')
    (tmp_path / "x.txt").write_text("one two\n")
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [2, 3]}\n')
    parser = make_parser()

    def tokens_of(name, *words, vocab_size=300):
        given = ["--data", str(tmp_path / name), "--data-cache", str(tmp_path / "cache"), *map(str, words)]
        choice = options_from(parser.parse_args([str(plan), *given])).data
        model = small_model(vocab_size=vocab_size)
        return open_corpus(choice.paths[0], model, choice, "train").tokens[:].tolist()

    for name in ("x.jsonl", "x.txt"):
        assert bytes(tokens_of(name)).decode().strip() == "one two"
        with pytest.raises(InputError, match=r"--tokenizer: found none, expected that of the weights, which know 300"):
            tokens_of(name, "--weights", weights)
        assert bytes(tokens_of(name, "--weights", weights, vocab_size=256)).decode().strip() == "one two"
    assert tokens_of("ids.jsonl", "--weights", weights) == [2, 3]
    for folder, number in ((weights, 7), (tmp_path, 9)):
        tokenizer = Tokenizer(models.WordLevel({"?": 1, "one": number, "two": 3}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("x.jsonl", "x.txt"):
        assert tokens_of(name, "--weights", weights) == [7, 3]
        assert tokens_of(name, "--weights", weights, "--tokenizer", tmp_path) == [9, 3]


def test_held_out_parts_of_a_mixture(tmp_path):
    """Validation takes its part of every set; or a set of its own."""
    for name, first in (("a", 0), ("b", 100)):
        np.save(tmp_path / f"{name}.npy", np.arange(81) + first)
    data = DataChoice(paths=(tmp_path / "a.npy", tmp_path / "b.npy"), validate=True, validation_fraction=0.2)
    training, held = training_and_held_out(small_model(), 8, 0, data)
    firsts = sorted(int(row[0]) for row in held.batch(range(len(held)))[0])
    assert len(firsts) == 4 and sum(first < 100 for first in firsts) == 2
    assert isinstance(training, Mixture)
    assert not set(firsts) & {int(row[0]) for row in training.batch(range(400))[0]}
    own = replace(data, paths=(tmp_path / "a.npy",), validation=tmp_path / "b.npy")
    training, held = training_and_held_out(small_model(), 8, 0, own)
    assert len(training) == len(held) == 10 and int(held.batch(range(10))[0].min()) == 100


PROBE = """
import sys, resource
from pathlib import Path
sys.path[:0] = [{root!r}, {comm!r}]
from runners.data.choice import DataChoice
from runners.data.sources import training_and_held_out
from tests.small_problems import small_model
def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
before = held()
data = DataChoice(paths=(Path({path!r}),), token_type="uint16", validate=True)
samples, validation = training_and_held_out(small_model(), 32, 0, data)
samples.digest(), samples.batch(range(10**9, 10**9 + 64)), validation.batch(range(64))
print(len(samples), held() - before)
"""


def test_twenty_gigabytes_take_no_memory(tmp_path):
    """Opened, held out, shuffled and read here and there: neither scanned nor listed (312 million samples)."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(20 * 10**9)
    program = PROBE.format(root=str(ROOT), comm=str(ROOT / "comm"), path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    count, grown_mb = done.stdout.split()
    assert int(count) == pytest.approx(0.99 * 10**10 / 32, rel=1e-6)
    assert float(grown_mb) < 100


def unfit(path, content):
    """Write what a file of the wrong kind holds."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        np.save(path, content)


WRONG = [
    ("x.bin", bytes(100), {}, r"x\.bin: found numbers of an unknown type, expected --token-type \(uint16"),
    ("x.bin", bytes(101), {"token_type": "uint16"}, r"x\.bin: bytes: found 101, expected a multiple of 2"),
    ("x.dat", bytes(range(256)), {}, r"--data .*x\.dat: found bytes that are no text, expected text, tokens"),
    ("x.txt", b"text\0with a hole", {}, "found bytes that are no text"),
    ("x.txt", b"", {}, "expected some text"),
    ("x.npy", np.array([[1, 2]]), {}, r"found int64 of shape \(1, 2\), expected one row of whole numbers"),
    ("x.npy", np.arange(5), {}, r"x\.npy: tokens: found 5, expected at least 9"),
    ("x.npy", b"no header", {}, r"x\.npy: .*expected a \.npy of token numbers"),
    ("x.npy", np.arange(50), {"token_type": "uint16"}, "--token-type: found 'uint16', expected int64, which the file"),
    ("x.idx", b"TNTIDX\0\0" + bytes(40), {}, r"x\.idx: found an index of Megatron's older kind \(TNTIDX\)"),
    ("x.idx", b"something else", {}, r"x\.idx: found the head b'something', expected an index of Megatron"),
    ("x.jsonl", '{"text": "a"}\nno json\n', {}, r"x\.jsonl, line 2: .*expected JSON"),
    ("x.jsonl", '{"body": "a"}\n', {}, r"x\.jsonl: found columns \['body'\], expected one of input_ids, .*"),
    ("x.jsonl", '{"text": "a"}\n', {"column": "tex"}, r"--data-column: found 'tex', expected 'text' \(nearest\)"),
    ("x.jsonl", '{"text": "a"}\n{"text": 3}\n', {}, r"example 1: found no 'text', expected a text or a list of tokens"),
    ("x.jsonl", '{"tokens": [1, 9223372036854775808]}\n', {}, "example 0: found no 'tokens', expected .* tokens there"),
    ("x.jsonl", '{"tokens": [1, 300]}\n', {}, r"document 0: token: found 300, expected 0\.\.255, those of the model"),
    ("x.jsonl", '{"text": "a"}\n{"text": "b\\ud83d"}\n', {}, r"x\.jsonl: example 1: text: found '\\ud83d', half a"),
    ("x.jsonl", "[" * 100_000, {}, r"x\.jsonl, line 1: .*recursion.*, expected JSON"),
    ("x.json", "[" * 100_000, {}, r"x\.json: .*recursion.*, expected a readable file of examples"),
    ("x.parquet", b"PAR0", {}, r"x\.parquet: .*expected a readable file"),
    ("x.json", '{"text": "a"}', {}, r"x\.json: found 'dict', expected a list of examples"),
    ("x.npy", np.arange(90), {"packing": "documents"}, "found tokens without borders of documents"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "how", "message"), WRONG)
def test_a_file_of_the_wrong_kind_is_one_line(name, content, how, message, tmp_path):
    """What was found and what to do; no guess."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    unfit(tmp_path / name, content)
    data = DataChoice(paths=(tmp_path / name,), cache=tmp_path / "cache", **how)
    with pytest.raises(InputError, match=message) as caught:
        samples_for(small_model(), 8, 0, data)
    assert "\n" not in str(caught.value)


def test_an_empty_part_of_a_set_says_nothing_of_its_columns(tmp_path):
    """As where a set was split into more files than it has rows."""
    (tmp_path / "data-0.jsonl").touch()
    (tmp_path / "data-1.jsonl").write_text(json.dumps({"tokens": list(range(90))}) + "\n")
    assert len(samples_for(small_model(), 8, 0, DataChoice(paths=(tmp_path,), cache=tmp_path / "cache"))) == 11


def test_a_token_that_the_model_does_not_know_is_named_where_it_is_read(tmp_path):
    """No file is scanned for it."""
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[777] = 300
    np.save(tmp_path / "x.npy", tokens)
    samples = samples_for(small_model(), 8, 0, DataChoice(paths=(tmp_path / "x.npy",)))
    with pytest.raises(InputError, match=r"x\.npy: token 777: found 300, expected 0\.\.255"):
        samples.batch(range(124))


def test_models_that_take_no_bytes_and_files_that_are_not_there(tmp_path):
    """One line each."""
    with pytest.raises(InputError, match="vocab_size: found 100, expected at least 256"):
        samples_for(small_model(vocab_size=100), 8, 0)
    for name, message in (
        ("none.txt", "--data .*: No such file"),
        ("none.jsonl", "no such file"),
        ("x.bin", "No such"),
    ):
        with pytest.raises(InputError, match=message):
            samples_for(small_model(), 8, 0, DataChoice(paths=(tmp_path / name,)))


def test_cut_pairs_and_shards_are_refused(tmp_path):
    """The index and the head of a shard say how long they are to be."""
    megatron(tmp_path)
    content = (tmp_path / "corpus.bin").read_bytes()
    (tmp_path / "corpus.bin").write_bytes(content[:-20])
    with pytest.raises(InputError, match=r"corpus\.bin: tokens: found \d+, expected \d+, as corpus\.idx says"):
        open_tokens(tmp_path / "corpus")
    (tmp_path / "corpus.idx").write_bytes((tmp_path / "corpus.idx").read_bytes()[:-8])
    with pytest.raises(InputError, match=r"as its head says \(it was cut\)"):
        open_tokens(tmp_path / "corpus.bin")
    folder = tmp_path / "shards"
    folder.mkdir()
    shards(folder)
    path = folder / "train_000001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"as its head says \(\d+ tokens of uint16\)"):
        open_tokens(path)


def test_the_programs_say_it_in_one_line_and_exit_2(tmp_path, capsys):
    """As a user sees it, before any rank starts."""
    write_plan(tmp_path / "plan.json", *routed_problem(1))
    (tmp_path / "tokens.bin").write_bytes(bytes(64))
    where = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "1", "--rank", "0"]
    words = ["--plan", str(tmp_path / "plan.json"), "--data", str(tmp_path / "tokens.bin")]
    assert dist_runner([*words, *where]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "tokens.bin: found numbers of an unknown type" in said
    assert dist_runner([*words, "--data-weights", "1", "2", *where]) == 2
    assert capsys.readouterr().err == "dist_runner: --data-weights: found 2, expected 1, one for each --data\n"


def test_tokens_that_the_model_does_not_know_are_named_before_ranks_start(tmp_path):
    """Numbers read as of the wrong type are nonsense in every sample: some are read by the launcher."""
    write_plan(tmp_path / "plan.json", *routed_problem(1))
    np.full(1000, 77, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    words = ["--data", "tokens.bin", "--token-type", "uint32", "--steps", "1", "--log-dir", "log"]
    code, _, said = ran(launch, ["plan.json", *words], tmp_path)
    assert code == 2 and "[rank" not in said
    assert re.search(r"^launch: tokens\.bin: token \d+: found 5046349, expected 0\.\.255, those", said, re.MULTILINE)


@needs_arrow
def test_tokens_that_are_not_there_are_named(tmp_path):
    """A list with a null in it, as outer joins leave; rows without any list are left out, as those without a text."""
    import pyarrow as pa
    from pyarrow import parquet

    kind = pa.list_(pa.int64())
    for name, rows in (("holes", [[1, 2], [3, None]]), ("rows", [[1] * 20, None])):
        parquet.write_table(pa.table({"input_ids": pa.array(rows, type=kind)}), tmp_path / f"{name}.parquet")
    choice = DataChoice(paths=(tmp_path / "holes.parquet",), cache=tmp_path / "cache")
    with pytest.raises(InputError, match=r"holes\.parquet: column 'input_ids': found a list with none in it"):
        samples_for(small_model(), 8, 0, choice)
    samples_for(small_model(), 8, 0, replace(choice, paths=(tmp_path / "rows.parquet",)))


def test_examples_without_text_are_left_out_of_json_as_of_parquet(tmp_path):
    """A null is no document; an example that has no such column at all is another matter."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert list(column_of(path, "text")) == ["one", "two"]
    path.write_text('{"text": "one"}\n{"title": "two"}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl: example 1: found no 'text'"):
        list(column_of(path, "text"))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_of_one_set_are_above_0_too(weight):
    """There is nothing to mix, and yet it cannot be what the user means."""
    with pytest.raises(InputError, match=r"--data-weights: found .*, expected a number > 0"):
        DataChoice(paths=(Path("x"),), weights=(weight,))


@pytest.mark.parametrize(
    ("classes", "fault"),
    [
        (np.array([0, 9, -1]), "classes: found -1, expected 0..9"),
        (np.array([0, 9, -100]), "classes: found -100, expected 0..9"),  # what no loss counts, inside
        (np.array([0, 10, 2]), "classes: found 10, expected 0..9"),
        (np.array([0.5, 1.0, 2.0]), "classes: found float64 of shape (3,), expected one row of whole numbers"),
        (np.array(["cat", "dog", "cat"]), "classes: found <U3 of shape (3,), expected one row of whole numbers"),
        (np.eye(3, dtype=np.int64), "classes: found int64 of shape (3, 3), expected one row of whole numbers"),
        (np.array([1, 2]), "classes: found 2, expected 3, one for each image"),
    ],
)
def test_classes_that_are_none_of_the_models_are_named(classes, fault, tmp_path):
    """Before any rank starts; of numbers below 0 some would be left out of the loss, and fractions cut off."""
    model = replace(
        small_model(), family="vit", image_size=4, patch_size=2, channels=1, vocab_size=10, max_seq_len=5, causal=False
    )
    np.savez(tmp_path / "images.npz", images=np.zeros((3, 1, 4, 4)), classes=classes)
    with pytest.raises(InputError, match=re.escape(f"images.npz: {fault}")):
        samples_for(model, 5, 0, DataChoice(paths=(tmp_path / "images.npz",)))
