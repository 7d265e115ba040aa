"""Every malformed file gives its one-line message and exit 2, through the command that a user would give it to.

The lists in `tests/bad` hold a line for each file: its name, a colon, the message (`...`: it goes on).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polygon.__main__ import main
from polygon.commands import cli
from polygon.formats import files

FOLDER = Path("tests/bad")
COMMANDS = {
    "clusters": ("init", ["--model", "gpt-tiny", "--global-batch", "8"]),
    "groups": ("search", []),
    "plans": ("evaluate", []),
}
"""For each list: the command that reads such files and its further options."""


def cases():
    """(list, file, message) of every line of the lists."""
    for name in COMMANDS:
        for line in (FOLDER / f"{name}.txt").read_text("utf-8").splitlines():
            file, message = line.split(": ", 1)
            yield pytest.param(name, FOLDER / file, message, id=f"{name}-{file}")


@pytest.mark.parametrize(("kind", "file", "message"), list(cases()))
def test_message_and_exit_code(kind, file, message, capsys):
    """Nothing on stdout, one line on stderr that names the file, exit 2."""
    command, options = COMMANDS[kind]
    code = cli.run(main, [command, str(file), *options])
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    expected = f"{file}: {message}"
    if message.endswith("..."):
        assert output.err.startswith(expected.removesuffix("...").rstrip())
    else:
        assert output.err == expected + "\n"


def test_as_a_process_of_its_own():
    """The same without our test's process around it: `python -m polygon.init` on a bad file."""
    file = FOLDER / "negative.yaml"
    command = [sys.executable, "-m", "polygon.init", str(file), "--model", "gpt-tiny", "--global-batch", "8"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = f"{file}: links[0].bandwidth_gbps: found -3, expected a number > 1e-09 and < 1000000\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", expected)


def test_every_malformed_file_is_listed():
    """No file without its expected message."""
    listed = {case.values[1] for case in cases()}
    assert {file for file in FOLDER.iterdir() if file.stem not in COMMANDS} <= listed


def test_file_that_cannot_be_written(tmp_path):
    """Writing into a folder that is not there names the file and leaves nothing behind."""
    with pytest.raises(files.InputError, match=r"out\.json: cannot be written: No such file or directory"):
        files.write_json(tmp_path / "no" / "out.json", {})
    assert list(tmp_path.iterdir()) == []
