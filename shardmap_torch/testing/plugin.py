"""Fixtures for pytest: `pytest_plugins = ["shardmap_torch.testing.plugin"]` in conftest.py.

It is no entry point: pytest would import torch for every run in an environment that has this
package, and would rewrite the assertions of all of its modules.
"""

from collections.abc import Callable

import pytest

from shardmap_torch.mesh import Mesh, make_mesh


@pytest.fixture
def simulated_mesh() -> Callable[..., Mesh]:
    """Makes meshes of simulated ranks that compute as real ones: `simulated_mesh(dp=2, tp=4)`."""

    def make(**sizes: int) -> Mesh:
        return make_mesh(tuple(sizes.values()), tuple(sizes), kind="simulated", simulate="ranks")

    return make
