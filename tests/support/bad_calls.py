"""Random junk for the functions of the libraries: each argument right, nearly right, or junk."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

import shardmap_torch as sm
from shardmap_torch import P, kernels, lax, nn, ops, optim, parallel, planning, random, saving
from tests.support.bad_input import Call, Draw, operand, or_junk, sine, some_mesh, spec

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module in (nn, ops, optim, parallel, planning, random, saving, lax, kernels, sm)
    for name in sorted({*module.__all__} - {"auto", "find_divergence", "this_machine"})
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


def argument(draw: Draw, name: str, annotation: object) -> Any:
    text = str(annotation)
    made = RIGHT.get(name) or next((make for word, make in KINDS if word in text), _tree)
    return or_junk(draw, made(draw), 0.15)


def _tree(draw: Draw) -> Any:
    return draw.choice((operand, lambda d: {"w": operand(d)}, lambda d: [operand(d)] * 2))(draw)


def library_call(draw: Draw) -> Call:
    """A function of a library with random arguments, outside of a body or in one."""
    name = draw.choice(sorted(FUNCTIONS))
    function, mesh = FUNCTIONS[name], some_mesh(draw)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in inspect.signature(function).parameters.values():
        if each.kind == each.VAR_POSITIONAL:
            args += [operand(draw) for _ in range(draw.choice((0, 1, 2)))]
        elif each.kind == each.POSITIONAL_ONLY or (each.default is each.empty and not kwargs):
            args.append(argument(draw, each.name, each.annotation))
        elif each.default is each.empty or draw.random() < 0.3:
            kwargs[each.name] = argument(draw, each.name, each.annotation)
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
