"""The bill of materials names what is in the page, and is that of the wheel."""

import base64
import json
import re

import pytest

from benchmarks.sbom import ROOT, bundled, completed

LOCK = json.loads((ROOT / "web/package-lock.json").read_text("utf-8"))
SOURCES = [path.read_text("utf-8") for path in (ROOT / "web/src").glob("*.ts*")]


def test_what_the_page_imports_is_listed_and_what_builds_it_is_not():
    """By name, with what each needs: echarts draws by zrender; vite and types leave nothing in the page."""
    found = {part["name"]: part for part in bundled(SOURCES, LOCK)}
    assert {
        "preact",
        "@preact/signals",
        "@preact/signals-core",
        "echarts",
        "zrender",
        "d3-geo",
        "d3-array",
        "world-atlas",
    } <= set(found)
    assert not {"vite", "typescript", "axe-core", "rolldown"} & set(found)
    assert found["@preact/signals"]["purl"].startswith("pkg:npm/%40preact/signals@")
    locked = LOCK["packages"]["node_modules/echarts"]
    assert found["echarts"]["hashes"] == [
        {"alg": "SHA-512", "content": base64.b64decode(locked["integrity"].removeprefix("sha512-")).hex()}
    ]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", part["version"]) and part["licenses"] for part in found.values())


def test_a_package_that_is_not_locked_is_an_error():
    """A bill that leaves something out would be worse than none."""
    with pytest.raises(ValueError, match="found no left-pad, which the page imports"):
        bundled(['import pad from "left-pad";'], LOCK)


def test_the_bill_is_the_wheels():
    """The wheel is what it is of, needs what is in the page, and does not tell from which folder it was installed."""
    wheel = {"name": "polygon-train", "bom-ref": "polygon-train==1", "type": "library"}
    wheel["externalReferences"] = [{"type": "distribution", "url": "file:///home/somebody/dist/polygon_train-1.whl"}]
    numpy = {"name": "numpy", "bom-ref": "numpy==2", "type": "library"}
    dependencies = [{"ref": "numpy==2"}, {"ref": "polygon-train==1", "dependsOn": ["numpy==2"]}]
    bill = {"metadata": {"tools": {}}, "components": [numpy, wheel], "dependencies": dependencies}
    made = completed(bill, [{"bom-ref": "npm:preact@11", "name": "preact"}])
    assert made["metadata"]["component"]["type"] == "application"
    assert [part["name"] for part in made["components"]] == ["numpy", "preact"]
    assert {"ref": "polygon-train==1", "dependsOn": ["npm:preact@11", "numpy==2"]} in made["dependencies"]
    assert "somebody" not in json.dumps(made)
    with pytest.raises(ValueError, match="found no polygon-train"):
        completed({**bill, "components": [numpy]}, [])
