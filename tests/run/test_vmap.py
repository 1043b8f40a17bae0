"""Batched bodies: what they can and cannot do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional

from shardmap_torch import (
    P,
    Partial,
    R,
    TransformError,
    V,
    all_gather,
    all_reduce,
    axis_index,
    make_mesh,
    reinterpret,
)
from shardmap_torch import shard_map as checked
from tests.programs.support.everywhere import same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random

MESH = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")


def test_a_backward_that_the_body_let_out_is_refused() -> None:
    """The ranks of such a backward are levels of vmap, which have ended."""
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
        "all_reduce('tp', Partial -> R) ran after the batched body had ended, where its ranks "
        "exist no "
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


@pytest.mark.parametrize("axes", [("tp",), ("dp", "tp")], ids=str)
@pytest.mark.parametrize("dst", [V, Partial], ids=str)
def test_what_varies_from_now_on_can_be_written_to(axes: tuple[str, ...], dst: Any) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        own = reinterpret(w * w, axes, src=R, dst=dst).clone()
        return own.add_(x)

    def derived(simulate: Any) -> list[Tensor]:
        mesh = make_mesh((2,) * len(axes), axes, kind="simulated", simulate=simulate)
        specs = (P(axes), P(replicate=set(axes)))
        mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(partial=set(axes)))
        x, w = (random((count,), 0).requires_grad_() for count in (2 * 2 ** len(axes), 2))
        y = mapped(x, w)
        return [y.detach(), *torch.autograd.grad((y**2).sum(), (x, w))]

    for actual, expected in zip(derived("vmap"), derived("ranks"), strict=True):
        same(actual, expected)


def test_a_branch_that_the_check_does_not_see_is_taken_by_each_rank() -> None:
    """Libraries leave such branches out on tensors without values, as masks of transformers do."""

    def body(x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) or not (x > 0).all():
            return x.relu()
        return x

    def mapped(simulate: Any) -> Callable[[Tensor], Tensor]:
        mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
        return checked(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))

    x = torch.tensor([1.0, 2.0, -3.0, 4.0])
    assert mapped("auto")(x).tolist() == x.relu().tolist()
    with pytest.raises(
        TransformError, match=r"control flow, at .*test_vmap.py:\d+.*\nFix: use make"
    ):
        mapped("vmap")(x)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: [torch.sin, torch.cos][axis_index("tp")](x),
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x * x.tolist()[0],
        lambda x: x.repeat_interleave(axis_index("tp") + 1),
    ],
)
def test_one_program_names_what_only_ranks_run_where_nothing_is_checked(body: Any) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")
    mapped = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(
        TransformError, match=r"cannot run, .*test_vmap.py:\d+.*\nFix: use make_mesh"
    ):
        mapped(torch.ones(4))


def test_what_autocast_casts_as_a_whole_runs_on_ranks() -> None:
    """torch.func.vmap takes it apart before autocast sees it, into what that does not cast."""

    def attend(x: Tensor, w: Tensor) -> Tensor:
        q = functional.linear(x, w).unflatten(-1, (-1, 2)).transpose(0, 1)
        return functional.scaled_dot_product_attention(q * torch.ones(2), q, q)

    x, w = random((3, 8), 0).float(), random((8, 8), 1).float().requires_grad_()
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = checked(attend, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P("tp"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mapped(x, w), attend(x, w))
