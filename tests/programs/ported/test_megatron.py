"""Megatron-LM's tensor parallel layers with raw torch.distributed calls.

Source: megatron/core/tensor_parallel/mappings.py, layers.py and cross_entropy.py. What a port
changes: sizes are `axis_size`, and ranks are `axis_index`, a tensor, so that a rank's part is
narrowed and not taken from a list; the early returns for one rank are gone; the cross entropy's
cotangent, which all ranks share, is converted before each rank multiplies it by its own; and under
global strictness its gradient compares ids with positions in place of writing at masked ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShardTypeError,
    axis_group,
    axis_index,
    axis_size,
    convert,
    shard_map,
)
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.programs.support.ported import Params, compare
from tests.support.pool import Gloo

# torch renames some calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

LENGTH, BATCH, WIDTH, HIDDEN, WORDS = 4, 2, 4, 8, 6
SPECS: Final = {
    **{"table": P("tp"), "up": P("tp"), "up_bias": P("tp")},
    **{"down": P(None, "tp"), "down_bias": P()},
}
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    **{"table": (WORDS, WIDTH), "up": (HIDDEN, WIDTH), "up_bias": (HIDDEN,)},
    **{"down": (WIDTH, HIDDEN), "down_bias": (WIDTH,)},
}


class Mappings:
    """The conjugate operators f and g, and those of sequence parallelism, over one group."""

    def __init__(self, group: Any) -> None:
        def summed(x: Tensor) -> Tensor:
            x = x.clone()
            dist.all_reduce(x, group=group)
            return x

        def gathered(x: Tensor) -> Tensor:
            out = x.new_empty(x.shape[0] * axis_size("tp"), *x.shape[1:])
            dist.all_gather_into_tensor(out, x.contiguous(), group=group)
            return out

        def scattered(x: Tensor) -> Tensor:
            out = x.new_empty(x.shape[0] // axis_size("tp"), *x.shape[1:])
            dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
            return out

        self.copy = _function(Tensor.clone, summed)
        self.reduce = _function(summed, Tensor.clone)
        self.gather = _function(gathered, scattered)
        self.scatter = _function(scattered, gathered)


def _function(run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Any:
    class Mapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return run(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Tensor:
            return back(grads[0])

    return Mapping.apply


def cross_entropy(group: Any, by_positions: bool) -> Any:
    """Makes Megatron's `_VocabParallelCrossEntropy`; `by_positions` in the way of global mode."""

    class VocabParallel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
            largest = logits.max(dim=-1)[0]
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            logits = logits - largest.unsqueeze(-1)
            count = logits.shape[-1]
            start = axis_index("tp") * count
            mask = (target < start) | (target >= start + count)
            own = (target - start).masked_fill(mask, 0)
            chosen = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(mask, 0.0)
            dist.all_reduce(chosen, group=group)
            exp = logits.exp()
            total = exp.sum(-1)
            dist.all_reduce(total, group=group)
            is_chosen = target.unsqueeze(-1) == start + torch.arange(count)
            saved = is_chosen if by_positions else mask
            ctx.save_for_backward(exp / total.unsqueeze(-1), saved, own)
            return total.log() - chosen

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            softmax, saved, own = ctx.saved_tensors
            grad = convert(grads[0], "tp", src=I, dst=R).unsqueeze(-1)
            if by_positions:
                return (softmax - saved.to(softmax.dtype)) * grad, None
            made = softmax.clone().flatten(0, -2)
            rows = torch.arange(made.shape[0])
            made[rows, own.flatten()] -= 1.0 - saved.flatten().to(made.dtype)
            return made.view_as(softmax) * grad, None

    return VocabParallel.apply


def model(
    group: Any, sequence: bool, by_positions: bool, p: Params, ids: Tensor, target: Tensor
) -> Tensor:
    """An embedding, one MLP and a tied head; `sequence` shards the sequence between them."""
    mappings, loss = Mappings(group), cross_entropy(group, by_positions)
    enter = mappings.gather if sequence else mappings.copy
    leave = mappings.scatter if sequence else mappings.reduce
    count = p["table"].shape[0]
    start = axis_index("tp") * count
    mask = (ids < start) | (ids >= start + count)
    found = functional.embedding((ids - start).masked_fill(mask, 0), p["table"])
    h = leave(found.masked_fill(mask.unsqueeze(-1), 0.0))
    columns = functional.gelu(functional.linear(enter(h), p["up"], p["up_bias"]))
    h = h + leave(functional.linear(columns, p["down"])) + p["down_bias"]
    losses: Tensor = loss(functional.linear(enter(h), p["table"]), target)
    return losses.mean()


def original(p: Params, ids: Tensor, target: Tensor) -> Tensor:
    h = functional.embedding(ids, p["table"])
    columns = functional.gelu(functional.linear(h, p["up"], p["up_bias"]))
    h = h + functional.linear(columns, p["down"], p["down_bias"])
    return functional.cross_entropy((h @ p["table"].T).flatten(0, 1), target.flatten())


def everything(sequence: bool, check: Any, mesh: Mesh) -> None:
    params = {name: random(shape, len(name)) for name, shape in SHAPES.items()}
    ids = torch.arange(LENGTH * BATCH).reshape(LENGTH, BATCH) * 5 % WORDS
    body = partial(model, axis_group(mesh, "tp"), sequence, check == "global")
    specs = SPECS, P(), P()
    compare(mesh, body, original, params, (ids, (ids + 1) % WORDS), specs, check)


@pytest.mark.parametrize("check", [True, "global"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("kind", ["ranks", "gloo"])
def test_the_layers_are_those_of_one_device(
    kind: str, sequence: bool, check: Any, gloo: Gloo
) -> None:
    run_on(kind, partial(everything, sequence, check), gloo)


def refused(is_sum: bool, check: Any, mesh: Mesh) -> None:
    """Layers with a copy whose backward sums nothing, or a sum whose backward sums again."""
    right = Mappings(axis_group(mesh, "tp"))
    enter = right.copy if is_sum else _function(Tensor.clone, Tensor.clone)
    leave = _function(right.reduce, right.reduce) if is_sum else right.reduce

    def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = leave(torch.tanh(x @ up) @ down)
        y: Tensor = right.reduce(torch.tanh(enter(h) @ up) @ down)
        return y

    specs = P(), P(None, "tp"), P("tp")
    f = shard_map(layers, mesh=mesh, in_specs=specs, out_specs=P(), check=check)
    args = [random(shape, 0).requires_grad_() for shape in ((3, 4), (4, 6), (6, 4))]
    once, never = "but its operand is", "a sum over ranks can only|the backward of Mapping is"
    with pytest.raises(ShardTypeError, match=once if is_sum else never):
        f(*args)


@pytest.mark.parametrize("check", [True, "global"])
@pytest.mark.parametrize("is_sum", [False, True], ids=["copy", "sum"])
@pytest.mark.parametrize("kind", ["ranks", "gloo"])
def test_a_backward_that_sums_nothing_or_twice_is_refused(
    kind: str, is_sum: bool, check: Any, gloo: Gloo
) -> None:
    run_on(kind, partial(refused, is_sum, check), gloo)
