"""The notebooks of the documentation run as they stand, each in a kernel of its own."""

import os
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


PUBLISHED = {"sailor-comparison"}
"""Those whose figures are claims about published runs, neither searched nor measured: they are what is found today."""


def printed(cell):
    """What a cell says on standard output and as its value."""
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
        if output.output_type != "error"
    )


def test_there_are_notebooks():
    """The first steps, two comparisons, a calibration, a solver."""
    named = {"quickstart", "compare-clusters", "calibrate-from-a-run", "write-a-solver", "sailor-comparison"}
    assert {path.stem for path in NOTEBOOKS} >= named


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_was_run(path, tmp_path, monkeypatch):
    """No cell raises; each that spoke when the notebook was written speaks again; the last one finds all well."""
    # Seconds to import: not for every worker that collects the tests.
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "comm"), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    written = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    for before, after in zip(written.cells, notebook.cells, strict=True):
        if before.cell_type == "code":
            assert before.execution_count is not None
            assert bool(printed(before)) == bool(printed(after))
            again = f"jupyter nbconvert --to notebook --execute --inplace docs/{path.name}"
            assert path.stem not in PUBLISHED or printed(before) == printed(after), again
    assert printed(notebook.cells[-1]) == "True"
    assert path.stem != "quickstart" or (tmp_path / "plan.json").is_file()
