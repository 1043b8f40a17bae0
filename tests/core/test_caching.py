"""Values are remembered between calls, and nothing stale is used."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from shardmap_torch import I, P, R, SpecError, all_reduce, axis_size, make_mesh, shard_map, use_mesh
from shardmap_torch.core.caching import Memo, Unguarded, drop_oldest, lazy


def test_a_memo_forgets_the_oldest_when_it_is_full() -> None:
    squares, made = Memo[int](limit=2), []

    def square(x: int) -> int:
        return squares.get(x, lambda: made.append(x) or x * x)  # type: ignore[func-returns-value]

    assert [square(x) for x in (1, 2, 1, 3, 2, 1)] == [1, 4, 1, 9, 4, 1]
    assert made == [1, 2, 3, 1]


class Busy(dict[int, int]):
    """A table to which another thread adds an entry whenever one looks for the oldest."""

    def __iter__(self) -> Iterator[int]:
        entries = super().__iter__()
        self[len(self)] = 0
        return entries


def test_a_table_may_be_changed_by_another_thread_while_it_drops_an_entry() -> None:
    busy, empty, full = Busy({0: 0}), dict[int, int](), {0: 1, 1: 2}
    for table in (busy, empty, full):
        drop_oldest(table)
    assert (busy, empty, full) == ({0: 0, 1: 0}, {}, {1: 2})


def test_a_memo_remembers_none_but_no_error() -> None:
    memo, calls = Memo[None](), []
    memo.get("a", lambda: calls.append(1))
    memo.get("a", lambda: calls.append(2))
    assert calls == [1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            memo.get("b", lambda: calls.append(1 // 0))


def test_a_key_without_a_hash_is_made_anew() -> None:
    memo = Memo[int]()
    assert [memo.get(["no hash"], lambda i=i: i) for i in range(2)] == [0, 1]  # type: ignore[misc]


def test_a_lazy_attribute_is_computed_once() -> None:
    calls = []

    class Thing:
        @lazy
        def size(self) -> int:
            calls.append(1)
            return 3

    thing = Thing()
    assert (thing.size, thing.size, calls) == (3, 3, [1])


@pytest.mark.parametrize("check", [True, False])
def test_a_call_sees_the_mesh_the_shapes_and_the_gradients_of_this_call(check: bool) -> None:
    @shard_map(in_specs=P("tp"), out_specs=P("tp"), check=check)
    def total(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "tp", dst=R) * axis_size("tp")

    four = torch.arange(4.0)
    meshes = {
        size: make_mesh((size,), ("tp",), kind="simulated", simulate="ranks") for size in (1, 2, 4)
    }
    for size in (2, 4, 1, 2):
        with use_mesh(meshes[size]):
            expected = size * four.reshape(size, -1).sum(0).repeat(size)
            torch.testing.assert_close(total(four), expected)
    with use_mesh(meshes[2]):
        for length in (2, 4, 2):
            assert total(torch.ones(length)).shape == (length,)
        with pytest.raises(SpecError, match="dim 0 has size 3"):
            total(torch.ones(3))
        x = four.clone().requires_grad_()
        for wanted in (False, True, False):
            x.requires_grad_(wanted)
            assert total(x).requires_grad == wanted
        total(x.requires_grad_()).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((4,), 4.0))


def test_an_unnamed_axis_is_refused_from_the_call_on_that_needs_it() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    f = shard_map(
        lambda x: all_reduce(x, "tp", dst=I), mesh=mesh, in_specs=P(), out_specs=P(), check=False
    )
    x = torch.ones(2)
    f(x)
    with pytest.raises(SpecError, match="must name every axis"):
        f(x.clone().requires_grad_())
    f(x)


def test_dynamo_knows_an_unguarded_value_by_its_identity_alone() -> None:
    held = [Unguarded({"scale": 2.0}), Unguarded({"scale": 3.0})]
    counter, x = CompileCounter(), torch.ones(2)

    def scaled(held: Unguarded[dict[str, float]]) -> torch.Tensor:
        return x * held.value["scale"]

    compiled = torch.compile(scaled, backend=counter, fullgraph=True)
    assert [compiled(each).tolist() for each in (*held, *held)] == [[2, 2], [3, 3]] * 2
    assert counter.frame_count == 2
    held[0].value["scale"] = 5.0  # nobody may
    assert compiled(held[0]).tolist() == [2, 2]
