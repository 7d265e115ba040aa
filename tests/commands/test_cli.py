"""What all commands share: exit codes, one-line errors, dispatch."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from polygon import search
from polygon.__main__ import COMMANDS, PROGRAMS, main, module_of
from polygon.commands import cli
from polygon.commands.objective_options import planning_parser
from polygon.domain.errors import InputError
from polygon.formats.files import write_plan
from polygon.planning import frontier, search_engine
from polygon.planning.telling import STARTS
from tests.exported_plans import planned

ROOT = Path(__file__).parents[2]


def test_bad_input_is_one_line_on_stderr_and_exit_2(capsys):
    """An InputError never shows a traceback."""

    def fail(argv):
        raise InputError("lab.yaml: name: found 3,\nexpected a text")

    assert cli.run(fail) == 2
    assert capsys.readouterr() == ("", "lab.yaml: name: found 3, expected a text\n")


def test_a_bug_is_not_hidden():
    """Any other exception is ours and passes through with its traceback."""

    def fail(argv):
        raise KeyError("bug")

    with pytest.raises(KeyError):
        cli.run(fail)


def test_interrupt_exits_as_shells_expect(capsys):
    """Ctrl-C gives 128 + SIGINT."""

    def wait(argv):
        raise KeyboardInterrupt

    assert cli.run(wait) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_page_of_commands_has_every_exit_code():
    """And what ends otherwise than by an exit code of ours is a bug."""
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    table = page.split("## Exit codes")[1].split("##")[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    by_signal = {cli.EXIT_BY_SIGNAL + number for number in (signal.SIGINT, signal.SIGTERM)}
    assert codes == {cli.EXIT_OK, cli.EXIT_BAD_INPUT, cli.EXIT_INFEASIBLE, cli.EXIT_BROKEN_PIPE, *by_signal}


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
@pytest.mark.parametrize(
    "program", [["-m", "polygon.init"], ["-m", "runners.launch"], [str(ROOT / "runners/dist_runner.py")]], ids=str
)
def test_an_interrupt_while_a_command_is_imported_is_one_line(program, error, tmp_path):
    """Ctrl-C in the first second ends by SIGINT as later, without a traceback; a fault of ours keeps its own."""
    (tmp_path / "numpy.py").write_text(f"raise {error}")
    command = [sys.executable, *program, "--help"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if error == "KeyboardInterrupt":
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")
    else:
        assert done.returncode == 1 and done.stderr.startswith("Traceback")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_is_an_answer_and_the_second_ends(number):
    """Work that asks is told once; who cannot wait presses again. Who answered before does so afterwards."""
    before = signal.getsignal(number)
    with cli.interruptible() as interrupted:
        assert not interrupted()
        interrupted.heed()
        signal.raise_signal(number)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            interrupted.heed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder with `lab.yaml`, where commands run."""
    (tmp_path / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 1, devices_per_node: 2}]}]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def signal_at_progress(monkeypatch):
    """Commands get this signal when they first tell how far they are."""

    def arrange(number):
        @contextmanager
        def progress(talk, what, total=None):
            signals = iter([number])

            def show(done, note):
                for each in signals:
                    signal.raise_signal(each)

            yield show

        monkeypatch.setattr(cli.Talk, "progress", progress)

    return arrange


LAB = ["lab.yaml", "--model", "gpt2", "--global-batch", "4", "--seq-len", "128"]


@pytest.mark.parametrize(
    ("number", "words", "told"),
    [
        (signal.SIGINT, ["search", "--cluster", *LAB], "interrupted: this is the best so far"),
        (signal.SIGTERM, ["search", "--cluster", *LAB], "interrupted: this is the best so far"),
        (signal.SIGTERM, ["init", *LAB], "interrupted: these are the best so far"),
        (signal.SIGTERM, ["pareto", "--cluster", *LAB], "interrupted: this is the front so far"),
        (signal.SIGTERM, ["grid3d", *LAB, "--jobs", "1"], "interrupted: these are the configurations so far"),
        (signal.SIGTERM, ["explain", "plan.json"], "interrupted: no time for 10 questions"),
    ],
)
def test_work_that_is_interrupted_keeps_its_best_and_tells_by_its_exit_code(
    number, words, told, lab, signal_at_progress, capsys
):
    """The file is written and it is said why it is not all; `&&` and `set -e` do not go on with it unseen."""
    if "plan.json" in words:
        assert cli.run(main, ["search", "--cluster", *LAB, "--effort", "quick", "-o", "plan.json"]) == 0
    before = signal.getsignal(number)
    signal_at_progress(number)
    assert cli.run(main, [*words, "-o", "kept.json"]) == 128 + number
    data, talk = capsys.readouterr()
    assert told in talk and data and (lab / "kept.json").exists()
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, "search --cluster"),
        (signal.SIGTERM, "init"),
        (signal.SIGTERM, "pareto --cluster"),
        (signal.SIGTERM, "grid3d"),
        (signal.SIGINT, "grid3d"),
        (signal.SIGINT, "validate"),
    ],
)
def test_work_that_is_interrupted_with_nothing_to_keep_writes_nothing(number, command, lab, monkeypatch, capsys):
    """One line, the same exit codes, and a file of an earlier run stays as it is."""

    def interrupt(*args, tell=None, **fields):
        signal.raise_signal(number)
        tell(STARTS, 0.0, math.inf)  # searches are ended where they tell, others are by now

    monkeypatch.setattr(search_engine, "find_groups", interrupt)
    monkeypatch.setattr(frontier, "find_plan", interrupt)
    monkeypatch.setattr("polygon.grid3d.grid.spread", lambda *args, **fields: (interrupt() for _ in [0]))
    monkeypatch.setattr("polygon.commands.validate.predict", interrupt)
    words = [*command.split(), *LAB, "-o", "kept.json"]
    if command == "validate":
        words = ["validate", str(ROOT / "instances/measured/published_runs.json"), "--errors", "kept.json"]
    (lab / "kept.json").write_text("of an earlier run")
    assert cli.run(main, words) == 128 + number
    data, talk = capsys.readouterr()
    assert (data, talk.splitlines()[-1]) == ("", "interrupted")
    assert (lab / "kept.json").read_text() == "of an earlier run"


def test_the_runtime_of_a_command_goes_before_that_of_its_file(tmp_path, capsys):
    """A cluster is planned for it, a plan is priced for it; every result names it, in text and for machines."""
    cluster = tmp_path / "lab.yaml"
    cluster.write_text("regions: [{name: lab, nodes: [{device: a100-40gb, count: 1, devices_per_node: 2}]}]\n")
    plan, groups = str(tmp_path / "plan.json"), str(tmp_path / "groups.json")
    task = ["--model", "gpt3-350m", "--global-batch", "8", "--seq-len", "128", "--quiet"]
    assert main(["init", str(cluster), "--runtime", "Megatron-LM", "--stages", "1", "-o", groups, *task]) == 0
    assert "runtime       megatron-core\n" in capsys.readouterr().out
    assert main(["search", groups, "-o", plan, "--quiet"]) == 0
    assert "runtime       megatron-core\n" in capsys.readouterr().out
    for options, runtime in (([], "megatron-core"), (["--runtime", "nemo"], "nemo")):
        assert main(["evaluate", plan, *options]) == 0
        assert f"runtime       {runtime}\n" in capsys.readouterr().out
        assert main(["evaluate", plan, "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["runtime"] == runtime
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", plan, "--runtime", "nemp"])
    assert stopped.value.code == 2
    assert "argument --runtime: found runtime 'nemp', expected 'nemo' (nearest)" in capsys.readouterr().err


def test_a_plan_that_its_limits_do_not_allow_is_priced_and_its_rules_are_named(tmp_path, capsys):
    """It is a whole plan: what it takes is told beside what it breaks, exit 3."""
    plan = tmp_path / "plan.json"
    write_plan(plan, *planned())
    data = json.loads(plan.read_text())
    used = data["stages"][0]["workers"][0]["region"]
    data["problem"]["constraints"]["forbidden_regions"] = [used]
    plan.write_text(json.dumps(data))
    assert main(["evaluate", str(plan)]) == cli.EXIT_INFEASIBLE
    told = capsys.readouterr().out
    assert re.search("^step  ", told, re.M) and f"violation: stage 0: uses forbidden region {used}\n" in told + "\n"


def test_infeasible_is_a_result(capsys):
    """No plan: the reason on stderr, exit 3."""
    assert cli.run(lambda argv: cli.infeasible("needs 3 GiB more on t4")) == 3
    assert capsys.readouterr().err == "needs 3 GiB more on t4\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--seed", "x"], "argument --seed: found 'x', expected a whole number >= 0"),
        (["--seed", "-1"], "argument --seed: found '-1', expected a whole number >= 0"),
        (["--time-limit", "nan"], "argument --time-limit: found 'nan', expected a number > 0"),
        (["--time-limit", "0"], "argument --time-limit: found '0', expected a number > 0"),
        (["--tim", "3"], "unrecognized arguments: --tim 3"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(option, message, capsys):
    """Usage errors name the option, what was found and what is allowed."""
    parser = cli.CommandParser(prog="polygon x", parents=[cli.search_options(), cli.output_options(out="the plan")])
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(option)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"polygon x: {message} (see polygon x --help)\n"


def test_unknown_command_names_the_nearest(capsys):
    """A misspelt command exits 2 and says which one is near."""
    with pytest.raises(SystemExit) as stop:
        main(["generat"])
    assert stop.value.code == 2
    assert "found command 'generat', expected 'generate' (nearest)" in capsys.readouterr().err


def test_every_offered_command_exists_and_explains_itself(capsys, monkeypatch):
    """Each listed command answers --help under its own name, or a program of the runtime under the one it has."""
    offered = {command: module for command in COMMANDS if (module := module_of(command))}
    assert offered
    for command, module in offered.items():
        if module in sys.modules:  # by another test, which finds it again where it was: as the package's attribute, too
            package, _, name = module.rpartition(".")
            monkeypatch.setattr(sys.modules[package], name, sys.modules[module])
            monkeypatch.delitem(sys.modules, module)
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        by_whom = "" if module.startswith(PROGRAMS) else f"polygon {command}"
        assert capsys.readouterr().out.startswith(f"usage: {by_whom}")


def test_a_reader_that_leaves_early_is_no_error():
    """`polygon ... | head -1` leaves no traceback."""
    program = (
        "import sys\nfrom polygon.commands import cli\nsys.exit(cli.run(lambda argv: print('line\\n' * 200000) or 0))"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait() == cli.EXIT_BROKEN_PIPE


def run_program(code, *, encoding="utf-8", redirect=""):
    """Exit code and streams of a program that runs `code` as a command, through a shell that redirects."""
    program = f"import sys\nfrom polygon.commands import cli\nsys.exit(cli.run(lambda argv: {code}))"
    done = subprocess.run(
        f'"$PYTHON" -c "$PROGRAM" {redirect}',
        shell=True,
        env={**os.environ, "PYTHON": sys.executable, "PROGRAM": program, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_data_is_utf_8_in_any_locale():
    """A Greek letter is no reason to fail, and JSON is UTF-8."""
    assert run_program("cli.emit({}, '9 \u00b5s \u03b1', as_json=False) or 0", encoding="ascii") == (
        0,
        "9 \u00b5s \u03b1\n".encode(),
        b"",
    )


def test_a_closed_output_is_no_error():
    """`>&-` is a way to want no output."""
    assert run_program("cli.emit({}, 'x', as_json=False) or 0", redirect=">&-") == (0, b"", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("text", ["'x'", "'x' * 100_000"])
def test_a_full_disk_is_one_line_and_exit_2(text):
    """What cannot be written is said, whether the buffer or the disk is full first."""
    code, _, err = run_program(f"cli.emit({{}}, {text}, as_json=False) or 0", redirect=">/dev/full")
    assert (code, err) == (2, b"standard output: cannot be written: No space left on device\n")


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    """The folder must exist, and the name must not be a folder's."""
    parser = cli.CommandParser(prog="polygon x", parents=[cli.output_options(out="the plan")])
    for path, fault in ((tmp_path / "no" / "plan.json", "found no folder"), (tmp_path, "found a directory, expected")):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(["-o", str(path)])
        assert stop.value.code == 2
        assert f"argument -o/--out: {path}: {fault}" in capsys.readouterr().err
    for path in (str(tmp_path / "plan.json"), "-", "/dev/null", "plan.json"):
        assert parser.parse_args(["-o", path]).out == path


def test_talk_goes_to_stderr_and_can_be_silenced(capsys):
    """Standard output is for data alone."""
    cli.Talk().say("working")
    cli.Talk(quiet=True).say("not heard")
    with cli.Talk(quiet=True).progress("searching", 10) as update:
        update(3, "best 2 s")
    assert capsys.readouterr() == ("", "working\n")


def problem(*options):
    """What `read_problem` makes of a shipped cluster and these options."""
    parser = cli.CommandParser(prog="polygon x", parents=[cli.problem_options()])
    return cli.read_problem("instances/one-node.yaml", parser.parse_args(list(options)))


def test_problem_of_options():
    """Cluster, model and batch; the sequence length defaults to what the model was made for."""
    given = problem("--model", "gpt3-1.3b", "--global-batch", "8", "--precision", "fp16", "--optimizer", "sgd")
    assert (given.model.name, given.batch.seq_len) == ("gpt3-1.3b", 2048)
    assert (given.batch.precision, given.batch.gradient_precision, given.batch.optimizer) == ("fp16", "fp32", "sgd")
    assert problem("--model", "vit-huge", "--global-batch", "8").batch.seq_len == 257
    assert problem("--model", "llama3.2-1b", "--global-batch", "8").batch.seq_len == cli.LONGEST_DEFAULT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--model: found nothing, expected it beside the cluster instances/one-node.yaml"),
        (("--model", "gpt3-1.3b"), "--global-batch: found nothing, expected it beside the cluster"),
        (("--model", "gpt3-1.4b", "--global-batch", "8"), "model: found model 'gpt3-1.4b', expected 'gpt3-1.3b'"),
        (("--model", "no/such.json", "--global-batch", "8"), "no/such.json: found no such file, expected a file"),
        (
            ("--model", "gpt2", "--global-batch", "8", "--seq-len", "2048"),
            "batch.seq_len: found 2048, expected at most",
        ),
        (("--model", "gpt2", "--global-batch", "8", "--precision", "fp12"), "batch.precision: found 'fp12', expected"),
        (("--model", "gpt2", "--global-batch", "8", "--constraints", "no.yaml"), "no.yaml: found no such file"),
        (("--model", "gpt2", "--global-batch", "1" + 23 * "0"), "batch.global_batch: found 1e+23, expected at most 1"),
    ],
)
def test_problem_options_that_do_not_fit(options, message):
    """The message names the option or the field."""
    with pytest.raises(InputError) as error:
        problem(*options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("blocks: 100000000", "model.blocks: found 1e+08, expected at most 10000"),
        ("hidden_size: 65", "hidden_size: found 65, expected a multiple of heads = 4, or head_dim beside it"),
        ("vocab_size: 1000000000000", "model.vocab_size: found 1e+12, expected at most 2147483647"),
    ],
)
def test_slips_in_a_model_file(line, message, tmp_path):
    """Sizes that no model has are refused at once, not planned for hours."""
    fields = ["blocks: 2", "hidden_size: 64", "heads: 4", "vocab_size: 100", "max_seq_len: 128"]
    kept = [field for field in fields if not field.startswith(line.split(":")[0])]
    file = tmp_path / "m.yaml"
    file.write_text("\n".join([*kept, line]), encoding="utf-8")
    with pytest.raises(InputError) as error:
        problem("--model", str(file), "--global-batch", "8")
    assert str(error.value) == f"{file}: {message}"


def test_a_slip_in_constraints_names_file_and_nearest(tmp_path):
    """What only shows beside the cluster is still said of the file."""
    file = tmp_path / "constraints.yaml"
    file.write_text("forbidden_regions: [labb]", encoding="utf-8")
    with pytest.raises(InputError) as error:
        problem("--model", "gpt2", "--global-batch", "8", "--constraints", str(file))
    assert str(error.value) == f"{file}: forbidden_regions: found 'labb', expected 'lab' (nearest) or another of lab"


def test_a_profile_of_a_device_that_is_not_there_is_refused(tmp_path, capsys):
    """As a bench is: it would change nothing, and whoever gave it would not know."""
    layer = {"kind": "block", "micro_batch_size": 1, "forward_s": 0.01, "backward_s": 0.03}
    profile = {"format": "polygon-layer-profile", "device": "a100-80gb", "seq_len": 64, "layers": [layer]}
    (tmp_path / "profile.json").write_text(json.dumps(profile), "utf-8")
    (tmp_path / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 1}]}]", "utf-8")
    words = ["--cluster", str(tmp_path / "lab.yaml"), "--model", "gpt-tiny", "--global-batch", "2", "--seq-len", "64"]
    words += ["--profile", str(tmp_path / "profile.json")]
    assert cli.run(search.main, words) == 2
    assert capsys.readouterr().err == "--profile: found layers of a100-80gb, expected one of t4\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 32}, "profile of t4: seq_len: found 64, expected 32, as it was measured"),
        ({"precision": "fp32"}, "profile of t4: precision: found 'bf16', expected fp32, as it was measured"),
        ({"hidden_size": 77}, "profile of t4: hidden_size: found 128, expected 77, as it was measured"),
    ],
)
def test_a_profile_of_other_layers_is_refused_and_beside_others_left_out(changes, message, tmp_path, capsys):
    """It changed nothing, and the last of several files went before those that fit. What counts is told."""
    layers = [
        {"kind": kind, "micro_batch_size": 1, "forward_s": 0.01, "backward_s": 0.03}
        for kind in ("embedding", "block", "head")
    ]
    fits = {"format": "polygon-layer-profile", "device": "t4", "seq_len": 64, "hidden_size": 128, "layers": layers}
    for name, data in (("fits", fits), ("other", fits | changes)):
        (tmp_path / name).write_text(json.dumps(data), "utf-8")
    (tmp_path / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 1}]}]", "utf-8")
    words = ["--cluster", str(tmp_path / "lab.yaml"), "--model", "gpt-tiny", "--global-batch", "2", "--seq-len", "64"]
    words += ["--effort", "quick", "--quiet"]
    fitting, other = ["--profile", str(tmp_path / "fits")], ["--profile", str(tmp_path / "other")]
    assert cli.run(search.main, [*words, *other]) == 2
    assert capsys.readouterr().err == message + "\n"
    assert cli.run(search.main, [*words, *fitting, *fitting]) == 2
    assert capsys.readouterr().err == "profile of t4: found 2 files, expected one\n"
    told = [[], fitting, [*fitting, *other]]
    assert [cli.run(search.main, [*words, *more]) for more in told] == [0, 0, 0]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compute from")]
    assert lines == ["compute from  data sheets", "compute from  profile", "compute from  profile"]


def test_a_cluster_in_place_of_groups_is_told_where_it_goes():
    """The likeliest slip of a first day."""
    parser = planning_parser("polygon search", "", "the plan")
    with pytest.raises(InputError, match=r"lab.yaml: found no groups of polygon init, .* or --cluster lab.yaml"):
        cli.read_task(parser.parse_args(["lab.yaml"]), "search")


def test_constraints_file(tmp_path):
    """Constraints come from a file of their own."""
    file = tmp_path / "constraints.yaml"
    file.write_text("memory_headroom: 0.2\nforbidden_regions: [lab]\n", encoding="utf-8")
    given = problem("--model", "gpt2", "--global-batch", "8", "--constraints", str(file))
    assert (given.constraints.memory_headroom, given.constraints.forbidden_regions) == (0.2, ("lab",))


def test_what_a_models_shape_does_not_say_is_said_on_stderr(capsys):
    """One line a note; nothing for a plain model, and nothing where the command is to be quiet."""
    said = "note: gemma-3-4b: a vision tower is counted with the embedding, one image a sequence\n"
    problem("--model", "gemma-3-4b", "--global-batch", "8")
    assert capsys.readouterr().err == said
    problem("--model", "gpt3-1.3b", "--global-batch", "8")
    parser = cli.CommandParser(prog="polygon x", parents=[cli.problem_options()])
    parser.set_defaults(quiet=True)
    cli.read_problem("instances/one-node.yaml", parser.parse_args(["--model", "gemma-3-4b", "--global-batch", "8"]))
    assert capsys.readouterr().err == ""


def test_a_name_of_the_hub_says_what_to_do():
    """One line with the command that fetches the config."""
    with pytest.raises(
        InputError, match=r"^model: found 'google/gemma-3-4b-pt', expected a file .*hf download google/"
    ):
        problem("--model", "google/gemma-3-4b-pt", "--global-batch", "8")


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "llama3-405b"),
        ("--global-batch", "64"),
        ("--seq-len", "512"),
        ("--precision", "bf16"),
        ("--gradient-precision", "fp32"),
        ("--state-precision", "fp32"),
        ("--optimizer", "adamw"),
        ("--constraints", "limits.yaml"),
    ],
)
def test_what_to_train_is_said_once(options):
    """A problem file and a groups file say what to train: options beside them are refused, not dropped in silence."""
    parser = cli.CommandParser(prog="polygon x", parents=[cli.problem_options()])
    path = "instances/native/tiny-2-t4-one-site.yaml"
    assert cli.read_problem(path, parser.parse_args([])).batch.global_batch == 32
    with pytest.raises(InputError, match=f"{options[0]}: found '?{options[1]}'? beside {path}"):
        cli.read_problem(path, parser.parse_args(options))


def test_groups_say_what_to_train(tmp_path):
    """So does the file of `polygon.init`."""
    groups, plan = str(tmp_path / "groups.json"), str(tmp_path / "plan.json")
    options = ["--model", "gpt3-350m", "--global-batch", "8"]
    assert main(["init", "instances/one-node.yaml", *options, "-o", groups]) == 0
    with pytest.raises(InputError, match="--model: found 'gpt3-350m' beside"):
        search.main([groups, *options, "-o", plan])
