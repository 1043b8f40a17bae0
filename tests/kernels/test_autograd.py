"""Kernels where autograd is used otherwise than by one backward of one loss."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch.errors import TransformError
from shardmap_torch.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.kernels.support.calls import body, normal
from tests.support.pool import Pool

Gloo = Callable[[int], Pool]

KERNELS: Final[dict[str, Callable[..., Tensor]]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce to R": partial(matmul_all_reduce, dst="R"),
    "matmul_all_reduce to I": partial(matmul_all_reduce, dst="I"),
}


def written(kernel: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    """Gradients through a result that was written to in place."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = kernel(x, w)
    y.mul_(3.0).add_(x.sum())
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), (x, w))]


def jacobian(kernel: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    return list(torch.func.jacrev(lambda *xs: kernel(*xs).sin().sum(0), argnums=(0, 1))(x, w))


def jacobian_of_gradient(kernel: Callable[..., Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    gradient = torch.func.grad(lambda x, w: kernel(x, w).sin().sum())
    return [torch.func.jacrev(gradient)(x, w)]


USES: Final = (written, jacobian, jacobian_of_gradient)


def differences() -> dict[str, float]:
    """Overlapped against the unfused composition, whose derivatives are the collectives'."""
    found = {}
    with body():
        x, w = normal(1, 4, 3), normal(2, 3, 2)
        for name, kernel in KERNELS.items():
            for use in USES:
                ours, truth = (
                    use(lambda x, w, o=overlap, k=kernel: k(x, w, "tp", overlap=o), x, w)
                    for overlap in ("require", "off")
                )
                pairs = zip(ours, truth, strict=True)
                largest = max(float((a - b).abs().max()) for a, b in pairs)
                found[f"{name}, {use.__name__}"] = largest
    return found


def test_every_use_of_a_kernel_in_autograd_has_the_results_of_its_composition(gloo: Gloo) -> None:
    for found in gloo(2).run(differences, timeout=120):
        assert len(found) == len(KERNELS) * len(USES)
        assert {name: size for name, size in found.items() if not size < 1e-10} == {}


def batched(overlap: str) -> str:
    with body():
        x, w = normal(1, 4, 3).requires_grad_(), normal(2, 3, 2)
        y = all_gather_matmul(x, w, "tp", overlap=overlap).sum(1)  # type: ignore[call-overload]
        cotangents: Any = torch.eye(8, dtype=torch.float64)
        with pytest.raises(TransformError) as raised:
            torch.autograd.grad(y, x, cotangents, is_grads_batched=True)
        return str(raised.value)


@pytest.mark.parametrize("overlap", ["require", "off"])
def test_gradients_batched_by_autograd_are_refused_before_anything_is_sent(
    gloo: Gloo, overlap: str
) -> None:
    for text in gloo(2).run(batched, overlap):
        assert text == (
            "The backward of a collective cannot be batched by is_grads_batched=True, nor by "
            "vectorize=True of torch.autograd.functional. Use torch.func.jacrev, or torch.func."
            "vmap over the function that torch.func.vjp returns."
        )
