"""An all-to-all of as many rows as data says."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.errors import CollectiveError, TransformError, show
from shardmap_torch.ops.arguments import Axis, collective_in, read_axes, shown
from shardmap_torch.ops.body import axis_index
from shardmap_torch.ops.gather import all_gather
from shardmap_torch.types import R, V

_NAME = "ragged_all_to_all"


def ragged_all_to_all(
    x: Tensor,
    axis: Axis,
    *,
    send_sizes: Tensor | Sequence[int],
    length: int | None = None,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Sends the next `send_sizes[r]` rows of each rank's value to every rank r.

    The sizes may differ by rank and depend on data. Shapes do not: the result has room for
    `length` rows, those that arrive come first, in the order of the ranks that sent them, and
    zeros stand behind. Only rows that are addressed to a rank are sent.

    Shape: x [m, ...] becomes [length, ...]. Types: V becomes V. Backward: the same with the sizes
    of the receivers; rows that nobody was sent get a gradient of zero. Sends the rows for other
    ranks, at most x.nbytes per rank, and (n-1) * n integers first, by which every rank knows all
    sizes. They are read by Python, so that a GPU is waited for. A simulated mesh of strategy
    "auto" runs a body that calls it as ranks. With `check="global"` it belongs in a
    `local_region`: rows that data sends to other ranks mean nothing on one device.

    Args:
        x: rows, sorted by the rank that they are for.
        axis: an axis name, or several that act as one.
        send_sizes: numbers of rows for each of the n ranks: integers [n], of any type.
        length: rows of the result, the same on all ranks; by default n * m, which always suffices.
        comm_dtype: dtype in which the values travel.
        grad_comm_dtype: dtype in which the cotangents travel.

    Returns:
        The rows that arrive, and how many of them each rank has sent: integers [n], of type V.

    Raises:
        CollectiveError: outside a body, unknown axis, sizes that are no n integers; on all ranks,
            if a rank sends more rows than it has or one would receive more than `length`.
        ShardTypeError: in a checked body, for `x` of another type.
        TransformError: in a batched body (`simulate="vmap"`), under `torch.vmap` or torch.compile.

    Source: `jax.lax.ragged_all_to_all`; `torch.distributed.all_to_all_single` with split sizes.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, axis_index, make_mesh, ragged_all_to_all, shard_map
        >>> mesh = make_mesh((2,), ("ep",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        ... def f(x):  # rank 0 keeps one of its rows and sends two; rank 1 keeps all three
        ...     sizes = torch.tensor([[1, 2], [0, 3]])[axis_index("ep")]
        ...     return ragged_all_to_all(x, "ep", send_sizes=sizes, length=5)[0]
        >>> f(torch.arange(1.0, 7.0))
        tensor([1., 0., 0., 0., 0., 2., 3., 4., 5., 6.])
    """
    axes, scope = read_axes(_NAME, axis)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    room = _check(x, send_sizes, length, num_ranks, axes)
    _require_ranks(scope, axes)
    sizes = torch.as_tensor(send_sizes, dtype=torch.int64, device=x.device)
    own = axis_index(axes)
    # Sizes that are equal on all ranks are gathered like any others.
    table = all_gather((sizes + 0 * own.to(x.device)).unsqueeze(0), axes, dim=0, dst=R)
    dtypes = comm_dtype, grad_comm_dtype
    collective = collective_in(dtypes, _NAME, V, V, axes, lengths=(x.shape[0], room))
    scope.on_operation(collective, x)
    if not is_checker(scope.backend):
        collective = replace(collective, counts=_counts(table, collective))
    y = bind(scope.backend, collective, x)
    return y, table.index_select(1, own.reshape(1).to(x.device)).squeeze(1)


def _check(
    x: Tensor,
    send_sizes: Tensor | Sequence[int],
    length: int | None,
    num_ranks: int,
    axes: tuple[str, ...],
) -> int:
    """Checks the arguments, as far as shapes tell; returns the rows of the result."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise CollectiveError(f"{_NAME} takes a tensor of rows, not {show(x)}.")
    if isinstance(send_sizes, Tensor):
        whole = not (send_sizes.is_floating_point() or send_sizes.is_complex())
        shape, matches = str(list(send_sizes.shape)), whole and send_sizes.shape == (num_ranks,)
    else:
        known = isinstance(send_sizes, list | tuple) and all(type(s) is int for s in send_sizes)
        shape, matches = show(send_sizes), known and len(send_sizes) == num_ranks
    if not matches:
        raise CollectiveError(
            f"{_NAME}: send_sizes must be {num_ranks} integers, one for each rank of "
            f"{shown(axes)}, not {shape}."
        )
    if length is None:
        return num_ranks * x.shape[0]
    if type(length) is not int or not 0 <= length < 2**48:
        raise CollectiveError(f"{_NAME}: length={show(length)} is no number of rows.")
    return length


def _require_ranks(scope: Scope, axes: tuple[str, ...]) -> None:
    if torch.compiler.is_compiling():
        raise TransformError(
            f"{_NAME} cannot be compiled: its sizes are numbers that data decides. Call it outside "
            "of torch.compile."
        )
    if scope.backend.markers(axes):
        raise TransformError(
            f"{_NAME} cannot run in a batched body: each rank sends another number of rows. Use "
            'make_mesh(..., simulate="ranks"), which "auto" chooses here.'
        )
    if is_checker(scope.backend):
        scope.backend.needs_ranks()


def _counts(table: Tensor, collective: Collective) -> tuple[tuple[int, ...], ...]:
    """Reads the sizes of all ranks, which all of them see alike and refuse alike."""
    sizes = base_of(table)
    if is_dtensor(sizes):  # over automatic axes
        sizes = sizes.full_tensor()
    if sizes.ndim != 2:
        raise TransformError(
            f"{_NAME} cannot run under torch.vmap: each example sends another number of rows. "
            "Loop over the examples."
        )
    counts = tuple(map(tuple, sizes.tolist()))
    rows, room = collective.lengths
    problems = [
        f"rank {rank} has {rows} rows and sends {list(sent)}"
        for rank, sent in enumerate(counts)
        if min(sent) < 0 or sum(sent) > rows
    ]
    problems += [
        f"rank {rank} would receive {sum(received)} rows, and length={room}"
        for rank, received in enumerate(zip(*counts, strict=True))
        if sum(received) > room
    ]
    if problems:
        raise CollectiveError(f"{collective}: {'; '.join(problems)}.")
    return counts
