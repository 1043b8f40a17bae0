"""Random junk for the functions of the libraries: each argument right, nearly right, or junk."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import shardmap_torch as sm
from shardmap_torch import (
    Mesh,
    P,
    kernels,
    lax,
    nn,
    ops,
    optim,
    parallel,
    planning,
    random,
    saving,
    testing,
)
from tests.support.bad_input import Call, Draw, operand, or_junk, sine, some_mesh, spec

_LEFT_OUT: Final = {
    *("auto", "find_divergence", "this_machine"),
    *("while_loop", "fori_loop"),  # which are endless for some arguments
}
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module in (nn, ops, optim, parallel, planning, random, saving, lax, kernels, testing, sm)
    for name in sorted({*module.__all__} - _LEFT_OUT)
    if inspect.isfunction(getattr(module, name))
}

RIGHT: Final[dict[str, Callable[[Draw], Any]]] = {
    "axis": lambda draw: draw.choice(("a", "b", None)),
    "axis_name": lambda draw: "a",
    "mesh": some_mesh,
    "spec": spec,
    "specs": spec,
    "in_specs": spec,
    "out_specs": spec,
    "dim": lambda draw: draw.choice((0, 1, -1)),
    "key": lambda draw: random.key(0),
    "shape": lambda draw: draw.choice(((2, 2), (4,), ())),
    "path": lambda draw: "nowhere/at/all",
    "pattern": lambda draw: "*",
    "patterns": lambda draw: {"**": P()},
    "optimizer": lambda draw: optim.sgd(0.1),
}
KINDS: Final[tuple[tuple[str, Callable[[Draw], Any]], ...]] = (
    ("Callable", lambda draw: draw.choice((sine, lambda *args: args[-1], lambda *args: args))),
    ("Tensor", operand),
    ("bool", lambda draw: draw.random() < 0.5),
    ("int", lambda draw: draw.choice((0, 1, 2, 4))),
    ("float", lambda draw: draw.choice((0.0, 0.5, 1.0))),
    ("str", lambda draw: draw.choice(("sum", "mean", "a"))),
    ("Sequence", lambda draw: draw.choice(((1,), (1, 2), [operand(draw), operand(draw)]))),
)
"""Makes a value for a parameter whose annotation has this word."""


def argument(draw: Draw, name: str, annotation: object, chance: float) -> Any:
    text = str(annotation)
    made = RIGHT.get(name) or next((make for word, make in KINDS if word in text), _tree)
    return or_junk(draw, made(draw), chance)


def _tree(draw: Draw) -> Any:
    return draw.choice((operand, lambda d: {"w": operand(d)}, lambda d: [operand(d)] * 2))(draw)


def arguments(
    draw: Draw, function: Callable[..., Any], chance: float = 0.15
) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments for the parameters of a function, each junk by this chance."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in inspect.signature(function).parameters.values():
        if each.kind == each.VAR_KEYWORD:
            continue
        if each.kind == each.VAR_POSITIONAL:
            args += [operand(draw) for _ in range(draw.choice((0, 1, 2)))]
        elif each.kind == each.POSITIONAL_ONLY or (each.default is each.empty and not kwargs):
            args.append(argument(draw, each.name, each.annotation, chance))
        elif each.default is each.empty or draw.random() < 0.3:
            kwargs[each.name] = argument(draw, each.name, each.annotation, chance)
    return args, kwargs


def library_call(draw: Draw) -> Call:
    """A function of a library with random arguments, outside of a body or in one."""
    name = draw.choice(sorted(FUNCTIONS))
    function, mesh = FUNCTIONS[name], some_mesh(draw)
    args, kwargs = arguments(draw, function)
    if draw.random() < 0.4:
        return lambda: function(*args, **kwargs)
    where = draw.randrange(len(args)) if args and draw.random() < 0.7 else None

    def call() -> object:
        def body(x: Tensor) -> Any:
            given = [x if k == where else each for k, each in enumerate(args)]
            return function(*given, **kwargs)

        check: Any = draw.choice((True, True, "global", False))
        return sm.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check=check)(
            torch.ones(12, 4)
        )

    return call


def product(x: Tensor, w: Tensor) -> Tensor:
    return sm.all_reduce(x @ w, "a", dst=sm.I)


def mapped_on(mesh: Mesh) -> Callable[..., Any]:
    return sm.shard_map(product, mesh=mesh, in_specs=(P(None, "a"), P("a")), out_specs=P())


@cache
def objects() -> Sequence[Any]:
    """Objects as the public functions return them; meshes are made anew, which calls close."""
    mesh = sm.make_mesh((2,), ("a",), kind="simulated", simulate="ranks")
    x, f, gpu = torch.ones(4, 4), mapped_on(mesh), planning.H100
    explanation, program = sm.explain(f, x, x), sm.trace(f, x, x)
    estimate = planning.estimate(f, x, x, hardware=gpu)
    ranking = planning.best_mesh(
        lambda mesh: (mapped_on(mesh), (x, x)), 2, axes=("a",), hardware=gpu
    )
    sharding = sm.visualize_sharding(x, mesh=mesh, spec=P("a"))
    validation = sm.validate_rule(torch.sin, x)
    with sm.redistributions() as redistributions:
        sm.auto(torch.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)
    return (
        *(explanation, explanation.rows[0], explanation.page(), program, program.equations[0]),
        *(estimate, estimate.spans[0], gpu, ranking, ranking.best, sharding, sharding.page()),
        *(validation, redistributions, sm.check_program(f, x, x), sm.ShapeDtype((2,))),
        *(ops.axis_group(mesh, "a"), P("a", None), P(partial={"a"}), sm.I, sm.S(0)),
        *(optim.sgd(0.1), optim.adamw(0.1), optim.adamw(0.1, weight_decay=0.1), sm.Row()),
        *(sm.ColwiseParallel(), parallel.LocalAttributes(heads={"heads": 2})),
    )


def members(of: object) -> list[str]:
    """The public attributes that classes of this package define, and what syntax calls."""
    called = {"__call__", "__getitem__", "__enter__", "__eq__", "__contains__", "__getattr__"}
    return sorted(
        {
            name
            for each in type(of).__mro__
            if each.__module__.startswith("shardmap_torch")
            for name in vars(each)
            if name in called or not name.startswith("_")
            if not isinstance(of, ProcessGroup) or hasattr(ProcessGroup, name)
        }
    )


def method_call(draw: Draw) -> Call:
    """A method of a public object with random arguments, or a property of it."""
    of = some_mesh(draw) if draw.random() < 0.3 else draw.choice(objects())
    if draw.random() < 0.15:
        of = type(of)
        args, kwargs = arguments(draw, of, 0.4)
        return lambda: of(*args, **kwargs)
    name = draw.choice(members(of))
    method = inspect.getattr_static(type(of), name)
    if not inspect.isfunction(method):
        return lambda: getattr(of, name)
    args, kwargs = arguments(draw, getattr(of, name), 0.4)
    return lambda: getattr(of, name)(*args, **kwargs)
