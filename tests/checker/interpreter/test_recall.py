"""Tests that calls which are typed as before get the types, texts and errors of calls anew."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, R, all_reduce, convert, make_mesh, shard_map, trace
from shardmap_torch.checker.interpreter import modes
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.errors import ShardTypeError

MESH = make_mesh((2, 2), ("dp", "tp"), kind="abstract")
SPECS = P("dp"), P(None, "tp"), P("tp")


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R)
    h = (h @ up).relu().flatten(1)
    made: Tensor = x + all_reduce(h @ down, "tp", dst=I)
    return made


def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(4):
        x = layer(x, up, down)
    return x


def step(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    grad = torch.func.grad(lambda w: layers(x, w, down).square().sum())(up)
    made: Tensor = up - 0.1 * all_reduce(grad, "dp", dst=I)
    return made


def written(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = x.clone()
    for _ in range(3):
        y.unsqueeze_(0)
        y = y.squeeze(0).add_(1)
        y = layer(y, up, down)
    return y


def unsummed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(3):
        x = layer(x, up, down)
    h = convert(x, "tp", src=I, dst=R)
    return ((h @ up).relu() @ down).relu()


def text(body: Callable[..., Tensor], out: P, strictness: Any) -> str:
    f = shard_map(body, mesh=MESH, in_specs=SPECS, out_specs=out, check=strictness)
    x, up, down = torch.zeros(4, 4), torch.zeros(4, 8), torch.zeros(8, 4)
    try:
        return str(trace(f, x.requires_grad_(), up.requires_grad_(), down.requires_grad_()))
    except ShardTypeError as error:
        return str(error)


@pytest.mark.parametrize("strictness", ["local", "global"])
@pytest.mark.parametrize(
    ("body", "out"),
    [(layers, P("dp")), (step, P(None, "tp")), (written, P("dp")), (unsummed, P("dp"))],
)
def test_programs_and_errors_are_those_of_calls_typed_anew(
    body: Callable[..., Tensor], out: P, strictness: str
) -> None:
    found = text(body, out, strictness)
    with patch.object(modes, "find", lambda *args: None):
        assert found == text(body, out, strictness)


def test_only_one_of_equal_layers_is_typed_anew() -> None:
    calls = []
    call = Interpreter.call

    def noting(self: Interpreter, op: Any, *args: Any) -> Any:
        calls.append(op)
        return call(self, op, *args)

    with patch.object(Interpreter, "call", noting):
        text(layers, P("dp"), "local")
    assert calls.count(torch.ops.aten.relu.default) == 1
    assert 1 <= calls.count(torch.ops.aten.mm.default) < 4 * 6
