"""Tests that calls which are typed as before get the types, texts and errors of calls again."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, R, all_reduce, convert, make_mesh, shard_map, trace
from shardmap_torch.checker.interpreter import modes, operations
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.rules import infer
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.functorch import base_of
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import V

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


def promoted(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(3):
        x = x.to(torch.promote_types(x.dtype, torch.float64))
        y = x[None, None]
        heads = functional.scaled_dot_product_attention(y, y, y)
        x = layer(heads[0, 0].to(torch.float32), up, down)
    return x


def listed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    made = torch._foreach_add([x.detach(), x.detach(), layer(x, up, down)], 1.0)
    return torch._foreach_mul(made, [1.0, 0.0, 2.0])[2]


def unsummed_in_a_list(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = (convert(x, "tp", src=I, dst=R) @ up).relu() @ down
    return torch._foreach_sqrt([x.detach(), x.detach(), y])[2]


def unsummed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(3):
        x = layer(x, up, down)
    h = convert(x, "tp", src=I, dst=R)
    return ((h @ up).relu() @ down).relu()


class Times(torch.autograd.Function):
    """Passes `x` on; its gradient is the cotangent's product with what each rank has of `part`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor) -> Tensor:
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return all_reduce(g * ctx.part, "tp", dst=I), None


def unsummed_later(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = layer(x, up, down).detach().requires_grad_()
    made = Times.apply(y, up[:2])  # type: ignore[no-untyped-call]  # torch's
    (grad,) = torch.autograd.grad(made, y, y.detach())
    return grad + torch.autograd.grad((y * up[:2]).sum(), y)[0]


def text(body: Callable[..., Tensor], out: P, strictness: Any) -> str:
    f = shard_map(body, mesh=MESH, in_specs=SPECS, out_specs=out, check=strictness)
    x, up, down = torch.zeros(4, 4), torch.zeros(4, 8), torch.zeros(8, 4)
    try:
        return str(trace(f, x.requires_grad_(), up.requires_grad_(), down.requires_grad_()))
    except ShardTypeError as error:
        return str(error)


@pytest.mark.sample(4, "unsummed_in_a_list-out5-global", "unsummed_later-out7-local")
@pytest.mark.parametrize("strictness", ["local", "global"])
@pytest.mark.parametrize(
    ("body", "out"),
    [
        *((body, P("dp")) for body in (layers, written, unsummed)),
        *((body, P("dp")) for body in (promoted, listed, unsummed_in_a_list)),
        (step, P(None, "tp")),
        (unsummed_later, P("dp")),
    ],
)
def test_programs_and_errors_are_those_of_calls_typed_anew(
    body: Callable[..., Tensor], out: P, strictness: str
) -> None:
    found = text(body, out, strictness)
    with patch.object(operations, "find", lambda *args: None):
        assert found == text(body, out, strictness)


def typed_anew(body: Callable[..., Tensor]) -> list[str]:
    """Returns the names of the operations that are typed anew in one check."""
    calls = []
    call = operations._interpret

    def noting(self: Interpreter, op: Any, *args: Any) -> Any:
        calls.append(op._schema.name.removeprefix("aten::"))
        return call(self, op, *args)

    anew = patch.object(operations, "OUTCOMES", Memo[Any]())
    with anew, patch.object(operations, "_interpret", noting):
        text(body, P("dp"), "local")
    return calls


def test_only_one_of_equal_layers_is_typed_anew() -> None:
    calls = typed_anew(layers)
    assert calls.count("relu") == 1
    assert 1 <= calls.count("mm") < 4 * 6


def test_calls_without_tensors_or_draws_are_remembered() -> None:
    calls = typed_anew(promoted)
    assert calls.count("promote_types") == 1
    # The input has another type than what layers return.
    assert calls.count("_scaled_dot_product_flash_attention_for_cpu") == 2


def test_positions_of_lists_that_are_alike_are_typed_once() -> None:
    outcomes = []
    outcome = infer._outcome

    def noting(row: Any, typing: Any, arguments: Any) -> Any:
        outcomes.append(arguments)
        return outcome(row, typing, arguments)

    op = torch.ops.aten._foreach_add.ScalarList
    arguments = {"self": [*torch.ones(3, 2)], "scalars": [1.0, 0.0, 1.0]}
    with patch.object(infer, "_outcome", noting):
        types = infer.type_call(op, arguments, lambda x: (V,), 1)
    assert types == [(V,)] * 3
    assert len(outcomes) == 2


def test_an_operator_on_lists_looks_at_each_of_its_tensors_a_few_times() -> None:
    def scaled(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch._foreach_mul([*x.unsqueeze(0).expand(64, -1, -1)], 2.0)[-1]

    with patch.object(modes, "base_of", Mock(side_effect=base_of)) as asked:
        text(scaled, P("dp"), "local")
    assert 64 <= asked.call_count < 64 * 8
