"""What all commands of polygon share: options, exit codes, errors in one line, talk on stderr.

A command is a module with ``main(argv: list[str] | None = None) -> int`` that builds a `CommandParser` with
``prog="polygon NAME"`` and the parents below; its last two lines are::

    if __name__ == "__main__":
        sys.exit(cli.run(main))

Data goes to standard output (with `--json` for machines), talk and progress to standard error.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.util import find_spec
from types import FrameType
from typing import Any, NoReturn

from polygon.commands.interrupts import is_ours, say_interrupted
from polygon.domain.errors import InputError, fault, located, one_of, require
from polygon.domain.message import Message
from polygon.domain.model import Batch
from polygon.domain.optimizer import OPTIMIZERS

if is_ours(sys.modules["__main__"]):  # a command that has yet to import the rest of itself
    sys.excepthook = say_interrupted

EXIT_OK, EXIT_BAD_INPUT, EXIT_INFEASIBLE = 0, 2, 3
EXIT_BY_SIGNAL, EXIT_BROKEN_PIPE = 128, 141
"""Shells have it so: 128 + the signal that ended the work, 130 by Ctrl-C; 128 + SIGPIPE."""

LONGEST_DEFAULT = 8192
"""Sequence length where the user gives none and the model takes more: few train at the most that a model can take."""

SEQ_LEN_HELP = f"tokens of a sequence (default: the model's most, up to {LONGEST_DEFAULT})"

Main = Callable[[list[str] | None], int]


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit 2, and whose options cannot be abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


started_by = ""
"""The command that started a program of `runners` in this process (`polygon launch`); empty: it was started itself."""


def _start_of(name: str) -> str:
    """What one types to start a program, as it was done."""
    spec = sys.modules["__main__"].__spec__
    as_module = f"python -m {spec.name}" if spec is not None and spec.name.rpartition(".")[2] == name else ""
    return started_by or as_module or f"{name}.py"


class ProgramParser(CommandParser):
    """The parser of a program of `runners`: its help says how it is started, the line of an error its name alone.

    Parameters
    ----------
    name : str
        Of the program's module.
    description : str, optional
        Its first paragraph is shown.
    """

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(prog=_start_of(name), description=(description or "").split("\n\n", maxsplit=1)[0])
        self._name = name

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self._name}: {message}\n")


def run(main: Main, argv: list[str] | None = None) -> int:
    """Run a command and turn what it raises into an exit code and one line on stderr."""
    # Imports and searches make a million objects that stay: to look through them as often as is usual takes a tenth of
    # a short command.
    gc.set_threshold(20_000, 20, 20)
    _prepare_streams()
    try:
        code = main(argv)
        write()
    except InputError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        return _fail("interrupted", EXIT_BY_SIGNAL + number)
    except BrokenPipeError:  # the reader has gone (`| head`)
        _drop_output()
        return EXIT_BROKEN_PIPE
    return code


def _prepare_streams() -> None:
    """Data is UTF-8 whatever the locale says, as in files; one that was closed (`>&-`) keeps nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def write(text: str = "") -> None:
    """Write to standard output, with all that it still holds; InputError where it cannot take it (a full disk)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise InputError(f"standard output: cannot be written: {error.strerror}") from None


def _drop_output() -> None:
    """Let the interpreter's last flush of standard output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def infeasible(reason: Message | str) -> int:
    """Say on stderr why no plan exists; returns the exit code for it."""
    return _fail(str(reason), EXIT_INFEASIBLE)


def require_torch(command: str) -> None:
    """For commands of the runtime: InputError where what the planner does without is not installed."""
    if find_spec("torch") is None:
        raise InputError(f"{command}: found no torch, expected it installed: pip install 'polygon-train[train]'")


def interrupted(asked: Asked) -> int:
    """Say on stderr that work was interrupted that had nothing to keep yet; returns the exit code for it."""
    return _fail("interrupted", asked.exit_code)


def _fail(message: str, code: int) -> int:
    print(" ".join(message.split("\n")), file=sys.stderr)  # noqa: T201 - this is where the program talks
    return code


# Options that several commands have: parents for argparse


def output_options(*, out: str | None = None) -> argparse.ArgumentParser:
    """`--json`, `--quiet`, and `-o/--out` where the command writes a file (`out` says which)."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("output")
    if out is not None:
        told = f"{out}; - writes it to standard output"
        group.add_argument("-o", "--out", type=out_file, metavar="FILE", help=told)
    group.add_argument("--json", action="store_true", help="machine-readable result on standard output")
    group.add_argument("--quiet", action="store_true", help="no talk and no progress on standard error")
    return parent


def search_options(*, time_limit_s: float | None = None) -> argparse.ArgumentParser:
    """`--seed` and `--time-limit` of commands that search."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("search")
    group.add_argument("--seed", type=whole(0), default=0, help="of the random numbers (default %(default)s)")
    _add_time_limit(group, time_limit_s)
    return parent


def time_limit_option() -> argparse.ArgumentParser:
    """`--time-limit` of commands that draw no random numbers."""
    parent = argparse.ArgumentParser(add_help=False)
    _add_time_limit(parent, None)
    return parent


def _add_time_limit(group: Any, time_limit_s: float | None) -> None:
    default = "none" if time_limit_s is None else "%(default)g"
    group.add_argument(
        "--time-limit",
        type=number(above=0),
        default=time_limit_s,
        metavar="SECONDS",
        help=f"answer after about this long, with the best so far (default {default})",
    )


PROBLEM_OPTIONS = (
    "--model", "--global-batch", "--seq-len", "--precision", "--gradient-precision", "--state-precision", "--optimizer",
    "--constraints",
)  # fmt: skip
"""Of `problem_options`, what a problem file and a groups file say themselves."""


def _given(args: argparse.Namespace, option: str) -> Any:
    """The value of an option; None where it was not given."""
    return getattr(args, option.removeprefix("--").replace("-", "_"))


def _nothing_beside(path: str, args: argparse.Namespace) -> None:
    """Refuse options that a file's problem would go before in silence."""
    for option in PROBLEM_OPTIONS:
        value = _given(args, option)
        if value is not None:
            raise InputError(f"{option}: found {value!r} beside {path}, expected none: that file says what to train")


def problem_options() -> argparse.ArgumentParser:
    """Model, batch and constraints: what makes a problem of a cluster (see `read_problem`)."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("what to train")
    usual = {field.name: field.default for field in fields(Batch)}
    named = "name in the catalogue, Hugging Face config.json (or its folder), or polygon's own model file"
    group.add_argument("--model", help=named)
    group.add_argument("--global-batch", type=whole(1), metavar="N", help="sequences per step")
    group.add_argument("--seq-len", type=whole(1), metavar="N", help=SEQ_LEN_HELP)
    group.add_argument("--precision", help=f"of compute and activations (default {usual['precision']})")
    group.add_argument("--gradient-precision", help=f"of weight gradients (default {usual['gradient_precision']})")
    group.add_argument("--optimizer", help=f"{', '.join(OPTIMIZERS)} (default {usual['optimizer']})")
    kept = f"of what the optimizer keeps, fp32 or bf16 (default {usual['state_precision']})"
    group.add_argument("--state-precision", help=kept)
    group.add_argument(
        "--constraints", metavar="FILE", help="YAML: memory headroom, regions forbidden or required, ..."
    )
    _add_runtime(group)
    return parent


def runtime_option() -> argparse.ArgumentParser:
    """`--runtime` of commands that read a plan (`problem_options` has it too): it goes before what the file says."""
    parent = argparse.ArgumentParser(add_help=False)
    _add_runtime(parent)
    return parent


def _add_runtime(group: Any) -> None:
    told = "program that executes the step, of those that polygon show runtimes lists (default: the file's, or polygon)"
    group.add_argument("--runtime", type=_runtime, metavar="NAME", help=told)


def _runtime(text: str) -> Any:
    """An argparse type: a runtime of the catalogue."""
    from polygon.formats import catalogue

    try:
        return catalogue.runtime(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def with_runtime(problem: Any, args: argparse.Namespace) -> Any:
    """The problem, for the program of `--runtime` where one was given."""
    runtime = getattr(args, "runtime", None)
    return problem if runtime is None else replace(problem, runtime=runtime)


def bench_options() -> argparse.ArgumentParser:
    """What a device reaches as measured, in place of what its architecture is known to reach (see `benched`)."""
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(
        "--bench",
        action="append",
        default=[],
        metavar="FILE",
        help="operators of a device type as polygon bench-device measured them; a profile of it goes before",
    )
    return parent


def benched(problem: Any, args: argparse.Namespace) -> Any:
    """The problem with devices as the files of `--bench` have them, for commands that take it."""
    if not getattr(args, "bench", None):
        return problem
    from polygon.cost.bench_fit import with_benches
    from polygon.formats import files

    return with_benches(problem, [files.read_bench(path) for path in args.bench])


def profile_options() -> argparse.ArgumentParser:
    """Measured operators and layer times in place of the device model (see `read_measured` and `benched`)."""
    parent = argparse.ArgumentParser(add_help=False, parents=[bench_options()])
    parent.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="FILE",
        help="layer times: a file of runners.profile_layers per device type, or a sailor_profiles file of models",
    )
    parent.add_argument("--calibration", metavar="FILE", help="factors fitted to real runs by polygon calibrate")
    return parent


def read_measured(args: argparse.Namespace) -> dict[str, Any]:
    """Profiles and calibration of `profile_options`, as `polygon.Problem` takes them."""
    from polygon.api.measurements import read_calibration, read_profiles

    factors = None if args.calibration is None else read_calibration(args.calibration)
    return {"profiles": read_profiles(args.profile), "calibration": factors}


def _measured_for(problem: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The same for a problem, which must have what was measured: a profile of other layers changes nothing.

    Raises
    ------
    InputError
        Where no profile is of the problem's devices, or of its layers; two are of the same; where a calibration is of
        other devices alone.
    """
    from polygon.cost.profiles import KindProfile

    found = read_measured(args)
    known = problem.cluster.catalogue
    measured = sorted({device for profile in found["profiles"] for device in profile.devices})
    if measured and not set(measured) & set(known):
        raise fault("--profile", Message("found.devices_of", devices=tuple(measured)), one_of(measured[0], known))
    kinds = [profile for profile in found["profiles"] if isinstance(profile, KindProfile) and profile.device in known]
    fitting = [profile.device for profile in kinds if profile.fits(problem.model, problem.batch)]
    for name in fitting:
        require(
            fitting.count(name) == 1, f"profile of {name}", Message("found.files", files=fitting.count(name)), "one"
        )
    factors = found["calibration"]
    fitted = sorted({*factors.compute, *factors.update}) if factors else []
    if fitted and not set(fitted) & set(known):
        raise fault("--calibration", Message("found.factors_of", devices=tuple(fitted)), one_of(fitted[0], known))
    if len(kinds) == len(found["profiles"]) and not fitting:
        for profile in kinds:
            profile.check(problem.model, problem.batch)
    return found


def posed(problem: Any, args: argparse.Namespace) -> Any:
    """A problem under `profile_options`.

    Returns
    -------
    polygon.Problem
    """
    from polygon.api.planner import Problem

    return Problem.of(problem, **_measured_for(problem, args))


def read_tables(problem: Any, args: argparse.Namespace) -> Any:
    """Cost tables of a problem under `profile_options`."""
    return posed(problem, args).tables


def read_plan(path: str, args: argparse.Namespace) -> Any:
    """The plan of a file under `profile_options` and `runtime_option`.

    Returns
    -------
    polygon.Plan
    """
    from polygon.api.planner import Problem
    from polygon.api.plans import Plan
    from polygon.formats import files

    problem, plan, _ = files.read_plan(path)
    problem = benched(with_runtime(problem, args), args)
    return Plan(Problem.of(problem, **_measured_for(problem, args)), plan)


def read_problem(path: str, args: argparse.Namespace) -> Any:
    """The problem of a cluster file, `problem_options` and `bench_options`; a problem file stands for itself, alone.

    Returns
    -------
    polygon.domain.plan.Problem
    """
    from polygon.domain.plan import Problem
    from polygon.formats import files

    cluster = files.read_cluster_or_problem(path)
    if isinstance(cluster, Problem):
        _nothing_beside(path, args)
        return benched(with_runtime(cluster, args), args)
    for option in ("--model", "--global-batch"):
        if _given(args, option) is None:
            raise InputError(f"{option}: found nothing, expected it beside the cluster {path}")
    model = files.read_model(args.model)
    for note in model.notes:
        Talk(quiet=getattr(args, "quiet", False)).say(f"note: {model.name}: {note}")
    formats = ("precision", "gradient_precision", "state_precision")
    said = {name: getattr(args, name) for name in ("global_batch", *formats, "optimizer")}
    said["seq_len"] = args.seq_len or model.tokens_per_image or min(model.max_seq_len, LONGEST_DEFAULT)
    batch = files.read_batch({name: value for name, value in said.items() if value is not None})
    problem = benched(with_runtime(Problem(cluster=cluster, model=model, batch=batch), args), args)
    if args.constraints is None:
        return problem
    constraints = files.read_constraints(args.constraints)
    with located(f"{args.constraints}: "):
        return replace(problem, constraints=constraints)


def read_task(args: argparse.Namespace, command: str) -> tuple[Any, Any]:
    """What a command plans that takes `groups` or `--cluster`: the problem, and the groups or None."""
    from polygon.formats import files

    if (args.groups is None) == (args.cluster is None):
        raise InputError(f"{command}: expected either a groups file or --cluster FILE with --model and --global-batch")
    if args.cluster is not None:
        return read_problem(args.cluster, args), None
    if args.groups.endswith((".yaml", ".yml", ".txt")):
        raise InputError(f"{args.groups}: found no groups of polygon init, expected those or --cluster {args.groups}")
    groups = files.read_groups(args.groups)
    _nothing_beside(args.groups, args)
    groups = replace(groups, problem=benched(with_runtime(groups.problem, args), args))
    return groups.problem, groups


def out_file(text: str) -> str:
    """An argparse type: a file that can be written, refused before the work rather than after it."""
    from polygon.formats import files

    try:
        files.check_writable(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def picture_file(text: str) -> str:
    """An argparse type: an `out_file` whose name ends as a picture does that matplotlib, which must be there, draws."""
    from polygon.messages.figures import check_picture

    try:
        check_picture(out_file(text))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def whole(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number within limits."""
    limits = f">= {at_least}" if at_most is None else f"in {at_least}..{at_most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least or (at_most is not None and value > at_most):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number {limits}")
        return value

    return convert


def whole_numbers(at_least: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers separated by commas, in ascending order without repetitions."""

    def convert(text: str) -> list[int]:
        try:
            values = sorted({int(word) for word in text.split(",") if word})
        except ValueError:
            values = []
        if not values or values[0] < at_least:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected whole numbers >= {at_least} such as 1,2,4")
        return values

    return convert


def number(*, above: float | None = None, at_least: float | None = None) -> Callable[[str], float]:
    """An argparse type: a finite number within limits."""
    limits = f" > {above:g}" if above is not None else f" >= {at_least:g}" if at_least is not None else ""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = (above is None or value > above) and (at_least is None or value >= at_least)
        if not (math.isfinite(value) and fits):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a number{limits}")
        return value

    return convert


# Results and talk


def emit(data: Any, text: str, *, as_json: bool) -> None:
    """Print a result on standard output: as JSON for machines or as text for people."""
    if as_json:
        from polygon.formats.serialization import format_json

        text = format_json(data)
    write(text if text.endswith("\n") else text + "\n")


@contextmanager
def handled_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """`handler` answers these signals inside the block; afterwards whoever answered before does again."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def stop_signals() -> list[int]:
    """Signals that ask work to end: SIGTERM, and SIGINT where the parent has not set it to be ignored."""
    return [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]


class Interrupted(KeyboardInterrupt):
    """A signal asked the work to end; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Asked:
    """Whether a signal has asked work to end, and what a command then exits with that has kept a part of the work."""

    def __init__(self) -> None:
        self._number: int | None = None

    def __call__(self) -> bool:
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """As of a program that the signal ended; a KeyboardInterrupt that nobody sent counts as Ctrl-C."""
        return EXIT_BY_SIGNAL + (self._number or signal.SIGINT)

    def heed(self) -> None:
        """Interrupt here, if a signal has asked for it: in the middle of compiled code Python could not tell it on."""
        if self._number is not None:
            raise Interrupted(self._number)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Answer the first signal by noting it, and a second by an interrupt."""
        self._number = number
        signal.signal(number, self.interrupt)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Answer a signal by an interrupt."""
        self._number = number
        raise Interrupted(number)


@contextmanager
def interruptible() -> Iterator[Asked]:
    """For work that asks from time to time: the first Ctrl-C or SIGTERM is an answer, the second an interrupt."""
    asked = Asked()
    with handled_signals(stop_signals(), asked.note):
        yield asked


@contextmanager
def interrupted_by_signals() -> Iterator[Asked]:
    """For work that keeps its best at a KeyboardInterrupt: `timeout` and batch systems send SIGTERM instead."""
    asked = Asked()
    with handled_signals(stop_signals(), asked.interrupt):
        yield asked


class Talk:
    """What a command says on stderr while it works; nothing with `--quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, text: str) -> None:
        """One line."""
        if not self.quiet:
            print(text, file=sys.stderr)  # noqa: T201 - this is where the program talks

    @contextmanager
    def progress(self, what: str, total: float | None = None) -> Iterator[Callable[[float, str], None]]:
        """A progress bar, where stderr is a terminal.

        Gives a function of how much is done (of `total`; a spinner where there is none) and what to say beside it.
        """
        if self.quiet or not sys.stderr.isatty():
            yield lambda done, note: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
