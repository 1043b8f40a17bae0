"""Tests that comparisons made as before find what comparisons made again find."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    all_reduce,
    axis_index,
    check_program,
    convert,
    make_mesh,
    shard_map,
    trace,
)
from shardmap_torch.checker.spmd import operations
from shardmap_torch.checker.spmd.operations import Repeated
from shardmap_torch.checker.spmd.ops.aten_rules import propagate
from shardmap_torch.checker.verify.verdict import verify
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.run import checked
from tests.support.fuzzing import sampled

MESH = make_mesh((2, 2), ("dp", "tp"), kind="abstract")
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear(x: Tensor, up: Tensor, down: Tensor, between: Any = torch.relu) -> Tensor:
    h = between(convert(x, "tp", src=I, dst=R) @ up * 4)  # as many as rows of a shard
    made: Tensor = x + all_reduce(h @ down, "tp", dst=I)
    torch.add(made.flatten(), made.flatten())
    return made


def _local_size(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = (convert(x, "tp", src=I, dst=R) @ up * x.shape[0]).relu()
    made: Tensor = x + all_reduce(h @ down, "tp", dst=I)
    return made


def _other_order(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Adds what has the same shapes in both programs, and entries in another order."""
    made = linear(x, up, down)
    torch.add(made.flatten(), made.t().flatten())
    return made


def _in_place(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(x, up, down, lambda h: h.clone().relu_())


def _hook(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    def hooked(h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient * gradient.shape[0])
        return h.relu()

    return linear(x, up, down, hooked)


def _unsummed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + (convert(x, "tp", src=I, dst=R) @ up * 4).relu() @ down


DIFFERENT: dict[str, Layer] = {
    "a constant": lambda x, up, down: linear(x, up, down) * 0.5,
    "a constant that is a local size": _local_size,
    "an argument that is a local size": lambda x, up, down: linear(x, up, down)[: x.shape[0]],
    "another order": _other_order,
    "a slice of what is sharded": lambda x, up, down: linear(x[:1], up, down),
    "a dtype": lambda x, up, down: linear(x.double(), up.double(), down.double()).float(),
    "no gradient": lambda x, up, down: linear(x.detach(), up, down),
    "no gradient of a weight": lambda x, up, down: linear(x, up.detach(), down),
    "a write": _in_place,
    "an alias": lambda x, up, down: linear(x.view_as(x), up, down),
    "the other operand": lambda x, up, down: linear(x, down.t(), up.t()),
    "a hook": _hook,
    "a draw": lambda x, up, down: linear(x, up, down, functional.dropout),
    "a rank's own number": lambda x, up, down: linear(x + axis_index("dp"), up, down),
    "positions": lambda x, up, down: linear(x + torch.arange(x.shape[0])[:, None], up, down),
    "a sum that is left out": _unsummed,
    "a norm over what is sharded": lambda x, up, down: linear(x / x.norm(), up, down),
    "microbatches": lambda x, up, down: torch.cat([linear(y, up, down) for y in x.chunk(2)]),
}


def text(body: Callable[..., Tensor]) -> str:
    specs = P("dp"), P(None, "tp"), P("tp")
    f = shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("dp"), check="global")
    given = [torch.zeros(shape, requires_grad=True) for shape in ((8, 4), (4, 8), (8, 4))]
    try:
        return str(trace(f, *given))
    except ShardTypeError as error:
        return str(error)


@pytest.mark.sample(5, "a draw-True")
@pytest.mark.parametrize("gradient", sampled([False, True], True))
@pytest.mark.parametrize("different", DIFFERENT)
def test_a_layer_that_differs_is_compared_as_if_there_were_no_others(
    different: str, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for layer in (linear, linear, DIFFERENT[different], linear, DIFFERENT[different]):
            x = layer(x, up, down)
        return x

    def gradients(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        made: Tensor = torch.func.grad(lambda x: layers(x, up, down).square().sum())(x)
        return made

    body = gradients if gradient else layers
    monkeypatch.setattr(checked, "verify", verify)  # numbers are not tried
    found = text(body)
    with patch.object(Repeated, "note", lambda *args: False):
        assert found == text(body)


def test_only_one_of_equal_layers_is_compared_anew() -> None:
    compared = []

    def noting(step: Any) -> Any:
        compared.append(step.op)
        return propagate(step)

    def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(6):
            x = linear(x, up, down)
        return x

    with patch.object(operations, "propagate", noting):
        text(layers)
    assert compared.count(torch.ops.aten.relu.default) == 1
    assert compared.count(torch.ops.aten.mm.default) == 2


def test_a_multiple_of_a_value_is_not_taken_for_the_value() -> None:
    def body(x: Tensor) -> Tensor:
        return (x * 4).exp() + (x * x.shape[0]).exp()  # of 4 rows on a rank, and 8 on one device

    mapped = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check="global")
    with pytest.raises(ShardTypeError, match="exp is not what it is on one device: it is 1/2"):
        check_program(mapped, ShapeDtype((8, 4), torch.float64))
