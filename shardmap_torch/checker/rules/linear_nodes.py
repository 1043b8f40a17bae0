"""Autograd nodes whose backward is linear in its cotangent although its operations are not.

`matrix_exp` takes the exponential of a block matrix that the cotangent is one block of, and
`logcumsumexp` the logarithm of the cotangent's absolute value. Typed operation by operation, a
pending sum would be refused there; yet the backward's result is a pending sum of the gradient.
"""

from collections.abc import Sequence
from typing import Final

from shardmap_torch.checker.rules.lattice import PRODUCT, Conflict, Outcome, join, plain
from shardmap_torch.core.torch_private.engine import current_autograd_node
from shardmap_torch.types import AxisType, K, Partial, R, Z

_LINEAR: Final = frozenset({"LinalgMatrixExpBackward0", "LogcumsumexpBackward0"})


def is_in_linear_backward() -> bool:
    """Returns whether the backward of such a node is running."""
    node = current_autograd_node()
    return node is not None and node.name() in _LINEAR


def join_linearly(types: Sequence[AxisType]) -> Outcome:
    """Returns the type of a result in such a backward: P if an operand is P, else their join.

    Example:
        >>> join_linearly([Partial, R, K]), join_linearly([R, K])
        (Partial, R)
    """
    types = [plain(axis_type) for axis_type in types]
    if Partial not in types:
        return join(types)
    bad = next((axis_type for axis_type in types if axis_type not in (Partial, R, K, Z)), None)
    return Partial if bad is None else Conflict(Partial, bad, PRODUCT)
