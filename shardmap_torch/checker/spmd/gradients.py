"""Gradients in the ranks' program and on one device: sharded like the values they belong to."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    fitted,
)
from shardmap_torch.checker.spmd.recorder import Event, Ref
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import Sums, common_scale, reject_scaled
from shardmap_torch.core.functorch import base_of, dims_of

WRAP: Final = (
    "compute it in forward and backward from values that are equal on its ranks, with "
    "all_reduce in a shardmap_torch.Function, or wrap it in local_region(f, in_types, out_types)."
)


class Gradients:
    """Relates the cotangents and gradients of differentiations in a body to those on one device.

    Attributes:
        has_custom_backward: whether the user's own code has run in this differentiation.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.has_custom_backward = False

    def note(
        self,
        event: Event,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        before: Sequence[Tensor | None],
    ) -> None:
        """Lays out gradients like their values, as the multiples that the outputs are.

        Raises:
            UnrelatedError: they are not the gradients of the one-device program.
        """
        scale = self._check_seeds(event, outputs, seeds)
        if self.has_custom_backward:
            reject_scaled(scale)  # the user's own backward may not be linear
        found = iter(event.results)
        refs = event.arguments["operands"]
        olds = [*zip(before, event.arguments["before"], strict=True)]
        olds += [(None, None)] * (len(operands) - len(olds))
        for operand, gradient, ref, old in zip(operands, gradients, refs, olds, strict=True):
            if gradient is not None:
                shard = self._notes.find(operand, ref, "what it is the gradient of")
                number, shape = next(found)
                shard = self._batched_like(shard, operand, gradient, shape)
                self._note(shard, operand, gradient, number, scale, old)

    def _batched_like(
        self, shard: ShardedTensor, operand: Tensor, gradient: Tensor, shape: Shape
    ) -> ShardedTensor:
        """Lays out a gradient like its value, and a batch of gradients like a batch of values."""
        (own, levels), (mine, batched) = dims_of(operand), dims_of(gradient)
        dims: dict[int, Dim] = {to: shard.dims[at] for at, to in zip(own, mine, strict=True)}
        for level, at in batched.items():
            found = shard.dims[levels[level]] if level in levels else self._batched.get(level)
            if found is None:
                raise UnrelatedError("nothing is known about how what a vmap batches is sharded")
            dims[at] = found
        local = tuple(base_of(gradient).shape)
        return fitted([dims[at] for at in range(len(local))], local, shape)

    def _check_seeds(
        self, event: Event, outputs: Sequence[Tensor], seeds: Sequence[Tensor | None]
    ) -> Sums:
        """Returns the multiple of the gradient that a backward from these outputs gives."""
        scales = []
        self._batched: dict[int, Dim] = {}  # by the level of a vmap
        refs = zip(event.arguments["outputs"], event.arguments["seeds"], strict=True)
        for output, seed, (ref, seed_ref) in zip(outputs, seeds, refs, strict=True):
            self._notes.reject_loose(output)
            sums = self._notes.sums(output)
            shard = self._notes.find(output, ref, "what is differentiated")
            if (seed is None) != (seed_ref is None):
                raise UnrelatedError("a cotangent is given in one program only")
            if seed is not None:
                self._notes.reject_unfinished(seed)
                given = self._notes.find(seed, seed_ref, "the cotangent")
                pairs = _pairs(output, seed)
                same = all(given.dims[to] in (shard.dims[at], ANY) for at, to in pairs)
                pending = self._notes.sums(seed).partial & self._no_addends(output)
                if not same or pending:
                    raise UnrelatedError("the cotangent is not sharded like its value")
                self._note_batches(output, seed, given)
            self._batched.update({e: shard.dims[at] for e, at in dims_of(output)[1].items()})
            scales.append(sums)
        if any(each.scale == 1 for each in scales) and any(each.scale != 1 for each in scales):
            for each in scales:
                reject_scaled(each)
        return common_scale(scales)

    def _note_batches(self, output: Tensor, seed: Tensor, given: ShardedTensor) -> None:
        """Notes how a batch of cotangents is sharded.

        On each rank one of a value that is not batched gives the gradient of that rank's addend.
        """
        levels = dims_of(output)[1]
        for level, at in dims_of(seed)[1].items():
            axes = [axis for axis, _ in given.dims[at] if axis and given.dims[at] != ANY]
            if axes and level not in levels:
                raise UnrelatedError(
                    f"each rank of {axes[0]!r} has cotangents of its own for one value",
                    f"gather them first, with all_gather over {axes[0]!r}.",
                )
            self._batched[level] = given.dims[at]

    def _no_addends(self, output: Tensor) -> frozenset[str]:
        """Returns the axes over which the cotangents of an output cannot be pending sums.

        A value that all ranks of an axis have, each for a use of its own, has one addend of its
        cotangent on each. A backward is linear, so that the sum of what it makes of them is what it
        makes of their sum; the user's own may not be.
        """
        types = self._notes.types(output)
        return frozenset(a for a, each in types if each.varies or self.has_custom_backward)

    def _note(
        self,
        shard: ShardedTensor,
        operand: Tensor,
        gradient: Tensor,
        number: int,
        scale: Sums,
        old: tuple[Tensor | None, Ref | None],
    ) -> None:
        sums = self._notes.sums(operand)
        reject_scaled(sums)
        # Gradients of values that each rank uses differently are pending sums.
        parts = (a for a, axis_type in self._notes.types(gradient) if axis_type.varies)
        partial = frozenset(parts) - frozenset(shard.axes)
        if partial & sums.partial:  # each addend has the gradient of the sum: equal on all ranks
            raise UnrelatedError(
                f"over {min(partial & sums.partial)!r} the value is a pending sum, and ranks have "
                "other gradients of it"
            )
        made = Sums(partial).scaled(scale.scale, scale.means, scale.cause)
        self._check_before(shard, made, *old)
        self._notes.note(gradient, number, shard)
        self._notes.set_sums(gradient, made)

    def _check_before(
        self, shard: ShardedTensor, made: Sums, old: Tensor | None, ref: Ref | None
    ) -> None:
        """Requires that a gradient can be added to the one that was in `.grad` before."""
        if (old is None) != (ref is None):
            raise UnrelatedError("a gradient is added to another in one program only")
        if old is None or ref is None:
            return
        self._notes.reject_loose(old)
        have = self._notes.find(old, ref, "the gradient that was in .grad before")
        sums = self._notes.sums(old)
        if have.dims != shard.dims or sums.partial != made.partial:
            raise UnrelatedError(
                "it is added to what was in .grad before, which is "
                f"{have.spec(sums.partial)}, and it is {shard.spec(made.partial)}",
                "give the first a name of its own, and set .grad to None.",
            )
        if sums.scale != made.scale:
            reject_scaled(sums)
            reject_scaled(made)

    def layout_of(self, value: Tensor | None, ref: Ref | None) -> ShardedTensor:
        """Returns the layout of the value whose gradient custom code gets or returns."""
        if value is None or ref is None:
            raise UnrelatedError("the value whose gradient it works on is not known", WRAP)
        self._notes.reject_unfinished(value)
        return self._notes.find(value, ref, "the value whose gradient it works on")

    def note_cotangent(
        self, shard: ShardedTensor, value: Tensor | None, gradient: Tensor, number: int
    ) -> None:
        """Lays out the gradient that custom code gets like its value."""
        assert value is not None  # its shard is known
        self._notes.note(
            gradient, number, fitted(shard.dims, tuple(gradient.shape), shard.global_shape)
        )
        parts = frozenset(a for a, own in self._notes.types(gradient) if own.varies)
        summed = self._notes.sums(value).partial
        parts -= {*shard.axes}
        self._notes.set_sums(gradient, Sums(parts - summed, equal=summed & parts))

    def require(
        self, shard: ShardedTensor, value: Tensor | None, gradient: Tensor, ref: Ref
    ) -> None:
        """Requires that a gradient which custom code returns is laid out like its value.

        Raises:
            UnrelatedError: it is not.
        """
        assert value is not None  # its shard is known
        self._notes.reject_unfinished(gradient)
        have = self._notes.find(gradient, ref, "a gradient that it returns")
        if len(have.dims) != len(shard.dims) or any(
            found not in (wanted, ANY) for found, wanted in zip(have.dims, shard.dims, strict=True)
        ):
            raise UnrelatedError(
                f"a gradient that it returns is sharded {have.spec()}, its value {shard.spec()}",
                WRAP,
            )
        known = self._notes.sums(value).partial | set(shard.axes)
        sums = self._notes.sums(gradient)
        added = {axis for axis, each in self._notes.types(gradient) if each.varies} - known
        for axis in sorted(sums.partial ^ added):
            if axis in sums.partial:
                raise UnrelatedError(
                    f"a gradient that it returns is a pending sum over {axis!r}, and its value has "
                    "one " + ("for each rank" if axis in known else "that nothing sums"),
                    WRAP,
                )
            if not sums.zero:
                raise UnrelatedError(
                    f"a gradient that it returns is equal on all ranks of {axis!r}, where they add "
                    "their gradients up",
                    WRAP,
                )


def _pairs(value: Tensor, other: Tensor) -> list[tuple[int, int]]:
    """Returns the dims that a value and its cotangent, or tangent, have in common."""
    (own, levels), (mine, batched) = dims_of(value), dims_of(other)
    both = [(at, batched[level]) for level, at in levels.items() if level in batched]
    return [*zip(own, mine, strict=True), *both]
