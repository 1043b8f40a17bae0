"""`torch.einsum` is checked in steps that do not depend on sizes."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, ShardTypeError, all_reduce, check_program, shard_map
from shardmap_torch.checker.rewrites.functions import einsum, rewritten
from tests.checker.support.one_device import RANKS, assert_is_one_device, numbers

HOST: Final[Any] = None
EQUATIONS: Final[dict[str, list[tuple[int, ...]]]] = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "ij,jk": [(2, 3), (3, 4)],
    "bij,bjk->ikb": [(2, 3, 4), (2, 4, 5)],
    "b...i,...ij->b...j": [(2, 3, 5, 4), (5, 4, 2)],
    "...i,...i": [(2, 3), (3,)],
    "...ij->ij": [(2, 2, 3, 4)],
    "ii": [(3, 3)],
    "biij->bij": [(2, 3, 3, 4)],
    "iii->i": [(3, 3, 3)],
    "ij->ji": [(2, 3)],
    "i,j->ij": [(2,), (3,)],
    "ba, Ab": [(2, 3), (4, 2)],
    "bij,bjk,k->bi": [(1, 2, 3), (2, 3, 4), (4,)],
    "i,->i": [(3,), ()],
    "bhqd,bhkd->bhqk": [(2, 3, 4, 5), (2, 3, 4, 5)],
    "bthk,hkd->btd": [(2, 3, 4, 5), (4, 5, 6)],
    "ijx,jky,kxz->iyz": [(2, 3, 4), (3, 2, 2), (2, 4, 3)],
    "ij,ij->": [(1, 3), (4, 3)],
    "": [()],
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_steps_make_the_einsum(equation: str) -> None:
    operands = [numbers(*shape) for shape in EQUATIONS[equation]]
    expected = torch.einsum(equation, *operands)
    torch.testing.assert_close(einsum(HOST, equation, *operands), expected)
    torch.testing.assert_close(einsum(HOST, equation, operands), expected)
    wholes = [(10 * x).long() for x in operands]
    found = einsum(HOST, equation, *wholes)
    assert found.dtype == torch.int64
    assert found.equal(torch.einsum(equation, *wholes))


@pytest.mark.parametrize("equation", ["ij->ji", "ii->i"])
def test_a_view_stays_one(equation: str) -> None:
    x = numbers(3, 3)
    assert einsum(HOST, equation, x).data_ptr() == torch.einsum(equation, x).data_ptr()


@pytest.mark.parametrize("equation", ["ij,jk->iz", "ij->i", "ij,jk->ii", "i,j,k->", "i1,1k->ik"])
def test_what_torch_refuses_is_left_to_torch(equation: str) -> None:
    x = numbers(3, 3)
    assert einsum(HOST, equation, x, x) is NotImplemented
    with pytest.raises(RuntimeError):
        torch.einsum(equation, x, x)


def test_lists_of_dims_and_autocast_are_left_to_torch() -> None:
    x = numbers(3, 3)
    assert einsum(HOST, x, [0, 1], x, [1, 2]) is NotImplemented
    with torch.autocast("cpu", torch.bfloat16):
        assert rewritten(HOST, torch.einsum, (), {}) is torch.einsum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_run_has_the_dtypes_of_its_check(dtype: torch.dtype) -> None:
    def body(x: Tensor) -> list[Tensor]:
        y = torch.bilinear(x, input2=x, weight=x.new_ones(2, 4, 4))
        pooled = functional.adaptive_avg_pool3d(x[:, None, None, None], 1)
        return [all_reduce(z.sum(), "a", dst=I) for z in (y, pooled)]

    with torch.autocast("cpu", torch.bfloat16):
        shard_map(body, mesh=RANKS, in_specs=P("a"), out_specs=P())(numbers(4, 4).to(dtype))


Body = Callable[[Tensor, Tensor], Tensor]
X, Y = numbers(4, 3, 2), numbers(4, 2, 5)
ROWS: Final = P(("a", "b"))


def batched(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", x, y)


def batch_within(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->ibk", x, y).transpose(0, 1)


def attention(x: Tensor, y: Tensor) -> Tensor:
    scores = torch.einsum("bqd,bkd->bqk", x, x).softmax(-1)
    return torch.einsum("bqk,bkd->bqd", scores, x)


def contracted(x: Tensor, y: Tensor) -> Tensor:
    return all_reduce(torch.einsum("bij,bjk->ik", x, y), ("a", "b"), dst=I)


RIGHT: Final = [(batched, ROWS), (batch_within, ROWS), (attention, ROWS), (contracted, P())]


@pytest.mark.parametrize(("body", "out"), RIGHT)
def test_one_entry_on_each_rank_equals_one_device(body: Body, out: P) -> None:
    assert_is_one_device(body, (X, Y), (ROWS, ROWS), out)


def pending(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->ik", x, y).sin()


def of_other_batches(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bij,cjk->bik", x, y)


def squared_sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bij,cij->bc", x, x)


def summed_twice(x: Tensor, y: Tensor) -> Tensor:
    return all_reduce(torch.einsum("bij,bjk->bik", x, y), ("a", "b"), dst=I)


def of_one_axis(x: Tensor, y: Tensor) -> Tensor:
    return all_reduce(torch.einsum("bij,bjk->ik", x, y), "a", dst=I)


WRONG: Final = [
    (pending, P()),
    (of_other_batches, ROWS),
    (squared_sum, ROWS),
    (summed_twice, P()),
    (of_one_axis, P()),
]


@pytest.mark.parametrize(("body", "out"), WRONG)
def test_other_programs_than_on_one_device_are_refused(body: Body, out: P) -> None:
    mapped = shard_map(body, mesh=RANKS, in_specs=(ROWS, ROWS), out_specs=out, check="global")
    with pytest.raises(ShardTypeError):
        check_program(mapped, X, Y)
