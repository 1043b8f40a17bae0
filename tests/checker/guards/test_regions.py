"""Equal regions are interpreted once, and only those: a layer that differs is checked itself."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    all_reduce,
    assert_type,
    checkpoint,
    convert,
    make_mesh,
    shard_map,
    value_and_grad,
)
from shardmap_torch.checker.api import stand_ins
from shardmap_torch.checker.guards.regions import Regions
from shardmap_torch.checker.ir.program import Equation, PathOutcome, Use
from shardmap_torch.checker.verify import path

LAYERS = 5
Layer = Callable[..., Tensor]
Body = Callable[[Sequence[Any], Tensor], Tensor]


def layer(w: Any, x: Tensor, sums: bool = True) -> Tensor:
    h = torch.tanh(convert(x, "tp", src=I, dst=R) @ w["up"]) @ w["down"]
    y: Tensor = all_reduce(h, "tp", dst=I) if sums else h
    return y


def use_of(use: Use) -> tuple[Any, ...]:
    of = use.storage_type
    return use.name, use.types, use.dtype, use.shape, use.number, of.types, of.origin()


def program_of(outcome: PathOutcome) -> list[Any]:
    """Describes a program, with the equations that equations of a backward belong to."""
    number = {id(each): at for at, each in enumerate(outcome.program.equations)}

    def described(each: Equation) -> tuple[Any, ...]:
        uses = [*map(use_of, each.operands)], [*map(use_of, each.results)]
        forward = None if each.forward is None else number[id(each.forward)]
        rest = each.site, each.backward, each.collective, each.sent, each.literals, each.spot
        return (each.name, *uses, forward, *rest)

    return [*map(described, outcome.program.equations), outcome.outputs, outcome.program.gradients]


@contextmanager
def watching(remembers: bool) -> Iterator[tuple[list[Any], list[int]]]:
    """Yields the programs and records that are checked in this context, and a number of repeats."""
    found: list[Any] = []
    repeats: list[int] = []
    outcome, repeat, key = path._outcome, Regions.repeat, Regions._key

    def note(request: Any, *rest: Any) -> PathOutcome:
        made = outcome(request, *rest)
        steps = [(str(x), x.note, x.last, x.depth, [*x.later]) for x in request.start.walk()]
        found.append((program_of(made), steps, made.traits.rank_only, made.traits.draws))
        return made

    def count(*args: Any) -> Any:
        repeats.append(1)
        return repeat(*args)

    with (
        patch.object(path, "_outcome", note),
        patch.object(Regions, "repeat", count),
        patch.object(Regions, "_key", key if remembers else lambda *_: None),
    ):
        yield found, repeats


def verdict(make: Callable[[], Body], remembers: bool) -> tuple[Any, int]:
    """Checks a loss of layers and its gradients; returns programs or the error, and repeats."""
    mesh, body = make_mesh((2, 2), ("dp", "tp"), kind="abstract"), make()
    specs = [{"up": P(None, "tp"), "down": P("tp"), "b": P()}] * LAYERS
    shapes = {"up": ShapeDtype((4, 8)), "down": ShapeDtype((8, 4)), "b": ShapeDtype((4,))}

    @shard_map(mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))
    def step(ws: Sequence[Any], x: Tensor) -> Any:
        def loss(ws: Sequence[Any], x: Tensor) -> Tensor:
            return all_reduce(body(ws, x).square().mean(), "dp", op="mean", dst=I)

        first, _ = value_and_grad(loss)(ws, x)
        value, grads = value_and_grad(loss)(ws, x + first)  # it descends from what has ended
        return value, [{n: all_reduce(g, "dp", dst=I) for n, g in each.items()} for each in grads]

    given, _ = stand_ins((([shapes] * LAYERS, ShapeDtype((8, 4))), {}))
    with watching(remembers) as (found, repeats):
        try:
            step._shardmap_verdict(given, {})  # type: ignore[attr-defined]
        except (ShardTypeError, RuntimeError) as error:
            return str(error).splitlines()[:6], len(repeats)
    return found, len(repeats)


def in_loop(call: Callable[[int, Any, Tensor], Tensor]) -> Body:
    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        for at, w in enumerate(ws):
            x = call(at, w, x + w["b"])
        return x

    return body


def equal() -> Body:
    return in_loop(lambda _, w, x: checkpoint(layer, w, x))


def equal_closures() -> Body:
    def call(at: int, w: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: layer(w, x), x)

    return in_loop(call)


def nested() -> Body:
    def outer(w: Any, x: Tensor) -> Tensor:
        return checkpoint(layer, w, x) + x

    return in_loop(lambda _, w, x: checkpoint(outer, w, x))


@pytest.mark.parametrize("make", [equal, equal_closures, nested])
def test_equal_layers_have_the_program_that_each_would_have(make: Callable[[], Body]) -> None:
    known, repeats = verdict(make, remembers=True)
    assert repeats >= LAYERS or Regions.recall.__module__ != Regions.__module__  # made anew
    assert known == verdict(make, remembers=False)[0]


def flag() -> Body:
    return in_loop(lambda at, w, x: checkpoint(layer, w, x, at < LAYERS - 1))


def cell() -> Body:
    sums = True

    def call(at: int, w: Any, x: Tensor) -> Tensor:
        nonlocal sums
        sums = at < LAYERS - 1
        return checkpoint(lambda w, x: layer(w, x, sums), w, x)

    return in_loop(call)


COUNT = {"calls": 0}


def mutated_global() -> Body:
    COUNT["calls"] = 0

    def counting(w: Any, x: Tensor) -> Tensor:
        COUNT["calls"] += 1
        return layer(w, x, COUNT["calls"] < LAYERS)

    return in_loop(lambda _, w, x: checkpoint(counting, w, x))


def attribute() -> Body:
    class Layer:
        calls = 0

        def __call__(self, w: Any, x: Tensor) -> Tensor:
            self.calls += 1
            return layer(w, x, self.calls < LAYERS)

    own = Layer()
    return in_loop(lambda _, w, x: checkpoint(own, w, x))


def iterator() -> Body:
    counter = itertools.count(1)
    return in_loop(
        lambda _, w, x: checkpoint(lambda w, x: layer(w, x, next(counter) < LAYERS), w, x)
    )


def generator() -> Body:
    flags = (at < LAYERS - 1 for at in itertools.count())
    return in_loop(lambda _, w, x: checkpoint(lambda w, x: layer(w, x, next(flags)), w, x))


def namespace() -> Body:
    options = SimpleNamespace(sums=True)

    def call(at: int, w: Any, x: Tensor) -> Tensor:
        options.sums = at < LAYERS - 1
        return checkpoint(lambda w, x: layer(w, x, options.sums), w, x)

    return in_loop(call)


def mode() -> Body:
    class Last(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.tanh:
                Last.calls += 1
                if Last.calls % LAYERS == 0:
                    return all_reduce(args[0], "tp", dst=I)
            return func(*args, **kwargs or {})

    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        with Last():
            return equal()(ws, x)

    return body


WRONG = (flag, cell, mutated_global, attribute, iterator, generator, namespace)


@pytest.mark.parametrize("make", WRONG)
def test_a_last_layer_that_is_wrong_is_refused_as_it_would_be_alone(
    make: Callable[[], Body],
) -> None:
    refusal, _ = verdict(make, remembers=True)
    assert isinstance(refusal[0], str), "a wrong layer was accepted"
    assert refusal == verdict(make, remembers=False)[0]


def tied() -> Body:
    def two(first: Any, second: Any, x: Tensor) -> Tensor:
        return layer(first, x) + layer(second, x)

    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        for at, w in enumerate(ws):
            x = checkpoint(two, ws[at - 1], w if at % 2 else ws[at - 1], x)
        return x

    return body


def dropped() -> Body:
    def own(w: Any, x: Tensor) -> Tensor:
        return layer(w, torch.nn.functional.dropout(x, 0.5))

    return in_loop(lambda _, w, x: checkpoint(own, w, x))


def written_operand() -> Body:
    def own(w: Any, x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(x.detach().sum())
        return layer(w, x) * seen

    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        seen = torch.zeros(())
        for w in ws:
            x = checkpoint(own, w, x, seen)
        return all_reduce(x + seen, "dp", dst=I, op="mean")

    return body


def written_capture() -> Body:
    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        seen = torch.zeros(4)

        def own(w: Any, x: Tensor) -> Tensor:
            seen.mul_(2)
            return layer(w, x) + seen

        for w in ws:
            x = checkpoint(own, w, x)
        return x

    return body


def detached() -> Body:
    def call(at: int, w: Any, x: Tensor) -> Tensor:
        own = {n: each.detach() for n, each in w.items()} if at == 3 else w
        return checkpoint(layer, own, x.detach() if at == 1 else x)

    return in_loop(call)


def autocasted() -> Body:
    def call(at: int, w: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=at == 2):
            return checkpoint(layer, w, x).float()

    return in_loop(call)


def branching() -> Body:
    def own(w: Any, x: Tensor) -> Tensor:
        y = layer(w, x)
        return y * 2 if all_reduce(y.detach().sum(), "dp", dst=I).item() > 0 else y

    return in_loop(lambda at, w, x: checkpoint(own if at == 3 else layer, w, x))


def of_other_types() -> Body:
    def own(w: Any, x: Tensor, scale: Tensor) -> Tensor:
        return layer(w, x) * scale

    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        for at, w in enumerate(ws):
            scale = w["b"] if at % 2 else all_reduce(w["up"].sum(), "tp", dst=I) * torch.ones(4)
            x = checkpoint(own, w, x, scale)
        return x

    return body


def cached() -> Body:
    @lru_cache
    def scale() -> Tensor:
        return torch.ones(4) * 2

    return in_loop(lambda _, w, x: checkpoint(lambda w, x: layer(w, x) * scale(), w, x))


def kept() -> Body:
    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def own(w: Any, x: Tensor) -> Tensor:
            seen.append(x.detach())
            return layer(w, x)

        for w in ws:
            x = checkpoint(own, w, x)
        return x + torch.stack(seen).sum(0)

    return body


def asserted() -> Body:
    def own(w: Any, x: Tensor) -> Tensor:
        assert_type(w["b"], {"tp": I})
        y: Tensor = layer(w, x) + w["b"]
        return y

    return in_loop(lambda _, w, x: checkpoint(own, w, x))


def passed_through() -> Body:
    def own(w: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return layer(w, x), y, y.view(-1)

    def body(ws: Sequence[Any], x: Tensor) -> Tensor:
        y = x * 2
        for w in ws:
            x, y, z = checkpoint(own, w, x, y)
            x = x + z.view(x.shape)
        return x + y

    return body


OTHERS = (
    *(mode, tied, dropped, written_operand, written_capture, detached, autocasted, branching),
    *(of_other_types, cached, kept, asserted, passed_through),
)


@pytest.mark.parametrize("make", OTHERS)
def test_layers_that_differ_or_do_more_have_the_program_that_each_has_alone(
    make: Callable[[], Body],
) -> None:
    assert verdict(make, remembers=True)[0] == verdict(make, remembers=False)[0]
