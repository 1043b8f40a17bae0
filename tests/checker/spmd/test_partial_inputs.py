"""check="global": inputs that are pending sums, and gradients with respect to them."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    P,
    S,
    ShardTypeError,
    V,
    all_reduce,
    assert_type,
    make_mesh,
    reinterpret,
    shard_map,
)

ADDENDS: Final = torch.randn(3, dtype=torch.float64)
W: Final = torch.randn(3, dtype=torch.float64)
MESH: Final = make_mesh((2,), ("tp",), kind="simulated")


def finished(p: Tensor, w: Tensor) -> Tensor:
    return (all_reduce(p, "tp", dst=I) * w).sin().sum()


def later(p: Tensor, w: Tensor) -> Tensor:
    return all_reduce((p * w).sum(), "tp", dst=I).sin()


def pending(p: Tensor, w: Tensor) -> Tensor:
    return (p * w).sum()


@pytest.mark.parametrize("loss", [finished, later, pending])
def test_each_addend_has_the_gradient_of_the_sum(loss: Callable[..., Tensor]) -> None:
    f: Any = shard_map(
        torch.func.grad(loss),
        mesh=MESH,
        in_specs=(P(partial={"tp"}), P()),
        out_specs=P(),
        check="global",
    )
    one = make_mesh((1,), ("tp",), kind="simulated")
    want = shard_map(
        torch.func.grad(loss), mesh=one, in_specs=(P(partial={"tp"}), P()), out_specs=P()
    )
    torch.testing.assert_close(f(ADDENDS, W), want(ADDENDS, W))


def test_a_gradient_that_differs_between_addends_is_refused() -> None:
    def body(p: Tensor, w: Tensor) -> Tensor:
        def loss(p: Tensor) -> Tensor:
            return (reinterpret(p, "tp", src="P", dst=V) * w.cumsum(0)).sum()

        gradient: Tensor = torch.func.grad(loss)(p)
        return all_reduce(gradient, "tp", dst=I)

    specs: Any = {"in_specs": (P(partial={"tp"}), P("tp")), "out_specs": P()}
    with pytest.raises(ShardTypeError):
        shard_map(body, mesh=MESH, check="global", **specs)(ADDENDS, torch.cat([W, W]))


def asserted(spec: P, dim: int, ranks: int = 2) -> Tensor:
    mesh = make_mesh((ranks,), ("tp",), kind="simulated")

    def body(x: Tensor) -> Tensor:
        return assert_type(x, {"tp": S(dim)})

    found: Tensor = shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check="global")(
        torch.ones(4, 2)
    )
    return found


def test_the_dim_of_an_asserted_shard_may_be_counted_from_the_end() -> None:
    asserted(P("tp"), -2)
    asserted(P(None, "tp"), -1)
    with pytest.raises(ShardTypeError, match=r"expects S\(1\) over 'tp', but the value is S\(0\)"):
        asserted(P("tp"), -1)
    with pytest.raises(CollectiveError, match=r"S\(2\) names dim 2 of a tensor of 2 dims"):
        asserted(P("tp"), 2)


def test_a_shard_may_be_asserted_over_an_axis_of_one_rank() -> None:
    asserted(P("tp"), 0, ranks=1)
