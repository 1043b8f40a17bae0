"""Transforms and nesting: what torch.func and autograd do to a shard_mapped function."""

import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    MeshError,
    P,
    R,
    ShardMapError,
    SpecError,
    TransformError,
    all_gather,
    all_reduce,
    axis_index,
    check_program,
    convert,
    current_mesh,
    device_put,
    explain,
    make_mesh,
    trace,
    use_mesh,
)
from shardmap_torch import shard_map as checked
from tests.programs.support.everywhere import (
    ON_EVERY_MESH,
    ON_PROCESSES_OR_VMAP,
    ON_REAL_RANKS,
    SIMULATED,
    claimed,
    run_on,
    same,
)
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random
from tests.support.golden import told
from tests.support.pool import Gloo

# torch's own forward mode scripts some decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

X, W = random((4, 3), 1), random((3, 2), 2)
Ws = torch.stack([W, 2 * W, -W])


def body(x: Tensor, w: Tensor) -> Tensor:
    """Each rank has some rows of x, and uses w in its own way."""
    return all_reduce((torch.tanh(x @ w) ** 3).sum(), "tp", dst=I)


def reference(x: Tensor, w: Tensor) -> Tensor:
    return (torch.tanh(x @ w) ** 3).sum()


def whole_body(x: Tensor, w: Tensor) -> Tensor:
    """Computes the body where w still is one value."""
    return body(x, convert(w, "tp", src=I, dst=R))


def mapped(mesh: Mesh) -> Callable[[Tensor, Tensor], Tensor]:
    return shard_map(body, mesh=mesh, in_specs=(P("tp"), P(replicate="tp")), out_specs=P())


F = Callable[..., Any]


def squared_gradient(f: F) -> F:
    return lambda x, w: (torch.func.grad(f, argnums=1)(x, w) ** 2).sum()


def through_autograd(f: F) -> F:
    def double(x: Tensor, w: Tensor) -> Any:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(x, w), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)

    return double


FIRST_ORDER: dict[str, tuple[Callable[[F], F], tuple[Tensor, Tensor]]] = {
    "grad": (lambda f: torch.func.grad(f, argnums=(0, 1)), (X, W)),
    "vjp": (lambda f: lambda x, w: torch.func.vjp(f, x, w)[1](torch.tensor(2.0).double()), (X, W)),
}
HIGHER: dict[str, tuple[Callable[[F], F], tuple[Tensor, Tensor]]] = {
    "jvp": (lambda f: lambda x, w: torch.func.jvp(f, (x, w), (x, w)), (X, W)),
    "jacrev": (lambda f: torch.func.jacrev(f, argnums=(0, 1)), (X, W)),
    "jacfwd": (lambda f: torch.func.jacfwd(f, argnums=(0, 1)), (X, W)),
    "hessian": (lambda f: torch.func.hessian(f, argnums=1), (X, W)),
    "grad of grad": (lambda f: torch.func.grad(squared_gradient(f), argnums=(0, 1)), (X, W)),
    "double backward": (through_autograd, (X, W)),
    "vmap": (lambda f: torch.func.vmap(f, in_dims=(None, 0)), (X, Ws)),
    "vmap of grad": (
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1)), in_dims=(None, 0)),
        (X, Ws),
    ),
    "grad of vmap": (
        lambda f: torch.func.grad(
            lambda x, w: torch.func.vmap(f, in_dims=(None, 2))(x, w).sum(), argnums=(0, 1)
        ),
        (X, Ws.movedim(0, 2)),
    ),
}


@ON_EVERY_MESH
@pytest.mark.parametrize("transform", FIRST_ORDER)
def test_first_order_transform_from_outside(transform: str, kind: str, gloo: Gloo) -> None:
    run_on(kind, _Outside(transform), gloo)


@ON_PROCESSES_OR_VMAP
@pytest.mark.parametrize("transform", HIGHER)
def test_transform_from_outside(transform: str, kind: str, gloo: Gloo) -> None:
    run_on(kind, _Outside(transform), gloo)


class _Outside:
    def __init__(self, transform: str) -> None:
        self.transform = transform

    def __call__(self, mesh: Mesh) -> None:
        transform, arguments = (FIRST_ORDER | HIGHER)[self.transform]
        same(transform(mapped(mesh))(*arguments), transform(reference)(*arguments))


@pytest.mark.parametrize("transform", HIGHER)
def test_rank_threads_refuse_all_but_first_order_gradients(transform: str) -> None:
    made, arguments = HIGHER[transform]
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    with told(TransformError):
        made(mapped(mesh))(*arguments)
    same(mapped(mesh)(X, W), reference(X, W))  # and nothing is left behind


INSIDE: dict[str, Callable[[F], F]] = {
    "grad": lambda f: lambda w: torch.func.grad(f)(w),
    "jacrev": lambda f: lambda w: torch.func.jacrev(f)(w),
    "grad of grad": lambda f: torch.func.grad(lambda w: (torch.func.grad(f)(w) ** 2).sum()),
    "vmap": lambda f: lambda w: torch.func.vmap(f)(torch.stack([w, 2 * w])),
    "vmap at the last dim": lambda f: (
        lambda w: torch.func.vmap(f, in_dims=2)(torch.stack([w, 2 * w], 2))
    ),
    "vmap of grad": lambda f: lambda w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, w])),
}
FORWARD: dict[str, Callable[[F], F]] = {
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (w,)),
    "jacfwd": lambda f: lambda w: torch.func.jacfwd(f)(w),
    "hessian": lambda f: lambda w: torch.func.hessian(f)(w),
    "vmap of jvp": lambda f: (
        lambda w: torch.func.vmap(lambda tangent: torch.func.jvp(f, (w,), (tangent,))[1])(
            torch.stack([w, 2 * w])
        )
    ),
}


class _Inside:
    def __init__(self, transform: str) -> None:
        self.transform = transform

    def __call__(self, mesh: Mesh) -> None:
        transform = (INSIDE | FORWARD)[self.transform]

        def step(x: Tensor, w: Tensor) -> Any:
            return transform(lambda w: whole_body(x, w))(w)

        f = shard_map(step, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
        same(f(X, W), transform(lambda w: reference(X, w))(W))


@ON_EVERY_MESH
@pytest.mark.parametrize("transform", INSIDE)
def test_transform_in_the_body(transform: str, kind: str, gloo: Gloo) -> None:
    run_on(kind, _Inside(transform), gloo)


def after_a_step(f: F) -> F:
    """Returns what differs after a step along a gradient whose cotangents depend on `w`."""
    return lambda w: w - torch.func.grad(lambda w: f(w) ** 3)(w)


def outside_of_a_gradient_inside(mesh: Mesh) -> None:
    def step(x: Tensor, w: Tensor) -> Any:
        return after_a_step(lambda w: whole_body(x, w))(w)

    f = shard_map(step, mesh=mesh, in_specs=(P("tp"), P(invariant="tp")), out_specs=P())
    one = after_a_step(lambda w: reference(X, w))
    expected = torch.func.grad(lambda w: (one(w) ** 2).sum())(W)
    same(torch.func.grad(lambda w: (f(X, w) ** 2).sum())(W), expected)
    leaf = W.clone().requires_grad_()
    same(torch.autograd.grad((f(X, leaf) ** 2).sum(), leaf)[0], expected)


@ON_PROCESSES_OR_VMAP
@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_in_the_body(transform: str, kind: str, gloo: Gloo) -> None:
    run_on(kind, _Inside(transform), gloo)


@pytest.mark.parametrize("transform", FORWARD)
def test_rank_threads_refuse_forward_mode_of_a_collective(transform: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    with told(TransformError):
        _Inside(transform)(mesh)
    same(torch.func.jvp(torch.sin, (W,), (W,))[1], W.cos() * W)  # the levels are as they were


def test_forward_mode_of_another_thread_changes_no_call() -> None:
    """Has a rank's body wait while another thread enters and leaves torch's one level."""
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")

    def body(x: Tensor) -> Tensor:
        for _ in range(2):
            other = threading.Thread(target=next, args=(levels, None))
            other.start()
            other.join()
            x = all_reduce(x, "tp", dst=I) * 1.0
        return x

    def enter_and_leave() -> Generator[None]:
        for _ in range(8):
            with torch.autograd.forward_ad.dual_level():
                yield
            yield

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    levels = enter_and_leave()
    try:
        same(f(torch.ones(2)), torch.full((1,), 4.0))
    finally:
        levels.close()


def autograd_inside(mesh: Mesh) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        whole_body(x, w).backward()
        assert w.grad is not None
        return w.grad

    f = shard_map(step, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    same(f(X, W), torch.func.grad(reference, argnums=1)(X, W))


@ON_REAL_RANKS
def test_backward_in_the_body(kind: str, gloo: Gloo) -> None:
    run_on(kind, autograd_inside, gloo)


def backward_late_and_elsewhere(mesh: Mesh) -> None:
    x = X.clone().requires_grad_()
    first, second = mapped(mesh)(x, W), mapped(mesh)(2 * x, W)
    for y in (second, first):  # not in the order of the calls
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    y = X.clone().requires_grad_()
    (reference(y, W) + reference(2 * y, W)).backward()
    assert x.grad is not None
    assert y.grad is not None
    same(x.grad, y.grad)


def backward_twice(mesh: Mesh) -> None:
    x = X.clone().requires_grad_()
    y = mapped(mesh)(x, W)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad is not None
    same(x.grad, 2 * torch.func.grad(reference)(X, W))


def grad_modes(mesh: Mesh) -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not mapped(mesh)(x, W).requires_grad
    with torch.inference_mode():
        assert mapped(mesh)(X.clone(), W).is_inference()
    f = shard_map(torch.detach, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    assert not f(x).requires_grad
    g = shard_map(torch.argmax, mesh=mesh, in_specs=P(replicate="tp"), out_specs=P())
    assert not g(x).requires_grad


def unused_input(mesh: Mesh) -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    specs = (P("tp"), P(replicate="tp"))
    f = shard_map(lambda x, w: x * 2, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    y = f(x, w)
    y.sum().backward()
    assert w.grad is None
    assert x.grad is not None
    same(x.grad, torch.full_like(X, 2))


def one_tensor_twice(mesh: Mesh) -> None:
    x = X.clone().requires_grad_()
    specs = (P("tp"), P(None, replicate="tp"))

    def body(a: Tensor, b: Tensor) -> Tensor:
        return all_reduce((a.sum(0) * b[0]).sum(), "tp", dst=I)

    shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())(x, x).backward()
    expected = torch.func.grad(lambda x: (x.sum(0) * x[0]).sum())(X)
    assert x.grad is not None
    same(x.grad, expected)


def closure(mesh: Mesh) -> None:
    leaf = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    factor = leaf * 3  # not a leaf itself

    def scaled(x: Tensor) -> Tensor:
        return all_reduce(x.sum(), "tp", dst=I) * factor

    y = shard_map(scaled, mesh=mesh, in_specs=P("tp"), out_specs=P(), check=False)(X)
    same(torch.autograd.grad(y, leaf), (X.sum() * 3,))


def closure_as_result(mesh: Mesh) -> None:
    w = W.clone().requires_grad_()

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, w

    y, out = checked(body, mesh=mesh, in_specs=P("tp"), out_specs=(P("tp"), P()))(X)
    same((y, out), (X * 2, W))


def test_a_body_that_vmap_cannot_batch_runs_as_ranks() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = checked(lambda z: z.conj().imag * 2, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    same(mapped(torch.complex(X, X * 3)), X * -6)


def searching_for_nan(mesh: Mesh) -> None:
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # torch warns that it is slow
        total = checked(
            lambda x: all_reduce((x * x).sum(), "tp", dst=I),
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P(),
        )
        total(x).backward()
    assert x.grad is not None
    same(x.grad, 2 * X)


def test_rank_threads_refuse_a_closure_that_an_outer_transform_tracks() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")

    def loss(w: Tensor) -> Tensor:
        def with_closure(x: Tensor) -> Tensor:
            return all_reduce((x * w).sum(), "tp", dst=I)

        out: Tensor = shard_map(with_closure, mesh=mesh, in_specs=P("tp"), out_specs=P())(X)
        return out

    with told(TransformError):
        torch.func.grad(loss)(torch.tensor(2.0).double())


def losses_on(mesh: Mesh, check: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A loss whose body closes over its weights, in a dict and by another function; and by hand."""

    def forward(x: Tensor, params: dict[str, Any]) -> Tensor:
        scale, power = params["scale"]
        out: Tensor = torch.tanh(x @ params["w"]) ** power * scale
        return out.mean()

    def loss(w: Tensor, scale: Tensor) -> Tensor:
        params = {"w": w, "scale": (scale, 3)}

        def local(x: Tensor) -> Tensor:
            return forward(x, params)

        def closing(x: Tensor) -> Tensor:
            return all_reduce(local(x), "tp", op="mean", dst=I)

        out: Tensor = checked(closing, mesh=mesh, in_specs=P("tp"), out_specs=P(), check=check)(X)
        return out

    return loss, lambda w, scale: forward(X, {"w": w, "scale": (scale, 3)})


def reaching(mesh: Mesh) -> None:
    """Takes gradients of what a body closes over, which each rank uses in its own way."""
    scale = torch.arange(2.0, dtype=torch.float64) + 1
    for check in (True, "global"):
        loss, one = losses_on(mesh, check)
        same(
            torch.func.grad(loss, argnums=(0, 1))(W, scale),
            torch.func.grad(one, argnums=(0, 1))(W, scale),
        )


def test_every_transform_reaches_what_the_body_closes_over() -> None:
    scale = torch.arange(2.0, dtype=torch.float64) + 1
    loss, one = losses_on(make_mesh((2,), ("tp",), kind="simulated"), "global")
    for transform in (
        lambda f: torch.func.jacrev(torch.func.grad(f))(W, scale),
        lambda f: torch.func.vmap(f, in_dims=(0, None))(Ws, scale),
        lambda f: torch.func.vmap(torch.func.grad(f), in_dims=(0, None))(Ws, scale),
        lambda f: torch.func.jvp(f, (W, scale), (W.cos(), scale.sin())),
    ):
        same(transform(loss), transform(one))


# ---------------------------------------------------------------------------- meshes and nesting


def matmul_over_tp(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(x @ w, "tp", dst=I)


def nested(mesh: Mesh) -> None:
    x, w = random((4, 6), 3), random((6, 2), 4)

    def outer(x: Tensor, w: Tensor) -> Tensor:
        inner = shard_map(
            matmul_over_tp, in_specs=(P(None, "tp"), P("tp")), out_specs=P(), axis_names={"tp"}
        )
        return torch.tanh(inner(x, w))

    f = shard_map(
        outer,
        mesh=mesh,
        in_specs=(P("dp"), P(replicate="dp")),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    x.requires_grad_()
    y = f(x, w)
    same(y, torch.tanh(x @ w))
    place = shard_map(lambda g: g, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    gradient = torch.autograd.grad(y, x, place(torch.ones(4, 2, dtype=torch.float64)))
    same(gradient, torch.autograd.grad(torch.tanh(x @ w).sum(), x))


@ON_EVERY_MESH
def test_an_inner_shard_map_binds_the_axes_that_are_left(kind: str, gloo: Gloo) -> None:
    run_on(kind, nested, gloo, (2, 2), ("dp", "tp"))


def ambient(mesh: Mesh) -> None:
    seen: list[Mesh | None] = []

    @shard_map(in_specs=P("tp"), out_specs=P("tp"))
    def see(x: Tensor) -> Tensor:
        seen.append(current_mesh())
        return x

    with use_mesh(mesh):
        same(see(X), X)
    assert set(seen) == {mesh}
    assert current_mesh() is None


def test_the_mesh_is_looked_up_in_each_call() -> None:
    count = shard_map(lambda: all_reduce(torch.ones(()), "tp", dst=I), in_specs=(), out_specs=P())
    for size in (2, 3):
        with use_mesh(make_mesh((size,), ("tp",), kind="simulated")):
            assert count() == size


def test_without_a_mesh_the_error_says_how_to_give_one() -> None:
    with told(MeshError):
        shard_map(torch.neg, in_specs=P(), out_specs=P())(X)


def test_an_abstract_mesh_has_nothing_to_run_on() -> None:
    mesh = make_mesh((8192,), ("tp",), kind="abstract")
    with pytest.raises(MeshError) as caught:
        shard_map(torch.neg, mesh=mesh, in_specs=P(), out_specs=P())(X)
    assert str(caught.value) == "neg: an abstract mesh has no data to run on; use check=True."


GRID = make_mesh((2, 2), ("dp", "tp"), kind="simulated")


def nested_with(**inner: Any) -> Callable[[], Any]:
    def outer(x: Tensor) -> Any:
        return shard_map(torch.neg, in_specs=P(), out_specs=P(), **inner)(x)

    f = shard_map(outer, mesh=GRID, in_specs=P(), out_specs=P(), axis_names={"dp"})
    return lambda: f(X)


def nested_twice() -> Any:
    def outer(x: Tensor) -> Any:
        return shard_map(torch.neg, in_specs=P(), out_specs=P())(x)

    return shard_map(outer, mesh=GRID, in_specs=P(), out_specs=P())(X)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            lambda: shard_map(torch.neg, mesh=GRID, in_specs=P(), out_specs=P(), axis_names={"pp"})(
                X
            ),
            SpecError,
        ),
        (lambda: shard_map(cast(Any, 3), mesh=GRID, in_specs=P(), out_specs=P()), SpecError),
        (lambda: shard_map(torch.neg, mesh=GRID, in_specs=[P()], out_specs=P()), SpecError),
        (nested_with(axis_names={"dp"}), SpecError),
        (nested_twice, SpecError),
        (nested_with(mesh=make_mesh((4,), ("tp",), kind="simulated")), MeshError),
    ],
)
def test_misuse_of_shard_map_is_explained(call: Callable[[], Any], error: type[Exception]) -> None:
    with told(error):
        call()


@SIMULATED
def test_a_body_that_fails_leaves_nothing_behind(kind: Any) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=kind)

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("broken")

    with use_mesh(mesh), torch.no_grad():
        with pytest.raises(RuntimeError, match="broken"):
            shard_map(fail, in_specs=P("tp"), out_specs=P())(X)
        assert current_mesh() is mesh
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert [thread for thread in threading.enumerate() if thread.name.startswith("rank ")] == []
    with pytest.raises(Exception, match="was called outside shard_map"):
        axis_index("tp")
    same(mapped(mesh)(X, W), reference(X, W))


def decorated(mesh: Mesh) -> None:
    @shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
    def gathered(x: Tensor) -> Tensor:
        """Has a docstring."""
        return all_gather(x, "tp", dst=I)

    assert gathered.__name__ == "gathered"
    assert gathered.__doc__ == "Has a docstring."
    same(gathered(X), X)


def test_names_for_all_do_not_replace_modules_of_torch_and_python() -> None:
    import shardmap_torch

    exported = [getattr(shardmap_torch, name) for name in shardmap_torch.__all__]
    assert not any(isinstance(value, ModuleType) for value in exported)


@pytest.mark.parametrize(
    ("kind", "check"),
    [(ShardMapError, True), (RuntimeError, True), (RuntimeError, "global"), (RuntimeError, False)],
)
def test_the_traceback_of_an_error_has_the_frames_of_the_user(
    kind: type[Exception], check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layer(x: Tensor) -> Tensor:
        if kind is RuntimeError:  # torch's, for shapes that do not go together
            return x + torch.ones(3)
        return all_reduce(all_reduce(x, "tp", dst=I), "tp", dst=I)

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = checked(lambda x: layer(x), mesh=mesh, in_specs=P("tp"), out_specs=P(), check=check)

    def frames(call: Callable[..., object], *args: object) -> list[str]:
        with pytest.raises((kind, SpecError)) as caught:
            call(*args)
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    x = torch.ones(4)
    assert frames(mapped, x) == ["frames", "<lambda>", "layer"]
    for ask in (check_program, trace, explain):
        if check is not False:
            assert frames(ask, mapped, x) == ["frames", "<lambda>", "layer"]
    assert frames(device_put, torch.ones(3), mesh, P("tp")) == ["frames"]
    monkeypatch.setenv("SHARDMAP_TRACEBACK", "full")
    assert "run" in frames(mapped, x)


WRONG = """
from torch import nn, randn
from shardmap_torch import ColwiseParallel, make_mesh, parallelize

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        return y.FORM

mesh = make_mesh((2,), ("tp",), kind="simulated")
parallelize(Model(), mesh, {"up": ColwiseParallel()})(randn(4, 8))
"""


@pytest.mark.parametrize("form", ["view(4, 8)", "softmax(-1)"])
def test_an_error_that_ends_a_script_shows_the_lines_of_the_user_alone(
    form: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRONG.replace("FORM", form))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    files = re.findall(r'^  File "(.*?)"', done.stderr, re.MULTILINE)
    assert {*files} == {str(script)}
    assert ("in forward" in done.stderr) == (form == "view(4, 8)")  # fails there, not at its end
    assert done.stderr.count("Error") == 1


test_on_every_mesh = claimed(
    {
        "a gradient from outside goes through one in the body": outside_of_a_gradient_inside,
        "backward after the body on another thread": backward_late_and_elsewhere,
        "a graph that is kept can be used again": backward_twice,
        "grad modes hold in the body and for the result": grad_modes,
        "an unused input gets no gradient": unused_input,
        "one tensor may enter by two specs": one_tensor_twice,
        "a closure that is used as one value gets its gradient": closure,
        "a closed over tensor can be a result": closure_as_result,
        "anomaly detection does not disturb the checker": searching_for_nan,
        "a gradient reaches what the body closes over": reaching,
        "the mesh is that of use mesh and seen in the body": ambient,
        "as a decorator it keeps name and docstring": decorated,
    },
)
