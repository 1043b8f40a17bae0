"""Compiled calls of mapped functions themselves: the body alone is compiled, on local tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import DTensor

from shardmap_torch import (
    I,
    P,
    ShardMapError,
    ShardTypeError,
    all_reduce,
    axis_index,
    device_put,
    full,
    make_mesh,
    shard_map,
)
from tests.support.pool import Gloo

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning"
)

SPECS = {"down": P("tp"), "scale": P(), "up": P(None, "tp")}


def layer(weights: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over the ranks, and a tree in the order of the arguments' entries."""
    h = torch.tanh(x @ weights["up"])
    y = all_reduce(h @ weights["down"], "tp", dst=I) * weights["scale"]
    return y, {name: 2 * weight for name, weight in weights.items()}


def operands() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (6, 8), "scale": (6,), "down": (8, 6), "x": (4, 6)}
    found = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    return found, found.pop("x")


def leaf_by_leaf(f: Any, weights: dict[str, Tensor], x: Tensor) -> tuple[list[str], list[Tensor]]:
    """The names of results in their order; a value, and the gradient of each leaf."""
    leaves = [each.detach().requires_grad_() for each in (*weights.values(), x)]
    y, doubled = f(dict(zip(weights, leaves, strict=False)), leaves[-1])
    loss = y.cos().sum() + full(doubled["up"]).sin().sum()
    grads = torch.autograd.grad(loss, leaves)
    return list(doubled), [y.detach(), *full(list(grads))]


def on_local_tensors() -> tuple[set[type], int, list[type]]:
    """The types that graphs are given, how many graphs there are, and the types of results."""
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    f = shard_map(layer, mesh=mesh, in_specs=(SPECS, P()), out_specs=(P(), SPECS))
    kinds, graphs = set[type](), 0

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        boxed = make_boxed_func(graph.forward)

        def run(given: list[Any]) -> Any:
            kinds.update(type(x) for x in given if isinstance(x, Tensor))
            return boxed(given)

        run._boxed_call = True  # type: ignore[attr-defined]  # as torch marks it
        return run

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    weights, x = operands()
    placed = device_put(weights, mesh, SPECS, as_dtensor=True)
    for names in (("up", "scale", "down"), ("down", "up", "scale")):
        ordered = {name: placed[name] for name in names}
        order, found = leaf_by_leaf(compiled, ordered, x)
        assert order == list(names)
        expected = leaf_by_leaf(f, ordered, x)[1]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    y, doubled = compiled(placed, x)
    return kinds, graphs, [type(y), *[type(doubled[name]) for name in SPECS]]


def test_a_compiled_body_is_given_local_tensors_and_has_all_gradients(gloo: Gloo) -> None:
    for kinds, graphs, results in gloo(2).run(on_local_tensors, timeout=120):
        assert kinds == {Tensor}
        # Forward and backward for each order of entries, and the forward without gradients.
        assert graphs == 5
        assert results == [Tensor, DTensor, Tensor, DTensor]


def changed_between_calls() -> tuple[list[float], str]:
    """Results while a number that the body refers to changes, and the error when it gets wrong."""
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    scale, sums = 1.0, True

    def body(x: Tensor) -> Tensor:
        y = x.sum() * scale
        return all_reduce(y, "tp", dst=I) if sums else y * axis_index("tp")

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    (x,) = device_put([torch.ones(4)], mesh, P("tp"))
    found = []
    for scale in (1.0, 1.0, 3.0, 1.0):  # noqa: B007 - the body reads it
        found.append(compiled(x).item())
    sums = False
    try:
        compiled(x)
    except ShardTypeError as error:
        return found, str(error)
    return found, "accepted"


def test_a_compiled_call_is_checked_again_when_its_code_refers_to_another_value(gloo: Gloo) -> None:
    for found, text in gloo(2).run(changed_between_calls, timeout=120):
        assert found == [4.0, 4.0, 12.0, 4.0]
        assert text.startswith(
            "body: the result does not match out_specs:\n  out: P() promises one"
        )


def test_functions_do_not_share_the_limit_of_compilations() -> None:
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("x",), kind="simulated")
    with torch._dynamo.config.patch(recompile_limit=1):
        for factor in (1.0, 2.0):
            f = shard_map(lambda x, by=factor: x * by, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            compiled = torch.compile(f, backend="eager", fullgraph=True)
            assert compiled(torch.ones(2)).tolist() == [factor] * 2


def squared(x: Tensor) -> Tensor:
    return all_reduce((x * x).sum(), "tp", dst=I)


def total(x: Tensor) -> Tensor:
    return all_reduce(x.sum(), "tp", dst=I)


def ends_of_unlike_calls(within: bool, backend: str) -> list[str]:
    """Returns how calls end that rank 1 makes in another order, and of other values.

    `within` other code that is compiled, or each compiled by itself.
    """
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("tp",), kind="process_group", timeout=20)
    one, two = (
        shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P()) for body in (squared, total)
    )
    compiled = partial(torch.compile, backend=backend, fullgraph=True)
    calls = [compiled((lambda x, f=f: 2 * f(x.sin())) if within else f) for f in (one, two)]
    x, found = torch.arange(4.0), []
    known = [call(x) for call in calls]
    for order, differs in (([1, 0] if mesh.rank else [0, 1], 0), ([0, 1], mesh.rank)):
        try:
            for at in order:
                assert torch.equal(calls[at](x + differs), known[at])
        except ShardMapError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("within", "backend"),
    [pytest.param(False, "eager", marks=pytest.mark.fuzz), (True, "aot_eager")],
)
def test_compiled_calls_are_compared_in_order_and_values(
    gloo: Gloo, within: bool, backend: str
) -> None:
    for order, values in gloo(2).run(ends_of_unlike_calls, within, backend, timeout=120):
        assert "programs. They have come to different calls:\n  rank 0: squared at " in order
        assert "x: float32[4], P('tp'), has other values on rank 1 than on rank 0" in values
