"""check="global": positions of extrema over a sharded dim, from all ranks' candidates."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    make_mesh,
    shard_map,
)

Body = Callable[[Tensor], Tensor]
X: Final = torch.randperm(32).reshape(4, 8).double()
EQUAL: Final = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [2] * 8, [3, 0, 0, 0, 0, 0, 0, 3], [0] * 8])
SPECS: Final[dict[str, Any]] = {"in_specs": P("dp", "tp"), "out_specs": P("dp"), "check": "global"}


def gather(x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    return all_gather(x, "tp", dim=dim, dst=I, **kwargs)


def start(x: Tensor) -> Tensor:
    return axis_index("tp") * x.shape[-1]


def greedy(x: Tensor) -> Tensor:
    values, at = x.max(-1)
    best = gather(values, 0, tiled=False).argmax(0, keepdim=True)
    return gather(at + start(x), 0, tiled=False).gather(0, best)[0]


def greedy_in_place(x: Tensor) -> Tensor:
    values, at = x.max(-1, keepdim=True)
    at += start(x)
    _, best = gather(values, -1).max(-1, keepdim=True)
    return gather(at, -1).gather(-1, best).squeeze(-1)


def smallest(x: Tensor) -> Tensor:
    values, at = x.min(-1)
    _, best = gather(values.unsqueeze(-1), -1).min(-1)
    return gather((start(x) + at)[:, None], 1).gather(1, best.unsqueeze(-1)).squeeze(-1)


def top_two(x: Tensor) -> Tensor:
    values, at = x.topk(2)
    largest, best = gather(values, -1).topk(2)
    return gather(at + start(x), -1).gather(-1, best) + largest


def top_values(x: Tensor) -> Tensor:
    return gather(x.detach().topk(2, 1).values, 1).topk(1, dim=1).values.exp()


@pytest.mark.parametrize("body", [greedy, greedy_in_place, smallest, top_two, top_values])
def test_what_is_chosen_among_candidates_is_chosen_on_one_device(body: Body) -> None:
    ties = [] if body in (top_two, top_values) else [EQUAL.double()]
    for x in (X, *ties):
        mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
        one = make_mesh((1, 1), ("dp", "tp"), kind="simulated")
        found = [shard_map(body, mesh=each, **SPECS)(x) for each in (mesh, one)]
        assert torch.equal(*found)


def picked(at: Callable[[Tensor, Tensor], Tensor], values: Callable[[Tensor], Tensor]) -> Body:
    """Makes a greedy choice of other positions, or by other values."""

    def body(x: Tensor) -> Tensor:
        best = gather(values(x), 0, tiled=False).argmax(0, keepdim=True)
        return gather(at(x.max(-1)[1], x), 0, tiled=False).gather(0, best)[0]

    return body


def largest(x: Tensor) -> Tensor:
    return x.max(-1)[0]


WRONG: Final[dict[str, Body]] = {
    "no offset": picked(lambda at, x: at, largest),
    "offset by the index": picked(lambda at, x: at + axis_index("tp"), largest),
    "offset twice": picked(lambda at, x: at + start(x) + start(x), largest),
    "by other values": picked(lambda at, x: at + start(x), lambda x: largest(-x)),
    "by the sizes": picked(lambda at, x: at + start(x), lambda x: largest(x).abs()),
    "of those the smallest": lambda x: gather(largest(x), 0, tiled=False).min(0)[0],
    "the sum": lambda x: gather(x.topk(2)[0], -1).sum(-1),
    "the rank of the best": lambda x: gather(largest(x), 0, tiled=False).argmax(0),
    "a rank's own": lambda x: x.argmax(-1),
    "largest position": lambda x: all_reduce(x.max(-1)[1], "tp", op="max", dst=I),
    "the smallest of the largest": lambda x: gather(x.topk(2)[0], -1).topk(2, largest=False)[0],
}


@pytest.mark.parametrize("name", WRONG)
def test_another_choice_among_candidates_is_refused(name: str) -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
    with pytest.raises(ShardTypeError, match="check='global'"):
        shard_map(WRONG[name], mesh=mesh, **SPECS)(X)


def largest_values(x: Tensor) -> Tensor:
    values = gather(x.max(-1)[0], 0, tiled=False)  # on one device a dim more than x.max(-1)[0]
    return values.gather(0, values.argmax(0, keepdim=True))[0]


SAME: Final[dict[str, Body]] = {
    "offset by one more, as on one device": picked(lambda at, x: at + (start(x) + 1), largest),
    "values of the rank that has the largest": largest_values,
}


@pytest.mark.parametrize("name", SAME)
def test_other_choices_that_one_device_makes_too_are_right_with_ties(name: str) -> None:
    """Trials with numbers accept them; here are values and gradients, also of equal entries."""
    runs = [
        shard_map(
            SAME[name],
            mesh=make_mesh(shape, ("dp", "tp"), kind="simulated", simulate="ranks"),
            **SPECS,
        )
        for shape in ((2, 4), (1, 1))
    ]
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(3, (4, 8), generator=generator).double() if seed else EQUAL.double()
        leaves = [x.clone().requires_grad_() for _ in runs]
        found, expected = (run(leaf) for run, leaf in zip(runs, leaves, strict=True))
        assert torch.equal(found, expected)
        if expected.requires_grad:
            weights = torch.arange(1.0, 5.0, dtype=x.dtype)
            for y in (found, expected):
                y.backward(weights)
            assert torch.equal(*[leaf.grad for leaf in leaves])  # type: ignore[arg-type]  # set
