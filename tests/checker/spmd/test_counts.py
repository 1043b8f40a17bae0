"""Numbers of rows, samples or tokens that each rank knows of its own part, added up."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, R, all_reduce, axis_size
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

X: Final = numbers(8, 3)


def total(x: Tensor) -> Tensor:
    found: Tensor = all_reduce(x, "a", dst=I)
    return found


def size(x: Tensor) -> float:
    return float(x.shape[0])


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], dtype=x.dtype)


def sync_batch_norm(x: Tensor) -> Tensor:
    """Packs sums and the number of rows into one all_reduce, as torch's SyncBatchNorm does."""
    count = torch.full((1,), x.shape[0], dtype=x.dtype)
    packed = all_reduce(torch.cat([x.sum(0), x.square().sum(0), count]), "a", dst=R)
    mean, square, count = packed.split([x.shape[1], x.shape[1], 1])
    mean, square = mean / count, square / count
    normalized: Tensor = (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
    return normalized


def perplexity(x: Tensor) -> Tensor:
    loss = functional.cross_entropy(x, x.argmax(-1).detach(), reduction="sum")
    return torch.exp(total(loss) / total(torch.tensor(x.shape[0])))


COUNTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "a number": lambda x: torch.tensor(size(x)),
    "an int": lambda x: torch.tensor(x.numel()) / x.shape[1],
    "in a new tensor": lambda x: x.new_tensor(size(x)),
    "full": lambda x: torch.full((), x.shape[0], dtype=x.dtype),
    "full like": lambda x: torch.full_like(x[0, :1], size(x)),
    "a product": lambda x: x.shape[0] * torch.ones(1),
    "a sum of ones": lambda x: ones(x).sum(),
    "a sum of ones of a shape": lambda x: torch.ones_like(x[:, 0]).sum(),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("spec", [P("a"), P(("a", "b"))], ids=str)
def test_the_number_of_a_rank_s_rows_is_a_pending_sum(name: str, spec: P) -> None:
    axes = ("a",) if spec == P("a") else ("a", "b")

    def average(x: Tensor) -> Tensor:
        count = all_reduce(COUNTS[name](x), axes, dst=I)
        return all_reduce(x.square().sum(0), axes, dst=I) / count

    assert_is_one_device(average, [X], spec, P())


@pytest.mark.parametrize("body", [perplexity, sync_batch_norm])
def test_a_program_that_adds_up_numbers_of_rows_is_that_of_one_device(body: Any) -> None:
    assert_is_one_device(body, [X], P("a"), P() if body is perplexity else P("a"))


WRONG: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "not added up": lambda x: torch.tensor(size(x)),
    "a sum that is not added up": lambda x: ones(x).sum(),
    "of all ranks": lambda x: total(torch.tensor(size(x) * axis_size("a"))),
    "of no part": lambda x: total(torch.tensor(8.0)),
    "over another axis": lambda x: all_reduce(torch.tensor(size(x)), ("a", "b"), dst=I),
    "over one of two axes": lambda x: total(torch.tensor(size(x))) * total(torch.ones(())),
    "a reciprocal": lambda x: total(torch.tensor(1 / size(x))),
    "one more": lambda x: total(torch.tensor(size(x) + 1)),
    "in an integer that does not hold it": lambda x: total(
        torch.full((), x.shape[0] / 8, dtype=torch.int64)
    ),
    "as a factor of each addend": lambda x: total(ones(x).sum() * x.sum()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_number_that_is_another_one_on_one_device_is_refused(name: str) -> None:
    count = WRONG[name]
    assert_is_refused(lambda x: total(x.sum(0)) / count(x), [X], P("a"), P())
