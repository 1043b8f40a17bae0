"""Cross-entropy losses whose classes (the vocabulary) are sharded over an axis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.errors import LayerError
from shardmap_torch.nn.arguments import axes_of, check_inner, num_rows, read_layout, to_replicate
from shardmap_torch.nn.embedding import own_rows
from shardmap_torch.nn.region import PerRank, per_rank
from shardmap_torch.ops import all_gather, all_reduce, axis_size, convert
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import I, R, TypeLike, V

Reduction: TypeAlias = Literal["none", "sum", "mean"]


@dataclass(frozen=True)
class Loss:
    """A cross-entropy over classes that are sharded over `axis`; see the functions below."""

    name: str
    axis: Axis
    reduction: Reduction = "mean"
    batch_axis: Axis = ()
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise LayerError(
                f"{self.name}: reduction={self.reduction!r} is none of none, sum, mean."
            )
        if not 0 <= self.label_smoothing <= 1:
            raise LayerError(
                f"{self.name}: label_smoothing={self.label_smoothing} is not within 0 and 1."
            )
        if self.z_loss < 0:
            raise LayerError(f"{self.name}: z_loss={self.z_loss} is negative.")

    def valid(self, targets: Tensor) -> Tensor | None:
        """Returns the mask of the positions that are not ignored; None if all count."""
        return None if self.ignore_index is None else targets != self.ignore_index

    def nats(
        self,
        logits: Tensor,
        targets: Tensor,
        look_up: Callable[[Tensor, Tensor], Tensor] | None = None,
        scale: Tensor | None = None,
        class_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes the loss of each position.

        The loss is the sum over the classes of mass * (log_total - logit), whose mass is that of
        the targets, of which a share is spread over all classes.

        Args:
            logits: [..., v/r].
            targets: class numbers, or [..., v/r] probabilities.
            look_up: takes logits and class numbers, and returns the logits of these: an addend.
            scale: the factor of each target.
            class_weight: the factors of all classes.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = all_reduce(logits.detach().amax(-1), self.axis, op="max", dst=R)
        shifted = logits - largest.unsqueeze(-1)
        log_total = all_reduce(shifted.exp().sum(-1), self.axis, dst=I).log()
        mass: Tensor | None = scale
        if look_up is None:
            score = (targets * shifted).sum(-1)
            mass = all_reduce(targets.sum(-1), self.axis, dst=I)
        else:
            score = look_up(shifted, targets)
            score = score if scale is None else score * scale
        if self.label_smoothing:
            num_classes = shifted.shape[-1] * axis_size(self.axis)
            spread, share = shifted, self.label_smoothing / num_classes
            if class_weight is not None:
                spread = shifted * convert(class_weight, self.axis, src=I, dst=V, dim=0)
            score = score * (1 - self.label_smoothing) + spread.sum(-1) * share
            if mass is not None:
                all_of = num_classes if class_weight is None else class_weight.sum()
                mass = mass * (1 - self.label_smoothing) + share * all_of
        weighted = log_total if mass is None else log_total * mass
        nats = weighted - all_reduce(score, self.axis, dst=I)
        return nats + self.z_loss * (log_total + largest).square() if self.z_loss else nats

    def reduce(self, nats: Tensor, valid: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """Sums or averages, over the global batch, the positions that are not ignored."""
        nats = nats if valid is None else nats.where(valid, 0)
        if self.reduction == "none":
            return nats
        axes = axes_of(self.batch_axis)
        total = nats.sum()
        total = all_reduce(total, axes, dst=I) if axes else total
        if self.reduction == "sum":
            return total
        counted = scale if valid is None or scale is None else scale * valid
        counted = valid if counted is None else counted
        if counted is None:
            return total / (nats.numel() * (axis_size(axes) if axes else 1))
        count = counted.sum()
        return total / (all_reduce(count, axes, dst=I) if axes else count)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    reduction: Reduction = "mean",
    batch_axis: Axis = (),
    ignore_index: int | None = -100,
    class_weight: Tensor | None = None,
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
        class_weight: [v], a factor of each class, equal on all ranks; for integer targets. "mean"
            divides by the sum of the targets' factors.
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
    loss = Loss(name, axis, reduction, batch_axis, ignore_index, label_smoothing, z_loss)
    soft = targets.is_floating_point()
    if targets.shape != (logits.shape if soft else logits.shape[:-1]):
        raise LayerError(
            f"{name}: logits [..., v/r] {list(logits.shape)} take integer targets of shape "
            f"{list(logits.shape[:-1])}, or probabilities of shape {list(logits.shape)}, not "
            f"{targets.dtype} {list(targets.shape)}."
        )
    if soft:
        if class_weight is not None:
            raise LayerError(f"{name}: class_weight= is for integer targets; scale probabilities.")
        return loss.reduce(loss.nats(logits, targets), None)
    valid = loss.valid(targets)
    ids = targets if valid is None else targets.where(valid, 0)
    scale = None if class_weight is None else class_weight[ids]
    nats = loss.nats(logits, ids, own_scores(axis), scale, class_weight)
    return loss.reduce(nats, valid, scale)


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
    them, and sends once more what the forward sends.

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
        axis: as in `vocab_parallel_cross_entropy`.
        src: type of x over `axis`, as in `column_linear`.
        chunk_size: positions a chunk.
        reduction: as in `vocab_parallel_cross_entropy`.
        batch_axis: as in `vocab_parallel_cross_entropy`.
        ignore_index: as in `vocab_parallel_cross_entropy`.
        label_smoothing: as in `vocab_parallel_cross_entropy`.
        z_loss: as in `vocab_parallel_cross_entropy`.

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
    loss = Loss(name, axis, reduction, batch_axis, ignore_index, label_smoothing, z_loss)
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
    valid = loss.valid(targets)
    ids = targets if valid is None else targets.where(valid, 0)
    nats: Tensor = chunked_nats(loss, chunk_size)(x, weight, ids)
    return loss.reduce(nats, valid)


def chunked_nats(loss: Loss, chunk_size: int) -> PerRank:
    """Makes the per-rank loss: x [..., d], weight [d, v/r], targets [...] -> nats [...]."""

    def nats_of_chunk(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return loss.nats(rows @ weight, targets, own_scores(loss.axis).function)

    # A region: a chunk of a rank's positions is no chunk of those of one device.
    @per_rank("...d,dv,...->...", over={"v": loss.axis})
    def nats_by_chunks(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(
            x.flatten(0, -2).split(chunk_size), targets.flatten().split(chunk_size), strict=True
        )
        nats = [checkpoint(nats_of_chunk, rows, weight, ids) for rows, ids in chunks]
        return torch.cat(nats).reshape(targets.shape)

    return nats_by_chunks


def own_scores(axis: Axis) -> PerRank:
    """Makes the per-rank lookup of the targets' logits: a pending sum, zero on the other ranks."""

    @per_rank("...v,...->...", over={"v": axis}, partial=axis)
    def logits_of_own_targets(logits: Tensor, targets: Tensor) -> Tensor:
        ids, owned = own_rows(targets, logits.shape[-1], axis, logits.dtype)
        return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * owned

    return logits_of_own_targets
