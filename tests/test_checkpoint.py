"""checkpoint: the same values and gradients with less saved, wherever it runs."""

import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardmap_torch import (
    I,
    P,
    R,
    TransformError,
    V,
    all_reduce,
    axis_index,
    checkpoint,
    convert,
    full,
    make_mesh,
    nn,
    save_results,
    shard_map,
    value_and_grad,
)
from shardmap_torch.mesh import Mesh
from tests.support.golden import told
from tests.support.pool import Gloo

# torch compiles its forward-mode decompositions when the first one is used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Strategy = Literal["vmap", "ranks"]
Call = Callable[..., Any]

WEIGHTS = P(None, "tp", replicate="dp"), P("tp", replicate="dp")


def plainly(function: Call, *args: Any) -> Any:
    return function(*args)


def block(params: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    """Column- then row-parallel, in a dict with a value that is no tensor."""
    x = convert(x, "tp", src=I, dst=R)
    hidden = torch.tanh(x @ params["up"])
    return {"y": all_reduce(hidden @ params["down"], "tp", dst=I), "name": "block"}


def model(call: Call, mesh: Mesh) -> Callable[..., Tensor]:
    @shard_map(
        mesh=mesh,
        in_specs=(P("dp", invariant="tp"), *WEIGHTS),
        out_specs=P("dp"),
        check=mesh.simulate == "vmap",
    )
    def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        params = {"up": up, "down": down}
        for _ in range(2):
            out = call(block, params, x)
            assert out["name"] == "block"
            x = out["y"]
        return x

    return run


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (3, 4), (4, 3)]
    x, up, down = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return x, up, down


X, UP, DOWN = OPERANDS = _operands()


def simulated(strategy: Strategy) -> Mesh:
    return make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=strategy)


def same(compute: Callable[[Call], Any]) -> None:
    """Computed with and without checkpoint it is the same."""
    # Second derivatives are of the size 1e3; 1e-12 of it is rounding.
    torch.testing.assert_close(compute(checkpoint), compute(plainly), rtol=1e-12, atol=1e-10)


def loss_of(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(*args: Tensor) -> Tensor:
        return (f(*args) ** 2).sum()

    return loss


def leaves_of(values: tuple[Tensor, ...]) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values]


# ----------------------------------------------------------------- transforms from outside


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_backward_gives_the_gradients_without(strategy: Strategy) -> None:
    def compute(call: Call) -> list[Tensor | None]:
        leaves = leaves_of(OPERANDS)
        loss_of(model(call, simulated(strategy)))(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    same(compute)


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_func_grad_from_outside_gives_the_gradients_without(strategy: Strategy) -> None:
    same(
        lambda call: torch.func.grad(loss_of(model(call, simulated(strategy))), argnums=(0, 1, 2))(
            *OPERANDS
        )
    )


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "grad of grad": lambda f: torch.func.grad(
        lambda x: (torch.func.grad(loss_of(f))(x, UP, DOWN) ** 2).sum()
    )(X),
    "create_graph": lambda f: twice(loss_of(f), OPERANDS),
    "hessian": lambda f: torch.func.hessian(lambda s: loss_of(f)(X * s, UP, DOWN))(
        torch.ones(3, dtype=torch.float64)
    ),
    "jacrev": lambda f: torch.func.jacrev(lambda s: f(X * s, UP, DOWN))(
        torch.ones(3, dtype=torch.float64)
    ),
    "jvp": lambda f: torch.func.jvp(lambda x: f(x, UP, DOWN), (X,), (torch.cos(X),)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: loss_of(f)(x, UP, DOWN)))(
        torch.stack([X, 2 * X])
    ),
    "is_grads_batched": lambda f: batched_gradients(f, *OPERANDS),
}


def twice(loss: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    leaves = leaves_of(values)
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(((g**2).sum() for g in grads), torch.zeros(())), leaves)


def batched_gradients(f: Callable[..., Tensor], *values: Tensor) -> Any:
    leaves = leaves_of(values)
    y = f(*leaves)
    directions = torch.stack([torch.cos(y.detach()), torch.sin(y.detach())])
    return torch.autograd.grad(y, leaves, directions, is_grads_batched=True)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_from_outside_give_what_they_give_without(name: str) -> None:
    same(lambda call: TRANSFORMS[name](model(call, simulated("vmap"))))


def test_backward_runs_on_another_thread() -> None:
    def compute(call: Call) -> list[Tensor | None]:
        leaves = leaves_of(OPERANDS)
        loss = loss_of(model(call, simulated("vmap")))(*leaves)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [leaf.grad for leaf in leaves]

    same(compute)


# ------------------------------------------------------------------- transforms in the body


def gradients_inside(call: Call, mesh: Mesh) -> Any:
    """A train step: the gradient is taken in the body."""

    @shard_map(
        mesh=mesh,
        in_specs=(P("dp"), P(None, "tp"), P("tp")),
        out_specs=(P(None, "tp"), P("tp")),
        check=mesh.simulate == "vmap",
    )
    def step(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        def loss(up: Tensor, down: Tensor) -> Tensor:
            params = convert({"up": up, "down": down}, "dp", src=I, dst=R)
            out = call(block, params, x)
            total: Tensor = all_reduce((out["y"] ** 2).sum(), "dp", dst=I)
            return total

        grads: tuple[Tensor, Tensor] = torch.func.grad(loss, argnums=(0, 1))(up, down)
        return grads

    return step(*OPERANDS)


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_func_grad_inside_the_body_gives_the_gradients_without(strategy: Strategy) -> None:
    same(lambda call: gradients_inside(call, simulated(strategy)))


@pytest.mark.parametrize(
    ("op", "dtype"), [("max", torch.float64), ("sum", torch.complex128)], ids=str
)
@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_pulling_back_after_the_level_of_vjp_has_ended(
    strategy: Strategy, op: Any, dtype: torch.dtype
) -> None:
    """A maximum's backward looks at what its forward has kept."""

    def compute(call: Call) -> Any:
        mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=strategy)

        @shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=strategy == "vmap")
        def run(x: Tensor) -> Tensor:
            def inner(v: Tensor) -> Tensor:
                reduced: Tensor = call(lambda y: all_reduce(y, "dp", dst=R, op=op), v * x)
                return reduced * v * reduced

            y, pull, *_ = torch.func.vjp(inner, x.to(dtype))
            (gradient,) = pull(torch.cos(y))
            found: Tensor = gradient
            return torch.view_as_real(found) if found.is_complex() else found

        return run(X)

    same(compute)


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_a_gradient_in_the_body_is_no_sum_over_ranks_where_one_outside_is_taken_too(
    strategy: Strategy,
) -> None:
    def compute(call: Call) -> Any:
        mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=strategy)

        @shard_map(
            mesh=mesh, in_specs=P(invariant="dp"), out_specs=P("dp"), check=strategy == "vmap"
        )
        def run(x: Tensor) -> Tensor:
            def loss(x: Tensor) -> Any:
                own: Tensor = call(lambda x: convert(x, "dp", src=I, dst=R) ** 2, x)
                return (own * (axis_index("dp") + 1)).sum()

            y, pull, *_ = torch.func.vjp(lambda x: loss(x * 2), x)
            (gradient,) = pull(torch.ones_like(y))
            own: Tensor = convert(gradient, "dp", src=I, dst=V, dim=0)
            return own

        return run(X.clone().requires_grad_()).detach()

    same(compute)


@pytest.mark.parametrize("where", ["inner body", "round the inner body"])
@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_nested_bodies_keep_all_their_axes(strategy: Strategy, where: str) -> None:
    def compute(call: Call) -> Any:
        def layer(z: Tensor) -> Tensor:
            total: Tensor = all_reduce(torch.sin(z), ("tp", "dp"), dst=R)
            return total * z * (1 + axis_index("tp"))

        def inner_body(z: Tensor) -> Tensor:
            result: Tensor = call(layer, z) if where == "inner body" else layer(z)
            return result

        spec = P(None, "tp")
        inner = shard_map(inner_body, in_specs=spec, out_specs=spec, axis_names={"tp"}, check=False)

        @shard_map(
            mesh=simulated(strategy),
            in_specs=P("dp"),
            out_specs=P("dp"),
            axis_names={"dp"},
            check=strategy == "vmap",
        )
        def outer(x: Tensor) -> Tensor:
            result: Tensor = inner(x) if where == "inner body" else call(inner, x)
            return result

        x = X[:, :2].clone().requires_grad_()
        (grad,) = torch.autograd.grad((outer(x) ** 2).sum(), x)
        return grad, torch.func.grad(loss_of(outer))(x.detach())

    same(compute)


# ----------------------------------------------------------------------- processes, saving


def on_rank() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def whole(call: Call) -> Callable[..., Tensor]:
        f = model(call, mesh)
        return lambda *args: f(*args).full_tensor()  # type: ignore[attr-defined]

    def backward(call: Call) -> Any:
        leaves = leaves_of(OPERANDS)
        loss_of(whole(call))(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    def inside(call: Call) -> Any:
        return [getattr(y, "_local_tensor", y) for y in gradients_inside(call, mesh)]

    same(backward)
    same(inside)
    same(lambda call: twice(loss_of(whole(call)), OPERANDS))
    reference = leaves_of(OPERANDS)
    loss_of(model(plainly, simulated("ranks")))(*reference).backward()
    torch.testing.assert_close(
        backward(checkpoint), [r.grad for r in reference], rtol=0, atol=1e-10
    )


def test_processes_give_the_gradients_without(gloo: Gloo) -> None:
    gloo(4).run(on_rank)


def test_only_the_arguments_are_saved() -> None:
    def saved(call: Call) -> int:
        sizes: list[int] = []

        def deep(x: Tensor) -> Tensor:
            for _ in range(10):
                x = torch.tanh(torch.sin(x))
            return x

        def pack(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            call(deep, torch.ones(100, requires_grad=True))
        return sum(sizes)

    assert saved(checkpoint) == 100
    assert saved(plainly) == 2000


def test_without_gradients_the_function_is_just_called() -> None:
    with torch.no_grad():
        y = checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    assert y.grad_fn is None
    assert checkpoint(torch.sin, torch.ones(2)).grad_fn is None


def test_keyword_and_static_arguments_reach_the_function() -> None:
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(lambda x, *, power, scale: scale["by"] * x**power, x, power=3, scale={"by": x})
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [4.0, 4.0]


def test_unused_outputs_and_arguments_have_no_gradient() -> None:
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y, _ = checkpoint(lambda x, unused: (2 * x, unused * 3), x, unused)
    assert torch.autograd.grad(y.sum(), [x, unused], allow_unused=True)[1] is None


# -------------------------------------------------------------------- random draws, autocast


def test_dropout_masks_are_those_of_the_first_run() -> None:
    """Ranks are threads that draw from one generator in turns, between collectives."""
    seen: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            x = torch.nn.functional.dropout(x, 0.5)
            x = x + 0 * all_reduce(x, "dp", dst=R).detach()
            return torch.nn.functional.dropout(x, 0.5)

        return checkpoint(layer, x)

    mesh = make_mesh((4,), ("dp",), kind="simulated")
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=False)
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = f(x)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(y.sum(), x)
    seen.append(grad)
    # With x = 1 the function is its own derivative: the mask, scaled.
    torch.testing.assert_close(grad, y.detach())
    assert 0 < int((y > 0).sum()) < 64
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    shard_map(
        lambda x: torch.nn.functional.dropout(torch.nn.functional.dropout(x, 0.5), 0.5),
        mesh=mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
        check=False,
    )(x.detach())
    assert torch.equal(torch.get_rng_state(), after)


class Doubled(TorchFunctionMode):
    """Makes a sine twice as large, as a mode may that gives functions another meaning."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is torch.sin else y


@pytest.mark.parametrize("simulate", ["auto", "ranks"])
def test_function_modes_are_those_of_the_first_run(simulate: Any) -> None:
    def body(x: Tensor) -> Tensor:
        with Doubled():
            return checkpoint(lambda x: torch.sin(x * x), x)

    mesh = make_mesh((2,), ("a",), kind="simulated", simulate=simulate)
    f = shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    y = f(x)
    torch.testing.assert_close(y, 2 * torch.sin(x * x))
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, (4 * x * torch.cos(x * x)).detach())


def test_autocast_is_that_of_the_first_run() -> None:
    dtypes: list[torch.dtype] = []

    def f(x: Tensor) -> Tensor:
        y = x @ x
        dtypes.append(y.dtype)
        return y

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(f, x)
    y.sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


# -------------------------------------------------------------------------------- misuse


def test_a_hidden_tensor_that_needs_a_gradient_is_rejected_in_backward() -> None:
    layer = torch.nn.Linear(2, 3)
    y = checkpoint(layer, torch.ones(2, requires_grad=True))
    with told(TransformError):
        y.sum().backward()


def test_a_function_that_computes_something_else_the_second_time_is_rejected() -> None:
    calls: list[int] = []

    def changing(x: Tensor) -> list[Tensor]:
        calls.append(1)
        return [x * 2] * len(calls)

    (y,) = checkpoint(changing, torch.ones(2, requires_grad=True))
    with told(TransformError):
        y.sum().backward()


# ----------------------------------------------------------------------------- closed over


def test_closed_over_tensors_get_their_gradients() -> None:
    def compute(call: Call) -> Any:
        a, b, c, x = leaves_of((X, X, X, X))
        scale = {"b": b}

        def helper(x: Tensor) -> Tensor:
            return helper(x[1:]) if len(x) == 4 else x * c[0]

        def layer(factor: Tensor, x: Tensor, *, power: int = 3) -> Tensor:
            return helper(torch.sin(x) * a**power * scale["b"] * factor)

        y = call(partial(layer, a, power=2), x)
        return torch.autograd.grad((y**2).sum(), [a, b, c, x])

    same(compute)


def closing_over_a_mask(call: Call) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor, mask: Tensor) -> Tensor:
        def masked(x: Tensor) -> Tensor:
            return torch.sin(x) * mask

        result: Tensor = call(masked, x)
        return result

    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="vmap")
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    return lambda x: f(x, mask)


def test_closed_over_values_of_a_batched_body_keep_their_ranks_when_its_levels_are_gone() -> None:
    def compute(call: Call) -> Any:
        f = closing_over_a_mask(call)
        y, pull = torch.func.vjp(f, torch.ones(4))  # type: ignore[misc]
        return torch.func.grad(lambda x: f(x).sum())(torch.ones(4)), pull(torch.ones_like(y))

    same(compute)


# ----------------------------------------------------------------------------- saved results

MM: Any = torch.ops.aten.mm.default


class Matmuls(TorchDispatchMode):
    """Counts matmuls, and refers to what they compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count, self.made = 0, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is MM:
            self.count += 1
            self.made.append(weakref.ref(out.untyped_storage()))
        return out


def deep(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def squares(function: Call) -> Callable[..., Tensor]:
    """The function's squared results, with its matmuls saved, all and every second one."""
    return lambda *args: checkpoint(function, *args).square().sum()


def matrices(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(("every", "again"), [(1, 0), (2, 2), (3, 3)])
def test_saved_results_are_not_computed_again(every: int, again: int) -> None:
    operands = matrices(6)
    with Matmuls() as matmuls:
        y = squares(save_results(deep, {MM: every}))(*operands)
        alive = sum(each() is not None for each in matmuls.made)
        found = torch.autograd.grad(y, operands, retain_graph=True)
        assert matmuls.count == 5 + again + 10
        assert alive == 5 - again
        torch.testing.assert_close(torch.autograd.grad(y, operands), found, rtol=0, atol=0)
        assert not any(each() is not None for each in matmuls.made[:5])  # freed in the backward
    expected = torch.autograd.grad(deep(*operands).square().sum(), operands)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


SAVING: dict[str, Callable[..., Any]] = {
    "grad": lambda f, *w: torch.func.grad(f, (0, 1))(*w),
    "jvp": lambda f, *w: torch.func.jvp(f, w, w),
    "jvp of grad": lambda f, *w: torch.func.jvp(torch.func.grad(f), w, w),
    "hessian": lambda f, *w: torch.func.hessian(f)(*w),
    "grad of grad": lambda f, *w: torch.func.grad(lambda *a: torch.func.grad(f)(*a).square().sum())(
        *w
    ),
    "late vjp": lambda f, *w: torch.func.vjp(f, *w)[1](torch.ones((), dtype=torch.float64)),
    "vmap of grad": lambda f, x, *w: torch.func.vmap(
        torch.func.grad(f), in_dims=(0, *[None] * len(w))
    )(torch.stack([x, 2 * x]), *w),
}


@pytest.mark.parametrize("transform", SAVING.values(), ids=SAVING)
@pytest.mark.parametrize("every", [1, 2])
def test_saved_results_change_no_derivative(transform: Callable[..., Any], every: int) -> None:
    operands = [x.detach() for x in matrices(4)]
    found = transform(squares(save_results(deep, {MM: every})), *operands)
    expected = transform(lambda *args: deep(*args).square().sum(), *operands)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_within_another", [False, True])
def test_several_calls_in_one_checkpoint_have_results_of_their_own(is_within_another: bool) -> None:
    saving = save_results(deep, {MM: 2})
    layer = save_results(lambda x, w: saving(x @ w, w, w), {MM: 1}) if is_within_another else saving

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x

    operands = matrices(4)
    found = torch.autograd.grad(squares(layers)(*operands), operands)
    expected = torch.autograd.grad(layers(*operands).square().sum(), operands)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_what_was_written_into_is_computed_again() -> None:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh((x @ w).mul_(2))

    operands = matrices(2)
    found = torch.autograd.grad(squares(save_results(scaled, {MM: 1}))(*operands), operands)
    expected = torch.autograd.grad(scaled(*operands).square().sum(), operands)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_saved_results_of_other_shapes_are_rejected() -> None:
    runs: list[int] = []

    def changing(x: Tensor, w: Tensor) -> Tensor:
        runs.append(1)
        return x[: 5 - len(runs)] @ w

    with told(TransformError):
        squares(save_results(changing, {MM: 1}))(*matrices(2)).backward()


def layers_that_save(check: Any, **kind: Any) -> None:
    """Compares loss and gradients of layers, whose results may be saved, with one device."""

    def layer(params: Any, x: Tensor) -> Tensor:
        return deep(x, params["w"])

    def total(run: Call, options: Any, params: Any, x: Tensor) -> Tensor:
        y = nn.fsdp_layers(run, params, x, axis="dp", **options)
        return all_reduce(y.square().sum(), "dp", dst=I)

    mesh, leaves = make_mesh((2,), ("dp",), **kind), matrices(4)
    loss = deep(*leaves).square().sum()
    expected = loss, *torch.autograd.grad(loss, leaves[1:])
    x, *weights = [leaf.detach() for leaf in leaves]
    for spec, recompute in itertools.product((P("dp"), P(None, "dp")), (True, False)):
        layers = [{"w": spec}] * 3
        specs: Any = {"in_specs": (layers, P("dp")), "out_specs": (P(), layers)}
        for run in (layer, save_results(layer, {MM: 1})):
            step = value_and_grad(partial(total, run, {"specs": spec, "recompute": recompute}))
            f = shard_map(step, mesh=mesh, check=check, **specs)
            value, found = full(f([{"w": w} for w in weights], x))
            got = value, *[params["w"] for params in found]
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sample(4)
@pytest.mark.parametrize("check", ["local", "global", False])
@pytest.mark.parametrize("kind", ["vmap", "ranks", "processes"])
def test_layers_that_save_results_are_one_device(check: Any, kind: Any, gloo: Gloo) -> None:
    if kind == "processes":
        gloo(2).run(layers_that_save, check)
    else:
        layers_that_save(check, kind="simulated", simulate=kind)
