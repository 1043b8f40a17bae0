"""check="global" and assertions of tensors: a rank's own condition is none of one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_reduce,
    check_program,
    explain,
    make_mesh,
    shard_map,
)

Ask = Callable[[Tensor], Tensor]

X: Final = torch.randn(8, 3)


def asserting(ask: Ask, *text: str) -> Callable[..., Any]:
    def body(x: Tensor) -> Tensor:
        torch._assert_async(ask(x), *text)
        return x * 2

    mesh = make_mesh((2,), ("dp",), kind="simulated")
    return shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check="global")


SAME: Final[dict[str, Ask]] = {
    "all": lambda x: (x < 99).all(),
    "all of all": lambda x: (x < 99).all(1).all() & (x > -99).all(),
    "none": lambda x: ~(x > 99).any(),
    "finite": lambda x: x.isfinite().all(),
    "of a sum": lambda x: all_reduce(x.sum(), "dp", dst=I) < 99,
}
OWN: Final[dict[str, Ask]] = {
    "any": lambda x: (x > 0).any(),
    "any of any": lambda x: (x > 0).any(1).any() | (x < -99).any(),
    "not all": lambda x: ~(x > 0).all(),
}


@pytest.mark.parametrize("name", SAME)
def test_what_all_ranks_together_assert_as_one_device_is_proven(name: str) -> None:
    assert explain(asserting(SAME[name]), X).one_device == "proven"


@pytest.mark.parametrize("text", [(), ("it is none",)])
@pytest.mark.parametrize("name", OWN)
def test_what_a_rank_asserts_of_its_own_part_is_refused(name: str, text: tuple[str, ...]) -> None:
    with pytest.raises(ShardTypeError) as caught:
        check_program(asserting(OWN[name], *text), X)
    head = (
        "body: check='global': _assert_async is not what it is on one device: over 'dp' it is the"
    )
    assert str(caught.value).startswith(f"{head} max of a rank's part, from ")
    assert "Fix: all_reduce it over 'dp' with op='max' first." in str(caught.value)
