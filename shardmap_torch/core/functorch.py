"""torch.func's levels of transforms: the values under them, and what they differentiate."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardmap_torch.core.torch_private.engine import (
    GradInterpreter,
    TransformType,
    forward_level,
    functorch,
    is_vmapped_by_autograd,
    retrieve_all_functorch_interpreters,
    temporarily_pop_interpreter_stack,
)
from shardmap_torch.errors import TransformError


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor under all torch.func transforms."""
    while functorch.is_functorch_wrapped_tensor(tensor):  # not by `levels`: each call comes here
        tensor = functorch.get_unwrapped(tensor)
    return tensor


_WITNESS: Final = base_of(torch.empty(0, device="cpu"))
"""Tensor that tokens wrap: operands, which refer to their tokens, would stay alive with them."""


class Token:
    """A torch.func differentiation, known by its level; it lives as long as its transform."""

    def __init__(self, level: int) -> None:
        """Keeps a tensor of that level, which ends with the transform."""
        self._witness = functorch._wrap_for_grad(_WITNESS, level)

    @property
    def level(self) -> int:
        """Level of the transform; not positive once it has ended."""
        return int(functorch.maybe_get_level(self._witness))

    @property
    def alive(self) -> bool:
        """Returns whether the transform has not ended."""
        return self.level > 0


def levels(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor, and those under it, one for each torch.func transform."""
    yield tensor
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        yield tensor


def tangents(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tangents that forward mode knows of a value, and theirs, each after its value."""
    for each in levels(tensor) if forward_level() >= 0 else ():
        if not functorch.is_batchedtensor(each):
            tangent = _tangent(each)
            if tangent is not None and not base_of(tangent)._is_zerotensor():
                yield each, tangent
                yield from tangents(tangent)


def _tangent(tensor: Tensor) -> Tensor | None:
    """Returns the tangent of a tensor at its own level, below those of later transforms."""
    level = functorch.maybe_get_level(tensor)
    with ExitStack() as popped:
        while (top := functorch.peek_interpreter_stack()) is not None and top.level() > level:
            popped.enter_context(temporarily_pop_interpreter_stack())
        tangent: Tensor | None = forward_ad.unpack_dual(tensor, level=0).tangent
    return tangent


def can_receive_gradient(value: Any) -> bool:
    """Returns whether a gradient can flow into `value` in this call, at any functorch level."""
    if not isinstance(value, Tensor) or not torch.is_grad_enabled():
        return False
    while True:
        if value.requires_grad:
            return True
        # Dynamo traces plain tensors only, and not this question.
        if torch.compiler.is_dynamo_compiling() or not functorch.is_functorch_wrapped_tensor(value):
            return False
        value = functorch.get_unwrapped(value)


def dims_of(tensor: Tensor) -> tuple[list[int], dict[int, int]]:
    """Finds a tensor's dims in the tensor under all transforms.

    Returns:
        For each dim its dim there, and for the level of each vmap the dim that it batches there.

    Example:
        >>> found = []
        >>> def note(x):
        ...     found.append(dims_of(x))
        ...     return x
        >>> _ = torch.func.vmap(note, in_dims=1)(torch.zeros(2, 3, 4))
        >>> found
        [([0, 2], {1: 1})]
    """
    batched: list[tuple[int, int]] = []
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            batched.append((functorch.maybe_get_level(tensor), functorch.maybe_get_bdim(tensor)))
        tensor = functorch.get_unwrapped(tensor)
    dims = list(range(tensor.ndim))
    return dims, {level: dims.pop(dim) for level, dim in reversed(batched)}


def batched_at(x: Tensor, levels: Sequence[int]) -> Tensor:
    """Batches the leading dims of a tensor, each at the level of a vmap that is open."""
    rest = list(levels)
    for level in sorted(levels):
        position = rest.index(level)
        x = functorch._add_batch_dim(x, position, level)
        del rest[position]
    return x


def stacked_over(x: Tensor, levels: Sequence[int]) -> Tensor:
    """Returns a tensor under vmaps with a leading dim for each of these levels, all that it has.

    The dim is of length 1 at levels at which it is not batched.
    """
    dims, own = dims_of(x)
    x = base_of(x).permute([*[own[level] for level in levels if level in own], *dims])
    for position, level in enumerate(levels):
        if level not in own:
            x = x.unsqueeze(position)
    return x


def is_batched(tensor: Tensor) -> bool:
    """Returns whether a torch.func.vmap batches it, at any level."""
    return any(map(functorch.is_batchedtensor, levels(tensor)))


def is_smooth(value: Any) -> bool:
    """Returns whether it is a tensor with gradients: floating or complex."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_transformed_otherwise() -> bool:
    """Returns whether a transform other than torch.func.grad and vjp is active."""
    levels = functorch.get_interpreter_stack() or ()
    others = any(level.key() != TransformType.Grad for level in levels)
    return others or forward_level() >= 0


def outer_grad_mode() -> bool:
    """Returns the grad mode outside of all transforms that differentiate."""
    for transform in retrieve_all_functorch_interpreters():
        if isinstance(transform, GradInterpreter):
            return bool(transform.prev_grad_mode())
    return torch.is_grad_enabled()


def num_derivatives() -> int:
    """Returns how many transforms of torch.func, but `vmap`, are active."""
    stack = functorch.get_interpreter_stack() or ()
    return sum(level.key() != TransformType.Vmap for level in stack)


def is_only_vmapped() -> bool:
    """Returns whether all transforms that are active are vmaps."""
    stack = functorch.get_interpreter_stack() or ()
    return forward_level() < 0 and all(level.key() == TransformType.Vmap for level in stack)


def reject_batched_gradients() -> None:
    """Refuses the vmap of `torch.autograd.grad(is_grads_batched=True)`, a backward's caller.

    It has no rules for autograd Functions.

    Raises:
        TransformError: a backward runs under it.
    """
    if is_vmapped_by_autograd():
        raise TransformError(
            "The backward of a collective cannot be batched by is_grads_batched=True, nor by "
            "vectorize=True of torch.autograd.functional. Use torch.func.jacrev, or torch.func."
            "vmap over the function that torch.func.vjp returns."
        )
