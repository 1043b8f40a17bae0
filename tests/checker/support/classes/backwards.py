"""Random bodies with Functions and hooks of the user's own, under global strictness."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

import shardmap_torch
from shardmap_torch import I, P, all_reduce, make_mesh, shard_map
from tests.checker.support.classes.backs import BACKS, BY_ENTRY, Back, Context
from tests.checker.support.classes.trials import differentiated, fate_against, numbers

NAMES: Final = ("dp", "tp")
MESHES: Final = {
    strategy: make_mesh((2, 2), NAMES, kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
ONE: Final = make_mesh((1, 1), NAMES, kind="simulated", simulate="ranks")
SPECS: Final = (P("dp"), P("dp"), P(("dp", "tp")), P(("tp", "dp")), P("dp", "tp"), P(None, "tp"))
OPERANDS: Final = (numbers(8, 6), numbers(6, 6))

Place: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Computes the next value from the one before and from w."""


def row_axes(spec: P) -> tuple[str, ...]:
    """Returns the mesh axes that shard the first dim."""
    entry = spec.entries[0]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def new_style(back: Back, axes: tuple[str, ...], base: Any) -> Callable[[Tensor], Tensor]:
    """A Function of `setup_context` that is the sine, with that backward."""

    class Own(base):  # type: ignore[misc]
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return back(Context(x, axes), g * x.cos())

    apply: Callable[[Tensor], Tensor] = Own.apply
    return apply


def old_style(back: Back, axes: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """A Function whose forward takes the context, and that keeps a Python number there."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            ctx.save_for_backward(x)
            return x * factor

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return back(Context(ctx.saved_tensors[0], axes), g * ctx.factor), None

    return lambda x: Own.apply(x, 1.5)  # type: ignore[no-untyped-call]  # torch's


def hooked(back: Back, axes: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """A hook on a value in the middle."""

    def step(x: Tensor) -> Tensor:
        y = x.cos()
        if y.requires_grad:
            context = Context(y.detach(), axes)
            y.register_hook(lambda g: back(context, g))
        return y

    return step


def reentrant(back: Back, axes: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """A Function whose backward computes again, with a hook on the way."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.cos()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                y = leaf * 1
                y.register_hook(lambda g: back(Context(x, axes), g))
                found: Tensor = torch.autograd.grad(y.cos(), leaf, g)[0]
                return found

    apply: Callable[[Tensor], Tensor] = Own.apply
    return apply


MAKES: Final[Mapping[str, Callable[[Back, tuple[str, ...]], Callable[[Tensor], Tensor]]]] = {
    "Function": lambda back, axes: new_style(back, axes, torch.autograd.Function),
    "our Function": lambda back, axes: new_style(back, axes, shardmap_torch.Function),
    "old Function": old_style,
    "hook": hooked,
    "reentrant Function": reentrant,
}
OPERATIONS: Final[Mapping[str, Place]] = {
    "tanh": lambda x, w: x.tanh(),
    "weighed": lambda x, w: x * w[0, 0],
    "layer_norm": lambda x, w: functional.layer_norm(x, x.shape[1:]),
    "matmul": lambda x, w: x @ w,
    "softmax": lambda x, w: x.softmax(-1),
}


@dataclass(frozen=True)
class Own:
    """A step whose backward is the user's own; `again`: in a checkpoint."""

    make: str
    backs: tuple[str, ...]
    again: bool = False

    def place(self, axes: tuple[str, ...]) -> Place:
        def back(context: Context, g: Tensor) -> Tensor:
            for name in self.backs:
                g = BACKS[name](context, g)
            return g

        step = MAKES[self.make](back, axes)
        if self.again:
            return lambda x, w: shardmap_torch.checkpoint(lambda x: step(x).tanh(), x)
        return lambda x, w: step(x)


def _value(chain: Place, x: Tensor, w: Tensor, axes: Sequence[str]) -> Tensor:
    return chain(x, w)


def _sum(chain: Place, x: Tensor, w: Tensor, axes: Sequence[str]) -> Tensor:
    return all_reduce(chain(x, w).square().sum(), axes, dst=I)


def _ours(chain: Place, x: Tensor, w: Tensor, axes: Sequence[str]) -> Tensor:
    found: Tensor = shardmap_torch.grad(lambda x: _sum(chain, x, w, axes))(x)
    return found


def _functional(chain: Place, x: Tensor, w: Tensor, axes: Sequence[str]) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: _sum(chain, x, w, axes))(x)
    return found


def _inner(chain: Place, x: Tensor, w: Tensor, axes: Sequence[str]) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(_sum(chain, leaf, w.detach(), axes), leaf)[0]


ENDS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "value": _value,
    "sum": _sum,
    "grad": _ours,
    "torch.func.grad": _functional,
    "torch.autograd.grad": _inner,
}


@dataclass(frozen=True)
class Backward:
    """A body of steps, some of which have backwards of their own."""

    spec: P
    steps: tuple[str | Own, ...]
    end: str
    strategy: str = "ranks"

    @property
    def right(self) -> bool:
        owns = [step for step in self.steps if isinstance(step, Own)]
        return all(set(step.backs) <= BY_ENTRY.keys() for step in owns)

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """Runs as the body of one rank."""
        axes = row_axes(self.spec)
        places = [
            OPERATIONS[step] if isinstance(step, str) else step.place(axes) for step in self.steps
        ]

        def chain(x: Tensor, w: Tensor) -> Tensor:
            for place in places:
                x = place(x, w)
            return x

        return ENDS[self.end](chain, x, w, tuple(self.spec.mentioned))

    def fate(self) -> str:
        out = P() if self.end == "sum" else self.spec

        def run(mesh: Any, check: Any) -> list[Tensor]:
            mapped = shard_map(
                lambda x, w: self(x, w),
                mesh=mesh,
                in_specs=(self.spec, P()),
                out_specs=out,
                check=check,
            )
            return differentiated(mapped, OPERANDS)

        return fate_against(lambda: run(MESHES[self.strategy], "global"), lambda: run(ONE, True))


def drawn(rng: random.Random) -> Backward:
    """Draws a body; in about half of them every backward is right."""
    spec = rng.choice(SPECS)
    names = sorted(BY_ENTRY if rng.random() < 0.4 else BACKS)
    kept = sorted(OPERATIONS) if spec.entries[1:] == () else ["tanh", "weighed"]

    def own() -> Own:
        backs = tuple(rng.choices(names, k=rng.choice((1, 1, 2))))
        return Own(rng.choice(sorted(MAKES)), backs, rng.random() < 0.2)

    steps: list[str | Own] = [own(), *(rng.choice(kept) for _ in range(rng.randint(0, 2)))]
    if rng.random() < 0.3:
        steps.append(own())
    rng.shuffle(steps)
    return Backward(spec, tuple(steps), rng.choice(sorted(ENDS)), rng.choice(sorted(MESHES)))
