"""Function: an autograd.Function whose backward communicates, wherever and whenever it runs."""

import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import shardmap_torch
from shardmap_torch import (
    CollectiveError,
    Function,
    I,
    P,
    R,
    TransformError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    make_mesh,
    reduce_scatter,
    shard_map,
)
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.mesh import Mesh
from tests.support.golden import told
from tests.support.pool import Gloo

# torch compiles its forward-mode decompositions when the first one is used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Strategy = Literal["vmap", "ranks"]
Gathered = Callable[[Tensor, Tensor], Tensor]


class GatherMatmul(Function):
    """all_gather(x) @ w with a backward of its own, which gathers x again."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, axis: str) -> Tensor:
        return all_gather(x, axis, dst=R) @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, ctx.axis = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        assert current_scope() is not None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, w = ctx.saved_tensors
        assert ctx.needs_input_grad[2:] == (False,)
        whole = all_gather(x, ctx.axis, dst=R)
        return reduce_scatter(grad @ w.mT, ctx.axis), whole.mT @ grad, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        x, w = ctx.saved_tensors
        dx, dw, _ = tangents
        parts = [all_gather(dx, ctx.axis, dst=R) @ w] if dx is not None else []
        parts += [all_gather(x, ctx.axis, dst=R) @ dw] if dw is not None else []
        total: Tensor = sum(parts[1:], parts[0])
        return total


class OldGatherMatmul(Function):
    """A Function in the form that torch.func cannot transform, with `vjp` for `backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return all_gather(x, "tp", dst=R) @ w

    @staticmethod
    def vjp(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        x, w = ctx.saved_tensors
        return reduce_scatter(grad @ w.mT, "tp"), all_gather(x, "tp", dst=R).mT @ grad


def ours(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = GatherMatmul.apply(x, w, "tp")
    return result


def old(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = OldGatherMatmul.apply(x, w)
    return result


def derived(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, "tp", dst=R) @ w


def simulated() -> Mesh:
    return make_mesh((2, 2), ("dp", "tp"), kind="simulated")


def model(gathered: Gathered, mesh: Mesh) -> Callable[..., Tensor]:
    @shard_map(
        mesh=mesh,
        in_specs=(P(("dp", "tp")), P(None, "tp", replicate="dp")),
        out_specs=P(),
        check=False,
    )
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = all_gather(torch.tanh(gathered(x, w)), "tp", dim=1, dst=I)
        return all_gather(y, "dp", dst=I)

    return run


def _operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(8, 3, dtype=torch.float64, generator=generator),
        torch.randn(3, 4, dtype=torch.float64, generator=generator),
    )


X, W = _operands()


def same(
    compute: Callable[[Gathered], Any], gathered: Gathered = ours, wanted: Gathered = derived
) -> None:
    torch.testing.assert_close(compute(gathered), compute(wanted), rtol=1e-12, atol=1e-10)


def loss_of(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(*args: Tensor) -> Tensor:
        return (f(*args) ** 2).sum()

    return loss


def gradients(loss: Callable[..., Tensor], create_graph: bool = False) -> Any:
    leaves = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=create_graph)
    if create_graph:
        total = sum(((g**2).sum() for g in grads), torch.zeros(()))
        return torch.autograd.grad(total, leaves)
    return grads


@pytest.mark.parametrize("gathered", [ours, old])
def test_backward_after_the_body_gives_the_derived_gradients(gathered: Gathered) -> None:
    same(lambda gathered: gradients(loss_of(model(gathered, simulated()))), gathered)


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "create_graph": lambda f: gradients(loss_of(f), create_graph=True),
    "grad": lambda f: torch.func.grad(loss_of(f), argnums=(0, 1))(X, W),
    "jvp": lambda f: torch.func.jvp(f, (X, W), (torch.cos(X), torch.sin(W))),
}


def test_func_grad_in_the_body_gives_the_derived_gradients() -> None:
    def compute(gathered: Gathered) -> Any:
        @shard_map(
            mesh=simulated(),
            in_specs=(P(("dp", "tp")), P(None, "tp")),
            out_specs=(P(("dp", "tp")), P(None, "tp", partial="dp")),
            check=False,
        )
        def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            def loss(x: Tensor, w: Tensor) -> Tensor:
                return (gathered(x, w) ** 2).sum()

            grads: tuple[Tensor, Tensor] = torch.func.grad(loss, argnums=(0, 1))(x, w)
            return grads

        return run(X, W)

    same(compute)


def on_rank() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def whole(gathered: Gathered) -> Callable[..., Tensor]:
        return loss_of(model(gathered, mesh))

    for gathered in (ours, old):
        same(lambda gathered: gradients(whole(gathered)), gathered)
    for transform in TRANSFORMS.values():
        same(lambda gathered: transform(model(gathered, mesh)))  # noqa: B023 - called at once
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(gradients(whole(ours))))
    thread.start()
    thread.join()
    reference = gradients(loss_of(model(derived, simulated())))
    torch.testing.assert_close(results, [reference], rtol=0, atol=1e-10)


def test_processes_give_the_derived_gradients(gloo: Gloo) -> None:
    gloo(4).run(on_rank)


class Copy(Function):
    """Invariant to replicate: the cotangents of all ranks add up."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return all_reduce(grads[0], "tp", dst=I)


def copied(strategy: Literal["ranks", "auto"], check: bool) -> Callable[..., Tensor]:
    @shard_map(
        mesh=make_mesh((2,), ("tp",), kind="simulated", simulate=strategy),
        in_specs=(P(invariant="tp"), P("tp")),
        out_specs=P(),
        check=check,
    )
    def loss(w: Tensor, x: Tensor) -> Tensor:
        total: Tensor = all_reduce((Copy.apply(w) * x).sum(), "tp", dst=I)
        return total

    return loss


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("strategy", ["ranks", "auto"])
def test_cotangents_of_an_equal_value_are_added_once(
    strategy: Literal["ranks", "auto"], check: bool
) -> None:
    grad = torch.func.grad(copied(strategy, check))(torch.tensor(1.0), torch.arange(4.0))
    assert grad.item() == 6.0


def test_a_batched_body_has_no_functions() -> None:
    class Batchable(Copy):
        generate_vmap_rule = True

    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")
    f = shard_map(lambda w: Batchable.apply(w), mesh=mesh, in_specs=P(), out_specs=P())
    with told(TransformError):
        f(torch.tensor(1.0))


def test_in_the_body_cotangents_of_an_equal_value_are_each_ranks_own() -> None:
    @shard_map(
        mesh=make_mesh((2,), ("tp",), kind="simulated"),
        in_specs=(P(), P("tp")),
        out_specs=P(),
        check=False,
    )
    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            total: Tensor = (Copy.apply(w) * x).sum() + Copy.apply(w)
            return total

        grad: Tensor = torch.func.grad(loss)(w)
        return grad

    # 6 from the shards of x, and 1 from each rank.
    assert step(torch.tensor(1.0), torch.arange(4.0)).item() == 8.0


def test_a_subclass_may_call_the_backward_of_its_parent() -> None:
    class Doubled(GatherMatmul):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
            x, w, _ = GatherMatmul.backward(ctx, *grads)
            assert x is not None
            assert w is not None
            rank = axis_index(ctx.axis)
            return x + 0 * rank, 2 * w, None

    def compute(gathered: Gathered) -> Any:
        return gradients(loss_of(model(gathered, simulated())))

    once, doubled = compute(ours), compute(lambda x, w: Doubled.apply(x, w, "tp"))
    torch.testing.assert_close(doubled, (once[0], 2 * once[1]), rtol=0, atol=1e-10)


def test_outside_of_any_body_it_is_a_plain_function() -> None:
    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert current_scope() is None
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert current_scope() is None
            return 2 * grads[0]

    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(Double.apply(x).sum(), x)[0].tolist() == [2.0, 2.0]


class Plain(torch.autograd.Function):
    """A Function as the error describes it: its backward has no mesh."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", dst=R)

    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return all_reduce(grads[0], "tp", dst=R)


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_a_plain_function_whose_backward_communicates_is_told_of_ours(strategy: Strategy) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=strategy)

    @shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=False)
    def run(x: Tensor) -> Tensor:
        result: Tensor = Plain.apply(x)  # type: ignore[no-untyped-call]
        return result

    y = run(torch.ones(2, requires_grad=True))
    with told(CollectiveError):
        y.sum().backward()


@pytest.mark.parametrize("gradient", [torch.func.grad, shardmap_torch.grad])
def test_a_function_is_one_step_of_the_program_however_its_gradient_is_taken(gradient: Any) -> None:
    """Under functorch torch applies it twice, without only once."""
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")

    def body(x: Tensor) -> Tensor:
        y: Tensor = gradient(lambda x: all_reduce(Scaled.apply(x).square().sum(), "tp", dst=I))(x)
        return y

    x = torch.arange(4.0)
    assert shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x).equal(8 * x)


class Scaled(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * axis_size("tp")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * axis_size("tp")
