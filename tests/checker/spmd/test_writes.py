"""Writes into fresh memory of a local size, under global strictness, against one device."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch import (
    I,
    OneDeviceWarning,
    P,
    all_reduce,
    axis_group,
    axis_size,
    explain,
    shard_map,
)
from tests.checker.support.one_device import RANKS, assert_is_one_device, assert_is_refused, numbers

# torch renames some calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

Body = Callable[[Tensor], Tensor]

X: Final = numbers(4, 8)
OWN: Final = P("a", invariant={"b"})


def scaled_zeros(x: Tensor) -> Tensor:
    total = torch.zeros(8, dtype=x.dtype).mul_(0.9).div_(2).add_(x.sum(0))
    return all_reduce(total, "a", dst=I)


def halves_of_a_sum(x: Tensor) -> Tensor:
    total = torch.zeros(8, dtype=x.dtype)
    total[:4] = x.sum(0)[:4]
    total[4:] = x.cos().sum(0)[4:]
    return all_reduce(total, "a", dst=I)


def half_of_a_sum(x: Tensor) -> Tensor:
    total = torch.zeros(8, dtype=x.dtype)
    total[:4] = x.mean(0)[:4]
    return all_reduce(total, "a", op="mean", dst=I)


def accumulated(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=x.dtype)
    total += x
    total.mul_(2)
    return total.sin()


def side_by_side(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 16, dtype=x.dtype)
    out[:, :8] = x
    out[:, 8:] = x.cos()
    return out.sin()


def stepped(x: Tensor) -> Tensor:
    """Takes a step as hand-written loops do: `x.data -= y` sets what it is already."""
    leaf = x.detach().clone().requires_grad_()
    leaf.sin().sum().backward()
    assert leaf.grad is not None
    leaf.data -= 0.1 * leaf.grad
    return leaf.detach() * x


def read_as_views(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    same, turned = out.detach(), out.t()
    out += x
    return same * turned.t() * x


def recurrent(x: Tensor) -> Tensor:
    """Flattens a state whose sharding nothing has told yet, as a matrix product does."""
    k = x.view(-1, 2, 4)
    state = torch.zeros(k.shape[0], 2, 4, 4, dtype=x.dtype)
    first = k[:, :, None] @ state
    state = state * 0.9 + k[..., None] * (k - first[:, :, 0])[:, :, None]
    return (k[:, :, None] @ state).flatten(1)


def recurrent_in_place(x: Tensor) -> Tensor:
    k, state = x.detach().view(-1, 2, 4), torch.zeros(x.shape[0], 2, 4, 4, dtype=x.dtype)
    first = torch.bmm(k.flatten(0, 1)[:, None], state.flatten(0, 1)).flatten()
    state += k[..., None] * (k - first.view_as(k))[:, :, None]
    return torch.einsum("bhd,bhde->bhe", k, state).flatten(1) * x


def of_ones(x: Tensor) -> Tensor:
    out = torch.ones(x.shape[0], 8, dtype=x.dtype)
    out[:, 2:5] = x[:, 2:5]
    out /= 2
    return out * x


def scattered(x: Tensor) -> Tensor:
    """Sums over all ranks with a call of torch.distributed, which writes into its output."""
    total = x.detach().sum(0)
    out = total.new_empty(total.shape[0] // axis_size("a"))
    dist.reduce_scatter_tensor(out, total, group=axis_group(RANKS, "a"))
    return out * 2


RIGHT: Final[dict[str, tuple[Body, P]]] = {
    "zeros times a number": (scaled_zeros, P()),
    "halves of a sum": (halves_of_a_sum, P()),
    "half of a mean": (half_of_a_sum, P()),
    "zeros of a local size": (accumulated, P("a")),
    "two parts": (side_by_side, P("a")),
    "views of zeros": (read_as_views, P("a")),
    "a part of ones": (of_ones, P("a")),
    "a recurrent state": (recurrent, P("a")),
    "a recurrent state in place": (recurrent_in_place, P("a")),
    "a step on .data": (stepped, P("a")),
    "reduce_scatter_tensor": (scattered, P("a")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_memory_of_equal_entries_takes_what_is_written(name: str) -> None:
    body, out = RIGHT[name]
    assert_is_one_device(body, [X], OWN, out)


@pytest.mark.parametrize("body", [recurrent, recurrent_in_place])
def test_layouts_follow_a_state_that_begins_as_zeros(body: Body) -> None:
    mapped = shard_map(body, mesh=RANKS, in_specs=OWN, out_specs=P("a"), check="global")
    assert explain(mapped, X.detach().requires_grad_()).one_device == "proven"


def sum_beside_a_number(x: Tensor) -> Tensor:
    total = torch.zeros(8, dtype=x.dtype)
    total[:4] = x.sum(0)[:4]
    total[4:] = 1.0
    return all_reduce(total, "a", dst=I)


def sum_beside_ones(x: Tensor) -> Tensor:
    total = torch.ones(8, dtype=x.dtype)
    total[:4] = x.sum(0)[:4]
    return all_reduce(total, "a", dst=I)


def sum_in_scaled_ones(x: Tensor) -> Tensor:
    return all_reduce(torch.ones(8, dtype=x.dtype).mul_(0.5).add_(x.sum(0)), "a", dst=I)


def other_axis(x: Tensor) -> Tensor:
    """Reads rows that "a" shards as those that "b" does."""
    out = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    same = out.detach()
    out += x
    return same * torch.zeros(4 // axis_size("b"), 8, dtype=x.dtype).add_(1)


def read_as_columns(x: Tensor) -> Tensor:
    """Reads by a view of zeros, by columns, what has been written into rows since."""
    out = torch.zeros(x.shape[1] // 2, 8, dtype=x.dtype)
    flat = out.flatten().detach()
    out[:, 0] = 1.0
    return (flat * x.detach().flatten()).view(x.shape)


def written_as_columns(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[1] // 2, 8, dtype=x.dtype)
    out.view(-1, 16)[:, 0] = 1.0
    return (out.flatten() * x.detach().flatten()).view(x.shape)


@pytest.mark.parametrize("body", [read_as_columns, written_as_columns])
def test_a_view_of_zeros_is_what_they_were(body: Body) -> None:
    columns = P(None, "a", invariant={"b"})
    mapped = shard_map(body, mesh=RANKS, in_specs=columns, out_specs=P(None, "a"))
    with pytest.warns(OneDeviceWarning):
        assert not mapped(X).equal(body(X))
    assert_is_refused(body, [X], columns, P(None, "a"))


def drawn(x: Tensor) -> Tensor:
    return x.detach() * torch.empty(x.shape[0], 8, dtype=x.dtype).normal_()


def scaled_behind_autograd(x: Tensor) -> Tensor:
    y = x.exp()
    z = y * 1
    y.data.mul_(x.shape[0])  # the backward of exp reads it
    return z


def summed_behind_autograd(x: Tensor) -> Tensor:
    y = x.sum(0).mul(0).exp()
    z = y * x
    y.data.copy_(x.sum(0))
    return z


WRONG: Final[dict[str, tuple[Body, P]]] = {
    "a number beside a sum": (sum_beside_a_number, P()),
    "a sum beside ones": (sum_beside_ones, P()),
    "a sum in ones": (sum_in_scaled_ones, P()),
    "rows of another axis": (other_axis, P("b")),
    "a number, unseen": (scaled_behind_autograd, P("a")),
    "a sum, unseen": (summed_behind_autograd, P("a")),
    "draws": (drawn, P("a")),
}


@pytest.mark.parametrize("name", WRONG)
def test_memory_does_not_take_what_changes_the_rest(name: str) -> None:
    body, out = WRONG[name]
    assert_is_refused(body, [X], OWN, out)
