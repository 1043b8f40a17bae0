"""A verdict is used again exactly as long as nothing that it depends on has changed."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import I, P, ShardTypeError, all_reduce, make_mesh, shard_map

MESH = make_mesh((2,), ("i",), kind="simulated", simulate="ranks")
X = torch.ones(2)
REDUCE = True


def count_checks(body: Any, **options: Any) -> tuple[Any, list[int]]:
    """The mapped function, and a list that grows with each interpretation."""
    mapped = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), **options)
    verdicts = vars(mapped)["_shardmap_verdict"].__self__._checked._verdicts
    checks: list[int] = []
    before = verdicts.get

    def get(key: Any, make: Any) -> Any:
        def counted() -> Any:
            checks.append(1)
            return make()

        return before(key, counted)

    verdicts.get = get
    return mapped, checks


def reduced(x: Tensor) -> Tensor:
    return all_reduce(x, "i", dst=I) if REDUCE else x


def test_equal_calls_are_checked_once() -> None:
    f, checks = count_checks(reduced)
    for _ in range(3):
        f(X)
    assert len(checks) == 1
    f(torch.ones(4))
    f(X.double())
    f(X.clone().requires_grad_())
    assert len(checks) == 4
    with torch.no_grad():
        f(X)
    assert len(checks) == 5


def test_a_global_flag_that_removes_a_collective_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    f, _ = count_checks(lambda x: reduced(x))
    f(X)
    monkeypatch.setitem(globals(), "REDUCE", False)
    with pytest.raises(ShardTypeError, match="the result varies over it"):
        f(X)


@pytest.mark.parametrize("kind", ["cell", "attribute", "list", "module"])
def test_what_a_body_closes_over_is_part_of_the_signature(kind: str) -> None:
    flag, options, flags, module = True, SimpleNamespace(reduce=True), [True], nn.Dropout(0.0)

    def body(x: Tensor) -> Tensor:
        wanted = {
            "cell": flag,
            "attribute": options.reduce,
            "list": flags[0],
            "module": module.training,
        }
        return all_reduce(x, "i", dst=I) if wanted[kind] else x

    f, _ = count_checks(body)
    f(X)
    flag, options.reduce, flags[0] = False, False, False
    module.eval()
    with pytest.raises(ShardTypeError, match="the result varies over it"):
        f(X)


def test_the_arguments_of_a_partial_and_the_object_of_a_method_are_part_of_the_signature() -> None:
    class Model:
        reduce = True

        def __init__(self) -> None:
            self.reduce = True

        def __call__(self, scale: float, x: Tensor) -> Tensor:
            return all_reduce(x * scale, "i", dst=I) if self.reduce else x

    model = Model()
    f, checks = count_checks(partial(model.__call__, 2.0))
    f(X)
    f(X)
    assert len(checks) == 1
    model.reduce = False
    with pytest.raises(ShardTypeError, match="the result varies over it"):
        f(X)
