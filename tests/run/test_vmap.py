"""Batched bodies: what they can and cannot do."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    TransformError,
    V,
    all_gather,
    all_reduce,
    make_mesh,
    reinterpret,
)
from shardmap_torch import shard_map as checked
from tests.programs.support.everywhere import same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random
from tests.support.golden import told

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
    with told(TransformError):
        kept[0](random((2,), 1))


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
    assert shapes == [(4, 2)] * 2  # of the check, and of the run


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


def test_what_nothing_has_checked_runs_on_ranks() -> None:
    """Hooks, questions and numbers that one batched program would drop or cannot have."""
    seen: list[float] = []

    def body(x: Tensor) -> Tensor:
        x.register_hook(lambda g: seen.append(float(g.sum())))
        return x * x.sum().item() if x.requires_grad else x

    x = torch.arange(4.0).requires_grad_()
    y = checked(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check=False)(x)
    assert y.tolist() == [0.0, 1.0, 10.0, 15.0]
    y.sum().backward()
    assert sorted(seen) == [2.0, 10.0]


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


LAST: Final = torch.channels_last
IMAGES: Final = random((4, 2, 6, 6), 2)
BY_RANK: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "contiguous": lambda x: x.contiguous(memory_format=LAST),
    "to": lambda x: x.to(memory_format=LAST),
    "a cast": lambda x: x.to(torch.float32, memory_format=LAST).double(),
    "clone": lambda x: x.clone(memory_format=LAST).relu(),
    "channels_last_3d": lambda x: x[..., None].contiguous(memory_format=torch.channels_last_3d),
    "empty_like": lambda x: torch.empty_like(x, memory_format=LAST).copy_(x),
    "a pooling": lambda x: functional.max_pool2d(x.contiguous(memory_format=LAST), 2),
    "a convolution": lambda x: functional.conv2d(
        x.to(memory_format=LAST), torch.ones(2, 2, 1, 1).double().to(memory_format=LAST)
    ),
    "clamped by tensors": lambda x: torch.zeros(6).double().clamp(x[0, 0], x[0, 0] + 1)[None],
    "stacked columns": lambda x: torch.column_stack((x[:, 0, 0], x[:, 1, 1])),
    "rrelu": lambda x: functional.rrelu(x, training=False),
}


@pytest.mark.parametrize("name", BY_RANK)
def test_what_torch_cannot_batch_runs_on_ranks_with_its_gradient(name: str) -> None:
    body = BY_RANK[name]

    def found(simulate: Any) -> list[Tensor]:
        mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
        x = IMAGES.clone().requires_grad_()
        y = checked(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x)]

    for _ in range(2):  # the second check repeats what the first has typed
        for actual, expected in zip(found("auto"), found("ranks"), strict=True):
            same(actual, expected)
    with pytest.raises((TransformError, RuntimeError)):
        found("vmap")


def test_one_program_names_a_memory_format_that_only_ranks_have() -> None:
    mapped = checked(BY_RANK["contiguous"], mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(TransformError, match="single ranks run: clone with a memory format"):
        mapped(IMAGES)


def test_an_error_of_the_bodys_own_is_that_of_a_rank() -> None:
    def body(x: Tensor) -> Tensor:
        root: Tensor = torch.linalg.cholesky(x)
        return root

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = checked(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky") as caught:
        mapped(-torch.eye(2).expand(2, 2, 2))
    assert not isinstance(caught.value, TransformError)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_a_loss_keeps_the_weight_that_torch_loses(simulate: Any, check: Any) -> None:
    x, y, w = (random((4, 3), seed) for seed in range(3))

    def loss(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        weighted: Any = functional.l1_loss  # whose weight torch's stubs lack
        total: Tensor = weighted(x, y, weight=w.expand_as(x), reduction="sum")
        return total

    def total(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return all_reduce(loss(x, y, w), "tp", src=Partial, dst=I)

    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
    specs = (P("tp"), P("tp"), P(replicate={"tp"}))
    mapped = checked(total, mesh=mesh, in_specs=specs, out_specs=P(), check=check)
    weight = w[0].clone().requires_grad_()
    for f in (mapped, loss):
        same(f(x, y, weight), loss(x, y, w[0]))
    found, expected = (torch.autograd.grad(f(x, y, weight), weight)[0] for f in (mapped, loss))
    same(found, expected)
