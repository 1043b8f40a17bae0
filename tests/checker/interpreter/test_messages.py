"""Advice of errors about values that ranks would read, each in another way."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, ShardTypeError, all_reduce, make_mesh, shard_map
from shardmap_torch.checker.verify import repairing
from tests.support.golden import hold_own, told

ADVICE: Final[dict[str, Callable[[Tensor], Any]]] = {
    "bincount": lambda x: torch.bincount(x.argmax(-1), minlength=6),
    "tolist": lambda x: x.split((x[:, 0] > 0).sum(0, keepdim=True).tolist()),
    "item": lambda x: x * x.sum().item(),
    "a draw": lambda x: x[:, int(torch.randint(0, 2, ())) :],
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_suits_what_reads_the_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairing, "_TRIES", 0)
    body = ADVICE[name]
    mesh = make_mesh((2,), ("a",), kind="simulated")
    with told(ShardTypeError):
        shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P())(torch.ones(4, 3))


def test_what_the_advice_says_is_accepted() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        best = x.argmax(-1)
        counted = torch.zeros(3, dtype=torch.int64).index_add(0, best, torch.ones_like(best))
        # torch.compile, in another test, switches validation off for the process
        drawn = torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x)
        return all_reduce(counted, "a", dst=I), drawn

    mesh = make_mesh((2,), ("a",), kind="simulated")
    options: Any = {"in_specs": P("a"), "out_specs": (P(), P("a")), "check": "global"}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    counted, drawn = shard_map(body, mesh=mesh, **options)(x)
    assert counted.equal(torch.bincount(x.argmax(-1), minlength=3))
    torch.testing.assert_close(drawn, torch.distributions.Normal(x, x.exp()).log_prob(x))


def test_a_python_result_names_the_body_that_returns_it() -> None:
    def body(x: Tensor) -> tuple[Tensor, int]:
        return x, x.shape[0]

    mesh = make_mesh((2,), ("a",), kind="simulated")
    options: Any = {"in_specs": P("a"), "out_specs": (P("a"), None), "check": "global"}
    with pytest.raises(ShardTypeError) as caught:
        shard_map(body, mesh=mesh, **options)(torch.ones(4))
    head, place, _ = str(caught.value).splitlines()
    assert head.endswith("the result out[1] is 2 on a rank and 4 on one device.")
    hold_own(place)
