"""Parts that begin where a tensor says, against one device, on real ranks and in both modes."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, axis_index, make_mesh, shard_map
from tests.checker.support.rejections import X, assert_right, numbers, rejection

AT: Final = torch.tensor(2)


@pytest.mark.parametrize(
    "part",
    [
        lambda x, at: torch.narrow(x, 0, at, 2),
        lambda x, at: x.narrow(start=at, dim=1, length=3),
        lambda x, at: torch.select(x, 1, at),
        lambda x, at: x.select(-1, at),
    ],
)
def test_a_rank_reads_from_its_own_start(part: Callable[[Tensor, Any], Tensor]) -> None:
    assert_right(
        lambda x: part(x, axis_index("tp"))[None].sin(),
        lambda x: torch.stack([part(x, rank) for rank in range(4)]).sin(),
        numbers(6, 6, 4),
        in_specs=P(),
        out_specs=P("tp"),
    )


def _assign(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[:, :, at : at + 1] = k[:, :, :1]
    return c


def _assign_several(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[..., at : at + k.shape[2], :] = k
    return c


def _assign_number(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[1, :, :at] = 2.0
    c[..., None, at:, :] = k[:, :, None, 1:]
    return c


def _assign_below(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[0, :, :at] = k[0]  # as many as there are
    return c


def _narrowed(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c.narrow(2, at, 2).copy_(k)
    return c * c


WRITES: Final[dict[str, Callable[[Tensor, Tensor, Any], Tensor]]] = {
    "one entry": _assign,
    "several": _assign_several,
    "a number": _assign_number,
    "as many as the position": _assign_below,
    "narrow": _narrowed,
    "slice_scatter": lambda c, k, at: torch.slice_scatter(c, k, 2, at, at + 2),
    "slice_scatter to an end": lambda c, k, at: c.slice_scatter(k, dim=2, end=at),
    "select_scatter": lambda c, k, at: torch.select_scatter(c, k[:, :, 1], 2, at),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("check", [True, "global"])
def test_a_cache_whose_heads_are_sharded_is_written_at_a_position(name: str, check: Any) -> None:
    cache, keys = numbers(2, 4, 6, 3).requires_grad_(), numbers(2, 4, 2, 3).requires_grad_()
    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate="ranks")
    heads = P(None, "tp")
    f = shard_map(
        WRITES[name], mesh=mesh, in_specs=(heads, heads, P()), out_specs=heads, check=check
    )
    expected = WRITES[name](cache, keys, 2)
    y = f(cache, keys, AT)
    torch.testing.assert_close(y, expected)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    found = torch.autograd.grad((y * weights).sum(), [cache, keys])
    for x, wanted in zip(
        found, torch.autograd.grad((expected * weights).sum(), [cache, keys]), strict=True
    ):
        torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("name", [n for n in WRITES if n != "narrow"])
def test_a_cache_whose_positions_are_sharded_is_not_written_at_one(name: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(
        WRITES[name],
        mesh=mesh,
        in_specs=(P(None, None, "tp"), P(), P()),
        out_specs=P(None, None, "tp"),
        check="global",
    )
    with pytest.raises(Exception, match="not what it is on one device"):
        f(numbers(2, 4, 6, 3), numbers(2, 4, 2, 3), AT)


def test_a_slice_between_tensors_is_not_read() -> None:
    def body(x: Tensor) -> Tensor:
        start = axis_index("tp")
        return x[start : start + 2]

    text = rejection(body, X.detach(), in_specs=P(), out_specs=P("tp"))
    assert text.splitlines() == [
        "body: the size of a slice whose bounds are tensors depends on data.",
        f"  at test_ranges.py:{body.__code__.co_firstlineno + 2}: return x[start : start + 2]",
        "Fix: use torch.narrow(x, dim, start, length), whose start may be a tensor; or take all of "
        "it, and mask.",
    ]


def test_a_write_between_tensors_beside_other_tensors_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        y, start = x.clone(), axis_index("tp")
        y[torch.arange(2), start : start + 1] = 0.0
        return y

    text = rejection(body, X.detach(), in_specs=P(), out_specs=P("tp"))
    assert text.splitlines() == [
        "body: a write between bounds that are tensors is known to the checker beside integers and "
        "slices only.",
        f"  at test_ranges.py:{body.__code__.co_firstlineno + 2}: "
        "y[torch.arange(2), start : start + 1] = 0.0",
        "Fix: use index_copy, or torch.where with a mask.",
    ]
