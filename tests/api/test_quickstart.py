"""The notebook of the documentation runs as it stands, in a kernel of its own."""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def printed(cell):
    """What a cell says on standard output and as its value."""
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
        if output.output_type != "error"
    )


def test_every_cell_runs_and_was_run(tmp_path, monkeypatch):
    """No cell raises; each that spoke when the notebook was written speaks again; the plan's file is there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    written = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    for before, after in zip(written.cells, notebook.cells, strict=True):
        if before.cell_type == "code":
            assert before.execution_count is not None
            assert bool(printed(before)) == bool(printed(after))
    assert printed(notebook.cells[-1]) == "True"
    assert (tmp_path / "plan.json").is_file()
