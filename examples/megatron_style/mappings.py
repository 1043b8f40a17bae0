"""The conjugate operators of tensor and sequence parallelism, with calls of torch.distributed.

Each is an autograd Function whose backward is another one's forward: f and g of Shoeybi et al. 2019
(Megatron-LM), g-bar and its kin of Korthikanti et al. 2022 (sequence parallelism), and the
all-to-all of Jacobs et al. 2023 (DeepSpeed Ulysses). No line here knows shardmap_torch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def total(x: Tensor, group: Any) -> Tensor:
    """Returns the sum over the ranks."""
    if dist.get_world_size(group) == 1:
        return x
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def own_part(x: Tensor, dim: int, group: Any) -> Tensor:
    """Returns the rank's part along a dim."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    return torch.split(x, x.shape[dim] // size, dim=dim)[dist.get_rank(group)].contiguous()


def gathered(x: Tensor, group: Any) -> Tensor:
    """Returns the parts of all ranks along dim 0."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_single(out, x.contiguous(), group=group)
    return out


def gathered_last(x: Tensor, group: Any) -> Tensor:
    """Returns the parts of all ranks along the last dim, which travel along dim 0."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    return torch.cat(gathered(x, group).chunk(size, dim=0), dim=-1)


def scattered(x: Tensor, group: Any) -> Tensor:
    """Returns the rank's part along dim 0 of the sum over the ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def exchanged(x: Tensor, group: Any) -> Tensor:
    """Sends part i along dim 0 to rank i."""
    if dist.get_world_size(group) == 1:
        return x
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def apply(function: Any, *args: Any) -> Any:
    """Applies a Function, of which torch's own types say nothing."""
    return function.apply(*args)


class CopyToRegion(Function):
    """f: the identity, whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Returns the value."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sums the gradients of what each rank has made of it."""
        return total(grads[0], ctx.group), None


class ReduceFromRegion(Function):
    """g: the sum over the ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Sums over the ranks."""
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the gradient, which each addend has."""
        return grads[0], None


class ScatterLast(Function):
    """The rank's part along the last dim; its backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Takes the part."""
        ctx.group = group
        return own_part(x, -1, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gathers the gradients of the parts."""
        return gathered_last(grads[0], ctx.group), None


class GatherLast(Function):
    """The parts of all ranks along the last dim; its backward takes the rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Gathers the parts."""
        ctx.group = group
        return gathered_last(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Takes the part of the gradient."""
        return own_part(grads[0], -1, ctx.group), None


class ScatterFirst(Function):
    """The rank's part along the sequence; its backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Takes the part."""
        ctx.group = group
        return own_part(x, 0, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gathers the gradients of the parts."""
        return gathered(grads[0], ctx.group), None


class GatherFirst(Function):
    """The sequence of all ranks, of which each uses all; its backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Gathers the parts."""
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sums the gradients, and takes the part."""
        return scattered(grads[0], ctx.group), None


class ReduceScatterFirst(Function):
    """The rank's part along the sequence of the sum; its backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Sums, and takes the part."""
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gathers the gradients of the parts."""
        return gathered(grads[0], ctx.group), None


class AllToAll(Function):
    """Part i along dim 0 goes to rank i, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Exchanges the parts."""
        ctx.group = group
        return exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Exchanges them back."""
        return exchanged(grads[0], ctx.group), None
