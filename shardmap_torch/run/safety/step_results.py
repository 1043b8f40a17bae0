"""Results of steps that take gradients by themselves, and are not differentiated again."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardmap_torch.boundary.call import Call
from shardmap_torch.core.functorch import can_receive_gradient, is_smooth
from shardmap_torch.core.tree import Tree, flatten, unflatten
from shardmap_torch.errors import ShardTypeError


def differentiated_once(call: Call, result: Tree, refusal: ShardTypeError) -> Tree:
    """Attaches results to the arguments, so that a backward through them raises `refusal`."""
    leaves, structure = flatten(result)
    anchor = next(x for x in (call.leaves[at] for at in call.crossing) if can_receive_gradient(x))
    places = [at for at, x in enumerate(leaves) if is_smooth(x)]
    if places:
        apply: Any = _DifferentiatedOnce.apply
        attached = apply(f"{refusal}", anchor, *(leaves[at] for at in places))
        for at, value in zip(places, attached, strict=True):
            leaves[at] = value
    return unflatten(structure, leaves)


class _DifferentiatedOnce(Function):
    """The identity, whose backward is an error."""

    @staticmethod
    def forward(ctx: Any, why: str, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.why = why
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise ShardTypeError(
            "a backward has come to the result of a step that takes gradients by itself, and that "
            f"cannot be differentiated again:\n{ctx.why}"
        )
