"""What a batched body can and cannot do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, R, TransformError, all_gather, all_reduce, make_mesh
from tests.programs.everywhere import same
from tests.programs.everywhere import unchecked as shard_map
from tests.programs.harness import random

MESH = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")


def test_a_backward_that_the_body_let_out_is_refused() -> None:
    """Its ranks are levels of vmap, which have ended."""
    kept: list[Callable[..., Any]] = []

    def body(x: Tensor) -> Tensor:
        y, pull_back, *_ = torch.func.vjp(lambda x: all_reduce(x, "tp", dst=R), x)
        kept.append(pull_back)
        value: Tensor = y
        return value

    shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P(replicate="tp"))(random((4,), 0))
    with pytest.raises(TransformError) as caught:
        kept[0](random((2,), 1))
    assert str(caught.value) == (
        "all_reduce('tp', P -> R) ran after the batched body had ended, where its ranks exist no "
        'more. Use make_mesh(..., simulate="ranks") for code that runs backward by itself.'
    )


def test_values_that_are_equal_on_all_ranks_are_computed_once() -> None:
    shapes: list[torch.Size] = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.Tensor.__matmul__ or func is torch.Tensor.matmul:
                inner = out
                while torch._C._functorch.is_functorch_wrapped_tensor(inner):
                    inner = torch._C._functorch.get_unwrapped(inner)
                shapes.append(inner.shape)
            return out

    def body(x: Tensor, w: Tensor) -> Tensor:
        return all_gather(x, "tp", dst=R) @ w

    x, w = random((4, 3), 0), random((3, 2), 1)
    with Seen():
        y = shard_map(body, mesh=MESH, in_specs=(P("tp"), P()), out_specs=P(replicate="tp"))(x, w)
    same(y, x @ w)
    assert shapes == [(4, 2)]
