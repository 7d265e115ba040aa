"""Who has to do with whom."""

from dataclasses import replace

from runners.engine.rank_layout import Layout
from tests.small_problems import routed_problem, small_cluster, small_plan


def test_ranks_watch_those_they_talk_to_and_rank_0():
    """Two pipelines of three stages, each with two ranks: the rank before and behind, the other of the stage, and the
    one that sees everybody; not whoever else is in the region, though all agree on the gradient's norm."""
    problem, _ = routed_problem(1)
    model = replace(problem.model, tied_embeddings=False)
    problem = replace(problem, cluster=small_cluster(2, 4), model=model)
    routes = [[0, 0, 0], [1, 1, 1]] * 4
    plan = small_plan(problem.cluster, [(0, 2), (2, 4), (4, 6)], [[0, 1], [2, 3], [4, 5]], routes)
    layout = Layout(problem, plan)
    assert "all" in layout.groups
    watched = {rank: layout.watched(rank) for rank in range(6)}
    assert watched == {0: [1, 2, 3, 4, 5], 1: [0, 3], 2: [0, 3, 4], 3: [0, 1, 2, 5], 4: [0, 2, 5], 5: [0, 3, 4]}
