"""Custom operators of the kernels: opaque to torch.compile, but with shapes and a backward.

Dynamo cannot trace point-to-point messages, so a compiled body reaches a kernel through operators
that name their endpoint by a string. They run the same kernels as eager code. A second derivative
of them is an error; compile the composition (`overlap="auto"`) for that.
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


@torch.library.custom_op("shardmap_torch::all_gather_matmul", mutates_args=())
def gather_op(
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
    """Returns the products, then the gathered chunked matrix; `biased` names weights with bias."""
    addends: list[Tensor | None] = [None] * len(ws)
    for index, bias in zip(biased, biases, strict=True):
        addends[index] = bias
    steps = gather_forward(_BY_NAME[name].transport, x, ws, addends, dim, Choice.read(forward))
    outs, gathered = run(steps)
    return [*outs, gathered]


@gather_op.register_fake
def _gather_shapes(
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    dim: int,
    num_ranks: int,
    *_: str,
) -> list[Tensor]:
    full = with_dim(x.shape, dim, x.shape[dim] * num_ranks)
    matrix = ChunkedDim.of(dim, x.ndim).matrix(x)
    outs = [x.new_empty(*full[:-1], w.shape[1]) for w in ws]
    return [*outs, x.new_empty(matrix.shape[0] * num_ranks, matrix.shape[1])]


@torch.library.custom_op("shardmap_torch::all_gather_matmul_backward", mutates_args=())
def gather_backward_op(
    gathered: Tensor,
    ws: Sequence[Tensor],
    dys: Sequence[Tensor],
    dim: int,
    num_ranks: int,
    name: str,
    backward: str,
) -> list[Tensor]:
    """Returns the input gradient, then the weight gradients."""
    needs_grad = [True] * len(ws)
    transport, choice = _BY_NAME[name].transport, Choice.read(backward)
    dx, dws = run(gather_backward(transport, gathered, ws, dys, needs_grad, dim, choice))
    return [dx, *(dw for dw in dws if dw is not None)]


@gather_backward_op.register_fake
def _gather_backward_shapes(
    gathered: Tensor, ws: Sequence[Tensor], dys: Sequence[Tensor], dim: int, num_ranks: int, *_: str
) -> list[Tensor]:
    shape = [*dys[0].shape[:-1], ws[0].shape[0]]
    dx = dys[0].new_empty(with_dim(shape, dim, shape[dim] // num_ranks))
    return [dx, *_contiguous_like(*ws)]


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ws, _, ctx.biased, ctx.dim, ctx.num_ranks, ctx.name, _, ctx.choice = inputs
    ctx.save_for_backward(output[-1], *ws)


def _gather_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    gathered, *ws = ctx.saved_tensors
    dys = [dy.contiguous() for dy in grads[: len(ws)]]
    options = (ctx.dim, ctx.num_ranks, ctx.name, ctx.choice)
    dx, *dws = gather_backward_op(gathered, ws, dys, *options)
    dbiases = [as_matrix(dys[index]).sum(0) for index in ctx.biased]
    # torch takes an empty list of numbers for one of tensors, and wants a list back.
    dbiased: list[None] | None = None if ctx.biased else []
    return dx, dws, dbiases, dbiased, None, None, None, None, None


gather_op.register_autograd(_gather_backward, setup_context=_gather_setup)


@torch.library.custom_op("shardmap_torch::matmul_reduce_scatter", mutates_args=())
def scatter_op(
    x: Tensor, w: Tensor, dim: int, num_ranks: int, name: str, forward: str, backward: str
) -> Tensor:
    """Returns this rank's block of the sum."""
    return run(scatter_forward(_BY_NAME[name].transport, x, w, dim, Choice.read(forward)))


@scatter_op.register_fake
def _scatter_shape(x: Tensor, w: Tensor, dim: int, num_ranks: int, *_: str) -> Tensor:
    shape = [*x.shape[:-1], w.shape[1]]
    return x.new_empty(with_dim(shape, dim, shape[dim] // num_ranks))


@torch.library.custom_op("shardmap_torch::matmul_reduce_scatter_backward", mutates_args=())
def scatter_backward_op(
    x: Tensor, w: Tensor, dy: Tensor, dim: int, name: str, backward: str
) -> list[Tensor]:
    """Returns both gradients."""
    choice, transport = Choice.read(backward), _BY_NAME[name].transport
    grads = run(scatter_backward(transport, x, w, dy, (True, True), dim, choice))
    return [grad for grad in grads if grad is not None]


@scatter_backward_op.register_fake
def _gradient_shapes(x: Tensor, w: Tensor, *_: Any) -> list[Tensor]:
    return _contiguous_like(x, w)


def _contiguous_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.dim, _, ctx.name, _, ctx.choice = inputs
    ctx.save_for_backward(x, w)


def _scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    dx, dw = scatter_backward_op(x, w, dy.contiguous(), ctx.dim, ctx.name, ctx.choice)
    return dx, dw, None, None, None, None, None


scatter_op.register_autograd(_scatter_backward, setup_context=_scatter_setup)


@torch.library.custom_op("shardmap_torch::matmul_all_reduce", mutates_args=())
def reduce_op(x: Tensor, w: Tensor, name: str, forward: str, backward: str) -> Tensor:
    """Returns the sum; `backward` is empty where its cotangent is equal on all ranks."""
    return run(reduce_forward(_BY_NAME[name].transport, x, w, Choice.read(forward)))


@reduce_op.register_fake
def _reduce_shape(x: Tensor, w: Tensor, *_: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


@torch.library.custom_op("shardmap_torch::matmul_all_reduce_backward", mutates_args=())
def reduce_backward_op(x: Tensor, w: Tensor, dy: Tensor, name: str, backward: str) -> list[Tensor]:
    """Returns both gradients."""
    choice, transport = Choice.read(backward), _BY_NAME[name].transport
    grads = run(reduce_backward(transport, x, w, dy, (True, True), choice))
    return [grad for grad in grads if grad is not None]


reduce_backward_op.register_fake(_gradient_shapes)


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.name, _, ctx.choice = inputs
    ctx.save_for_backward(x, w)


def _reduce_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    if ctx.choice:
        dx, dw = reduce_backward_op(x, w, dy.contiguous(), ctx.name, ctx.choice)
    else:
        dx, dw = dy @ w.t(), as_matrix(x).t() @ as_matrix(dy)
    return dx, dw, None, None, None


reduce_op.register_autograd(_reduce_backward, setup_context=_reduce_setup)


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call in a body that torch.compile traces; otherwise like `autograd.Call`.

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
        options = (self.dim, self.num_ranks, self.name, self.forward, self.backward)
        return tuple(gather_op(x, ws, present, biased, *options)[:-1])

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes the reduce-scatter or all-reduce of `x @ w`."""
        options = (self.name, self.forward, self.backward)
        if _family(self.forward) == "scatter":
            out: Tensor = scatter_op(x, w, self.dim, self.num_ranks, *options)
        else:
            out = reduce_op(x, w, *options)
        return out


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
