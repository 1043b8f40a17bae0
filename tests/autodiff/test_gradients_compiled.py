"""Gradients that are taken in a body, and whole steps of training, under torch.compile."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from shardmap_torch import (
    I,
    P,
    R,
    all_reduce,
    convert,
    device_put,
    full,
    grad,
    make_mesh,
    shard_map,
    value_and_grad,
    vjp,
)
from tests.support.fuzzing import sampled, sized
from tests.support.pool import Gloo

# Dynamo itself instantiates the class, and torch warns of that.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning"
)

Params = dict[str, Any]

SPECS: Params = {"w1": P(None, "tp"), "w2": P("tp"), "scale": P()}


def params() -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (6, 8), "w2": (8, 6), "scale": (6,)}
    return {k: torch.randn(shape, generator=generator).double() for k, shape in shapes.items()}


def batch(size: int) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(size)).double()


def loss(p: Params, x: Tensor) -> Tensor:
    h = torch.relu(convert(x * p["scale"], "tp", src=I, dst=R) @ p["w1"])
    total: Tensor = all_reduce(h @ p["w2"], "tp", dst=I).square().mean()
    return total


def descend(p: Params, x: Tensor) -> tuple[Params, Tensor]:
    value, grads = value_and_grad(loss)(p, x)
    return {k: p[k] - 0.1 * grads[k] for k in p}, value


def pulled_twice(p: Params, x: Tensor) -> tuple[Params, Tensor]:
    value, pull = vjp(loss, p, x)
    (first, _), (second, _) = pull(value), pull(value.cos())
    return {k: first[k] - second[k] for k in p}, value


def mapped(body: Callable[..., Any], check: bool = True) -> Callable[..., Any]:
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    specs = SPECS if check else {**SPECS, "scale": P(invariant="tp")}
    x = P() if check else P(invariant="tp")
    return shard_map(body, mesh=mesh, in_specs=(specs, x), out_specs=(SPECS, P()), check=check)


def counting(found: list[str]) -> Any:
    """A backend that notes each graph, forward or backward."""

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(graph.code)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


SIZES = sized((4, 4), (4, 4, 8))


def in_step(body: Callable[..., Any]) -> tuple[float, list[int]]:
    """Compares compiled steps with eager ones; returns the difference, and counts all-reduces."""
    torch._dynamo.reset()
    f, graphs = mapped(body), list[str]()
    compiled = torch.compile(f, backend=counting(graphs), fullgraph=True, dynamic=False)
    p = expected = device_put(params(), make_mesh((2,), ("tp",)), SPECS)
    differences = []
    for size in SIZES:
        p, value = compiled(p, batch(size))
        expected, eager = f(expected, batch(size))
        pairs = zip(optree.tree_leaves(p), optree.tree_leaves(expected), strict=True)
        differences += [value - eager, *(full(a) - full(b) for a, b in pairs)]
    largest = max(float(each.abs().max()) for each in differences)
    return largest, [code.count("_c10d_functional.all_reduce") for code in graphs]


@pytest.mark.parametrize("body", sampled([descend, pulled_twice], descend))
def test_a_compiled_step_has_its_gradients_in_one_graph_and_is_the_eager_one(
    gloo: Gloo, body: Callable[..., Any]
) -> None:
    reduced = {descend: 2, pulled_twice: 3}[body]  # of the forward, and of `convert` for each pull
    for difference, counts in gloo(2).run(in_step, body, timeout=240):
        assert difference < 1e-12
        assert counts == [reduced] * len(
            set(SIZES)
        )  # a graph for each size, and none for a backward


def wrong(p: Params, x: Tensor) -> tuple[Params, Tensor]:
    value, grads = value_and_grad(loss)({**p, "scale": convert(p["scale"], "tp", src=I, dst=R)}, x)
    return {k: p[k] - 0.1 * grads[k] for k in p}, value


def second(p: Params, x: Tensor) -> tuple[Params, Tensor]:
    def norm(p: Params) -> Any:
        return grad(loss)(p, x)["w2"].square().sum()

    return grad(norm)(p), loss(p, x)


def refusal(body: Callable[..., Any], check: bool, enabled: bool) -> str:
    """The error of a compiled call, where something outside may be differentiated or not."""
    torch._dynamo.reset()
    compiled = torch.compile(mapped(body, check), backend="eager", fullgraph=True)
    try:
        with torch.set_grad_enabled(enabled):
            compiled(params(), batch(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


TRANSFORMED = (
    "InternalTorchDynamoError: TransformError: A collective, or the boundary of a shard_mapped "
    "function, cannot be compiled under a torch.func transform: "
)


@pytest.mark.parametrize(
    ("body", "check", "enabled", "text"),
    [
        (wrong, True, True, "ShardTypeError: wrong: "),
        pytest.param(descend, False, True, TRANSFORMED, marks=pytest.mark.fuzz),
        pytest.param(second, True, True, TRANSFORMED, marks=pytest.mark.fuzz),
        pytest.param(descend, False, False, "accepted", marks=pytest.mark.fuzz),
        pytest.param(descend, True, True, "accepted", marks=pytest.mark.fuzz),
    ],
)
def test_a_compiled_step_that_is_wrong_or_cannot_be_compiled_is_refused(
    gloo: Gloo, body: Callable[..., Any], check: bool, enabled: bool, text: str
) -> None:
    for found in gloo(2).run(refusal, body, check, enabled, timeout=120):
        assert found.startswith(text)
