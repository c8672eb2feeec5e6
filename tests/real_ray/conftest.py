"""Two nodes of a Ray cluster on this machine, on loopback alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from ray_node import NODE

# Read when Ray is imported, here and by every process of the cluster: nodes take the loopback address as on a laptop,
# and nothing is reported to anyone.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Workers are as urgent as the tests that wait for them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        nodes.add_node(**NODE)
        yield nodes
    finally:
        nodes.shutdown()
