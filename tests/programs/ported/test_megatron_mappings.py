"""Megatron-LM's mappings between parallel regions, and its cross-entropy, as it calls torch.

Written anew from the formulas of "Megatron-LM" (Shoeybi et al. 2019) and "Reducing Activation
Recomputation" (Korthikanti et al. 2022): Functions of torch that ask a group for rank and size.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardmap_torch import (
    Mesh,
    P,
    ShardTypeError,
    TransformError,
    axis_group,
    full,
    make_mesh,
    shard_map,
)
from tests.programs.support.everywhere import KINDS, run_on, same
from tests.support.pool import Gloo

# torch 2.13 renames some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

Move = Callable[[Tensor], Tensor]


def moves_of(group: Any) -> Mapping[str, Move]:
    """Returns moves of the mappings, in one direction or the other."""

    def columns(x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(group.size(), -1)

    def add(x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone(), group=group)
        return x

    def gather(x: Tensor) -> Tensor:
        found = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous(), group=group)
        return found

    def scatter(x: Tensor) -> Tensor:
        found = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        dist.reduce_scatter_tensor(found, x.contiguous(), group=group)
        return found

    def exchange(x: Tensor) -> Tensor:
        dist.all_to_all_single(found := torch.empty_like(x), x.contiguous(), group=group)
        return found

    return {
        "keep": lambda x: x,
        "add": add,
        "take rows": lambda x: x.chunk(group.size())[group.rank()].contiguous(),
        "take columns": lambda x: columns(x)[group.rank()].contiguous(),
        "gather rows": gather,
        "gather columns": lambda x: torch.cat(gather(x).chunk(group.size()), -1).contiguous(),
        "add to rows": scatter,
        "add to columns": lambda x: scatter(torch.cat(columns(x))),
        "rows to columns": lambda x: exchange(torch.cat(columns(x))),
        "columns to rows": lambda x: torch.cat(exchange(x).chunk(group.size()), -1),
    }


def mapping(group: Any, there: str, back: str) -> Move:
    """Returns a Function that moves in one way, and gradients in the other."""
    moves = moves_of(group)

    class Mapping(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return moves[there](x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return moves[back](grads[0])

    apply: Move = Mapping.apply
    return apply


def cross_entropy(group: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns that of logits whose last dim is split."""

    class CrossEntropy(Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
            largest = logits.max(-1).values
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            logits = logits - largest.unsqueeze(-1)
            size = logits.shape[-1]
            start = group.rank() * size
            is_elsewhere = (target < start) | (target >= start + size)
            local = target - start
            local[is_elsewhere] = 0
            at = torch.arange(logits.shape[0])
            predicted = logits[at, local].clone()
            predicted[is_elsewhere] = 0.0
            dist.all_reduce(predicted, group=group)
            chances = torch.exp(logits)
            total = chances.sum(-1)
            dist.all_reduce(total, group=group)
            chances.div_(total.unsqueeze(-1))
            ctx.save_for_backward(chances, is_elsewhere, local)
            return torch.log(total) - predicted

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            chances, is_elsewhere, local = ctx.saved_tensors
            found = chances.clone()
            found[torch.arange(found.shape[0]), local] -= 1.0 - is_elsewhere.to(found.dtype)
            return found * grads[0].unsqueeze(-1), None

    apply: Callable[[Tensor, Tensor], Tensor] = CrossEntropy.apply
    return apply


X: Final = torch.arange(32.0, dtype=torch.float64).sin().reshape(4, 8)
W: Final = torch.arange(64.0, dtype=torch.float64).cos().reshape(8, 8)
U: Final = X.cos()
TARGET: Final = torch.tensor([1, 7, 3, 4])
COLUMNS, ROWS = P(None, "tp"), P("tp")

BODIES: Final[dict[str, Callable[[Move], Callable[[Tensor, Tensor], Tensor]]]] = {
    "x w": lambda move: lambda x, w: move(x) @ w,
    "(x w)": lambda move: lambda x, w: move(x @ w),
    "x u": lambda move: lambda x, u: move(x) * u,
}
Program = tuple[str, str, str, Any, Any, Any]
PROGRAMS: Final[dict[str, Program]] = {
    "copy": ("keep", "add", "x w", P(), COLUMNS, COLUMNS),
    "reduce": ("add", "keep", "(x w)", COLUMNS, ROWS, P()),
    "scatter": ("take columns", "gather columns", "x u", P(), COLUMNS, COLUMNS),
    "gather": ("gather columns", "take columns", "x u", COLUMNS, P(), P()),
    "scatter to sequence": ("take rows", "gather rows", "x u", P(), ROWS, ROWS),
    "gather from sequence": ("gather rows", "take rows", "x u", ROWS, P(), P()),
    "the same for columns": ("gather rows", "add to rows", "x w", ROWS, COLUMNS, COLUMNS),
    "reduce to sequence": ("add to rows", "gather rows", "(x w)", COLUMNS, ROWS, ROWS),
    "gather last dim": ("gather columns", "add to columns", "x w", COLUMNS, COLUMNS, COLUMNS),
    "reduce to last dim": ("add to columns", "gather columns", "(x w)", COLUMNS, ROWS, COLUMNS),
    "rows to columns": ("rows to columns", "columns to rows", "x u", ROWS, COLUMNS, COLUMNS),
    "columns to rows": ("columns to rows", "rows to columns", "x u", COLUMNS, ROWS, ROWS),
}
"""The moves of a mapping and of its gradients; its use, the specs of both, and the result's."""


def assert_right(f: Callable[..., Any], reference: Callable[..., Tensor], *args: Tensor) -> None:
    """Compares values, and gradients by a weighted sum, with one device."""
    ours, truth = ([x.clone().requires_grad_() for x in args] for _ in range(2))
    y, expected = f(*ours), reference(*truth)
    weights = torch.arange(float(expected.numel()), dtype=torch.float64).reshape(expected.shape)
    same(y, expected)
    same(
        torch.autograd.grad((full(y) * weights).sum(), ours),
        torch.autograd.grad((expected * weights).sum(), truth),
    )


def mapped(mesh: Mesh, program: Program) -> Callable[..., Tensor]:
    there, back, use, *ins, out = program
    body = BODIES[use](mapping(axis_group(mesh, "tp"), there, back))
    return shard_map(body, mesh=mesh, in_specs=tuple(ins), out_specs=out)


def map_all(mesh: Mesh) -> None:
    for program in PROGRAMS.values():
        is_factor = program[2] == "x u"
        reference = BODIES["x u" if is_factor else "x w"](lambda x: x)
        assert_right(mapped(mesh, program), reference, X, U if is_factor else W)
    loss = cross_entropy(axis_group(mesh, "tp"))
    f = shard_map(lambda x: loss(x, TARGET), mesh=mesh, in_specs=COLUMNS, out_specs=P())
    assert_right(f, partial(functional.cross_entropy, target=TARGET, reduction="none"), X)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_mappings_and_cross_entropy_are_those_of_one_device(kind: Any, gloo: Gloo) -> None:
    run_on(kind, map_all, gloo)


def refuse(mesh: Mesh) -> None:
    """A gathered sequence whose gradient is taken apart, where the ranks use it differently."""
    f = mapped(mesh, ("gather rows", "take rows", "x w", ROWS, COLUMNS, COLUMNS))
    with pytest.raises(ShardTypeError, match="Partial"):
        f(X.clone().requires_grad_(), W)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_mapping_with_the_gradient_of_another_is_refused(kind: Any, gloo: Gloo) -> None:
    run_on(kind, refuse, gloo)


def test_one_batched_program_is_refused_where_it_is_asked_for() -> None:
    """Functions of torch in the form of `forward(ctx, ...)` have no rule for vmap."""
    map_all(make_mesh((2,), ("tp",), kind="simulated"))
    with pytest.raises(TransformError, match="a Function without a rule for vmap"):
        map_all(make_mesh((2,), ("tp",), kind="simulated", simulate="vmap"))
