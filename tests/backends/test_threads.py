"""Ranks as threads: what they see of each other when they do not agree."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveMismatchError,
    I,
    P,
    R,
    all_gather,
    all_reduce,
    axis_index,
    broadcast,
    make_mesh,
    ppermute,
)
from tests.programs.support.everywhere import unchecked as shard_map
from tests.support.golden import told

MESH = make_mesh((3,), ("tp",), kind="simulated", simulate="ranks")
GRID = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")
HERE = "test_threads.py"


def rank() -> int:
    """Only threads may ask for a number; a batched body cannot branch on it."""
    return int(axis_index("tp"))


def line_of(function: Callable[..., Any], text: str) -> str:
    """Returns the place of `text` in `function`, as errors write it."""
    lines, first = inspect.getsourcelines(function)
    return f"{HERE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def other_collective(x: Tensor) -> Tensor:
    if rank() == 1:
        return all_gather(x, "tp", dst=I)
    return all_reduce(x, "tp", dst=I)


def other_operation(x: Tensor) -> Tensor:
    if rank() == 0:
        return all_reduce(x, "tp", dst=I, op="max")
    return all_reduce(x, "tp", dst=I)


def other_type(x: Tensor) -> Tensor:
    if rank() == 2:
        return all_reduce(x, "tp", dst=R)
    return all_reduce(x, "tp", dst=I)


def other_shape(x: Tensor) -> Tensor:
    return all_reduce(x[rank() :], "tp", dst=I)


def other_dtype(x: Tensor) -> Tensor:
    return all_reduce(x.double() if rank() else x, "tp", dst=I)


def other_source(x: Tensor) -> Tensor:
    return broadcast(x, "tp", rank() % 2, dst=I)


def other_pairs(x: Tensor) -> Tensor:
    return ppermute(x, "tp", [(0, 1)] if rank() else [(1, 0)])


def early_return(x: Tensor) -> Tensor:
    if rank() == 1:
        return x
    return all_reduce(x, "tp", dst=I)


DIFFERENT = "The ranks of one axis called different collectives:"
STUCK = "No rank can go on: each waits for ranks that have returned or wait elsewhere."
SUM = "all_reduce('tp', Partial -> I)"

CASES: list[tuple[Callable[[Tensor], Tensor], str, list[tuple[str, str]]]] = [
    (
        other_collective,
        DIFFERENT,
        [
            (f"ranks 0, 2 in {SUM} of float32[2]", "return all_reduce"),
            ("rank 1 in all_gather('tp', V -> I) of float32[2]", "return all_gather"),
        ],
    ),
    (
        other_operation,
        DIFFERENT,
        [
            (f"rank 0 in {SUM} with op='max' of float32[2]", 'op="max"'),
            (f"ranks 1, 2 in {SUM} of float32[2]", "dst=I)"),
        ],
    ),
    (
        other_type,
        DIFFERENT,
        [
            (f"ranks 0, 1 in {SUM} of float32[2]", "dst=I)"),
            ("rank 2 in all_reduce('tp', Partial -> R) of float32[2]", "dst=R)"),
        ],
    ),
    (
        other_shape,
        DIFFERENT,
        [(f"rank {r} in {SUM} of float32[{2 - r}]", "all_reduce") for r in range(3)],
    ),
    (
        other_dtype,
        DIFFERENT,
        [
            (f"rank 0 in {SUM} of float32[2]", "all_reduce"),
            (f"ranks 1, 2 in {SUM} of float64[2]", "all_reduce"),
        ],
    ),
    (
        other_source,
        DIFFERENT,
        [
            ("ranks 0, 2 in broadcast('tp', V -> I) of float32[2]", "broadcast"),
            ("rank 1 in broadcast('tp', V -> I) with source=1 of float32[2]", "broadcast"),
        ],
    ),
    (
        other_pairs,
        DIFFERENT,
        [
            ("rank 0 in ppermute('tp', V -> V) with perm=((1, 0),) of float32[2]", "ppermute"),
            ("ranks 1, 2 in ppermute('tp', V -> V) with perm=((0, 1),) of float32[2]", "ppermute"),
        ],
    ),
    (
        early_return,
        STUCK,
        [(f"ranks 0, 2 in {SUM} of float32[2]", "return all_reduce"), ("rank 1 has returned", "")],
    ),
]


@pytest.mark.parametrize(("body", "head", "said"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_ranks_that_disagree_are_told_with_their_lines(
    body: Callable[[Tensor], Tensor], head: str, said: list[tuple[str, str]]
) -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(torch.zeros(6))
    lines = [f"{what} at {line_of(body, text)}" if text else what for what, text in said]
    assert str(caught.value) == "\n  ".join([head, *lines])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_ranks_that_wait_along_different_axes_do_not_hang() -> None:
    def crossed(x: Tensor) -> Tensor:
        first, second = ("dp", "tp") if rank() == int(axis_index("dp")) else ("tp", "dp")
        return all_reduce(all_reduce(x, first, dst=I), second, dst=I)

    with pytest.raises(CollectiveMismatchError) as caught:
        shard_map(crossed, mesh=GRID, in_specs=P("dp"), out_specs=P())(torch.zeros(4))
    site = line_of(crossed, "return all_reduce")
    assert str(caught.value) == (
        f"{STUCK}\n"
        f"  ranks 0, 3 in all_reduce('dp', Partial -> I) of float32[2] at {site}\n"
        f"  ranks 1, 2 in all_reduce('tp', Partial -> I) of float32[2] at {site}"
    )


def test_ranks_that_disagree_in_the_backward_are_told_too() -> None:
    def half_detached(x: Tensor) -> Tensor:
        y = all_reduce(x, "tp", dst=R)
        return y.detach() * x if rank() else y * x

    x = torch.ones(6, requires_grad=True)
    y = shard_map(half_detached, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(x)
    with told(CollectiveMismatchError):
        y.sum().backward()


def returning(f: Callable[[Tensor], Any]) -> str:
    def body(x: Tensor) -> Any:
        return f(x)

    with pytest.raises(CollectiveMismatchError) as caught:
        shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(torch.zeros(6))
    return str(caught.value)


def test_results_of_different_shape_dtype_or_structure_are_told() -> None:
    head = "body: the ranks returned different results:"
    assert returning(lambda x: x[: 1 + rank() % 2]) == (
        f"{head}\n  ranks 0, 2 returned out float32[1]\n  rank 1 returned out float32[2]"
    )
    assert returning(lambda x: x.double() if rank() else x) == (
        f"{head}\n  rank 0 returned out float32[2]\n  ranks 1, 2 returned out float64[2]"
    )
    assert returning(lambda x: {"a": x, "b": x} if rank() else [x]) == (
        f"{head}\n  rank 0 returned out[0] float32[2]\n"
        "  ranks 1, 2 returned out['a'] float32[2], out['b'] float32[2]"
    )
    assert returning(lambda x: [x] if rank() else []) == (
        f"{head}\n  rank 0 returned nothing\n  ranks 1, 2 returned out[0] float32[2]"
    )


def test_an_error_in_the_body_keeps_its_type_and_names_its_rank() -> None:
    def fail(x: Tensor) -> Tensor:
        all_reduce(x, "tp", dst=I)
        if rank() == 1:
            raise KeyError("lost")
        return all_reduce(x, "tp", dst=I)

    with pytest.raises(KeyError) as caught:
        shard_map(fail, mesh=MESH, in_specs=P("tp"), out_specs=P())(torch.zeros(6))
    assert caught.value.args == ("lost",)
    assert caught.value.__notes__ == ["Raised on rank 1 (tp=1) of the simulated mesh (tp=3)."]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_ranks_share_no_memory() -> None:
    def write(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", dst=R).add_(axis_index("tp"))

    y = shard_map(write, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(torch.ones(3))
    assert y.tolist() == [3.0, 4.0, 5.0]


def test_ranks_draw_differently_and_the_same_in_each_run() -> None:
    draw = shard_map(torch.rand_like, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))
    torch.manual_seed(1)
    first = draw(torch.zeros(300))
    torch.manual_seed(1)
    assert torch.equal(draw(torch.zeros(300)), first)
    assert first.unique().numel() > 290


def test_modes_of_the_calling_thread_hold_on_the_ranks() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x.t()).dtype))
        return x

    f = shard_map(look, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))
    x = torch.ones(3, 2)
    with torch.no_grad():
        f(x)
    with torch.inference_mode():
        f(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        f(x)
    assert seen[::3] == [
        (False, False, torch.float32),
        (False, True, torch.float32),
        (True, False, torch.bfloat16),
    ]
