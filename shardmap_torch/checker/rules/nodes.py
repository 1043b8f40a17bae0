"""Backwards that are linear in their cotangent as a whole, while the operations in them are not.

`matrix_exp` takes the exponential of a block matrix that the cotangent is one block of, and
`logcumsumexp` the logarithm of the cotangent's absolute value. Operation by operation a sum still
to be taken would be lost there; what comes out at the end is that sum's gradient all the same.
"""

from collections.abc import Sequence
from typing import Final

import torch

from shardmap_torch.checker.rules.lattice import PRODUCT, Conflict, Outcome, join, plain
from shardmap_torch.types import AxisType, K, Partial, R, Z

_LINEAR: Final = frozenset({"LinalgMatrixExpBackward0", "LogcumsumexpBackward0"})


def is_in_linear_backward() -> bool:
    """Returns whether such a backward runs now."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() in _LINEAR


def join_linearly(types: Sequence[AxisType]) -> Outcome:
    """The type of anything made in it: P where a P went in, beside what all ranks have.

    Example:
        >>> join_linearly([Partial, R, K]), join_linearly([R, K])
        (Partial, R)
    """
    types = [plain(axis_type) for axis_type in types]
    if Partial not in types:
        return join(types)
    bad = next((axis_type for axis_type in types if axis_type not in (Partial, R, K, Z)), None)
    return Partial if bad is None else Conflict(Partial, bad, PRODUCT)
