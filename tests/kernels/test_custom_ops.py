"""The kernels under torch.compile: operators where required, the composition by default."""

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from shardmap_torch.backends import process_group
from shardmap_torch.kernels import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from shardmap_torch.kernels.custom_ops import endpoint_name, overlapped_op
from tests.kernels.support.calls import body, normal
from tests.support.pool import Pool

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
    assert max(gloo(2).run(compiled_difference, overlap, timeout=120)) < 1e-10


EDGES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gather, no bias": (
        lambda x, w: all_gather_matmul(x, w, "tp", overlap="require"),
        [(4, 3), (3, 4)],
    ),
    "gather to no columns": (
        lambda x, w, bias: all_gather_matmul(x, w, "tp", bias=bias, overlap="require"),
        [(4, 3), (3, 0), (0,)],
    ),
    "reduce over no columns": (
        lambda x, w: matmul_all_reduce(x, w, "tp", dst="I", overlap="require"),
        [(4, 0), (0, 4)],
    ),
}


def differences_at_edges() -> dict[str, float]:
    """Compiled against eager, as in `compiled_difference`."""
    found = {}
    with body():
        for name, (function, shapes) in EDGES.items():
            torch._dynamo.reset()
            results = []
            for run in (torch.compile(function, backend="aot_eager", fullgraph=True), function):
                leaves = [normal(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
                y = run(*leaves)
                results.append([y.detach(), *torch.autograd.grad(y.pow(2).sum(), leaves)])
            pairs = [(a - b).abs().sum() for a, b in zip(*results, strict=True)]
            found[name] = float(torch.stack(pairs).sum())
    return found


def test_an_operator_without_bias_or_with_no_columns_is_the_eager_kernel(gloo: Gloo) -> None:
    for differences in gloo(2).run(differences_at_edges, timeout=120):
        assert set(differences) == set(EDGES)
        assert max(differences.values()) < 1e-10


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
    assert gloo(2).run(kernels_in_the_graph, "auto", timeout=120)[0] == []
    names = gloo(2).run(kernels_in_the_graph, "require", timeout=120)[0]
    assert len(names) == 2


def failed_checks() -> list[str]:
    """torch's own checks of schema, shapes, autograd registration and tracing."""
    check = partial(torch.library.opcheck, rtol=1e-10, atol=1e-10)
    gather, scatter = "gather/ring/2", "scatter/direct/2"
    with body() as backend, warnings.catch_warnings():
        # The check of 2.14 with dynamic shapes reads `.grad` of its own tensors so.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        name = endpoint_name(backend, ("tp",))
        for dim in (0, 1, 2):
            x = normal(1, 3, 4, 6).requires_grad_()
            w = normal(2, 12 if dim == 2 else 6, 5).requires_grad_()
            v = normal(3, 12 if dim == 2 else 6, 2).requires_grad_()
            bias = normal(4, 5).requires_grad_()
            check(overlapped_op, (x, [w, v], [bias], [0], dim, 2, name, gather, scatter))
            y, u = normal(5, 4, 2, 6).requires_grad_(), normal(6, 6, 8).requires_grad_()
            check(overlapped_op, (y, [u], [], [], dim, 2, name, scatter, gather))
        for backward in ("sum/direct/2", ""):
            y, u = normal(5, 4, 2, 6).requires_grad_(), normal(6, 6, 8).requires_grad_()
            check(overlapped_op, (y, [u], [], [], 0, 2, name, "reduce/direct/2", backward))
    return []


def test_torch_finds_no_fault_with_the_operators(gloo: Gloo) -> None:
    assert gloo(2).run(failed_checks, timeout=120) == [[], []]


def reduced(dst: Any, overlap: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return matmul_all_reduce(x, w, "tp", dst=dst, bias=bias, chunks=2, overlap=overlap)

    return run


def compiled_reduction(dst: Any) -> tuple[float, list[str]]:
    """The largest difference from the composition in values and gradients, and the operators."""
    names: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(n.target) for n in graph.graph.nodes if "overlapped_" in str(n.target))
        return make_boxed_func(graph.forward)

    shapes = ((3, 5, 4), (4, 6), (6,))
    results = []
    with body():
        compiled = torch.compile(
            reduced(dst, "require"), backend=aot_autograd(fw_compiler=collect), fullgraph=True
        )
        for function in (compiled, reduced(dst, "off")):
            leaves = [normal(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
            y = function(*leaves)
            results.append([y.detach(), *torch.autograd.grad(y.pow(3).sum(), leaves)])
    difference = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    return difference, names


@pytest.mark.parametrize(("dst", "num_operators"), [("R", 2), ("I", 1)])
def test_a_compiled_all_reduce_has_an_operator_and_one_backward_where_it_sends(
    gloo: Gloo, dst: str, num_operators: int
) -> None:
    for difference, names in gloo(3).run(compiled_reduction, dst, timeout=120):
        assert difference < 1e-10
        assert len(names) == num_operators


def schedules_in_the_graph() -> list[Any]:
    found: list[Any] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if "matmul" in str(n.target)]
        found.extend(each for n in nodes for each in n.args if isinstance(each, str))
        return graph.forward

    def ring(x: Tensor, w: Tensor) -> Tensor:
        options: Any = {"overlap": "require", "schedule": "ring", "chunks": 3}
        y = all_gather_matmul(x, w, "tp", **options)
        return matmul_reduce_scatter(y, w.t(), "tp", **options)

    with body():
        x, w = normal(1, 6, 4), normal(2, 4, 4)
        torch.compile(ring, backend=collect, fullgraph=True)(x, w)
    return [text for text in found if "/" in text]


def test_a_compiled_ring_is_a_ring_in_its_backward_too(gloo: Gloo) -> None:
    assert gloo(2).run(schedules_in_the_graph, timeout=120)[0] == [
        "gather/ring/3",
        "scatter/ring/3",
        "scatter/ring/3",
        "gather/ring/3",
    ]


def _on_a_gpu(group: dist.ProcessGroup) -> bool:
    return False


def matmuls_that_inductor_can_fuse(dim: int) -> tuple[int, int]:
    """Returns what the micro-pipeline pass finds: gathers and scatters beside an mm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of what inductor imports.
        inductor = import_module("torch._inductor.fx_passes.micro_pipeline_tp")
        post_grad = import_module("torch._inductor.fx_passes.post_grad")
    found: list[tuple[int, int]] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        post_grad.view_to_reshape(graph)
        gathers = inductor.find_all_gather_patterns(graph.graph)
        scatters = inductor.find_reduce_scatter_patterns(graph.graph)
        fusable = [len(inductor._find_consumer_matmuls(match.res_node)) for match in gathers]
        produced = [inductor._find_producer_matmul(match.input_node) for match in scatters]
        found.append((sum(fusable), sum(each is not None for each in produced)))
        return make_boxed_func(graph.forward)

    def layers(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        a, b = all_gather_matmul(x, (w, v), "tp", gather_dim=dim)
        return matmul_reduce_scatter(a * b, u, "tp", scatter_dim=dim)

    # The pass is for GPUs; on gloo a reduce-scatter is an exchange, which it does not look for.
    with mock.patch.object(process_group, "_is_gloo", new=_on_a_gpu), body():
        operands = normal(1, 4, 6, 8), normal(2, 8, 5), normal(3, 8, 5), normal(4, 5, 8)
        views = get_decompositions([torch.ops.aten._unsafe_view])  # As inductor does.
        backend = aot_autograd(fw_compiler=collect, decompositions=views)
        y = torch.compile(layers, backend=backend, fullgraph=True)(*operands)
        assert float((y - layers(*operands)).abs().max()) < 1e-10
    return found[0]


@pytest.mark.parametrize("dim", [0, 1])
def test_inductor_recognises_the_composition_beside_its_matmuls(gloo: Gloo, dim: int) -> None:
    """Two matmuls of one gather, and one before the scatter."""
    assert gloo(2).run(matmuls_that_inductor_can_fuse, dim, timeout=120) == [(2, 1)] * 2
