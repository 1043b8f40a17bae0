"""Random bodies that take gradients: made as they run, from a seed and from the types they meet.

Local values are [N, N]. What is made is mostly well typed; the checker refuses the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add, mul
from random import Random
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_size,
    broadcast,
    checkpoint,
    convert,
    grad,
    ppermute,
    reduce_scatter,
    reinterpret,
    shift,
    typeof,
    value_and_grad,
    vjp,
)
from shardmap_torch.types import AxisType, K, Z
from tests.programs.support.harness import random

N: Final = 6
AXES: Final = ("dp", "tp")
SIZES: Final = {"dp": 2, "tp": 3}

SPECS: Final = (
    P("dp"),
    P(None, "tp"),
    P("dp", "tp"),
    P(),
    P(replicate=AXES),
    P("dp", replicate="tp"),
    P("tp", invariant="dp"),
)

Leaves: TypeAlias = list[Tensor]
Loss: TypeAlias = Callable[[Leaves], Tensor]


def per_rank(x: Tensor) -> Tensor:
    """Stacks all ranks' values."""
    for axis, axis_type in typeof(x).items():
        if axis_type == Partial:
            x = reinterpret(x, axis, src=Partial, dst=V)
        elif axis_type in (I, K, Z):
            x = convert(x, axis, src=I, dst=R)
        if axis_type in (I, K, R, Z):
            x = reinterpret(x, axis, src=R, dst=V)
    return x.unsqueeze(0)


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.cos()
    return y * x


UNARY: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    torch.sin,
    torch.tanh,
    torch.ones_like,
    partial(torch.softmax, dim=-1),
    Tensor.t,
    _without_grad,
    lambda x: x.clone().mul_(0.7),
    lambda x: x.detach() + 0.5 * x,
    lambda x: x.detach() * 0.5,
    lambda x: x.sum(0, keepdim=True).expand(N, N) * 0.3,
    lambda x: x[[1, 0, 3, 2, 5, 5]],
)

BINARY: Final[tuple[Callable[[Tensor, Tensor], Tensor], ...]] = (
    mul,
    add,
    lambda x, y: x @ y * 0.3,
)


def _sharded(x: Tensor, axis: str, src: AxisType) -> Tensor:
    return convert(x, axis, src=src, dst=V, dim=0).repeat(axis_size(axis), 1)


def _turned(x: Tensor, axis: str) -> Tensor:
    n = axis_size(axis)
    return ppermute(x, axis, [(rank, (rank + 1) % n) for rank in range(n)])


_Move: TypeAlias = Callable[[Tensor, str], Tensor]

_OF_EQUAL: Final[tuple[_Move, ...]] = (
    partial(convert, src=I, dst=R),
    partial(_sharded, src=I),
    lambda x, _: x,
)

MOVES: Final[Mapping[AxisType, tuple[_Move, ...]]] = {
    I: _OF_EQUAL,
    K: _OF_EQUAL,
    Z: _OF_EQUAL,
    R: (
        partial(reinterpret, src=R, dst=V),
        partial(convert, src=R, dst=I),
        partial(_sharded, src=R),
    ),
    V: (
        partial(all_reduce, dst=I),
        partial(all_reduce, dst=R),
        partial(all_reduce, op="mean", dst=I),
        partial(all_reduce, op="max", dst=R),
        partial(broadcast, source=1, dst=R),
        partial(shift, offset=1),
        partial(reinterpret, src=V, dst=Partial),
        _turned,
        lambda x, axis: all_gather(x, axis, dim=0, dst=I)[:N],
        lambda x, axis: all_gather(x, axis, dim=1, dst=R)[:, -N:],
        lambda x, axis: reduce_scatter(x, axis, dim=0).repeat(axis_size(axis), 1),
        lambda x, axis: all_to_all(x, axis, split_dim=0, concat_dim=1).reshape(N, N),
    ),
}
"""Collectives over an axis for values of each type there."""

ENDS: Final[Mapping[AxisType, tuple[_Move, ...]]] = {
    R: (
        partial(convert, src=R, dst=I),
        partial(convert, src=R, dst=Partial),
        partial(reinterpret, src=R, dst=V),
    ),
    V: (
        partial(all_reduce, dst=I),
        partial(all_reduce, op="max", dst=I),
        partial(reinterpret, src=V, dst=Partial),
        lambda x, _: x,
    ),
}
"""Collectives over an axis for scalars of each type there, before they are differentiated."""


def _by_value_and_grad(loss: Loss, leaves: Leaves) -> Leaves:
    value, found = value_and_grad(loss)(leaves)
    return [value, *found]


def _with_aux(loss: Loss, leaves: Leaves) -> Leaves:
    def both(leaves: Leaves) -> tuple[Tensor, dict[str, Any]]:
        value = loss(leaves)
        return value, {"twice": value * 2, "number": 3, "sine": leaves[0].sin()}

    (value, aux), found = value_and_grad(both, has_aux=True)(leaves)
    return [value, aux["twice"], aux["sine"], *found]


def _by_vjp(loss: Loss, leaves: Leaves) -> Leaves:
    value, pull_back = vjp(loss, leaves)
    return [value, *pull_back(torch.ones_like(value))[0], *pull_back(value.detach() * 2)[0]]


def _by_functorch(loss: Loss, leaves: Leaves) -> Leaves:
    found, value = torch.func.grad_and_value(loss)(leaves)
    return [value, *found]


def _by_functorch_vjp(loss: Loss, leaves: Leaves) -> Leaves:
    value, pull_back, *_ = torch.func.vjp(loss, leaves)
    return [value, *pull_back(torch.ones_like(value))[0]]


def _by_autograd(loss: Loss, leaves: Leaves) -> Leaves:
    own = [x.detach().requires_grad_() for x in leaves]
    with torch.enable_grad():
        value = loss(own) + 0 * own[0].sum()
    first, second = (
        torch.autograd.grad(value, own, scale, retain_graph=True, materialize_grads=True)
        for scale in (None, value.detach())
    )
    return [value.detach(), *first, *second]


def _of_a_gradient(loss: Loss, leaves: Leaves) -> Leaves:
    def second(leaves: Leaves) -> Tensor:
        return Body(0).scalar(grad(loss)(leaves)[0])

    return _by_value_and_grad(second, leaves)


INSIDE: Final = (
    _by_value_and_grad,
    _with_aux,
    _by_vjp,
    _by_functorch,
    _by_functorch_vjp,
    _of_a_gradient,
)
"""Ways to take a gradient, also in what is differentiated itself."""


class Body:
    """Makes choices from a seed, the same in each run."""

    def __init__(self, seed: float) -> None:
        self.random = Random(seed)

    def settled(self, x: Tensor) -> Tensor:
        """Takes pending sums."""
        for axis, axis_type in typeof(x).items():
            if axis_type == Partial:
                x = all_reduce(x, axis, dst=self.random.choice([I, R]))
        return x

    def common(self, *xs: Tensor) -> Leaves:
        """Values that an operator may take together."""
        values = list(map(self.settled, xs))
        for axis in AXES:
            types = [typeof(x)[axis] for x in values]
            if any(each not in (I, K, Z) for each in types):
                pairs = zip(values, types, strict=True)
                values = [convert(x, axis, src=I, dst=R) if t == I else x for x, t in pairs]
        return values

    def grown(self, values: Sequence[Tensor], depth: int) -> Tensor:
        """Computes a value from others, in some steps."""
        pool = list(values)
        for _ in range(self.random.randint(1, 4)):
            x, y = self.random.choices(pool, k=2)
            kind = self.random.random()
            if kind < 0.3:
                pool.append(self.random.choice(UNARY)(self.settled(x)))
            elif kind < 0.55:
                pool.append(self.random.choice(BINARY)(*self.common(x, y)))
            elif kind < 0.9 or not depth:
                pool.append(self.moved(self.settled(x)))
            elif kind < 0.93:
                again = self.random.random()
                pool.append(checkpoint(lambda *own, again=again: Body(again).grown(own, 0), x, y))
            else:
                pool += [each for each in self.gradients(pool, depth - 1) if each.ndim]
        return pool[-1]

    def moved(self, x: Tensor) -> Tensor:
        axis = self.random.choice(AXES)
        return self.random.choice(MOVES[typeof(x)[axis]])(x, axis)

    def scalar(self, x: Tensor) -> Tensor:
        """Makes of a value what is differentiated."""
        y = self.settled(x).sin().sum()
        for axis in AXES:
            ends = ENDS.get(typeof(y)[axis])
            y = self.random.choice(ends)(y, axis) if ends else y
        return y

    def gradients(self, pool: Sequence[Tensor], depth: int, outermost: bool = False) -> Leaves:
        """A value of some leaves, and its gradients, taken in some way."""
        how = self.random.choice((*INSIDE, _by_autograd) if outermost else INSIDE)
        leaves = self.random.sample(list(pool), self.random.randint(1, min(3, len(pool))))
        if self.random.random() < 0.15:
            leaves[0] = torch.full((N, N), 0.3, dtype=torch.float64)
        seed, rest = self.random.random(), list(pool) if self.random.random() < 0.2 else []

        def loss(leaves: Leaves) -> Tensor:
            own = Body(seed)
            return own.scalar(own.grown([*leaves, *rest], depth))

        return how(loss, leaves)

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Takes gradients, and then gradients by these."""
        first = self.gradients(values, 2, outermost=True)
        pool = [*values, *(x for x in first if x.ndim)]
        return tuple(map(per_rank, (*first, *self.gradients(pool, 1, outermost=True))))


def operand(spec: P, seed: int) -> Tensor:
    """A global value whose shards are [N, N]."""
    shape = [N, N]
    for dim, axes in spec.sharded_dims:
        for axis in axes:
            shape[dim] *= SIZES[axis]
    return random(shape, seed)
