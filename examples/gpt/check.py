"""Compares the sharded model with the same model on one device."""

import math
from typing import Any

import optree
import torch
from torch import Tensor

from examples.gpt import plain
from examples.gpt.model import Params
from examples.gpt.step import LossAndGrads
from shardmap_torch import full


def tolerance(dtype: torch.dtype, num_tokens: int) -> float:
    """The largest error, relative to the largest entry of a leaf, that rounding explains.

    float64: 1e-10, far above rounding and far below any error of the program. Else: a gradient is
    a sum over n tokens, which the ranks add in another order; n independent roundings of relative
    size u add up to about sqrt(n) * u, and 16 such sums in a row, as the layers are, to 4 of these.
    """
    if dtype == torch.float64:
        return 1e-10
    unit_roundoff = torch.finfo(dtype).eps / 2
    return 4 * math.sqrt(num_tokens) * unit_roundoff


def compare(
    sharded: LossAndGrads,
    params: Params,
    batch: Tensor,
    dtype: torch.dtype,
    num_microbatches: int = 1,
) -> dict[str, float]:
    """Returns, by leaf, the largest error of the gradient relative to its largest entry.

    Both models start from the same global values, in `dtype`, and no gradient is clipped.

    Raises:
        AssertionError: an error is above `tolerance`; names every such leaf.
    """
    params = optree.tree_map(lambda p: p.to(dtype), full(params))
    expected: Any = plain.loss_and_grads(params, full(batch), num_microbatches)
    actual: Any = full(sharded(params, batch))
    found: Any = optree.tree_map(_relative_error, actual, expected)
    errors = {"loss": found[0]}
    for path, error in zip(optree.tree_paths(found[1]), optree.tree_leaves(found[1]), strict=True):
        errors[".".join(map(str, path))] = error
    limit = tolerance(dtype, batch[:, 1:].numel())
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    if wrong:
        raise AssertionError(f"{dtype}: not equal to one device up to {limit:.1e}: {wrong}")
    return errors


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()
