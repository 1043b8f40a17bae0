"""`validate_rule`: tests rules, decompositions and regions with numbers on simulated ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardmap_torch.checker.rules.registry import MEANINGS, row_of
from shardmap_torch.contracts import export
from shardmap_torch.core.torch_private.engine import OpOverload, OpOverloadPacket
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardTypeError, SpecError, show
from shardmap_torch.run.threads import MAX_THREADS
from shardmap_torch.validate.numbers import Validation
from shardmap_torch.validate.regions import try_region
from shardmap_torch.validate.typings import Operation, try_types, try_values

__all__ = ["Validation", "validate_rule"]


def validate_rule(
    target: Callable[..., Any],
    *args: Any,
    num_ranks: int | Sequence[int] = (2, 3),
    seed: int = 0,
    **kwargs: Any,
) -> Validation:
    """Tests what users declare to the checker, forward and backward, on simulated ranks.

    The checker trusts a rule of `register_rule`, a function of `register_decomposition`, and the
    types of a `local_region`. This function compares them with numbers:

    * An operator that has a rule, or a function of local operations that have one. For each
      assignment of the types I, R, V and Partial to its tensors, the checker finds the types of the
      results, and those of the gradients for cotangents that the results accept. The ranks then
      compute both on random values of these types. Where the type is I, R or K they must be equal;
      where it is Z they must be zeros; where it is Partial the sum must depend on the operands'
      sums alone, and be what one rank computes from the sums. V, and typings that the checker
      refuses, claim nothing. An operator that has a decomposition must also have its results; its
      gradients are its own.
    * A function wrapped in `local_region`. It must have the same values and gradients, in float64,
      whether every axis of its types has one rank or `num_ranks`. A pending sum enters as random
      addends.

    Args:
        target: an overload, as in `torch.ops.mylib.scale.default`, or a function.
        args: an example call. Of an operator's tensors only shape, dtype and, for integers, the
            range of values count. A region's arguments are global values, used as they are: draw
            them at random, since zeros and ones hide errors.
        num_ranks: number of ranks of an axis, at least 2; several are tried one after the other.
        seed: seed of all random values.
        kwargs: more of the example call.

    Returns:
        The number of trials, the claims that held, and the types that are refused. Random values
        prove nothing, and results without finite values are not compared.

    Raises:
        ShardTypeError: claims that do not hold, all of them, each with the worst difference; or the
            target has no rule, or the checker refuses it for all types.
        SpecError: the example has no tensor, does not match the types of the region, or does not
            divide over the ranks.

    Source: `rulecheck` of spmd_types, which tries forwards.

    Example:
        >>> import torch
        >>> from shardmap_torch import Row, register_rule
        >>> @torch.library.custom_op("lib::shift", mutates_args=())
        ... def shift(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1
        >>> _ = shift.register_fake(lambda x: torch.empty_like(x))
        >>> op = torch.ops.lib.shift.default
        >>> register_rule(op, Row(linear=(("x",),)))  # wrong: every rank adds its own 1
        >>> validate_rule(op, torch.ones(1), num_ranks=2)
        Traceback (most recent call last):
        ...
        shardmap_torch.errors.ShardTypeError: validate_rule: lib.shift.default: 1 claim does...
          (x: Partial): result is Partial: the sum is not the operation on the sums; ...
    """
    counts = (num_ranks,) if isinstance(num_ranks, int) else tuple(num_ranks)
    if not counts or not 2 <= min(counts) <= max(counts) <= MAX_THREADS:
        raise SpecError(
            f"validate_rule: num_ranks is 2 to {MAX_THREADS:,}, or several, not {show(num_ranks)}."
        )
    name = _name_of(target)
    if not any(isinstance(leaf, Tensor) and leaf.numel() for leaf in flatten((args, kwargs))[0]):
        raise SpecError(
            f"validate_rule: {name} needs an example call with a tensor that has elements."
        )
    if hasattr(target, "_shardmap_region"):
        return try_region(name, target._shardmap_region, args, kwargs, counts, seed).report()
    operation = Operation.of(target, name, args, kwargs)
    findings = try_types(operation, counts, seed)
    if isinstance(target, OpOverload) and target in MEANINGS:
        try_values(operation, MEANINGS[target], seed, findings)
    return findings.report()


def _name_of(target: Any) -> str:
    """Returns the name of a target.

    Raises:
        ShardTypeError: it cannot be validated.
    """
    if isinstance(target, OpOverloadPacket):
        choices = ", ".join(target.overloads())
        raise ShardTypeError(
            f"validate_rule: {target} names several overloads; choose one of: {choices}."
        )
    if isinstance(target, OpOverload):
        if row_of(target) is None and target not in MEANINGS:
            raise ShardTypeError(
                f"validate_rule: {target} has no rule; give it one with register_rule or "
                "register_decomposition."
            )
        return str(target)
    if not callable(target):
        raise ShardTypeError(f"validate_rule takes an operator or a function, not {show(target)}.")
    return getattr(target, "__name__", type(target).__name__)


export(globals(), __all__, SpecError)
