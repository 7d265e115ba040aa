"""Any file of ours, told apart by its content."""

from __future__ import annotations

from collections.abc import Mapping

from polygon.api.inputs import Cluster, Model, keys_of
from polygon.api.measurements import is_profile, profiles_of
from polygon.api.planner import Problem
from polygon.api.plans import Plan
from polygon.cost.calibration import FORMAT as CALIBRATION
from polygon.cost.calibration import Calibration, calibration
from polygon.cost.tables import Profile
from polygon.domain.errors import located, require
from polygon.domain.groups import Groups
from polygon.formats import convert_plan, files, hugging_face, recognition
from polygon.formats.files import PathLike
from polygon.formats.schema import GroupsSpec, PlanSpec, check

Loaded = Plan | Problem | Groups | Cluster | Model | Calibration | tuple[Profile, ...]


def load(path: PathLike) -> Loaded:
    """What a file holds, told apart by its content: plan, problem, groups, cluster, model or measurements.

    Parameters
    ----------
    path : path
        JSON or YAML of polygon's own formats (docs/file-formats.md), PTAFM's text, a hostfile, Hugging Face's
        ``config.json``, a calibration, or measured layer times.

    Returns
    -------
    Plan, Problem, Groups, Cluster, Model, Calibration or tuple of profiles
        Where the kind is known, `Plan.from_file`, `Problem.from_file`, `Cluster.from_yaml` and `Model.from_yaml` have
        the narrower type.

    Raises
    ------
    InputError
        With the file, the place in it, what was found and what is allowed.
    """
    text = files.read_text(path)
    with located(f"{path}: "):
        data = recognition.parse_cluster(text)
        kind = data.get("format") if isinstance(data, Mapping) else None
        if kind == "polygon-plan":
            problem, plan, _ = convert_plan.plan_from_spec(check(PlanSpec, data))
            return Plan(Problem.of(problem), plan)
        if kind == "polygon-groups":
            return convert_plan.groups_from_spec(check(GroupsSpec, data))
        if kind == "polygon-problem":
            return Problem.of(files.problem_beside(path, data))
        if kind == CALIBRATION:
            return calibration(data)
        if is_profile(data):
            return profiles_of(data)
        if hugging_face.is_hugging_face(data) or (isinstance(data, Mapping) and "hidden_size" in data):
            return Model(recognition.model_from_text(text, files.model_name(path)))
        known = isinstance(data, Mapping) and (kind == "polygon-cluster" or "regions" in data)
        require(known, "content", keys_of(data), "a plan, groups, a problem, a cluster, a model or measurements")
        return Cluster(recognition.cluster_from_data(data, files.stem(path)))
