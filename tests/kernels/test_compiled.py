"""The kernels under torch.compile: operators where required, the composition by default."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import R
from shardmap_torch.kernels import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from shardmap_torch.kernels.compiled import endpoint_name, gather_op, scatter_op
from tests.kernels.test_overlapped import body, normal
from tests.pool import Pool

pytestmark = [
    pytest.mark.slow,
    # Dynamo (torch 2.13) makes an instance of each Function that it traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

Gloo = Callable[[int], Pool]


def block(overlap: Any) -> Callable[..., Tensor]:
    """Two projections of one gather, and the way back."""

    def run(x: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        a, b = all_gather_matmul(x, (w, v), "tp", bias=(bias, None), gather_dim=1, overlap=overlap)
        return matmul_reduce_scatter(a * b.sin(), v.t(), "tp", scatter_dim=-2, overlap=overlap)

    return run


def value_and_gradients(function: Callable[..., Tensor]) -> list[Tensor]:
    shapes = ((2, 6, 8), (8, 4), (8, 4), (4,))
    leaves = [normal(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), leaves)]


def compiled_difference(overlap: str) -> float:
    with body():
        compiled = torch.compile(block(overlap), backend="aot_eager", fullgraph=True)
        ours, truth = value_and_gradients(compiled), value_and_gradients(block("off"))
    return max(float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("overlap", ["auto", "require"])
def test_one_compiled_graph_equals_the_eager_composition(gloo: Gloo, overlap: str) -> None:
    assert max(gloo(2).run(compiled_difference, overlap)) < 1e-10


def kernels_in_the_graph(overlap: str) -> list[str]:
    found: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with body():
        x, w, v, bias = normal(1, 2, 6, 8), normal(2, 8, 4), normal(3, 8, 4), normal(4, 4)
        torch.compile(block(overlap), backend=collect, fullgraph=True)(x, w, v, bias)
    return [name for name in found if "matmul" in name and "shardmap" in name]


def test_auto_leaves_the_composition_to_inductor_and_require_puts_operators(gloo: Gloo) -> None:
    assert gloo(2).run(kernels_in_the_graph, "auto")[0] == []
    names = gloo(2).run(kernels_in_the_graph, "require")[0]
    assert len(names) == 2


def failed_checks() -> list[str]:
    """torch's own checks of schema, shapes, autograd registration and tracing."""
    with body() as backend:
        name = endpoint_name(backend, ("tp",))
        for dim in (0, 1, 2):
            x = normal(1, 3, 4, 6).requires_grad_()
            w = normal(2, 12 if dim == 2 else 6, 5).requires_grad_()
            v = normal(3, 12 if dim == 2 else 6, 2).requires_grad_()
            bias = normal(4, 5).requires_grad_()
            torch.library.opcheck(
                gather_op, (x, [w, v], [bias], [0], dim, 2, name, 2), rtol=1e-10, atol=1e-10
            )
            y, u = normal(5, 4, 2, 6).requires_grad_(), normal(6, 6, 8).requires_grad_()
            torch.library.opcheck(scatter_op, (y, u, dim, 2, name, 1), rtol=1e-10, atol=1e-10)
    return []


def test_torch_finds_no_fault_with_the_operators(gloo: Gloo) -> None:
    assert gloo(2).run(failed_checks, timeout=60.0) == [[], []]


def refusal() -> str:
    def reduce(x: Tensor, w: Tensor) -> Tensor:
        return matmul_all_reduce(x, w, "tp", dst=R, overlap="require")

    with body(), pytest.raises(Exception, match="has no operator for it") as caught:
        torch.compile(reduce, backend="eager", fullgraph=True)(normal(1, 4, 3), normal(2, 3, 2))
    return type(caught.value).__name__


def test_an_all_reduce_that_must_overlap_is_refused(gloo: Gloo) -> None:
    assert len(set(gloo(2).run(refusal))) == 1
