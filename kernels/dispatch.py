"""Chooses what runs a call: checks its arguments, sizes the problem, asks the cost model, caches.

Reading the arguments and asking the model takes 20 us, a third of the smallest exchange on gloo, so
a decision is kept for later calls with the same shapes, dtypes and options.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.operations import Collective, collective_of
from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope, current_scope
from shardmap_torch.core.caching import Memo
from shardmap_torch.errors import KernelError, show
from shardmap_torch.kernels.autograd import KernelCall, Unfused, block_rows
from shardmap_torch.kernels.endpoint import Situation, endpoint_of, is_modelled, obstacle, place_of
from shardmap_torch.kernels.planner import (
    Options,
    Overlap,
    Plan,
    Problem,
    candidates,
    check_overlap,
    decide,
    obstructed,
    record,
)
from shardmap_torch.ops.arguments import Axis, check_divides, read_axes, read_dim, read_type, shown
from shardmap_torch.types import I, Partial, R, V

Biases: TypeAlias = Sequence[Tensor | None]
Runner: TypeAlias = KernelCall | Unfused

_CHECKED: Final = "the body is being checked, not run"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Runner of a call, and the plan that gives the reason."""

    collective: Collective
    plan: Plan
    runner: Runner


_READY: Final = Memo[Prepared]()


def prepared(
    prepare: Callable[..., Prepared],
    axis: Axis,
    options: tuple[Any, ...],
    operands: tuple[Any, ...],
    overlap: Overlap,
) -> Prepared:
    """Returns `prepare(axis, *operands, *options)`, cached by shapes, dtypes and options.

    `operands` are tensors, sequences of them, or None; `overlap` is among the options. Records the
    plan.
    """
    scope = current_scope()
    place = None if scope is None else place_of(scope.backend, overlap)
    if scope is None or place is None:
        result = prepare(axis, *operands, *options)
    else:
        key = (prepare, place, scope.axes, axis, options, *_signature(operands))
        known = _READY.find(key)
        if known is None:  # `prepare` reports to the scope itself, before the fabric is measured.
            result = _READY.get(key, lambda: _planned(scope, prepare(axis, *operands, *options)))
        else:
            result = known
            scope.on_operation(result.collective, operands[0])
            if place is not scope.backend:  # whose backends live for one call
                runner = Unfused(scope.backend, result.collective)
                result = Prepared(result.collective, result.plan, runner)
    record(result.plan)
    return result


def _planned(scope: Scope, made: Prepared) -> Prepared:
    """Looks the collective of a composition up, in eager code."""
    plan = scope.backend.plan(made.collective)
    if plan is None or not isinstance(made.runner, Unfused):
        return made
    return replace(made, runner=Unfused(scope.backend, plan))


def _signature(operands: Sequence[Any]) -> list[Any]:
    """Returns the properties of operands that decide what runs."""
    return [
        (x.shape, x.dtype, x.device)
        if type(x) is Tensor or isinstance(x, Tensor)
        else None
        if x is None
        else tuple(_signature(x))
        for x in operands
    ]


def prepare_gather(
    axis: Axis,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Biases,
    dim: int,
    overlap: Overlap,
    chunks: int | None,
    save_gathered: bool,
) -> Prepared:
    """Prepares a call of `all_gather_matmul`."""
    op = "all_gather_matmul"
    _check_operand(op, x)
    axes, scope = read_axes(op, axis)
    dim = read_dim(op, "dim", dim, x.ndim)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    for each, addend in zip(ws, biases, strict=True):
        inner = x.shape[-1] * (num_ranks if dim == x.ndim - 1 else 1)
        _check_weight(op, each, inner, fused=True)
        _check_bias(op, addend, *each.shape[1:])
    problem = Problem(
        op=op,
        axis=shown(axes),
        num_ranks=num_ranks,
        schedule="gather/ring",
        block_rows=block_rows(x, dim),
        block_bytes=x.nbytes,
        flops=sum(2.0 * x.numel() * num_ranks * w.shape[1:].numel() for w in ws),
    )
    present = [addend for addend in biases if addend is not None]
    collective = collective_of("all_gather", V, R, axes, dim=dim)
    options = Options(overlap, chunks, save_gathered)
    return _prepare(scope, collective, problem, (x, *ws, *present), options)


def prepare_product(
    axis: Axis,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    op: str,
    to: Any,
    overlap: Overlap,
    chunks: int | None,
) -> Prepared:
    """Prepares a call of `matmul_reduce_scatter` or `matmul_all_reduce`; `to` is its dim or dst."""
    _check_operand(op, x)
    axes, scope = read_axes(op, axis)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    scatters = op == "matmul_reduce_scatter"
    to = read_dim(op, "dim", to, x.ndim) if scatters else read_type(op, to, "dst", (R, I))
    _check_weight(op, w, x.shape[-1])
    shape = torch.Size((*x.shape[:-1], w.shape[1]))
    rows, columns = shape[:-1].numel(), shape[-1]
    if scatters:
        check_divides(op, "dim", shape[to], axes, num_ranks)
        collective = collective_of("reduce_scatter", Partial, V, axes, dim=to)
        if to == len(shape) - 1:  # by features
            rows, columns = columns, columns // num_ranks
    else:
        collective = collective_of("all_reduce", Partial, to, axes)
    _check_bias(op, bias, columns)
    problem = Problem(
        op=op,
        axis=shown(axes),
        num_ranks=num_ranks,
        schedule="scatter/direct" if scatters else "reduce/direct",
        block_rows=rows // num_ranks,
        block_bytes=shape.numel() * x.element_size() / num_ranks,
        flops=2.0 * x.numel() * w.shape[1],
        passes=1 if scatters else 2,
    )
    return _prepare(scope, collective, problem, (x, w), Options(overlap, chunks))


def _prepare(
    scope: Scope,
    collective: Collective,
    problem: Problem,
    operands: Sequence[Tensor],
    options: Options,
) -> Prepared:
    """Chooses the kernel, or the unfused composition, with the reason."""
    check_overlap(problem.op, options.overlap)
    scope.on_operation(collective, operands[0])
    backend = scope.backend
    if options.chunks is not None:
        candidates(problem, options.chunks)  # Raises for bad chunks, on every mesh alike.
    unfused = Unfused(backend, collective)
    situation = Situation(problem.op, backend, collective.axes, options.overlap, operands)
    why = obstacle(situation)
    if why is not None:
        # A check is among these. The composition has the kernels' types, forward and backward.
        return Prepared(collective, _unfused_plan(situation, problem, why), unfused)
    assert isinstance(backend, ProcessGroupBackend) or is_modelled(backend)  # by the obstacles
    x = operands[0]
    endpoint = endpoint_of(backend, collective.axes, x.device)
    fabric, is_forced = partial(endpoint.fabric, x.dtype), options.overlap == "require"
    plan = decide(problem, fabric, options.chunks, forced=is_forced)
    if plan.choice is None:
        return Prepared(collective, plan, unfused)
    transport = endpoint.transport
    call = KernelCall(backend, transport, endpoint.fabric, collective, plan.choice, options)
    return Prepared(collective, plan, call)


def _unfused_plan(situation: Situation, problem: Problem, why: str) -> Plan:
    """Plans the composition, which runs because of an obstacle, whatever the sizes are.

    Raises:
        KernelError: If overlap is required, unless a body for processes is only being checked.
    """
    backend = situation.backend
    if is_checker(backend) and backend.mesh.kind != "simulated":
        return Plan(problem.op, problem.axis, None, _CHECKED)
    return obstructed(problem.op, problem.axis, situation.overlap, why)


def pairs(
    op: str, w: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the weights, and the bias or None of each."""
    ws = [w] if isinstance(w, Tensor) else list(w)
    if bias is None:
        return ws, [None] * len(ws)
    biases: list[Tensor | None] = [bias] if isinstance(bias, Tensor) else list(bias)
    if len(biases) != len(ws) or not ws:
        raise KernelError(f"{op}: {len(ws)} weights and {len(biases)} biases; pass one for each.")
    return ws, biases


def _check_operand(op: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise KernelError(f"{op}: x is a tensor [..., features], not {show(x)}.")
    if x.dtype in _UNMULTIPLIED or (x.is_floating_point() and x.itemsize == 1):
        raise KernelError(f"{op}: torch cannot multiply matrices of {x.dtype}.")


_UNMULTIPLIED: Final = frozenset({torch.bool, torch.uint16, torch.uint32, torch.uint64})


def _check_weight(op: str, w: Tensor, inner: int, *, fused: bool = False) -> None:
    if w.ndim < 2 or (w.ndim > 2 and not fused) or w.shape[0] != inner:
        raise KernelError(
            f"{op}: w has shape {list(w.shape)}, but the rows it multiplies have {inner} features; "
            f"pass [{inner}, m] (a torch.nn.Linear keeps [m, {inner}]: pass weight.t())."
        )


def _check_bias(op: str, bias: Tensor | None, *columns: int) -> None:
    if bias is not None and bias.shape != columns:
        raise KernelError(
            f"{op}: bias has shape {list(bias.shape)}, but the result has {prod(columns)} columns "
            f"here; pass {list(columns)}."
        )
