"""The kernels under torch.compile: their composition, which inductor can fuse."""

import warnings
from collections.abc import Callable
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
from shardmap_torch.errors import KernelError
from shardmap_torch.kernels import all_gather_matmul, matmul_reduce_scatter
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
        a, b = all_gather_matmul(x, (w, v), "tp", bias=(bias, None), dim=1, overlap=overlap)
        return matmul_reduce_scatter(a * b.sin(), v.t(), "tp", dim=-2, overlap=overlap)

    return run


def value_and_gradients(function: Callable[..., Tensor]) -> list[Tensor]:
    shapes = ((2, 6, 8), (8, 4), (8, 4), (4,))
    leaves = [normal(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), leaves)]


def compiled_difference() -> float:
    with body():
        compiled = torch.compile(block("auto"), backend="aot_eager", fullgraph=True)
        ours, truth = value_and_gradients(compiled), value_and_gradients(block("off"))
    return max(float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True))


def test_one_compiled_graph_equals_the_eager_composition(gloo: Gloo) -> None:
    assert max(gloo(2).run(compiled_difference, timeout=120)) < 1e-10


def refusal() -> str:
    with body(), pytest.raises(KernelError) as caught:
        torch.compile(block("require"), backend="eager")(
            normal(1, 2, 6, 8), normal(2, 8, 4), normal(3, 8, 4), normal(4, 4)
        )
    return str(caught.value)


def test_required_overlap_is_refused_in_compiled_code(gloo: Gloo) -> None:
    for text in gloo(2).run(refusal, timeout=120):
        assert text.startswith(
            "all_gather_matmul over axis 'tp' cannot overlap: torch.compile is active, whose own "
            "fusions need the composition.\n"
        )


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
        a, b = all_gather_matmul(x, (w, v), "tp", dim=dim)
        return matmul_reduce_scatter(a * b, u, "tp", dim=dim)

    # The pass is for GPUs; on gloo a reduce-scatter is an exchange, which it does not look for.
    with mock.patch.object(process_group, "_is_gloo", new=_on_a_gpu), body():
        operands = normal(1, 4, 6, 8), normal(2, 8, 5), normal(3, 8, 5), normal(4, 5, 8)
        views = get_decompositions([torch.ops.aten._unsafe_view])  # As inductor does.
        backend = aot_autograd(fw_compiler=collect, decompositions=views)
        y = torch.compile(layers, backend=backend, fullgraph=True)(*operands)
        assert float((y - layers(*operands)).abs().max()) < 1e-10
    return found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [0, 1])
def test_inductor_recognises_the_composition_beside_its_matmuls(gloo: Gloo, dim: int) -> None:
    """Two matmuls of one gather, and one before the scatter."""
    assert gloo(2).run(matmuls_that_inductor_can_fuse, dim, timeout=120) == [(2, 1)] * 2
