"""Queries of the body that runs: its mesh, whether it is checked, its types."""

from torch import Tensor

from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.arguments import finest
from shardmap_torch.types import AxisType


def mesh_of_body() -> Mesh | None:
    """Returns the mesh of the body that runs on this thread; None outside of any."""
    scope = current_scope()
    return None if scope is None else scope.backend.mesh


def is_checking() -> bool:
    """Returns whether the body is being checked, on tensors without values."""
    scope = current_scope()
    return scope is not None and is_checker(scope.backend)


def types_of(x: Tensor, axes: tuple[str, ...] | None = None) -> tuple[AxisType, ...] | None:
    """Returns the types of `x` that the checker found, along all bound axes or these.

    None outside of a body, or in one that is not checked. It is a step of the program, so that runs
    get what the check has found.
    """
    scope = current_scope()
    if scope is None:
        return None
    return scope.types_of(tuple(sorted(scope.axes)) if axes is None else finest(axes), x)
