"""The wheel's bill of materials, of what CycloneDX's tool finds where the wheel is installed alone (`make sbom`).

    python benchmarks/sbom.py environment.cdx.json -o dist/sbom.cdx.json

The wheel becomes the component that the bill is of. The packages whose code the page's build has put into
`polygon/web/static` are added: pip knows nothing of them, and they come with every wheel.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEEL = "polygon-train"
MADE = {"virtual:land": "world-atlas"}
"""Modules that `web/vite.config.ts` makes, and the package of which they hold something."""
IMPORTED = re.compile(r"""(?:from|import\()\s*["'](@[^/"']+/[^/"']+|[^./"'][^/"']*)""")


def bundled(sources: Iterable[str], lock: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Components of the packages that sources import, and of those that these need.

    Parameters
    ----------
    sources : iterable of str
        Text of the page's modules.
    lock : mapping
        `package-lock.json`: versions, licences and hashes.

    Raises
    ------
    ValueError
        Where an imported package is not locked.
    """
    packages = lock["packages"]
    found: set[str] = set()
    wanted = {MADE.get(name, name) for text in sources for name in IMPORTED.findall(text)}
    while missing := wanted - found:
        name = min(missing)
        if f"node_modules/{name}" not in packages:
            raise ValueError(f"package-lock.json: found no {name}, which the page imports")
        found.add(name)
        wanted |= set(packages[f"node_modules/{name}"].get("dependencies", ()))
    return [_component(name, packages[f"node_modules/{name}"]) for name in sorted(found)]


def _component(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    algorithm, _, value = entry["integrity"].partition("-")
    return {
        "bom-ref": f"npm:{name}@{entry['version']}",
        "type": "library",
        "name": name,
        "version": entry["version"],
        "purl": f"pkg:npm/{name.replace('@', '%40')}@{entry['version']}",
        "hashes": [{"alg": f"SHA-{algorithm.removeprefix('sha')}", "content": base64.b64decode(value).hex()}],
        "licenses": [{"license": {"id": entry["license"], "acknowledgement": "declared"}}],
    }


def completed(bill: Mapping[str, Any], page: list[dict[str, Any]]) -> dict[str, Any]:
    """The bill of an environment as that of the wheel in it, with the page's packages.

    Raises
    ------
    ValueError
        Where the environment has no wheel of ours.
    """
    (wheel, *_), others = _parted(bill["components"])
    for reference in wheel.get("externalReferences", ()):
        if reference["url"].startswith("file:"):  # where it lay while it was installed
            reference["url"] = reference["url"].rpartition("/")[2]
    dependencies = [
        {**entry, "dependsOn": sorted([*entry.get("dependsOn", ()), *(part["bom-ref"] for part in page)])}
        if entry["ref"] == wheel["bom-ref"]
        else entry
        for entry in bill["dependencies"]
    ]
    dependencies += [{"ref": part["bom-ref"]} for part in page]
    return {
        **bill,
        "metadata": {**bill["metadata"], "component": {**wheel, "type": "application"}},
        "components": [*others, *page],
        "dependencies": dependencies,
    }


def _parted(components: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    ours: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for component in components:
        (ours if component["name"] == WHEEL else others).append(component)
    if not ours:
        raise ValueError(f"environment: found no {WHEEL}, expected it installed there")
    return ours, others


def main() -> int:
    """Write the bill, which CycloneDX's own validator has read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="of cyclonedx-py environment")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    sources = [path.read_text("utf-8") for path in sorted((ROOT / "web/src").glob("*.ts*"))]
    page = bundled(sources, json.loads((ROOT / "web/package-lock.json").read_text("utf-8")))
    bill = completed(json.loads(args.environment.read_text("utf-8")), page)
    text = json.dumps(bill, indent=2, ensure_ascii=False) + "\n"
    fault = JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text)
    if fault is not None:
        print(f"{args.out}: no valid bill: {fault}", file=sys.stderr)
        return 1
    args.out.write_text(text, "utf-8")
    print(f"{args.out}: {len(bill['components'])} components, {len(page)} of them in the page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
