"""Donated arguments: what a call may write into, and that nobody uses it afterwards."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import optree
import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    ShapeDtype,
    ShardTypeError,
    SpecError,
    TransformError,
    all_reduce,
    device_put,
    make_mesh,
    shard_map,
    shift,
    value_and_grad,
)
from shardmap_torch.optim import adamw, sgd, sync_gradients
from shardmap_torch.optim.optimizer import Optimizer
from shardmap_torch.planning import H100, estimate
from shardmap_torch.planning.dry_run import DryRun, Tape
from tests.support.pool import Gloo

SPECS: Final = {"scale": P(replicate="tp"), "up": P(None, "tp"), "down": P("tp")}
OPTIMIZERS: Final = {
    "adamw": adamw(1e-2, weight_decay=0.1),
    "adamw in float64": adamw(1e-2, state_dtype=torch.float64),
    "sgd": sgd(1e-2, momentum=0.9),
}
SIZES: Final = 64, 256


def step_on(mesh: Mesh | None, optimizer: Optimizer, donates: bool, **options: Any) -> Any:
    """Maps a step of an MLP, which donates parameters and state or neither."""

    def step(params: Any, state: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            hidden = torch.tanh((x * params["scale"]) @ params["up"])
            y = all_reduce(hidden @ params["down"], "tp", dst=I)
            total: Tensor = y.square().sum()
            return total

        value, grads = value_and_grad(loss)(params)
        grads = sync_gradients(grads, SPECS)
        return *optimizer.update(params, grads, state, in_place=donates), value

    specs = SPECS, optimizer.specs(SPECS)
    donate = ("params", "state") if donates else ()
    return shard_map(
        step, mesh=mesh, in_specs=(*specs, P()), out_specs=(*specs, P()), donate=donate, **options
    )


def arguments(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    width, hidden = SIZES
    shapes = {"scale": (width,), "up": (width, hidden), "down": (hidden, width)}
    params = {name: 0.1 * torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return params, optimizer.init(params), torch.randn(2, width, dtype=dtype)


def tensors(tree: Any) -> list[Tensor]:
    found: Any = optree.tree_leaves(tree)
    return [getattr(x, "full_tensor", lambda x=x: x)() for x in found]


def three_steps(step: Callable[..., Any], args: Any) -> list[Tensor]:
    params, state, x = args
    for _ in range(3):
        params, state, value = step(params, state, x)
    return tensors((params, state, value))


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("check", ["local", "global", False])
def test_donating_steps_compute_as_others(optimizer: Optimizer, ranks: int, check: Any) -> None:
    mesh = make_mesh((ranks,), ("tp",), kind="simulated")
    expected, found = (
        three_steps(step_on(mesh, optimizer, donates, check=check), arguments(optimizer))
        for donates in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_what_was_donated_raises_where_it_is_used() -> None:
    optimizer = adamw(1e-2)
    params, state, x = arguments(optimizer)
    params["up"] = torch.nn.Parameter(params["up"], requires_grad=False)
    view, before = params["down"].view(-1), params["down"].clone()
    step = step_on(make_mesh((1,), ("tp",), kind="simulated"), optimizer, True)
    new, _, _ = step(params, state, x)
    for use in (
        params["up"].sum,
        lambda: params["up"] @ x,
        lambda: repr(params["up"]),
        lambda: torch.add(x, other=params["up"]),
        lambda: torch.stack([x, params["up"]]),
        lambda: torch.add(x, x, out=params["up"]),
    ):
        with pytest.raises(SpecError) as error:
            use()
        assert str(error.value) == (
            "params['up'] was donated to step, which may have written into its memory. Use what "
            "the call has returned, or do not donate it."
        )
    # The step has written into the memory, so that what else has it changes too.
    assert not torch.equal(view.view(before.shape), before)
    assert torch.equal(view.view(before.shape), new["down"])
    with pytest.raises(SpecError, match=r"^params\['\w+'\] was donated to step"):
        step(params, state, x)


@pytest.mark.parametrize("check", ["local", False])
def test_a_run_that_fails_takes_what_it_has_written_into(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        if os.environ["FAILS"] == "at once":
            raise ValueError("no data")
        z = x.mul_(2) + y
        if os.environ["FAILS"] == "late":
            raise ValueError("no data")
        return z

    mesh = make_mesh((1,), ("tp",), kind="simulated")
    mapped = shard_map(
        body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), donate=("x", "y"), check=check
    )
    for fails in ("never", "at once", "late"):
        monkeypatch.setenv("FAILS", fails)
        x, y = torch.ones(2), torch.ones(2)
        with nullcontext() if fails == "never" else pytest.raises(ValueError, match="no data"):
            assert mapped(x, y).tolist() == [3, 3]
        if fails == "at once":
            assert (x.tolist(), y.tolist()) == ([1, 1], [1, 1])
            continue
        for each in (x, y):
            with pytest.raises(SpecError, match=r"^[xy] was donated to body, which may have"):
                each.tolist()


def test_a_body_sees_what_it_has_written() -> None:
    mesh = make_mesh((1,), ("tp",), kind="simulated")

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x + 0
        x.mul_(2)
        return before, x

    for donate in ((), ("x",)):
        mapped = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), donate=donate)
        if donate:
            assert [y.tolist() for y in mapped(torch.ones(2))] == [[1, 1], [2, 2]]
        else:
            with pytest.raises(ShardTypeError, match="writes into a tensor that is the input x"):
                mapped(torch.ones(2))


def test_shared_memory_cannot_be_donated() -> None:
    mesh = make_mesh((1,), ("tp",), kind="simulated")
    closed = torch.ones(4)

    def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + b + c + closed

    mapped = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), donate=("a", "b"))
    for check in (mapped, shard_map(
        body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), donate=("a", "b"), check=False
    )):  # fmt: skip
        base = torch.ones(8)
        with pytest.raises(SpecError) as error:
            check(base[:4], base[2:6], base[4:])
        assert str(error.value) == (
            "body: the call may write into what is donated to it; clone these:\n"
            "  b shares memory with a\n"
            "  b shares memory with c"
        )
        assert base.tolist() == [1] * 8
    with pytest.raises(SpecError, match="a shares memory with a tensor that the body closes over"):
        mapped(closed, torch.ones(4), torch.ones(4))


def test_what_donates_is_not_differentiated_replayed_or_inside() -> None:
    mesh = make_mesh((1,), ("tp",), kind="simulated")
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": P("tp"), "out_specs": P("tp")}
    mapped = shard_map(lambda x: x * 2, donate="x", **specs)
    with pytest.raises(TransformError, match="what is donated cannot be differentiated"):
        mapped(torch.ones(2, requires_grad=True))
    with pytest.raises(TransformError, match="what is donated cannot be differentiated"):
        torch.func.grad(lambda x: mapped(x).sum())(torch.ones(2))
    with pytest.raises(SpecError, match="exclude each other"):
        shard_map(lambda x: x, donate="x", replay=True, **specs)
    with pytest.raises(SpecError) as error:
        shard_map(lambda x: x, donate=("y", "z"), **specs)
    assert str(error.value) == "donate= takes names of parameters, of x, not 'y', 'z'."


def test_a_donating_call_runs_uncompiled() -> None:
    mesh = make_mesh((1,), ("tp",), kind="simulated")
    mapped = shard_map(
        lambda x: x.mul_(2), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), donate="x"
    )
    compiled = torch.compile(lambda x: mapped(x + 1), backend="eager")
    x = torch.ones(2)
    assert compiled(x).tolist() == [4, 4]
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("writes", [False, True])
def test_a_program_that_changed_is_checked_again_unless_it_has_written(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(x: Tensor) -> Tensor:
        y = x.mul_(2) if writes else x * 2
        for _ in range(int(os.environ["TIMES"])):
            y = shift(y, "tp", 1)
        return y

    mesh = make_mesh((1,), ("tp",), kind="simulated")
    mapped = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), donate="x")
    for times in "12":
        monkeypatch.setenv("TIMES", times)
        if writes and times == "2":
            with pytest.raises(ShardTypeError, match="body does not do what it did when it was"):
                mapped(torch.ones(2))
        else:
            assert mapped(torch.ones(2)).tolist() == [2, 2]


def test_estimates_of_donating_steps_hold_parameters_and_moments_once() -> None:
    mesh, optimizer = make_mesh((2,), ("tp",), kind="abstract"), adamw(1e-2)
    sizes = {"scale": (512,), "up": (512, 4096), "down": (4096, 512)}
    shapes = {name: ShapeDtype(size) for name, size in sizes.items()}
    state = {"step": ShapeDtype((), torch.int64), "exp_avg": shapes, "exp_avg_sq": shapes}
    args = shapes, state, ShapeDtype((2, 512))
    twice, once = (
        estimate(step_on(mesh, optimizer, donates), *args, hardware=H100)
        for donates in (False, True)
    )
    each = 2 * 512 * 4096 * 4 // 2
    assert twice.peak - once.peak == pytest.approx(3 * each, rel=0.01)
    assert twice.donatable == pytest.approx(3 * each, rel=0.01)
    assert once.donatable < each / 100
    assert "donate= would save up to 25.2 MB" in str(twice)


def on_processes(donates: bool) -> tuple[list[Tensor], int, str]:
    """Returns the results of three steps, the most memory of one, and an error."""
    mesh, optimizer = make_mesh((2,), ("tp",), kind="process_group"), adamw(1e-2)
    step, specs = step_on(mesh, optimizer, donates), (SPECS, optimizer.specs(SPECS), P())
    args = device_put(arguments(optimizer), mesh, specs)
    found = three_steps(step, args)
    args = device_put(arguments(optimizer), mesh, specs)
    run = DryRun("step", mesh)
    leaves: list[Any] = optree.tree_leaves(args)
    with Tape(run) as tape:
        tape.hold([getattr(x, "_local_tensor", x) for x in leaves])
        step(*args)
    try:
        message = str((args[0]["up"] + 1).shape)
    except SpecError as error:
        message = str(error)
    return found, max(run.live()), message


def test_processes_hold_parameters_and_moments_once(gloo: Gloo) -> None:
    (expected, twice, fine), *_ = gloo(2).run(on_processes, False)
    (found, once, message), *_ = gloo(2).run(on_processes, True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert twice - once == pytest.approx(3 * 2 * 64 * 256 * 4 // 2, rel=0.02)
    assert fine == "torch.Size([64, 256])"
    assert message.startswith("params['up'] was donated to step, which may have written")
