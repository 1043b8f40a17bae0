"""Custom operators of the kernels: opaque to torch.compile, but with shapes and a backward.

Dynamo cannot trace point-to-point messages, so a compiled body reaches a kernel through an operator
that names its endpoint by a string, and the kernel by the family of its schedule. It runs the same
kernels as eager code. A second derivative of it is an error; compile the composition
(`overlap="auto"`) for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.caching import constant
from shardmap_torch.kernels.algorithms import (
    ChunkedDim,
    as_matrix,
    gather_backward,
    gather_forward,
    reduce_backward,
    reduce_forward,
    scatter_backward,
    scatter_forward,
    with_dim,
)
from shardmap_torch.kernels.endpoint import Endpoint, endpoint_of
from shardmap_torch.kernels.planner import (
    Family,
    Options,
    Plan,
    Problem,
    backward_schedules,
    candidates,
)
from shardmap_torch.kernels.transports.executor import Choice
from shardmap_torch.kernels.transports.protocol import run
from shardmap_torch.types import I

_BY_NAME: dict[str, Endpoint] = {}


@constant
def endpoint_name(backend: Backend, axes: tuple[str, ...]) -> str:
    """Registers an endpoint while tracing; returns the name under which the operators find it."""
    assert isinstance(backend, ProcessGroupBackend)
    endpoint = endpoint_of(backend, axes)
    name = str(endpoint.group.group_name)
    _BY_NAME[name] = endpoint
    return name


@torch.library.custom_op("shardmap_torch::overlapped_matmul", mutates_args=())
def overlapped_op(
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    dim: int,
    num_ranks: int,
    name: str,
    forward: str,
    backward: str,
) -> list[Tensor]:
    """Returns the results of the kernel of the schedule `forward`, then the gathered matrix.

    Only a gather takes several weights, and biases, which `biased` gives a weight each. `backward`
    is empty where the cotangent is equal on all ranks.
    """
    transport, choice = _BY_NAME[name].transport, Choice.read(forward)
    if _family(forward) == "gather":
        addends: list[Tensor | None] = [None] * len(ws)
        for index, bias in zip(biased, biases, strict=True):
            addends[index] = bias
        outs, gathered = run(gather_forward(transport, x, ws, addends, dim, choice))
        return [*outs, gathered]
    if _family(forward) == "scatter":
        return [run(scatter_forward(transport, x, ws[0], dim, choice))]
    return [run(reduce_forward(transport, x, ws[0], choice))]


@overlapped_op.register_fake
def _shapes(
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    dim: int,
    num_ranks: int,
    name: str,
    forward: str,
    backward: str,
) -> list[Tensor]:
    family = _family(forward)
    if family == "gather":
        full = with_dim(x.shape, dim, x.shape[dim] * num_ranks)
        matrix = ChunkedDim.of(dim, x.ndim).matrix(x)
        outs = [x.new_empty(*full[:-1], w.shape[1]) for w in ws]
        return [*outs, x.new_empty(matrix.shape[0] * num_ranks, matrix.shape[1])]
    shape = [*x.shape[:-1], ws[0].shape[1]]
    return [x.new_empty(_shard(shape, dim, num_ranks) if family == "scatter" else shape)]


def _shard(shape: Sequence[int], dim: int, num_ranks: int) -> list[int]:
    return with_dim(shape, dim, shape[dim] // num_ranks)


@torch.library.custom_op("shardmap_torch::overlapped_matmul_backward", mutates_args=())
def overlapped_backward_op(
    kept: Tensor,
    ws: Sequence[Tensor],
    dys: Sequence[Tensor],
    dim: int,
    num_ranks: int,
    name: str,
    backward: str,
) -> list[Tensor]:
    """Returns the input gradient, then the weight gradients; `kept` is x, or the gathered one."""
    transport, choice = _BY_NAME[name].transport, Choice.read(backward)
    both = (True, True)
    if _family(backward) == "scatter":
        needs_grad = [True] * len(ws)
        dx, dws = run(gather_backward(transport, kept, ws, dys, needs_grad, dim, choice))
        grads = [dx, *dws]
    elif _family(backward) == "gather":
        grads = [*run(scatter_backward(transport, kept, ws[0], dys[0], both, dim, choice))]
    else:
        grads = [*run(reduce_backward(transport, kept, ws[0], dys[0], both, choice))]
    return [grad for grad in grads if grad is not None]


@overlapped_backward_op.register_fake
def _gradient_shapes(
    kept: Tensor,
    ws: Sequence[Tensor],
    dys: Sequence[Tensor],
    dim: int,
    num_ranks: int,
    name: str,
    backward: str,
) -> list[Tensor]:
    if _family(backward) == "scatter":
        kept = dys[0].new_empty(_shard([*dys[0].shape[:-1], ws[0].shape[0]], dim, num_ranks))
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (kept, *ws)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, ws, _, ctx.biased, ctx.dim, ctx.num_ranks, ctx.name, forward, ctx.choice = inputs
    ctx.save_for_backward(output[-1] if _family(forward) == "gather" else x, *ws)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    kept, *ws = ctx.saved_tensors
    dys = [dy.contiguous() for dy in grads[: len(ws)]]
    if ctx.choice:
        options = (ctx.dim, ctx.num_ranks, ctx.name, ctx.choice)
        dx, *dws = overlapped_backward_op(kept, ws, dys, *options)
    else:
        dx, dws = dys[0] @ ws[0].t(), [as_matrix(kept).t() @ as_matrix(dys[0])]
    dbiases = [as_matrix(dys[index]).sum(0) for index in ctx.biased]
    # torch takes an empty list of numbers for one of tensors, and wants a list back.
    dbiased: list[None] | None = None if ctx.biased else []
    return dx, dws, dbiases, dbiased, None, None, None, None, None


overlapped_op.register_autograd(_backward, setup_context=_setup)


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call in a body that torch.compile traces; otherwise like `autograd.KernelCall`.

    Choices are strings, as operators take them; `backward` is empty where nothing is sent.
    """

    dim: int
    num_ranks: int
    name: str
    forward: str
    backward: str

    def gather(
        self, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Computes `all_gather(x) @ w + bias` for each w."""
        biased = [index for index, bias in enumerate(biases) if bias is not None]
        present = [bias for bias in biases if bias is not None]
        return tuple(self._results(x, ws, present, biased)[:-1])

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes the reduce-scatter or all-reduce of `x @ w`."""
        return self._results(x, [w], [], [])[0]

    def _results(
        self, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[int]
    ) -> list[Tensor]:
        options = (self.dim, self.num_ranks, self.name, self.forward, self.backward)
        results: list[Tensor] = overlapped_op(x, ws, biases, biased, *options)
        return results


_BACKWARD_FAMILY: Final[Mapping[str, Family]] = {
    "gather": "scatter",
    "scatter": "gather",
    "reduce": "sum",
}


def _family(schedule: str) -> str:
    return schedule.split("/")[0]


def compiled_call(
    backend: Backend, collective: Collective, problem: Problem, options: Options
) -> tuple[CompiledCall, Plan]:
    """Plans a compiled call, in as many parts as the rows allow: tracing measures nothing."""
    parts = options.chunks or max(candidates(problem, None), default=1)
    forward = problem.schedules[0]
    family = _BACKWARD_FAMILY[_family(forward)]
    backward = backward_schedules(family, options.schedule)[0]
    call = CompiledCall(
        collective.dim,
        problem.num_ranks,
        endpoint_name(backend, collective.axes),
        f"{forward}/{parts}",
        "" if collective.dst is I else f"{backward}/{parts}",
    )
    plan = Plan(problem.op, problem.axis, Choice(forward, parts), "compiled, required")
    return call, plan
