"""Pipelines: schedules as data, and the loss and gradients of layers sharded over the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.autodiff.gradients import vjp
from shardmap_torch.core.tree import flatten, map_leaves, unflatten
from shardmap_torch.errors import LayerError, show
from shardmap_torch.mesh import MAX_RANKS
from shardmap_torch.nn.region import PerRank, Types
from shardmap_torch.ops import all_reduce, axis_index, axis_size, shift
from shardmap_torch.spec import P
from shardmap_torch.types import I

Row: TypeAlias = tuple[int | None, ...]
"""The microbatch of each rank in one tick; None where a rank has nothing to do."""


@dataclass(frozen=True)
class Tick:
    """The work of all ranks between two messages: forward, then backward."""

    forward: Row
    backward: Row


Schedule: TypeAlias = tuple[Tick, ...]


def gpipe_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes a schedule that runs all microbatches forward, and then all backward.

    Each of n = `num_ranks` saves the inputs of all m = `num_microbatches`. It has 2(m + n - 1)
    ticks, of which each rank is idle in 2(n - 1). Plain numbers: nothing is sent.

    Source: Huang et al. 2019, "GPipe".

    Example:
        >>> [tick.forward for tick in gpipe_schedule(2, 2)]
        [(0, None), (1, 0), (None, 1), (None, None), (None, None), (None, None)]
    """
    return _schedule(num_ranks, num_microbatches, num_microbatches + 2 * (num_ranks - 1))


def one_forward_one_backward_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes a schedule that runs a microbatch backward as soon as it has reached the last rank.

    Rank r of n = `num_ranks` saves the inputs of at most 2(n - r) - 1 microbatches. It has
    `num_microbatches` + 2(n - 1) ticks, in most of which a rank does a forward and a backward.

    Source: Narayanan et al. 2019, "PipeDream" (1F1B), with a flush as in Megatron-LM.

    Example:
        >>> [tick.backward for tick in one_forward_one_backward_schedule(2, 2)]
        [(None, None), (None, 0), (0, 1), (1, None)]
    """
    return _schedule(num_ranks, num_microbatches, 2 * (num_ranks - 1))


def _schedule(num_ranks: int, num_microbatches: int, delay: int) -> Schedule:
    """Makes the schedule in which rank 0 runs a microbatch backward `delay` ticks after forward.

    A microbatch moves one rank a tick, so that the delay is 2 * (num_ranks - 1) at least.
    """

    def row(first: int, step: int) -> Row:
        numbers = [first + step * rank for rank in range(num_ranks)]
        return tuple([m if 0 <= m < num_microbatches else None for m in numbers])

    ticks = num_microbatches + delay
    if not 0 < num_ranks * ticks <= MAX_RANKS:
        raise LayerError(
            f"A schedule has up to {MAX_RANKS:,} places, not {num_ranks} ranks * {ticks} ticks."
        )
    return tuple([Tick(row(tick, -1), row(tick - delay, 1)) for tick in range(ticks)])


SCHEDULES: Final = (one_forward_one_backward_schedule, gpipe_schedule)


def num_saved(schedule: Schedule) -> int:
    """Counts the microbatches whose inputs a rank saves at once, on the rank with the most.

    Example:
        >>> num_saved(gpipe_schedule(2, 8)), num_saved(one_forward_one_backward_schedule(2, 8))
        (8, 3)
    """
    most = 0
    for rank in range(len(schedule[0].forward)):
        saved = 0
        for tick in schedule:
            saved += tick.forward[rank] is not None
            most = max(most, saved)
            saved -= tick.backward[rank] is not None
    return most


Stage = Callable[[Any, Tensor], Tensor | tuple[Tensor, ...]]
Loss = Callable[..., Tensor]


def pipeline_value_and_grad(
    stage: Stage,
    loss: Loss,
    params: Any,
    x: Tensor,
    targets: Tensor,
    axis: str,
    *,
    head: Any = None,
    schedule: Callable[[int, int], Schedule] = one_forward_one_backward_schedule,
) -> tuple[Tensor, Any, Tensor]:
    """Computes the loss of all microbatches and its gradients, layers being sharded over `axis`.

    Rank r has the r-th part of the layers. Microbatches pass from rank to rank, and their
    cotangents back, in the order of the schedule; the gradients do not depend on it.

    Shape: x [m, ...] has m microbatches, as have the targets; every leaf of `params` has the layers
    of this rank as leading dimension. Returns a scalar, gradients as `params`, and the gradient of
    x, [m, ...]. Types: `params` are sharded over `axis` along dimension 0, x, targets and `head`
    equal on its ranks; the loss and the gradients of x and `head` are I, the other gradients
    sharded as `params`. Over an axis that shards the targets the loss is a pending sum. Over one
    that shards x or the targets, leaves of `params` and `head` that it does not shard are R, and
    their gradients pending sums. Memory: the inputs of `num_saved(schedule)` microbatches (m for
    GPipe, at most 2n - 1 for 1F1B) and the activations of one stage for one microbatch, which are
    recomputed in its backward. All ranks run one program: if one runs forward and another backward
    in the same tick, each computes both and keeps its own.
    Sends one microbatch in each tick and direction that has work, and all-reduces the loss and the
    gradients of x and `head`.

    Args:
        stage: `stage(params, x)` applies the layers of one rank; the result has the shape of x. It
            may be a tuple of that and a scalar, which is added to the loss, such as the loads of
            experts.
        loss: `loss(y, targets)` of one microbatch, a scalar, or with a head `loss(head, y,
            targets)`; microbatches are summed.
        params: a pytree of this rank's layers.
        x: inputs of the first layer.
        targets: second argument of `loss`.
        axis: over which the layers are sharded.
        head: parameters of the loss, a pytree, as of a final norm and an unembedding. With it the
            second result is a pair, of the gradients of `params` and of `head`.
        schedule: `one_forward_one_backward_schedule`, or `gpipe_schedule`.

    Raises:
        LayerError: another number of microbatches in x and targets, a stage that changes the shape,
            or another schedule.
        CollectiveError: outside a body, or an unknown axis.

    Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient large-scale language model
    training on GPU clusters"; the collective form from JAX's guide to pipelines in shard_map.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("pp",), kind="simulated")
        >>> def stage(weights, x):
        ...     for weight in weights.unbind():
        ...         x = x * weight
        ...     return x
        >>> @shard_map(mesh=mesh, in_specs=(P("pp"), P()), out_specs=(P(), P("pp"), P()))
        ... def step(weights, x):
        ...     loss = lambda y, target: (y - target).sum()
        ...     return pipeline_value_and_grad(stage, loss, weights, x, x, "pp")
        >>> step(torch.tensor([2.0, 3.0]), torch.ones(4, 1))[:2]
        (tensor(20.), tensor([12.,  8.]))
    """
    if x.shape[:1] != targets.shape[:1] or not x.ndim or not x.shape[0]:
        raise LayerError(
            "pipeline_value_and_grad: x and targets have one leading dimension for microbatches, "
            f"not {list(x.shape)} and {list(targets.shape)}."
        )
    if unwrap(schedule) not in SCHEDULES:
        known = " or ".join(f"nn.{each.__name__}" for each in SCHEDULES)
        raise LayerError(f"pipeline_value_and_grad: schedule={show(schedule)} is not {known}.")
    with_head = loss if head is not None else lambda head, y, targets: loss(y, targets)
    leaves, structure = flatten((params, () if head is None else head))
    region = pipeline_region(stage, with_head, structure, axis, schedule, len(flatten(params)[0]))
    value, d_x, *grads = region(x, targets, *leaves)
    d_params, d_head = unflatten(structure, grads)
    return value, d_params if head is None else (d_params, d_head), d_x


def pipeline_region(
    stage: Stage,
    loss: Loss,
    structure: Any,
    axis: str,
    schedule: Callable[[int, int], Schedule],
    num_own: int,
) -> PerRank:
    """Makes the per-rank code of `pipeline_value_and_grad`, of x, targets, parameters and head.

    `structure` is that of parameters and head, whose first `num_own` leaves are parameters.
    """

    def pipeline_of_own_layers(x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ticks = schedule(axis_size(axis), x.shape[0])
        params, head = unflatten(structure, leaves)
        run = _Run(stage, loss, params, head, x, targets, axis, ticks)
        for tick in ticks:
            for row, go in ((tick.forward, run.go_forward), (tick.backward, run.go_back)):
                if any(m is not None for m in row):
                    go(*run.own(row))
        value, d_x, d_head = all_reduce((run.value, run.d_x, run.d_head), axis, dst=I)
        return (value, d_x, *flatten(run.grads)[0], *flatten(d_head)[0])

    return PerRank(pipeline_of_own_layers, partial(_types, axis=axis, num_own=num_own))


def _types(layouts: Sequence[P], ranks: Sequence[int], axis: str, num_own: int) -> Types:
    """Computes the types: sums over positions are pending over the axes that shard these."""
    x, targets, *leaves = (P(*layout.entries) for layout in layouts)
    own = [P(axis, *leaf.entries[1:]) for leaf in leaves[:num_own]]
    params = *own, *leaves[num_own:]
    batch = {*x.mentioned, *targets.mentioned}
    sums = tuple(P(*spec.entries, partial=batch.difference(spec.mentioned)) for spec in params)
    return (x, targets, *params), (P(partial=targets.mentioned), x, *sums)


class _Run:
    """State of one rank during a schedule: saved inputs, received messages, accumulated results."""

    def __init__(
        self,
        stage: Stage,
        loss: Loss,
        params: Any,
        head: Any,
        x: Tensor,
        targets: Tensor,
        axis: str,
        schedule: Schedule,
    ) -> None:
        self._stage, self._loss, self._params = stage, loss, params
        self._x, self._targets, self._axis = x, targets, axis
        self._rank = axis_index(axis)
        self._is_first = self._rank == 0
        self._is_last = self._rank == len(schedule[0].forward) - 1
        own = x[:1] * self._is_first  # of this rank: the ranks receive other things
        self._room = num_saved(schedule)
        self._saved = torch.zeros_like(own).expand(self._room, *x.shape[1:])
        self._received = self._cotangent = torch.zeros_like(own[0])
        self.value = torch.zeros((), dtype=x.dtype, device=x.device)
        self.d_x = torch.zeros_like(own).expand_as(x)
        self.grads = map_leaves(torch.zeros_like, params)
        # The ranks have other gradients of it, of which the last one's count.
        self._head = map_leaves(lambda p: p.where(self._rank >= 0, p), head)
        self.d_head = map_leaves(torch.zeros_like, self._head)

    def go_forward(self, m: Tensor, works: Tensor) -> None:
        """Applies the stage to a microbatch, saves its input and sends the result onward."""
        x = self._x.index_select(0, m).squeeze(0).where(self._is_first, self._received)
        self._saved = x.where(self._place(m % self._room, self._room, works), self._saved)
        y, *_ = self._apply(self._params, x)
        if y.shape != x.shape:
            raise LayerError(
                f"pipeline_value_and_grad: the stage turns {list(x.shape)} into {list(y.shape)}, "
                "which the next rank cannot take."
            )
        self._received = shift(y, self._axis, 1, wrap=False)

    def go_back(self, m: Tensor, works: Tensor) -> None:
        """Pulls a cotangent back through the stage, adds gradients and sends it backward."""
        x = self._saved.index_select(0, m % self._room).squeeze(0)
        (y, *further), pull = vjp(self._apply, self._params, x)
        target = self._targets.index_select(0, m).squeeze(0)
        value, pull_loss = vjp(lambda head, y: self._loss(head, y, target), self._head, y.detach())
        d_head, d_y = pull_loss(torch.ones_like(value))
        d_y = d_y.where(self._is_last, self._cotangent)
        d_params, d_x = pull((d_y, *map(torch.ones_like, further)))
        self.value = self.value + value.where(works & self._is_last, 0)
        for term in further:
            self.value = self.value + term.where(works, 0)
        self.grads = _added(self.grads, d_params, works)
        self.d_head = _added(self.d_head, d_head, works & self._is_last)
        place = self._place(m, self._x.shape[0], works & self._is_first)
        self.d_x = d_x.where(place, self.d_x)
        self._cotangent = shift(d_x, self._axis, -1, wrap=False)

    def _apply(self, params: Any, x: Tensor) -> tuple[Tensor, ...]:
        """Applies the stage; returns a tuple of its result and of scalars of the loss."""
        out = self._stage(params, x)
        return out if isinstance(out, tuple) else (out,)

    def own(self, row: Row) -> tuple[Tensor, Tensor]:
        """Returns this rank's microbatch, and whether it has one."""
        known = torch.tensor([-1 if m is None else m for m in row], device=self._x.device)
        m = known.index_select(0, self._rank.reshape(1))
        return m.clamp(min=0), m.squeeze(0) >= 0

    def _place(self, m: Tensor, count: int, works: Tensor) -> Tensor:
        """Returns the mask of this rank's row among `count`, empty if it has no work."""
        at = (torch.arange(count, device=m.device) == m) & works
        return at.reshape(-1, *[1] * (self._x.ndim - 1))


def _added(totals: Any, new: Any, mask: Tensor) -> Any:
    """Adds the new leaves where the mask is true."""
    leaves, structure = flatten(totals)
    pairs = zip(leaves, flatten(new)[0], strict=True)
    return unflatten(structure, [total + each.where(mask, 0) for total, each in pairs])
