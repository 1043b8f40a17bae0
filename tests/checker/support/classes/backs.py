"""Operations of a user's own backwards and hooks on a gradient, or on a value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import R, all_reduce, axis_index, axis_size


@dataclass(frozen=True)
class Context:
    """The value whose gradient a backward gets, and the axes that shard it.

    Attributes:
        value: the value itself.
        axes: mesh axes that shard its first dim.
    """

    value: Tensor
    axes: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.value.shape[0]

    def over(self, x: Tensor, op: Any = "sum") -> Tensor:
        """Reduces over the ranks that have other rows."""
        return all_reduce(x, self.axes, dst=R, op=op) if self.axes else x


Back = Callable[[Context, Tensor], Tensor]


def _global_rows(context: Context) -> int:
    count = context.rows
    for axis in context.axes:
        count *= axis_size(axis)
    return count


def _branch(context: Context, g: Tensor) -> Tensor:
    return g * 2 if context.rows > 4 else g


def _norm_branch(context: Context, g: Tensor) -> Tensor:
    return g * 0.5 if g.norm().item() > 1.0 else g


def _written(context: Context, g: Tensor) -> Tensor:
    g = g.clone()
    g[0] = 0
    return g


BY_ENTRY: Final[Mapping[str, Back]] = {
    "nothing": lambda context, g: g,
    "a constant": lambda context, g: 2 * g,
    "clipped by value": lambda context, g: g.clamp(-0.1, 0.1),
    "times the value": lambda context, g: g * context.value.sin(),
    "its sign": lambda context, g: g.sign(),
    "in place": lambda context, g: g.clone().mul_(0.5),
    "masked": lambda context, g: torch.where(context.value > 0, g, 0),
    "filled": lambda context, g: g.masked_fill(g > 0.3, 0.3),
    "zero": lambda context, g: torch.zeros_like(g),
    "ones": lambda context, g: torch.ones_like(g),
    "there and back": lambda context, g: g.mT.contiguous().mT,
    "doubled by parts": lambda context, g: torch.stack([g, g]).sum(0),
}
"""Right, however the value is sharded."""

BY_ROW: Final[Mapping[str, Back]] = {
    "a norm of rows": lambda context, g: g / (1 + g.norm(dim=1, keepdim=True)),
    "softmax of rows": lambda context, g: g.softmax(-1),
    "sorted rows": lambda context, g: g.sort(-1).values,
    "running sums of rows": lambda context, g: g.cumsum(1),
    "a global size": lambda context, g: g / _global_rows(context),
    "turned columns": lambda context, g: g.flip(1),
    "by number of columns": lambda context, g: g / g.shape[1],
}
"""Right where only rows are sharded."""

BY_RANK: Final[Mapping[str, Back]] = {
    "a norm of a rank's part": lambda context, g: g / (1 + g.norm()),
    "torch's clipping": lambda context, g: g * (0.5 / g.norm()).clamp(max=1.0),
    "a local size": lambda context, g: g / context.rows,
    "a number of entries": lambda context, g: g / g.numel(),
    "its length": lambda context, g: g * len(g),
    "centred": lambda context, g: g - g.mean(0, keepdim=True),
    "a maximum": lambda context, g: g / g.abs().max(),
    "first rows": lambda context, g: g * (torch.arange(len(g)) > 0).unsqueeze(1),
    "weighed by position": lambda context, g: g * torch.linspace(0, 1, len(g)).unsqueeze(1),
    "other order": lambda context, g: g.flip(0),
    "rolled": lambda context, g: g.roll(1, 0),
    "a norm of the value": lambda context, g: g / context.value.norm(),
    "a mean of the value": lambda context, g: g * context.value.mean(),
    "softmax of columns": lambda context, g: g.softmax(0),
    "running sums": lambda context, g: g.cumsum(0),
    "sorted columns": lambda context, g: g.sort(0).values,
    "spread sum": lambda context, g: g.sum().expand_as(g),
    "above the mean": lambda context, g: torch.where(g > g.mean(), g, 0),
    "a branch on a size": _branch,
    "a branch on a norm": _norm_branch,
    "a written row": _written,
    "flat": lambda context, g: g.reshape(-1).cumsum(0).reshape(g.shape),
    "by rank": lambda context, g: g * (1.0 + axis_index("dp")),
}
"""Other than on one device where rows are sharded."""

COMMUNICATING: Final[Mapping[str, Back]] = {
    "a norm over ranks": lambda context, g: g / (1 + context.over(g.square().sum()).sqrt()),
    "a maximum over ranks": lambda context, g: g / context.over(g.abs().max(), op="max"),
    "a mean over ranks": lambda context, g: g - context.over(g.mean(0), op="mean"),
    "a sum over ranks": lambda context, g: g + context.over(g),
    "a norm of norms": lambda context, g: g / (1 + context.over(g.norm())),
}
"""Send over the mesh, which is right for some."""

BACKS: Final[Mapping[str, Back]] = {**BY_ENTRY, **BY_ROW, **BY_RANK, **COMMUNICATING}
