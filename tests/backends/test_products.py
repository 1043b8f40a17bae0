"""Products for all simulated ranks at once: values, derivatives, and how many are made."""

from typing import Any

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
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from tests.programs.support.harness import random as drawn


class _Shapes(TorchDispatchMode):
    """Notes the sizes of what products of matrices make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.made.append(tuple([n for n in out.shape if n > 1]))
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
