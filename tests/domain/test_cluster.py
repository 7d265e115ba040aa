"""What a cluster refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polygon.domain.errors import InputError
from tests.small_problems import small_cluster


def test_regions_have_names_that_differ():
    """Two regions of one name cannot be told apart in plans and messages: the name is said."""
    cluster = small_cluster(1, 1, 1)
    assert [region.name for region in cluster.regions] == ["region-0", "region-1", "region-2"]
    first, second, third = cluster.regions
    with pytest.raises(InputError, match="regions: found 'region-1', expected names that differ"):
        replace(cluster, regions=(first, second, replace(third, name="region-1")))
