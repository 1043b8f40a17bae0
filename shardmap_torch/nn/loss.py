"""Cross-entropy losses whose classes (the vocabulary) are sharded over an axis."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from shardmap_torch.errors import LayerError
from shardmap_torch.nn.chunked_loss import chunked_nats
from shardmap_torch.nn.core.arguments import check_inner, num_rows, read_layout, to_replicate
from shardmap_torch.nn.core.region import PerRank, axes_of, per_rank
from shardmap_torch.nn.embedding import own_rows
from shardmap_torch.ops import all_gather, all_reduce, axis_size
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import I, R, TypeLike

Reduction: TypeAlias = Literal["none", "sum", "mean"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    reduction: Reduction = "mean",
    batch_axis: Axis = (),
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Computes the cross-entropy of logits whose classes (the last dimension) are sharded.

    The vocabulary is never gathered: a maximum, a sum and a score of the targets are all-reduced.

    Shape: logits [..., v/r], targets [...] of integers, or [..., v/r] of probabilities, gives [...]
    for `reduction="none"`, else a scalar. Types: logits are sharded over `axis` along the last
    dimension, targets equal on its ranks (probabilities sharded as the logits); the result is I
    over `axis`, and with "sum" and "mean" I over `batch_axis`. Backward: sends nothing. Sends three
    all-reduces of one number a position, a fourth for probabilities, and over `batch_axis` one or
    two scalars.

    Args:
        logits: those of this rank's classes; computed in float32 or better.
        targets: global class numbers, from 0 to v - 1, or `ignore_index`. The loss of another
            number is NaN: ranks cannot raise an error for a value without waiting for the device.
        axis: the axis, or several that act as one, over which the vocabulary is sharded.
        reduction: "mean" divides by the number of positions that are not ignored.
        batch_axis: the axes over which positions are sharded, so that sum and mean are those of
            the global batch. Without it they are those of this rank.
        ignore_index: positions with this target do not count; None: there are none, so that the
            mean needs no count to be communicated. Only for integer targets.
        label_smoothing: this part of each target is spread evenly over the global vocabulary.
        z_loss: adds z_loss * logsumexp(logits)**2, which keeps logits small.

    Raises:
        LayerError: shapes that do not match, or arguments out of range.
        CollectiveError: outside a body, or an unknown axis.

    Source: `torch.nn.functional.cross_entropy`, whose classes are dimension 1; Shoeybi et al. 2019,
    "Megatron-LM"; z-loss: Chowdhery et al. 2022, "PaLM".

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, y: vocab_parallel_cross_entropy(x, y, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P()), out_specs=P())
        >>> g(torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]]), torch.tensor([3, -100]))
        tensor(1.3863)
    """
    name = "vocab_parallel_cross_entropy"
    options = _Options(name, reduction, label_smoothing, z_loss, ignore_index)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    soft = targets.is_floating_point()
    if targets.shape != (logits.shape if soft else logits.shape[:-1]):
        raise LayerError(
            f"{name}: logits [..., v/r] {list(logits.shape)} take integer targets of shape "
            f"{list(logits.shape[:-1])}, or probabilities of shape {list(logits.shape)}, not "
            f"{targets.dtype} {list(targets.shape)}."
        )
    largest = all_reduce(logits.detach().amax(-1), axis, op="max", dst=R)
    shifted = logits - largest.unsqueeze(-1)
    log_total = all_reduce(shifted.exp().sum(-1), axis, dst=I).log()
    if soft:
        kept, weight = None, all_reduce(targets.sum(-1), axis, dst=I)
        own = (targets * shifted).sum(-1)
    else:
        kept, weight = options.kept(targets), None
        ids = targets if kept is None else targets.where(kept, 0)
        own = own_scores(axis)(shifted, ids)
    score = all_reduce(options.smoothed(own, shifted, axis), axis, dst=I)
    nats = options.weighted(log_total, weight) - score
    nats = nats + z_loss * (log_total + largest).square() if z_loss else nats
    return _reduced(nats, kept, reduction, batch_axis)


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    src: TypeLike = I,
    chunk_size: int = 1024,
    reduction: Reduction = "mean",
    batch_axis: Axis = (),
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Computes the cross-entropy of `x @ weight` without all logits in memory.

    The logits of a chunk of positions are computed, reduced and freed; the backward recomputes
    them, and needs no collective for them.

    Shape: x [..., d], weight [d, v/r], targets [...] of integers gives [...] for
    `reduction="none"`, else a scalar. Memory: chunk_size * v/r logits in place of all. Types:
    the weight is sharded over `axis` along dimension 1, x is `src`, the result as that of
    `vocab_parallel_cross_entropy`. Backward: for `src=I` one all-reduce of dx, for `src=S(i)` one
    reduce-scatter, for `src=R` dx is a pending sum. Sends what `vocab_parallel_cross_entropy`
    sends, in chunks, and the gather of x for `src=S(i)`.

    Args:
        x: activations of the last layer.
        weight: this rank's columns of the unembedding.
        targets: as in `vocab_parallel_cross_entropy`; integers only.
        axis: as there.
        src: type of x over `axis`, as in `column_linear`.
        chunk_size: positions a chunk.
        reduction: as there.
        batch_axis: as there.
        ignore_index: as there.
        label_smoothing: as there.
        z_loss: as there.

    Raises:
        LayerError: shapes that do not match, arguments out of range, or targets that are
            probabilities.
        CollectiveError: outside a body, or an unknown axis.

    Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models".

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w, y: vocab_parallel_linear_cross_entropy(x, w, y, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(), P(None, "tp"), P()), out_specs=P())
        >>> g(torch.ones(3, 2), torch.zeros(2, 4), torch.tensor([0, 1, 2]))
        tensor(1.3863)
    """
    name = "vocab_parallel_linear_cross_entropy"
    options = _Options(name, reduction, label_smoothing, z_loss, ignore_index)
    layout = read_layout(name, "src", src, "IRS")
    check_inner(name, x, num_rows(name, weight, "weight"), weight, "weight")
    if layout == I:
        x = to_replicate(x, axis)
    elif layout.dim is not None:
        x = all_gather(x, axis, dim=layout.dim, dst=R)
    if targets.is_floating_point() or targets.shape != x.shape[:-1]:
        raise LayerError(
            f"{name}: x {list(x.shape)} takes integer targets of shape {list(x.shape[:-1])}, not "
            f"{targets.dtype} {list(targets.shape)}. For probabilities use column_linear and "
            "vocab_parallel_cross_entropy."
        )
    if chunk_size < 1:
        raise LayerError(f"{name}: chunk_size={chunk_size} is not positive.")
    kept = options.kept(targets)
    ids = targets if kept is None else targets.where(kept, 0)
    nats: Tensor = chunked_nats(axis, chunk_size, label_smoothing, z_loss)(x, weight, ids)
    return _reduced(nats, kept, reduction, batch_axis)


@dataclass(frozen=True)
class _Options:
    name: str
    reduction: Reduction
    smoothing: float
    z_loss: float
    ignore_index: int | None

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise LayerError(
                f"{self.name}: reduction={self.reduction!r} is none of none, sum, mean."
            )
        if not 0 <= self.smoothing <= 1:
            raise LayerError(
                f"{self.name}: label_smoothing={self.smoothing} is not within 0 and 1."
            )
        if self.z_loss < 0:
            raise LayerError(f"{self.name}: z_loss={self.z_loss} is negative.")

    def kept(self, targets: Tensor) -> Tensor | None:
        """Returns the mask of the positions that are not ignored; None if all count."""
        return None if self.ignore_index is None else targets != self.ignore_index

    def smoothed(self, own: Tensor, shifted: Tensor, axis: Axis) -> Tensor:
        """Mixes the score of the targets with the mean over all classes."""
        if not self.smoothing:
            return own
        share = self.smoothing / (shifted.shape[-1] * axis_size(axis))
        return own * (1 - self.smoothing) + shifted.sum(-1) * share

    def weighted(self, log_total: Tensor, weight: Tensor | None) -> Tensor:
        """Scales by the sum of each position's probabilities, if targets are probabilities."""
        if weight is None:
            return log_total
        return log_total * (weight * (1 - self.smoothing) + self.smoothing)


def own_scores(axis: Axis) -> PerRank:
    """Makes the per-rank lookup of the targets' logits: a pending sum, zero on the other ranks."""

    @per_rank("...v,...->...", over={"v": axis}, partial=axis)
    def logits_of_own_targets(logits: Tensor, targets: Tensor) -> Tensor:
        ids, owned = own_rows(targets, logits.shape[-1], axis, logits.dtype)
        return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * owned

    return logits_of_own_targets


def _reduced(nats: Tensor, kept: Tensor | None, reduction: Reduction, batch_axis: Axis) -> Tensor:
    """Sums or averages, over the global batch, the positions that are not ignored."""
    nats = nats if kept is None else nats.where(kept, 0)
    if reduction == "none":
        return nats
    total, axes = nats.sum(), axes_of(batch_axis)
    total = all_reduce(total, axes, dst=I) if axes else total
    if reduction == "sum":
        return total
    if kept is None:
        return total / (nats.numel() * (axis_size(axes) if axes else 1))
    count = kept.sum()
    return total / (all_reduce(count, axes, dst=I) if axes else count)
