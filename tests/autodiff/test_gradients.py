"""`grad`, `value_and_grad` and `vjp`: JAX's signatures, torch.func's values, autograd's cost."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, assert_type

import optree
import pytest
import torch
from torch import Tensor
from torch._functorch import eager_transforms

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShardTypeError,
    TransformError,
    all_reduce,
    convert,
    full,
    grad,
    make_mesh,
    shard_map,
    value_and_grad,
    vjp,
)
from shardmap_torch.optim import sgd
from tests.support.golden import told
from tests.support.pool import Gloo

Params = dict[str, Any]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def example() -> tuple[Params, Tensor]:
    params = {"w": [random(6, 4), random(4, 6, seed=1)], "scale": random(6, seed=2)}
    return params, random(8, 6, seed=3)


def plain_loss(params: Params, x: Tensor) -> Tensor:
    w1, w2 = params["w"]
    total: Tensor = ((x * params["scale"]) @ w1).tanh().matmul(w2).square().sum()
    return total


def loss(params: Params, x: Tensor) -> tuple[Tensor, Params]:
    """The hidden width is sharded over "tp", the batch over "dp"; also what it has computed."""
    params = convert(params, "dp", src=I, dst=R)
    w1, w2 = params["w"]
    scaled = convert(x * params["scale"], "tp", src=I, dst=R)
    y = all_reduce((scaled @ w1).tanh() @ w2, "tp", dst=I)
    return all_reduce(y.square().sum(), "dp", dst=I), {"y": y, "count": 3, "none": None}


CUTS = {"w": [P(None, "tp"), P("tp")], "scale": P()}


def by_value_and_grad(params: Params, x: Tensor) -> tuple[Tensor, Tensor, Params]:
    (value, aux), gradients = value_and_grad(loss, has_aux=True)(params, x)
    return value, aux["y"], gradients


def by_vjp(params: Params, x: Tensor) -> tuple[Tensor, Tensor, Params]:
    value, pull_back, aux = vjp(lambda p: loss(p, x), params, has_aux=True)
    pull_back(torch.ones_like(value))
    return value, aux["y"], pull_back(torch.ones_like(value))[0]


WAYS = [by_value_and_grad, by_vjp]


def hold_against_one_device(mesh: Mesh, check: bool, body: Callable[..., Any]) -> None:
    typed = CUTS if check else {"w": [P(None, "tp"), P("tp")], "scale": P()}
    step = shard_map(
        body,
        mesh=mesh,
        in_specs=(typed, P("dp")),
        out_specs=(P(), P("dp"), typed),
        check=check,
    )
    params, x = example()
    found = full(step(params, x))
    gradients, value = torch.func.grad_and_value(plain_loss)(params, x)
    torch.testing.assert_close(found[0], value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[2], gradients, rtol=1e-10, atol=1e-10)
    assert not any(t.requires_grad for t in optree.tree_leaves(found))


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("body", WAYS)
def test_values_and_gradients_are_those_of_one_device_on_simulated_ranks(
    body: Callable[..., Any], check: bool, strategy: Any
) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=strategy)
    hold_against_one_device(mesh, check, body)


def in_worker() -> None:
    mesh = make_mesh((1, 2), ("dp", "tp"))
    for body in WAYS:
        for check in (True, False):
            hold_against_one_device(mesh, check, body)
    take_no_level(mesh)
    differentiate_from_outside(mesh)


def test_values_and_gradients_are_those_of_one_device_on_processes(gloo: Gloo) -> None:
    gloo(2).run(in_worker)


def take_no_level(mesh: Mesh) -> None:
    """Fails where a run, after the check, opens a level of torch.func."""

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a level was opened")

    params, x = example()
    specs: Any = (CUTS, P("dp"))
    for body in WAYS:
        step = shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P("dp"), CUTS))
        step(params, x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eager_transforms, "grad_and_value_impl", fail)
            patch.setattr(eager_transforms, "_vjp_with_argnums", fail)
            step(params, x)


def test_eager_ranks_take_gradients_by_plain_autograd() -> None:
    take_no_level(make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks"))


def cubed(w: Tensor, x: Tensor) -> Tensor:
    shared = convert(w, "dp", src=I, dst=R)
    return all_reduce((shared**3 * x).sum(), "dp", dst=I)


def differentiate_from_outside(mesh: Mesh) -> None:
    w, x = torch.tensor(2.0, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)
    for check, spec in ((True, P()), (False, P(invariant=mesh.axis_names))):
        step = shard_map(
            grad(cubed), mesh=mesh, in_specs=(spec, P("dp")), out_specs=P(), check=check
        )
        first = full(step(w, x))
        leaf = w.clone().requires_grad_()
        (second,) = torch.autograd.grad(full(step(leaf, x)), leaf)
        torch.testing.assert_close(first, 3 * w**2 * x.sum())
        torch.testing.assert_close(second, 6 * w * x.sum())


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_a_gradient_in_the_body_is_differentiated_from_outside(strategy: Any) -> None:
    differentiate_from_outside(
        make_mesh((2,), ("dp",), kind="simulated", simulate=strategy),
    )


def test_a_closed_over_tensor_that_begins_to_require_a_gradient_gets_one() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    w = torch.tensor(2.0)

    @shard_map(mesh=mesh, in_specs=(P(),), out_specs=P())
    def step(x: Tensor) -> Tensor:
        found: Tensor = grad(lambda x: w * x**2)(x)
        return found

    x = torch.tensor(3.0)
    assert not step(x).requires_grad
    w.requires_grad_()
    (second,) = torch.autograd.grad(step(x), w)
    assert second == 6.0


def test_outside_of_a_body_nested_gradients_are_right() -> None:
    x, w = torch.tensor(2.0), torch.tensor(3.0, requires_grad=True)
    assert grad(grad(lambda x: x**3))(x) == 12.0
    assert grad(lambda x: grad(lambda y: x * y**2)(x))(x) == 8.0
    assert torch.func.grad(grad(lambda x: x**3))(x) == 12.0
    (mixed,) = torch.autograd.grad(grad(lambda x: w * x**2)(x), w)
    assert mixed == 4.0
    with torch.no_grad():
        assert grad(lambda x: w * x**2)(x) == 12.0


Named = dict[str, Tensor]


def test_type_checkers_know_the_types_of_a_gradient_and_of_updated_parameters() -> None:
    """mypy reads these; at run time `assert_type` is the identity."""

    def loss(params: Named, scale: float) -> Tensor:
        return scale * params["w"]

    def both(params: Named) -> tuple[Tensor, int]:
        return params["w"], 3

    params = {"w": torch.tensor(2.0)}
    value, grads = value_and_grad(loss)(params, 3.0)
    assert_type(value, Tensor)
    assert_type(grads, Named)
    assert_type(grad(loss)(params, scale=1.0), Named)
    assert_type(grad(both, has_aux=True)(params), tuple[Named, int])
    assert_type(value_and_grad(both, has_aux=True)(params), tuple[tuple[Tensor, int], Named])
    updated, _ = sgd(1.0).update(params, grads, sgd(1.0).init(params))
    assert_type(updated, Named)
    assert updated["w"] == -1.0


def test_arguments_are_chosen_by_argnums_as_in_jax() -> None:
    def f(a: Tensor, b: list[Tensor], c: Tensor, scale: float = 1.0) -> Tensor:
        return scale * (a * b[0] ** 2 + 0 * c.detach())

    a, b, c = torch.tensor(2.0), [torch.tensor(3.0)], torch.tensor(1.0)
    assert grad(f)(a, b, c) == 9.0
    assert grad(f, 1)(a, b, c, scale=2.0) == [24.0]
    assert grad(f, -1)(a, b, c) == 0.0
    assert grad(f, (1, 0))(a, b, c) == ([12.0], 9.0)


def test_what_is_not_differentiated_comes_back_as_it_is() -> None:
    aux = {"count": 3, "none": None, "x": torch.tensor([4])}
    f = lambda x: (x**2, aux)  # noqa: E731
    assert grad(f, has_aux=True)(torch.tensor(3.0)) == (6.0, aux)
    assert value_and_grad(f, has_aux=True)(torch.tensor(3.0)) == ((9.0, aux), 6.0)
    assert torch.func.grad(lambda x: grad(f, has_aux=True)(x)[0])(torch.tensor(3.0)) == 2.0


def test_a_pull_back_gives_a_tuple_and_can_be_batched() -> None:
    out, pull_back = vjp(lambda x, y: {"xy": x * y, "y": y}, torch.tensor(2.0), torch.tensor(5.0))
    assert out == {"xy": 10.0, "y": 5.0}
    assert pull_back({"xy": torch.tensor(1.0), "y": torch.tensor(1.0)}) == (5.0, 3.0)
    gx, gy = torch.func.vmap(pull_back)({"xy": torch.eye(2)[0], "y": torch.eye(2)[1]})
    assert gx.tolist() == [5.0, 0.0]
    assert gy.tolist() == [2.0, 1.0]
    assert not gx.requires_grad


class Token:
    """Lives as long as the node that holds it."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


def test_no_graph_outlives_a_gradient() -> None:
    tokens: list[weakref.ref[Token]] = []

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        token = Token()
        tokens.append(weakref.ref(token))
        y = Doubled.apply(x, token)  # type: ignore[no-untyped-call]
        return y.sum(), y

    kept: Any = value_and_grad(f, has_aux=True)(torch.ones(3))
    gc.collect()
    assert tokens[0]() is None
    assert not any(t.requires_grad for t in optree.tree_leaves(kept))
    _, pull_back, aux = vjp(f, torch.ones(3), has_aux=True)
    assert tokens[1]() is not None
    assert not aux.requires_grad
    del pull_back
    gc.collect()
    assert tokens[1]() is None


def test_an_unreduced_gradient_is_refused_with_the_words_of_torch_func() -> None:
    mesh = make_mesh((2,), ("dp",), kind="abstract")

    def replicated(w: Tensor, x: Tensor) -> Tensor:
        total: Tensor = (w * x).sum()
        return total

    def text(take: Callable[..., Any]) -> str:
        specs = (P(replicate="dp"), P("dp"))
        program = shard_map(take, mesh=mesh, in_specs=specs, out_specs=P())
        with pytest.raises(ShardTypeError) as error:
            program(torch.ones(3), torch.ones(4, 3))
        return str(error.value)

    assert text(grad(replicated)) == text(torch.func.grad(replicated))


def identity(x: Any) -> Any:
    return x


ERRORS: list[Callable[[], Any]] = [
    lambda: grad(identity)(torch.ones(2)),
    lambda: grad(lambda x: 3)(torch.tensor(1.0)),  # type: ignore[arg-type, return-value]
    lambda: grad(identity)({"a": torch.ones(2, dtype=torch.int64), "b": [3]}),
    lambda: grad(identity, 2)(torch.tensor(1.0)),
    lambda: grad(identity, (0, -1))(torch.tensor(1.0)),
    lambda: grad(identity, has_aux=True)(torch.tensor(1.0)),
    lambda: vjp(lambda x: (x, 3), torch.tensor(1.0)),
    lambda: vjp(identity, torch.tensor(1.0))[1]((torch.tensor(1.0),)),
]


@pytest.mark.parametrize("call", ERRORS)
def test_misuse_is_refused_and_says_why(call: Callable[[], Any]) -> None:
    with told(TransformError):
        call()
