"""A run that leaves its checked program is stopped before anything of the difference is sent.

The flags here are hidden: nothing that the checker can see from outside of the body changes.
"""

import contextvars
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    Function,
    I,
    Mesh,
    P,
    ShardMapError,
    ShardTypeError,
    all_reduce,
    assume_constant,
    axis_index,
    checkpoint,
    lax,
    ppermute,
    shard_map,
)
from shardmap_torch.checker.guards.monitor import CheckedStep, Departure, RunMonitor, depart
from tests.programs.support.everywhere import ON_EVERY_MESH, ON_REAL_RANKS, run_on, same
from tests.programs.support.harness import worker_mesh
from tests.support.pool import Gloo

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("way", default="sum")
TEXT = StringIO("sum")
MEMORY = ctypes.create_unicode_buffer("sum", 16)


def rewrite(text: str) -> None:
    TEXT.seek(0)
    TEXT.truncate()
    TEXT.write(text)


@dataclass(frozen=True)
class Hidden:
    """A place that a run may find changed, though the checker does not follow each of them."""

    get: Callable[[], str]
    put: Callable[[str], Any]


PLACES = {
    "the environment": Hidden(
        lambda: os.environ.get("SHARDMAP_WAY", "sum"),
        lambda way: os.environ.__setitem__("SHARDMAP_WAY", way),
    ),
    "a context variable": Hidden(VARIABLE.get, VARIABLE.set),
    "memory of C": Hidden(
        lambda: MEMORY.value,
        lambda way: setattr(MEMORY, "value", way),
    ),
    "an object in C": Hidden(TEXT.getvalue, rewrite),
    "an attribute of a library": Hidden(
        lambda: getattr(torch.nn.functional, "shardmap_way", "sum"),
        lambda way: setattr(torch.nn.functional, "shardmap_way", way),
    ),
}
FLAG = PLACES["memory of C"]  # never followed


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    reset()


def reset() -> None:
    for place in PLACES.values():
        place.put("sum")


X = torch.arange(4.0)


def reduced(x: Tensor, way: str) -> Tensor:
    """In several ways, of which only "sum" and "twice" give the same on all ranks of 'a'."""
    if way == "none":
        return x
    if way == "other axis":
        return all_reduce(x, "b", dst=I)
    total = all_reduce(x, "a", dst=I)
    if way == "twice":
        return total + all_reduce(x.square(), "a", dst=I)
    return total + axis_index("a") if way == "index" else total


def rejections(mesh: Mesh, name: str) -> None:
    reset()
    place = PLACES[name]
    f = shard_map(
        lambda x: reduced(x, place.get()), mesh=mesh, in_specs=P(("b", "a")), out_specs=P("b")
    )
    for way in ("none", "other axis", "index"):
        same(f(X), torch.tensor([1.0, 5.0]))
        place.put(way)
        with pytest.raises(ShardTypeError, match=r"over 'a'|varies over it"):
            f(X)
        place.put("sum")


@ON_EVERY_MESH
@pytest.mark.parametrize("name", PLACES)
def test_a_hidden_flag_that_changes_a_collective_is_seen(name: str, kind: Any, gloo: Gloo) -> None:
    run_on(kind, partial(rejections, name=name), gloo, (2, 2), ("a", "b"))


def new_program(mesh: Mesh) -> None:
    reset()
    f = shard_map(lambda x: reduced(x.sum(), FLAG.get()), mesh=mesh, in_specs=P("a"), out_specs=P())
    sums = torch.tensor([1.0, 1.0, 5.0, 5.0])
    for way, value, slope in (("sum", 6.0, 0.0), ("twice", 32.0, 2.0), ("sum", 6.0, 0.0)):
        FLAG.put(way)
        for _ in range(2):
            x = X.clone().requires_grad_()
            y = f(x)
            same(y, torch.tensor(value))
            (grad,) = torch.autograd.grad(y, x)
            same(grad, 1 + slope * sums)


@ON_EVERY_MESH
def test_another_program_that_is_right_runs_from_the_start(kind: Any, gloo: Gloo) -> None:
    run_on(kind, new_program, gloo, (2,), ("a",))


@pytest.mark.parametrize("kind", ["vmap", "ranks"])
def test_another_program_runs_under_a_transform_from_outside(kind: Any, gloo: Gloo) -> None:
    def scenario(mesh: Mesh) -> None:
        f = shard_map(
            lambda w, x: reduced((w * x).sum(), FLAG.get()),
            mesh=mesh,
            in_specs=(P(), P("a")),
            out_specs=P(),
        )
        w = torch.tensor(1.0)
        for way, slope, bend in (("sum", 6.0, 0.0), ("twice", 58.0, 52.0), ("sum", 6.0, 0.0)):
            FLAG.put(way)
            same(torch.func.grad(f)(w, X), torch.tensor(slope))
            if mesh.simulate == "vmap":
                same(torch.func.grad(torch.func.grad(f))(w, X), torch.tensor(bend))

    run_on(kind, scenario, gloo, (2,), ("a",))


def test_ways_that_a_run_cannot_tell_apart_must_ask_for_the_same_type(gloo: Gloo) -> None:
    def scenario(mesh: Mesh) -> None:
        def body(n: Tensor, x: Tensor) -> Tensor:
            value = torch.ones(()) if n.item() > 0 else x.sum()
            return lax.psum(value, "a")

        f = shard_map(body, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
        with pytest.raises(ShardTypeError) as error:
            f(torch.tensor(1), X)
        line = body.__code__.co_firstlineno + 2
        assert str(error.value).splitlines()[:3] == [
            "body: the value is [V] on one path through the body and [K] on another, and a run "
            "cannot tell which path it takes.",
            f'  at test_monitor.py:{line}: return lax.psum(value, "a")',
            "Fix: pass the type as src=.",
        ]

    run_on("vmap", scenario, gloo, (2,), ("a",))


def unsteady(mesh: Mesh) -> None:
    reset()

    def body(x: Tensor) -> Tensor:
        FLAG.put("twice" if FLAG.get() == "sum" else "sum")
        return reduced(x.sum(), FLAG.get())

    f = shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P())
    with pytest.raises(ShardTypeError) as error:
        f(X)
    line = "test_monitor.py:" + str(reduced.__code__.co_firstlineno + 8)
    assert str(error.value) == (
        "body: the body does not do what it did when it was checked just before:\n"
        "  this run: the end\n"
        f"  the checked program: all_reduce('a', Partial -> I) of float32[] at {line}\n"
        "It must do the same whenever it is called with the same arguments. Pass what it depends "
        "on as an argument."
    )


@pytest.mark.parametrize("kind", ["vmap", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_body_that_changes_from_run_to_run_is_an_error(kind: Any, gloo: Gloo) -> None:
    run_on(kind, unsteady, gloo, (2,), ("a",))


def test_a_body_cannot_catch_that_it_is_stopped(gloo: Gloo) -> None:
    def scenario(mesh: Mesh) -> None:
        def body(x: Tensor) -> Tensor:
            try:
                return reduced(x, FLAG.get())
            except Exception:
                return x

        f = shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P())
        f(X)
        FLAG.put("twice")
        same(f(X), torch.tensor([6.0, 14.0]))

    run_on("vmap", scenario, gloo, (2,), ("a",))


def test_an_inner_function_with_other_specs_is_another_program(gloo: Gloo) -> None:
    program_paths: list[str] = assume_constant([])  # so that the checker does not look into it

    def scenario(mesh: Mesh) -> None:
        def body(x: Tensor) -> Tensor:
            program_paths.append(FLAG.get())
            spec = P("b") if FLAG.get() == "sum" else P(None, "b")
            doubled: Tensor = shard_map(lambda x: x * 2, in_specs=spec, out_specs=spec)(x)
            return doubled

        f = shard_map(body, mesh=mesh, axis_names="a", in_specs=P("a"), out_specs=P("a"))
        f(torch.ones(4, 2))
        FLAG.put("other dim")
        same(f(torch.ones(4, 2)), torch.full((4, 2), 2.0))

    run_on("vmap", scenario, gloo, (2, 2), ("a", "b"))
    # Interpreted and run; stopped, interpreted and run.
    assert list(program_paths) == ["sum"] * 2 + ["other dim"] * 3


# -------------------------------------------------------------------------------- backward


class Same(Function):
    """The identity on an invariant value that is used by each rank in its own way."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [None if g is None else reduced(g, FLAG.get()) for g in grads]
        return tuple(given)


def own(w: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    w, v = Same.apply(w, v)
    return all_reduce((w * x).sum(), "a", dst=I), all_reduce((v * x).sum(), "a", dst=I)


def recomputed(w: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    def layer(w: Tensor, x: Tensor) -> Tensor:
        return reduced((w.sin() * x).sum(), FLAG.get())

    return checkpoint(layer, w, x), checkpoint(layer, v, x)


def switched(mesh: Mesh, body: Callable[..., Any]) -> None:
    reset()
    f = shard_map(body, mesh=mesh, in_specs=(P(), P(), P("a")), out_specs=P())
    program_paths = ["twice", "none"] if body is own else ["twice", "none", "other axis"]
    for way in program_paths:
        FLAG.put("sum")
        w, v = torch.ones(()).requires_grad_(), torch.ones(()).requires_grad_()
        y, z = f(w, v, X)
        FLAG.put(way)
        with pytest.raises(ShardTypeError, match="a backward does not do what it did when it was"):
            torch.autograd.grad([y, z], [w, v])


@ON_REAL_RANKS
@pytest.mark.parametrize("body", [own, recomputed])
def test_a_flag_that_switches_after_the_forward_is_seen_in_the_backward(
    body: Any, kind: Any, gloo: Gloo
) -> None:
    run_on(kind, partial(switched, body=body), gloo, (2, 1), ("a", "b"))


def test_a_flag_that_switches_after_a_batched_forward_is_seen(gloo: Gloo) -> None:
    run_on("vmap", partial(switched, body=recomputed), gloo, (2, 1), ("a", "b"))


def parts(mesh: Mesh) -> None:
    reset()
    f = shard_map(own, mesh=mesh, in_specs=(P(), P(), P("a")), out_specs=P())
    w, v = torch.ones(()).requires_grad_(), torch.ones(()).requires_grad_()
    for outputs in ((0, 1), (0,), (1,)):
        for wanted in ((0, 1), (0,), (1,)):
            results = f(w, v, X)
            found = torch.autograd.grad(
                [results[i] for i in outputs], [(w, v)[i] for i in wanted], allow_unused=True
            )
            for i, grad in zip(wanted, found, strict=True):
                assert (grad is not None) == (i in outputs)
                if grad is not None:
                    same(grad, torch.tensor(6.0))


@ON_REAL_RANKS
def test_a_backward_of_some_results_for_some_inputs_is_a_part_of_the_program(
    kind: Any, gloo: Gloo
) -> None:
    run_on(kind, parts, gloo, (2,), ("a",))


# --------------------------------------------------------------------- one process differs


def on_one_rank(way: str, late: bool) -> list[str]:
    """Returns each process's error when only rank 1 changes its flag."""
    reset()
    mesh = worker_mesh((2,), ("a",))
    f = shard_map(own if late else reduced_by_flag, mesh=mesh, in_specs=SPECS[late], out_specs=P())
    w, v = torch.ones(()).requires_grad_(), torch.ones(()).requires_grad_()
    given = (w, v, X) if late else (X,)
    f(*given)
    out: Any = f(*given) if late else None
    if mesh.rank == 1:
        FLAG.put(way)
    try:
        if out is None:
            f(X)
            f(X)
        else:
            torch.autograd.grad(list(out), [w, v])
            f(*given)
    except ShardMapError as error:
        return [type(error).__name__, str(error)]
    return ["no error"]


def reduced_by_flag(x: Tensor) -> Tensor:
    return reduced(x.sum(), FLAG.get())


def on_one_end() -> list[str]:
    """Returns the errors where a process waits for a message of one other."""
    reset()
    mesh = worker_mesh((2,), ("a",))
    f = shard_map(sent_by_flag, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    f(X)
    if mesh.rank == 1:
        FLAG.put("none")
    try:
        f(X)
    except ShardMapError as error:
        return [type(error).__name__, str(error)]
    return ["no error"]


def sent_by_flag(x: Tensor) -> Tensor:
    return x if FLAG.get() == "none" else ppermute(x, "a", [(1, 0)])


SPECS = {False: P("a"), True: (P(), P(), P("a"))}


@pytest.mark.parametrize(("way", "late"), [("none", False), ("twice", False), ("twice", True)])
def test_a_flag_of_one_process_is_an_error_on_every_process(
    way: str, late: bool, gloo: Gloo
) -> None:
    try:
        first, second = gloo(2).run(on_one_rank, way, late)
    finally:
        gloo(2).close()  # they have stopped at different collectives
    assert first[0] == second[0] == "CollectiveMismatchError"
    for told in (first[1], second[1]):
        assert "rank 1" in told
        assert "comes to " in told or "failed before" in told
        assert "at test_monitor.py:" in told


def test_a_process_does_not_wait_for_a_message_that_is_not_sent(gloo: Gloo) -> None:
    try:
        first, second = gloo(2).run(on_one_end)
    finally:
        gloo(2).close()
    line = sent_by_flag.__code__.co_firstlineno + 1
    assert first[0] == second[0] == "CollectiveMismatchError"
    waiting = r"  rank 0 waits in #\d+ call \d+ of sent_by_flag: ppermute\('a', V -> V\) of "
    assert re.search(rf"{waiting}float32\[2\] at test_monitor\.py:{line}, begun\n", first[1])
    assert "comes to the end, where the program has ppermute('a', V -> V)" in first[1] + second[1]


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2).double(), torch.ones(2, 1)])
def test_an_operand_of_another_shape_or_dtype_is_another_step(other: Tensor) -> None:
    start = CheckedStep()
    start.then("a sum", torch.ones(2))
    RunMonitor(start, depart).on_operation("a sum", torch.ones(2))
    with pytest.raises(Departure, match=r"the checked program: a sum of float32\[2\]"):
        RunMonitor(start, depart).on_operation("a sum", other)
