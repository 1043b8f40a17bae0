"""The public operations: typed, differentiable, and unfused wherever overlap cannot pay."""

from collections.abc import Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor

from shardmap_torch.backend import Scope
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.compiled import CompiledCall, compiled_call
from shardmap_torch.kernels.endpoint import Situation, endpoint_of, is_checked, obstacle
from shardmap_torch.kernels.functions import (
    Call,
    block_rows,
    gather_unfused,
    reduce_unfused,
)
from shardmap_torch.kernels.plan import (
    Options,
    Overlap,
    Plan,
    Problem,
    Schedule,
    candidates,
    check_overlap,
    decide,
    obstructed,
    record,
    schedules,
)
from shardmap_torch.ops.arguments import Axis, check_divides, read_axes, read_dim, read_type, shown
from shardmap_torch.rule import Collective
from shardmap_torch.types import I, Partial, R, TypeLike, V


@overload
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    axis: Axis,
    *,
    gather_dim: int = 0,
    bias: Tensor | None = None,
    chunks: int | None = None,
    schedule: Schedule | None = None,
    save_gathered: bool = True,
    overlap: Overlap = "auto",
) -> Tensor: ...


@overload
def all_gather_matmul(
    x: Tensor,
    w: Sequence[Tensor],
    axis: Axis,
    *,
    gather_dim: int = 0,
    bias: Sequence[Tensor | None] | None = None,
    chunks: int | None = None,
    schedule: Schedule | None = None,
    save_gathered: bool = True,
    overlap: Overlap = "auto",
) -> tuple[Tensor, ...]: ...


def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    axis: Axis,
    *,
    gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    chunks: int | None = None,
    schedule: Schedule | None = None,
    save_gathered: bool = True,
    overlap: Overlap = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`all_gather(x, axis, dim=gather_dim, dst=R) @ w + bias`, multiplying chunks as they arrive.

    Shape: x [..., k] with `gather_dim` of size d, w [k, m] gives [..., m] with n*d there; with
    `gather_dim` last, w is [n*k, m]. Types: as its unfused composition: x is S(gather_dim) or V.
    Backward, overlapped too: dx is reduce-scattered while it is produced and while dw is computed.
    Sends (n-1) * x.nbytes per rank forward and as much backward, and again as much backward with
    `save_gathered=False`.

    Args:
        x: this rank's shard.
        w: a 2-D weight, or several that share one gather (q, k, v; gate, up).
        axis: an axis name, or several that act as one.
        gather_dim: the dim of x that is gathered.
        bias: added to each row of the product; one per weight where there are several.
        chunks: chunks into which each rank's shard is cut; by default as the cost model says, of
            at least 128 rows and at most 8.
        schedule: "ring" sends blocks to the next rank only, "two-way" half of the way to either
            side; by default as the cost model says. The backward of a ring is a ring.
        save_gathered: keep the gathered x for the backward (n * x.nbytes), or gather it again
            under the input gradient (keeps x alone; n * x.nbytes for the time of the backward).
        overlap: "auto" overlaps where the cost model predicts a gain of at least 3 %, "require"
            wherever possible or raises, "off" never. `last_plan()` tells what ran and why. In a
            body that torch.compile traces, "auto" is the composition, which inductor can fuse, and
            "require" an opaque operator that saves the gathered x and cannot be differentiated
            twice.

    Raises:
        KernelError: shapes that do not fit, chunks that the shard has no rows for, overlap
            required but impossible, or a peer that is gone.
        CollectiveError: outside a body, or an unknown axis.

    Source: Wang et al. 2023, "Overlap communication with dependent computation via
    decomposition"; Megatron-LM's sequence-parallel linear layer.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: all_gather_matmul(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
        >>> g(torch.arange(4.0).reshape(4, 1), torch.tensor([[1.0, 10.0]])).tolist()
        [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
    """
    op = "all_gather_matmul"
    ws, biases = _pairs(op, w, bias)
    axes, scope = read_axes(op, axis)
    dim = read_dim(op, "gather_dim", gather_dim, x.ndim)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    for each, addend in zip(ws, biases, strict=True):
        inner = x.shape[-1] * (num_ranks if dim == x.ndim - 1 else 1)
        _check_weight(op, each, inner)
        _check_bias(op, addend, each.shape[1])
    collective = Collective("all_gather", V, R, axes, dim=dim)
    problem = Problem(
        op=op,
        axis=shown(axes),
        num_ranks=num_ranks,
        schedules=schedules(op, "gather", schedule),
        block_rows=block_rows(x, dim),
        block_bytes=x.nbytes,
        flops=sum(2.0 * x.numel() * num_ranks * each.shape[1] for each in ws),
    )
    present = [addend for addend in biases if addend is not None]
    options = Options(overlap, schedule, chunks, save_gathered)
    call = _prepare(scope, collective, problem, (x, *ws, *present), options)
    if call is None:
        outs = gather_unfused(scope.backend, collective, x, ws, biases)
    else:
        outs = call.gather(x, ws, biases)
    return outs[0] if isinstance(w, Tensor) else outs


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    axis: Axis,
    *,
    scatter_dim: int = 0,
    bias: Tensor | None = None,
    chunks: int | None = None,
    schedule: Schedule | None = None,
    overlap: Overlap = "auto",
) -> Tensor:
    """`reduce_scatter(x @ w, axis, dim=scatter_dim) + bias`, sending chunks as they are made.

    Each addend travels once, straight to its owner, which adds them in rank order: results are
    equal from run to run. bfloat16 and float16 addends are added in float32 and rounded once.

    Shape: x [..., k], w [k, m] gives [..., m] with `scatter_dim` of size d cut to d/n. Types: as
    its unfused composition: the product is P (or V), the result S(scatter_dim). Backward: one
    gather of dy feeds dx and dw, chunk by chunk. Sends (n-1)/n * y.nbytes per rank forward and
    backward, y being the product.

    Args:
        x: this rank's features.
        w: this rank's rows of the weight, 2-D.
        axis: an axis name, or several that act as one.
        scatter_dim: the dim of the product that is cut.
        bias: added once, after the reduction.
        chunks: as in `all_gather_matmul`, of each rank's block of the result.
        schedule: "direct", the default, or "ring" where only neighbours have a link: sums travel to
            the next rank, in the order of travel and rounded at each hop. The backward of a ring is
            a ring.
        overlap: as in `all_gather_matmul`.

    Raises:
        KernelError: shapes that do not fit, chunks that the block has no rows for, overlap
            required but impossible, or a peer that is gone.
        CollectiveError: outside a body, unknown axis, or a size that does not divide.

    Source: as `all_gather_matmul`; the direct exchange from PyTorch's async tensor parallelism.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: matmul_reduce_scatter(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
        >>> g(torch.arange(4.0).reshape(2, 2), torch.ones(2, 1)).tolist()
        [[1.0], [5.0]]
    """
    op = "matmul_reduce_scatter"
    axes, scope = read_axes(op, axis)
    dim = read_dim(op, "scatter_dim", scatter_dim, x.ndim)
    _check_weight(op, w, x.shape[-1])
    shape = torch.Size((*x.shape[:-1], w.shape[1]))
    num_ranks = scope.backend.mesh.num_ranks(axes)
    check_divides(op, "scatter_dim", shape[dim], axes, num_ranks)
    collective = Collective("reduce_scatter", Partial, V, axes, dim=dim)
    rows = shape[-1] if dim == len(shape) - 1 else shape[:-1].numel()
    problem = Problem(
        op=op,
        axis=shown(axes),
        num_ranks=num_ranks,
        schedules=schedules(op, "scatter", schedule),
        block_rows=rows // num_ranks,
        block_bytes=shape.numel() * x.element_size() / num_ranks,
        flops=2.0 * x.numel() * w.shape[1],
    )
    call = _prepare(scope, collective, problem, (x, w), Options(overlap, schedule, chunks))
    if call is None:
        y = reduce_unfused(scope.backend, collective, x, w)
    else:
        y = call.scatter(x, w)
    _check_bias(op, bias, y.shape[-1])
    return y if bias is None else y + bias


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    axis: Axis,
    *,
    dst: TypeLike,
    bias: Tensor | None = None,
    chunks: int | None = None,
    overlap: Overlap = "auto",
) -> Tensor:
    """`all_reduce(x @ w, axis, dst=dst) + bias`, a chunk at a time.

    While one chunk is multiplied, the one before is added on its owner (in rank order, bfloat16
    and float16 in float32) and sent to everyone. Equal on all ranks, bit for bit.

    Shape: x [..., k], w [k, m] gives [..., m]. Types: as its unfused composition: the product is P
    (or V), the result `dst`, R or I. Backward: for R an all-reduce of the cotangent, each finished
    chunk of which feeds dx and dw at once; for I there is nothing to send. Sends
    2(n-1)/n * y.nbytes per rank, for R as much backward.

    Args:
        x: this rank's features.
        w: this rank's rows of the weight, 2-D.
        axis: an axis name, or several that act as one.
        dst: R when the ranks use the result in different ways, I when all repeat one computation.
        bias: added once, after the reduction.
        chunks: as in `all_gather_matmul`, of each rank's share of the rows.
        overlap: as in `all_gather_matmul`.

    Raises:
        KernelError: shapes that do not fit, chunks that the share has no rows for, overlap
            required but impossible, or a peer that is gone.
        CollectiveError: outside a body, or an unknown axis.

    Source: as `matmul_reduce_scatter`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: matmul_all_reduce(x, w, "tp", dst=I)
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
        >>> g(torch.arange(4.0).reshape(2, 2), torch.ones(2, 1)).tolist()
        [[1.0], [5.0]]
    """
    op = "matmul_all_reduce"
    axes, scope = read_axes(op, axis)
    to = read_type(op, dst, "dst", (R, I))
    _check_weight(op, w, x.shape[-1])
    _check_bias(op, bias, w.shape[1])
    num_ranks = scope.backend.mesh.num_ranks(axes)
    collective = Collective("all_reduce", Partial, to, axes)
    num_tokens = x.shape[:-1].numel()
    problem = Problem(
        op=op,
        axis=shown(axes),
        num_ranks=num_ranks,
        schedules=schedules(op, "reduce", None),
        block_rows=num_tokens // num_ranks,
        block_bytes=num_tokens * w.shape[1] * x.element_size() / num_ranks,
        flops=2.0 * x.numel() * w.shape[1],
        passes=2,
    )
    call = _prepare(scope, collective, problem, (x, w), Options(overlap, chunks=chunks))
    if call is None:
        y = reduce_unfused(scope.backend, collective, x, w)
    else:
        y = call.reduce(x, w)
    return y if bias is None else y + bias


def _prepare(
    scope: Scope,
    collective: Collective,
    problem: Problem,
    operands: Sequence[Tensor],
    options: Options,
) -> Call | CompiledCall | None:
    """The call of the kernel, or None where the unfused composition runs; records why."""
    check_overlap(problem.op, options.overlap)
    scope.meet(collective, operands[0])
    if options.chunks is not None:
        candidates(problem, options.chunks)  # Wrong on every mesh, or on none.
    backend = scope.backend
    if is_checked(backend):
        record(Plan(problem.op, problem.axis, None, "the body is being checked, not run"))
        return None
    why = obstacle(Situation(problem.op, backend, collective.axes, options.overlap, operands))
    if why is not None:
        record(obstructed(problem.op, problem.axis, options.overlap, why))
        return None
    if torch.compiler.is_compiling():
        return compiled_call(backend, collective, problem, options)
    assert isinstance(backend, ProcessGroupBackend)  # an obstacle otherwise
    endpoint = endpoint_of(backend, collective.axes)
    fabric = partial(endpoint.fabric, operands[0].dtype)
    plan = record(decide(problem, fabric, options.chunks, forced=options.overlap == "require"))
    if plan.choice is None:
        return None
    return Call(backend, endpoint, collective, plan.choice, options)


def _pairs(
    op: str, w: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The weights and the bias of each."""
    ws = [w] if isinstance(w, Tensor) else list(w)
    if bias is None:
        return ws, [None] * len(ws)
    biases: list[Tensor | None] = [bias] if isinstance(bias, Tensor) else list(bias)
    if len(biases) != len(ws) or not ws:
        raise KernelError(f"{op}: {len(ws)} weights and {len(biases)} biases; pass one for each.")
    return ws, biases


def _check_weight(op: str, w: Tensor, inner: int) -> None:
    if w.ndim != 2 or w.shape[0] != inner:
        raise KernelError(
            f"{op}: w has shape {list(w.shape)}, but the rows it multiplies have {inner} features; "
            f"pass [{inner}, m] (a torch.nn.Linear keeps [m, {inner}]: pass weight.t())."
        )


def _check_bias(op: str, bias: Tensor | None, columns: int) -> None:
    if bias is not None and bias.shape != (columns,):
        raise KernelError(
            f"{op}: bias has shape {list(bias.shape)}, but the result has {columns} columns here; "
            f"pass [{columns}]."
        )
