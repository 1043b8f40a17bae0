"""Bodies over some axes keep their values sharded over the others, and compute what they did."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    SpecError,
    V,
    all_reduce,
    axis_size,
    checkpoint,
    convert,
    device_put,
    full,
    mark_sharding,
    optim,
    redistributions,
    shard_map,
    value_and_grad,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.programs.support.harness import random
from tests.support.pool import Gloo

SHAPE, AXES = (2, 2), ("dp", "tp")
MANUAL: Mapping[str, Any] = {"axis_names": {"tp"}}
Params = dict[str, Tensor]

BLOCK = {
    "scale": P(),
    "q": P(None, "tp"),
    "k": P(None, "tp"),
    "v": P(None, "tp"),
    "o": P("tp"),
    "w1": P(None, "tp"),
    "b1": P("tp"),
    "w2": P("tp"),
}
"""Specs of the body: tensor parallel over the bound axis."""

STORED = BLOCK | {
    "scale": P("dp"),
    "q": P("dp", "tp"),
    "k": P(None, "tp"),
    "v": P("dp", "tp"),
    "o": P("tp", "dp"),
    "w1": P("dp", "tp"),
    "w2": P("tp", "dp"),
}
"""Specs of the parameters outside: sharded over the automatic axis too, as FSDP has them."""


def parameters() -> Params:
    shapes = {"scale": (8,), "w1": (8, 16), "b1": (16,), "w2": (16, 8)}
    shapes |= dict.fromkeys("qkvo", (8, 8))
    return {name: random(shape, i) / 2 for i, (name, shape) in enumerate(shapes.items())}


def block(params: Params, x: Tensor, heads: int, enter: Any, leave: Any) -> Tensor:
    """A transformer block on this rank's heads; `enter` and `leave` are around parallel parts."""
    h = enter(functional.layer_norm(x, x.shape[-1:], params["scale"]))
    q, k, v = ((h @ params[n]).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    scores = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    x = x + leave((scores @ v).transpose(1, 2).flatten(2) @ params["o"])
    up = functional.gelu(enter(x) @ params["w1"] + params["b1"])
    out: Tensor = x + leave(up @ params["w2"])
    return out


def parallel(params: Params, x: Tensor) -> Tensor:
    return block(
        params,
        x,
        heads=2 // axis_size("tp"),
        enter=lambda h: convert(h, "tp", src=I, dst=R),
        leave=lambda y: all_reduce(y, "tp", dst=I),
    )


def reference(params: Params, x: Tensor) -> Tensor:
    return block(params, x, heads=2, enter=lambda h: h, leave=lambda y: y)


def loss_of(f: Callable[[Params, Tensor], Tensor], params: Params, x: Tensor) -> Tensor:
    return f(params, x).square().mean()


def expected_of(params: Params, x: Tensor) -> tuple[Tensor, Params, Tensor]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    x = x.clone().requires_grad_()
    loss = loss_of(reference, leaves, x)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}, x.grad  # type: ignore[return-value,misc]


def close(actual: Any, expected: Any, name: str = "") -> None:
    torch.testing.assert_close(
        full(actual), expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}"
    )


def stays_sharded(x: Tensor, local: tuple[int, ...]) -> None:
    """Requires that a value of a body is global in shape, and on processes sharded in memory."""
    if isinstance(x, DTensor):
        assert x.device_mesh.mesh_dim_names == ("dp",)
        assert tuple(x.to_local().shape) == local


def equals_one_device(mesh: Mesh) -> None:
    params, x = parameters(), random((4, 3, 8), 99)
    loss, grads, x_grad = expected_of(params, x)
    is_real = mesh.kind == "process_group"
    kinds: list[type] = []

    def body(params: Params, x: Tensor) -> Tensor:
        assert x.shape == (4, 3, 8)
        kinds.append(type(x))
        stays_sharded(x, (2, 3, 8))
        y = parallel(params, x)
        stays_sharded(y, (2, 3, 8))
        return y

    for check in (True, "global"):
        f = shard_map(body, mesh=mesh, in_specs=(BLOCK, P()), out_specs=P(), check=check, **MANUAL)
        placed = device_put({name: p.clone() for name, p in params.items()}, mesh, STORED)
        data = device_put(x.clone(), mesh, P("dp"))
        for leaf in (*placed.values(), data):
            leaf.requires_grad_()
        y = f(placed, data)
        assert isinstance(y, DTensor) == is_real
        assert kinds[-1] is (DTensor if is_real else Tensor) or mesh.simulate == "vmap"
        if isinstance(y, DTensor):
            assert y.placements == (Shard(0), Replicate())
        found = full(y).square().mean()
        found.backward()
        close(found.detach(), loss)
        for name, leaf in placed.items():
            assert leaf.grad is not None
            close(leaf.grad, grads[name], name)
            if isinstance(leaf, DTensor):
                assert isinstance(leaf.grad, DTensor)
                assert leaf.grad.placements == leaf.placements
        close(data.grad, x_grad, "x")


@ON_EVERY_MESH
def test_a_block_has_the_values_and_gradients_of_one_device(kind: Any, gloo: Gloo) -> None:
    run_on(kind, equals_one_device, gloo, SHAPE, AXES)


def trains(mesh: Mesh) -> None:
    """A training step in the body: gradients, and an update, all sharded over both axes."""
    params, x = parameters(), random((4, 3, 8), 99)
    loss, grads, _ = expected_of(params, x)

    def step(params: Params, x: Tensor) -> tuple[Tensor, Params, Params]:
        found, gradients = value_and_grad(lambda p: loss_of(parallel, p, x))(params)
        new = {name: leaf - 0.1 * gradients[name] for name, leaf in params.items()}
        return found, gradients, new

    f = shard_map(step, mesh=mesh, in_specs=(BLOCK, P()), out_specs=(P(), BLOCK, BLOCK), **MANUAL)
    placed = device_put(params, mesh, STORED)
    with redistributions() as moved:
        found, gradients, new = f(placed, device_put(x, mesh, P("dp")))
    close(found, loss)
    for name, leaf in placed.items():
        close(gradients[name], grads[name], name)
        close(new[name], params[name] - 0.1 * grads[name], name)
        if isinstance(leaf, DTensor):
            for each in (new[name], gradients[name]):
                assert isinstance(each, DTensor)
                assert each.placements == leaf.placements
    if mesh.kind != "process_group":
        assert not moved.moves
        return
    # FSDP by sharding alone: each sharded weight is gathered, and its gradient is scattered.
    lines = [str(move).split("  # ")[0] for move in moved.moves]
    assert lines.count("mm: float64[8, 8] (S(0)) -> (R) over dp, sends 256 B") == 1
    assert "gradient: float64[8, 8] (P) -> (S(0)) over dp, sends 256 B" in lines
    assert all(move.is_implicit for move in moved.moves)
    assert moved.num_bytes == sum(move.num_bytes for move in moved.moves)


@ON_EVERY_MESH
def test_a_step_in_the_body_keeps_gradients_like_their_parameters(kind: Any, gloo: Gloo) -> None:
    run_on(kind, trains, gloo, SHAPE, AXES)


C = random((8,), 5)
Both = Callable[[Tensor, Tensor], Tensor]


def product(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(x @ w, "tp", dst=I)


def nested(x: Tensor, w: Tensor) -> Tensor:
    inner = shard_map(
        lambda a, b: all_reduce(a @ b, "dp", dst=I),
        in_specs=(P(None, None, "dp"), P("dp")),
        out_specs=P(),
        axis_names={"dp"},
    )
    y: Tensor = inner(x.sin(), w)
    return y.cos()


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    def part(x: Tensor, w: Tensor) -> Tensor:
        mine = convert(x * torch.arange(8.0), "tp", src=I, dst=V, dim=2)
        return all_reduce(mine @ convert(w, "tp", src=I, dst=V, dim=0), "tp", dst=I)

    return checkpoint(part, x, w).sin()


def updated(x: Tensor, w: Tensor) -> Tensor:
    optimizer, params = optim.adamw(lr=0.1), {"w": w}
    grads = value_and_grad(lambda p: (x @ p["w"]).square().mean())(params)[1]
    new: Tensor = optimizer.update(params, grads, optimizer.init(params))[0]["w"]
    return new


def marked(x: Tensor, w: Tensor) -> Tensor:
    y = mark_sharding(x @ w, None, (None, None, "dp"))
    stays_sharded(y, (4, 3, 4))
    return y


class Loss(torch.autograd.Function):
    """A loss whose backward, outside of the body, calls what DTensor has no right rule for."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return functional.mse_loss(x, torch.zeros_like(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return functional.mse_loss(x, torch.zeros_like(x))

        grad: Tensor = torch.func.grad(loss)(ctx.saved_tensors[0])
        return grad * grads[0]


def with_function(x: Tensor, w: Tensor) -> Tensor:
    loss: Tensor = Loss.apply(x @ w)  # type: ignore[no-untyped-call]  # torch's
    return loss


BODIES: dict[str, tuple[Both, Any, Any]] = {
    "split where an automatic axis shards": (product, (P(None, None, "tp"), P("tp")), P()),
    "sharded over both": (lambda x, w: x @ w, (P("tp"), P()), P("tp")),
    "closure": (lambda x, w: (x * C) @ w, P(), P()),
    "inner function": (nested, P(), P()),
    "recomputed": (recomputed, P(), P()),
    "a Function": (with_function, P(), P()),
    "marked": (marked, P(), P()),
    "pending sum": (
        lambda x, w: x @ w,
        (P(None, None, "tp"), P("tp")),
        P(partial={"tp"}),
    ),
}


def are_as_on_global_values(mesh: Mesh) -> None:
    """Compares values and gradients with those of plain arguments, also of a closed-over tensor."""
    C.requires_grad_()
    for name, (body, src, dst) in BODIES.items():
        f = shard_map(body, mesh=mesh, in_specs=src, out_specs=dst, **MANUAL)
        expected = gradients(f, arguments())
        placed = device_put(arguments(), mesh, P("dp"))
        for one, other in zip(gradients(f, placed), expected, strict=True):
            close(one, other, name)
        pulled = torch.func.grad(partial(square, f, placed[0].detach()))(placed[1].detach())
        close(pulled, expected[2], name)
    step = shard_map(updated, mesh=mesh, in_specs=P(), out_specs=P(), **MANUAL)
    x, w = device_put(arguments(), mesh, P("dp"))
    after = step(x, w)
    close(after, step(*arguments()))
    assert isinstance(after, DTensor)
    assert after.placements == w.placements  # type: ignore[attr-defined]  # a DTensor


def arguments() -> list[Tensor]:
    return [random((4, 3, 8), 9), random((8, 8), 1)]


def square(f: Both, x: Tensor, w: Tensor) -> Tensor:
    return full(f(x, w)).square().mean()


def gradients(f: Both, values: list[Tensor]) -> list[Tensor]:
    C.grad = None
    y = f(*(x.requires_grad_() for x in values))
    full(y).square().mean().backward()
    found = [y.detach(), *(x.grad for x in values), *([] if C.grad is None else [C.grad])]
    return [full(each) for each in found]  # type: ignore[misc]


def test_other_bodies_compute_what_they_do_on_global_values(gloo: Gloo) -> None:
    run_on("gloo", are_as_on_global_values, gloo, SHAPE, AXES)


def places(mesh: Mesh) -> None:
    """Uneven values are gathered, results keep an order of axes that comes back as it left."""
    x = device_put(random((4, 3, 8), 9), mesh, P("dp"))
    if not isinstance(x, DTensor):
        return
    f = shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), **MANUAL)
    rows = shard_map(lambda x: x[:3], mesh=mesh, in_specs=P(), out_specs=P(), **MANUAL)
    assert not isinstance(rows(x), DTensor)
    close(rows(x), full(x)[:3])
    ordered = device_put(full(x), mesh, P(("tp", "dp")))
    with redistributions() as moved:
        again = f(f(ordered))
    assert not moved.moves
    assert isinstance(again, DTensor)
    assert again.placements == ordered.placements
    close(again, 4 * full(x))
    with redistributions() as moved:
        f(x)  # sharded first over dp, and in the body first over tp
    assert [str(move).split("  # ")[0] for move in moved.moves] == [
        "argument: float64[4, 3, 8] (S(0), R) -> (R, S(0)) over dp, tp, sends 192 B"
    ]


def test_what_cannot_stay_sharded_is_gathered_and_reported(gloo: Gloo) -> None:
    run_on("gloo", places, gloo, SHAPE, AXES)


def names_its_axes(mesh: Mesh) -> None:
    f = shard_map(
        lambda x: mark_sharding(x, None, P("tp")), mesh=mesh, in_specs=P(), out_specs=P(), **MANUAL
    )
    with pytest.raises(SpecError) as caught:
        f(device_put(random((4, 3, 8), 9), mesh, P("dp")))
    assert str(caught.value) == (
        "mark_sharding by P('tp') names 'tp', over which this body is mapped; in a body it takes "
        "the other axes, which are automatic. Move the value by a collective, or reshard."
    )
    g = shard_map(
        lambda x: mark_sharding(x, None, P("dp")), mesh=mesh, in_specs=P(), out_specs=P(), **MANUAL
    )
    with pytest.raises(SpecError) as uneven:
        g(random((3, 8), 9))
    assert str(uneven.value).endswith(
        "dim 0 has size 3, which does not divide over 'dp' = 2 ranks (3 = 1*2 + 1)"
    )


@ON_EVERY_MESH
def test_marks_in_a_body_take_automatic_axes_only(kind: Any, gloo: Gloo) -> None:
    run_on(kind, names_its_axes, gloo, SHAPE, AXES)
