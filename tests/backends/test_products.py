"""Products for all simulated ranks at once: values, derivatives, and how many are made."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    S,
    all_reduce,
    check_program,
    make_mesh,
    nn,
    shard_map,
    value_and_grad,
)
from shardmap_torch.backends.products import _Product
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from tests.programs.support.harness import random as drawn

SIZES = (1, 2, 3)


def _operand(draw: random.Random, ranks: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Draws a tensor in any layout, that is equal on some ranks or repeats its values for them."""
    own = [1 if draw.random() < 0.3 else n for n in ranks]
    kept = [1 if draw.random() < 0.3 else n for n in own]
    base = torch.randn(*kept, *shape, dtype=torch.float64)
    order = draw.sample(range(base.ndim), base.ndim)
    base = base.permute(order).contiguous().permute([order.index(at) for at in range(len(order))])
    return base.expand(*own, *shape).detach().requires_grad_()


def _derivatives(f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> list[Tensor]:
    """Returns the value, both gradients of all its entries, and gradients of these."""
    y = f(a, b)
    seed = torch.linspace(-1, 1, y.shape[0] if y.ndim else 1, dtype=y.dtype)
    cotangent = seed.reshape(-1, *[1] * (y.ndim - 1)).expand_as(y)
    first = torch.autograd.grad(y, (a, b), cotangent, create_graph=True)
    plain = torch.autograd.grad(f(a, b), (a, b), cotangent)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), (a, b))  # type: ignore[arg-type]
    return [y, *first, *plain, *second]


@pytest.mark.parametrize("seed", range(40))
def test_products_and_their_derivatives_are_those_of_einsum(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    ranks = [draw.choice(SIZES) for _ in range(draw.randint(0, 3))]
    rows = [draw.choice((*SIZES, 0)) for _ in range(draw.randint(1, 3))]
    columns = [draw.choice(SIZES) for _ in range(draw.randint(1, 3))]
    inner = draw.choice((1, 3))
    a = _operand(draw, ranks, [*rows, inner])
    b = _operand(draw, ranks, [inner, *columns])
    sizes = tuple(
        1 if draw.random() < 0.4 else max(m, n)
        for m, n in zip(a.shape[: len(ranks)], b.shape[: len(ranks)], strict=True)
    )
    over, of_rows, of_columns = "ABC"[: len(ranks)], "abc"[: len(rows)], "xyz"[: len(columns)]
    of = f"{over}{of_rows}k", f"{over}k{of_columns}", f"{over}{of_rows}{of_columns}"
    summed = [at for at, size in enumerate(sizes) if size == 1]

    def product(a: Tensor, b: Tensor) -> Tensor:
        y: Tensor = _Product.apply(a, b, of, sizes)
        return y

    def expected(a: Tensor, b: Tensor) -> Tensor:
        y = torch.einsum(f"...{of_rows}k,...k{of_columns}->...{of_rows}{of_columns}", a, b)
        return y.sum(summed, keepdim=True) if summed else y

    for own, other in zip(_derivatives(product, a, b), _derivatives(expected, a, b), strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own, other)


class _Shapes(TorchDispatchMode):
    """Notes the sizes of what products of matrices make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.made.append(tuple(out.shape))
        return out


def test_layers_neither_repeat_weights_for_ranks_nor_write_addends() -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")

    @shard_map(
        mesh=mesh,
        in_specs=(P("dp", "tp"), P(None, None, "tp"), P("tp")),
        out_specs=(P(), (P(None, None, "tp", partial={"dp"}), P("tp", partial={"dp"}))),
    )
    def step(x: Tensor, up: Tensor, down: Tensor) -> object:
        def loss(up: Tensor, down: Tensor) -> Tensor:
            h = nn.column_linear(x, up, "tp", src=S(1)).sin().sum(-2)
            y = nn.row_linear(h, down, "tp", dst=S(1))
            return all_reduce(y.square().sum(), ("dp", "tp"), dst=I)

        return value_and_grad(loss, argnums=(0, 1))(up, down)

    x, up, down = drawn((4, 8, 6), 0), drawn((6, 2, 16), 1), drawn((16, 6), 2)
    check_program(step, x, up, down)
    step(x, up, down)
    with _Shapes() as seen:
        step(x, up, down)
    assert seen.made == [(32, 32), (32, 6), (32, 16), (2, 16, 6), (2, 6, 32)]
