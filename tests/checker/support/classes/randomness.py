"""Random bodies that draw: ambient numbers, dropout and keys, on every mesh and on one device."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    Mesh,
    P,
    assume_constant,
    check_program,
    full,
    make_mesh,
    shard_map,
    typeof,
)
from shardmap_torch import random as keyed
from shardmap_torch.types import V
from tests.checker.support.classes.trials import EQUAL, WRONG, fate_against
from tests.programs.support.harness import worker_mesh

NAMES: Final = ("dp", "tp")
SIZES: Final = (2, 2)
MESHES: Final = {
    strategy: make_mesh(SIZES, NAMES, kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
ABSTRACT: Final = make_mesh(SIZES, NAMES, kind="abstract")
SPECS: Final = (P(NAMES), P("dp"), P("tp"), P(), P())
"""Of the operands: one that differs on all ranks, over dp, over tp, none, and the key."""

SHAPE: Final = (2, 32)
"""Of each value on one rank."""

OF_OPERAND: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "rrelu": lambda x: functional.rrelu(x - x.mean(), training=True),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "mean": lambda x: torch.normal(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
}
FROM_NOTHING: Final[Mapping[str, Callable[[], Tensor]]] = {
    "rand": lambda: torch.rand(SHAPE),
    "randn": lambda: torch.randn(SHAPE),
    "empty": lambda: torch.empty(SHAPE).uniform_(),
}
OF_KEY: Final[Mapping[str, Callable[[Tensor, int], Tensor]]] = {
    "key": lambda key, n: keyed.normal(keyed.fold_in(key, n), SHAPE),
    "key over dp": lambda key, n: keyed.normal(keyed.fold_axis(keyed.fold_in(key, n), "dp"), SHAPE),
    "key over both": lambda key, n: keyed.uniform(keyed.fold_axis(key, NAMES), SHAPE) + n,
    "split": lambda key, n: keyed.uniform(keyed.split(key, n + 2)[n], SHAPE),
    "shards": lambda key, n: keyed.uniform(keyed.fold_in(key, n), (4, 32), spec=P("dp")),
}
LOCAL: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "sin": torch.sin,
    "softplus": functional.softplus,
}


@dataclass(frozen=True)
class Drawn:
    """A body of steps that draw, each from nothing, a key, or a value before it.

    Its values are equal over axes where the checker says so; a draw differs over the others.
    """

    steps: tuple[tuple[str, int], ...]
    seed: int

    right = True

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Runs as the body of one rank; the last argument is the key."""
        *values, key = args
        count = len(values)
        for number, (name, operand) in enumerate(self.steps):
            values.append(self._step(name, values[operand % len(values)], key, number))
        return tuple(values[count:])

    @staticmethod
    def _step(name: str, x: Tensor, key: Tensor, number: int) -> Tensor:
        if name in FROM_NOTHING:
            return FROM_NOTHING[name]()
        if name in OF_KEY:
            return OF_KEY[name](key, number)
        return {**OF_OPERAND, **LOCAL}[name](x)

    def values_on(self, mesh: Mesh) -> list[Tensor]:
        """Returns what each step gives on all ranks, stacked, and what the first operand gets."""
        torch.manual_seed(self.seed + 100 * mesh.rank if mesh.kind != "simulated" else self.seed)
        args = operands()
        specs: Any = {"in_specs": SPECS, "out_specs": (P(NAMES),) * len(self.steps)}
        found = shard_map(lambda *args: self(*args), mesh=mesh, **specs)(*args)
        return [full(y).detach() for y in found]

    def types(self) -> list[dict[str, bool]]:
        """Returns whether the values of each step vary, by axis, as the checker says."""
        found: list[Any] = assume_constant([])  # a check undoes other changes

        def body(*args: Tensor) -> Tensor:
            found[:] = map(typeof, self(*args))
            return args[0]

        mapped = shard_map(body, mesh=ABSTRACT, in_specs=SPECS, out_specs=SPECS[0])
        check_program(mapped, *operands())
        return [{axis: have[axis] == V for axis in NAMES} for have in found]

    def fate(self) -> str:
        return self.judged([self.values_on(mesh) for mesh in MESHES.values()])

    def judged(self, runs: Sequence[Sequence[Tensor]]) -> str:
        """Requires that all meshes gave the same bits, which are shared as they are typed."""
        first, *others = runs
        if not all(all(map(torch.equal, first, other)) for other in others):
            return WRONG
        shared = zip(self.steps, first, self.types(), strict=True)
        return EQUAL if all(map(_is_shared, *zip(*shared, strict=True))) else WRONG


def operands() -> tuple[Tensor, ...]:
    """Makes positive numbers that all differ, for each spec, and a key."""
    sizes = (8, 4, 4, 2)
    made = [torch.arange(1.0, 1 + 32 * n).reshape(n, 32) / 100 for n in sizes]
    return (*made, keyed.key(3))


def _is_shared(step: tuple[str, int], value: Tensor, varies: Mapping[str, bool]) -> bool:
    """Compares the ranks' values along each axis: equal where typed so, else of a draw's own."""
    ranks = value.reshape(*SIZES, *SHAPE)
    for at, axis in enumerate(NAMES):
        one, other = ranks.unbind(at)
        if torch.equal(one, other) == varies[axis]:
            return False
    return True


def drawn(rng: random.Random) -> Drawn:
    """Draws a body of one to four steps."""
    names = [*OF_OPERAND, *FROM_NOTHING, *OF_KEY, *LOCAL]
    steps = tuple((rng.choice(names), rng.randrange(8)) for _ in range(rng.randint(1, 4)))
    return Drawn(steps, rng.randrange(1000))


def in_worker(bodies: Sequence[Drawn]) -> list[list[Tensor]]:
    """For `Pool.run`: what bodies give on processes, each of another seed."""
    mesh = worker_mesh(SIZES, NAMES)
    return [body.values_on(mesh) for body in bodies]


# ------------------------------------------------------------------ sharded draws, one device

GLOBAL: Final = (8, 4)
Keyed = Callable[[Tensor, Tensor, P | None], Tensor]
ON_SHARDS: Final[Mapping[str, Keyed]] = {
    "dropout": lambda key, x, spec: keyed.dropout(key, x, 0.3, spec=spec),
    "uniform": lambda key, x, spec: x + keyed.uniform(key, GLOBAL, spec=spec, dtype=x.dtype),
    "normal": lambda key, x, spec: x * keyed.normal(key, GLOBAL, spec=spec, dtype=x.dtype),
    "bernoulli": lambda key, x, spec: torch.where(
        keyed.bernoulli(key, 0.4, GLOBAL, spec=spec), x, -x
    ),
    "randint": lambda key, x, spec: x + keyed.randint(key, GLOBAL, high=9, spec=spec),
    "sin": lambda key, x, spec: x.sin(),
    "without the spec": lambda key, x, spec: keyed.dropout(key, x, 0.3),
    "shared": lambda key, x, spec: x * keyed.uniform(key, (1, 1), dtype=x.dtype),
}
LAYOUTS: Final = (P("dp"), P("tp"), P(NAMES), P(("tp", "dp")), P("dp", "tp"), P(None, NAMES), P())


@dataclass(frozen=True)
class Sharded:
    """Draws from keys, of shards, under global strictness: bit-equal to one device."""

    spec: P
    steps: tuple[str, ...]
    splits: bool
    strategy: str

    @property
    def right(self) -> bool:
        return "without the spec" not in self.steps

    def run(self, key: Tensor, x: Tensor, spec: P | None) -> Tensor:
        """Computes on a shard, or with None for the spec on one device."""
        keys = keyed.split(key, len(self.steps)) if self.splits else None
        for number, name in enumerate(self.steps):
            own = keyed.fold_in(key, number) if keys is None else keys[number]
            x = ON_SHARDS[name](own, x, spec)
        return x

    def fate(self) -> str:
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(GLOBAL)
        mapped = shard_map(
            lambda key, x: self.run(key, x, self.spec),
            mesh=MESHES[self.strategy],
            in_specs=(P(), self.spec),
            out_specs=self.spec,
            check="global",
        )
        key = keyed.key(5)
        return fate_against(
            lambda: [_bits(mapped(key, x))], lambda: [_bits(self.run(key, x, None))]
        )


def _bits(x: Tensor) -> list[float]:
    found: list[float] = x.flatten().tolist()
    return found


def sharded(rng: random.Random) -> Sharded:
    """Draws a body of one to three steps."""
    steps = tuple(rng.choices(sorted(ON_SHARDS), k=rng.randint(1, 3)))
    return Sharded(rng.choice(LAYOUTS), steps, rng.random() < 0.5, rng.choice(sorted(MESHES)))
