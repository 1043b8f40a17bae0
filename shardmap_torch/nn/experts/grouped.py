"""A linear layer of several experts, on rows that are sorted by expert."""

from torch import Tensor

from shardmap_torch.core.grouped_matmul import grouped_product
from shardmap_torch.errors import LayerError


def grouped_linear(
    rows: Tensor, weights: Tensor, sizes: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Applies the linear layer of expert g to the next `sizes[g]` rows.

    Rows behind all groups cost nothing and become zeros, and their gradient is zero.

    Shape: rows [r, d], weights [g, d, f], integers sizes [g], bias [g, f] give [r, f]. Types: those
    of a matmul. Sends nothing. The sizes are read by Python, so that a GPU is waited for.

    Args:
        rows: sorted by expert.
        weights: one matrix per expert.
        sizes: number of rows of each expert.
        bias: one row per expert.

    Raises:
        LayerError: shapes that do not match.

    Source: `torch.nn.functional.grouped_mm`; Gale et al. 2022, "MegaBlocks".

    Example:
        >>> import torch
        >>> weights, sizes = torch.tensor([[[10.0]], [[100.0]]]), torch.tensor([1, 2])
        >>> grouped_linear(torch.arange(1.0, 5.0).unsqueeze(1), weights, sizes).squeeze()
        tensor([ 10., 200., 300.,   0.])
    """
    num_experts = weights.shape[0] if weights.ndim == 3 else -1
    wrong_rows = rows.ndim != 2 or rows.shape[1:] != weights.shape[1:2]
    wrong_bias = bias is not None and bias.shape != (num_experts, *weights.shape[2:])
    if wrong_rows or wrong_bias or sizes.shape != (num_experts,):
        shapes = [None if x is None else list(x.shape) for x in (rows, weights, sizes, bias)]
        raise LayerError(
            "grouped_linear takes rows [r, d], weights [g, d, f], sizes [g] and bias [g, f] or "
            f"None, not {', '.join(map(str, shapes))}."
        )
    product = grouped_product(rows, weights, sizes)
    if bias is None:
        return product
    # A bias is a weight of a feature that is always 1; rows behind all groups get none.
    ones = rows.new_ones(rows.shape[0], 1)
    return product + grouped_product(ones, bias.unsqueeze(1), sizes)
