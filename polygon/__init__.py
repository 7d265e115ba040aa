"""The planner: from cluster, model and batch to a plan with a predicted step time.

>>> import polygon
>>> lab = polygon.Cluster.from_dict({"regions": [{"name": "lab", "nodes": [
...     {"device": "a100-40gb", "count": 1, "devices_per_node": 2}]}]})
>>> result = polygon.Problem(lab, "opt-350m", polygon.Batch(global_batch=8, seq_len=512)).search(effort="quick")
>>> result.status, result.plan.devices
('feasible', 2)

May import `solvers`, numpy, scipy, numba and networkx; never torch, `runners` or `polygon_comm`. Importing it changes
nothing: no folder is looked at, no hook set, no kernel compiled, and what it offers is imported when it is first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polygon.api.comparison import Comparison
    from polygon.api.front import Front
    from polygon.api.inputs import Cluster, Model
    from polygon.api.loading import load
    from polygon.api.measurements import calibrate
    from polygon.api.planner import Problem
    from polygon.api.plans import Plan
    from polygon.api.results import Milestone, Result
    from polygon.bounds.lower_bound import LowerBound
    from polygon.cost.calibration import Calibration
    from polygon.cost.estimate import Estimate
    from polygon.domain.errors import InputError, PolygonError
    from polygon.domain.groups import Groups
    from polygon.domain.model import Batch
    from polygon.domain.plan import Constraints
    from polygon.domain.runtime import Runtime
    from polygon.planning.search_engine import Effort

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Calibration",
    "Cluster",
    "Comparison",
    "Constraints",
    "Effort",
    "Estimate",
    "Front",
    "Groups",
    "InputError",
    "LowerBound",
    "Milestone",
    "Model",
    "Plan",
    "PolygonError",
    "Problem",
    "Result",
    "Runtime",
    "calibrate",
    "load",
]

_HOMES = {
    "polygon.api.comparison": ("Comparison",),
    "polygon.api.front": ("Front",),
    "polygon.api.inputs": ("Cluster", "Model"),
    "polygon.api.loading": ("load",),
    "polygon.api.measurements": ("calibrate",),
    "polygon.api.planner": ("Problem",),
    "polygon.api.plans": ("Plan",),
    "polygon.api.results": ("Milestone", "Result"),
    "polygon.bounds.lower_bound": ("LowerBound",),
    "polygon.cost.calibration": ("Calibration",),
    "polygon.cost.estimate": ("Estimate",),
    "polygon.domain.errors": ("InputError", "PolygonError"),
    "polygon.domain.groups": ("Groups",),
    "polygon.domain.model": ("Batch",),
    "polygon.domain.plan": ("Constraints",),
    "polygon.domain.runtime": ("Runtime",),
    "polygon.planning.search_engine": ("Effort",),
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'polygon' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return [*__all__, "__version__"]


__path__.append(str(Path(__file__).parent / "commands"))  # so that `python -m polygon.evaluate` finds its command
