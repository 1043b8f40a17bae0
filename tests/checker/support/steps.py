"""The steps that random programs are made of: local operations, collectives, inner gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from tests.checker.support.communicate import Communication
from tests.checker.support.cuts import CUTS, PARTS
from tests.checker.support.machines import DETACHING, LENGTH, Machine, match

HALF: Final = LENGTH // 2


class _Product(torch.autograd.Function):
    """x * y with a backward of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * x


def _times(x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = _Product.apply(x, y)  # type: ignore[no-untyped-call]  # torch's
    return out


def _written(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(LENGTH, LENGTH, dtype=x.dtype)
    buffer[:HALF] = x[:HALF]
    buffer[HALF // 2 :] += y[HALF // 2 :]
    return buffer


def _written_into_a_copy(x: Tensor, y: Tensor) -> Tensor:
    copy = x.clone()
    copy[:, ::2].mul_(0.5)
    copy[1].copy_(y[0])
    return copy.add_(y, alpha=0.25)


def _indexed_writes(x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tensor([0, 3, 3, 5])
    return x.index_add(0, rows, y[:4]).index_put((rows[1:2],), y[6:7])


def _filled(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[:, 3].fill_(0.5)
    return copy


def _by_rank(x: Tensor, rank: Tensor) -> Tensor:
    """Each rank picks other rows."""
    return x.index_select(0, (torch.arange(LENGTH) + rank).remainder(LENGTH))


LINEAR: Final[Mapping[str, Callable[..., Tensor]]] = {
    "neg": torch.neg,
    "double": lambda x: 2 * x,
    "detach": lambda x: x.detach(),
    "flip": lambda x: x.flip(0),
    "transpose": lambda x: x.mT,
    "cumsum": lambda x: x.cumsum(0) / LENGTH,
    "zero": torch.zeros_like,
    "row mean": lambda x: x.mean(1, keepdim=True).expand(LENGTH, LENGTH),
    "lower triangle": torch.tril,
    "halves": lambda x: torch.cat([x[HALF:], torch.zeros_like(x[:HALF])]),
    "matmul with a constant": lambda x: x @ torch.eye(LENGTH, dtype=x.dtype).roll(1, 0),
    "scaled in place": lambda x: x.clone().mul_(0.5),
    "gather rows": lambda x: x[torch.tensor([1, 1, 0, 2, 3, 5, 4, 8, 9, 7, 6, 11])],
}
"""One operand, and linear in it."""

CURVED: Final[Mapping[str, Callable[..., Tensor]]] = {
    "sin": torch.sin,
    "plus one": lambda x: x + 1,
    "bounded square": lambda x: x * x / (1 + x * x),
    "softmax": lambda x: torch.softmax(x, 1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, [LENGTH]),
    "mask": lambda x: torch.where(x > 0, x, 0),
    "row maximum": lambda x: x.amax(1, keepdim=True).expand(LENGTH, LENGTH),
    "sort": lambda x: x.sort(0).values,
    "clamp": lambda x: x.clamp(-0.7, 0.8),
    "tanh in place": lambda x: x.clone().tanh_(),
    "filled in place": _filled,
}
"""One operand, and not linear in it."""

CUTTING: Final[Mapping[str, Callable[..., Tensor]]] = {
    **CUTS,
    **{
        f"{place}, {name}": partial(part, cut=each)
        for place, part in PARTS.items()
        for name, each in CUTS.items()
    },
}
"""One operand, of whose gradient something is cut."""

RANKED: Final[Mapping[str, Callable[..., Tensor]]] = {
    "scale by rank": lambda x, rank: x * (rank + 1.0) * 0.5,
    "shift by rank": lambda x, rank: x + (rank + 1.0),
    "rows by rank": _by_rank,
    "masked by rank": lambda x, rank: torch.where(rank > 0, x, 0),
}
"""One operand and the rank."""

BINARY: Final[Mapping[str, Callable[..., Tensor]]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "mul with its own backward": _times,
    "matmul": lambda x, y: x @ y / LENGTH,
    "addmm": lambda x, y: torch.addmm(x, x, y, beta=0.5, alpha=0.1),
    "div": lambda x, y: x / (1 + y * y),
    "cat": lambda x, y: torch.cat([x, y])[2 : 2 + LENGTH],
    "where": lambda x, y: torch.where(x > y, x, y),
    "select": lambda x, y: torch.where(x.detach() > 0, y, 0),
    "clip": lambda x, y: x * y.detach(),
    "write": _written,
    "write into a copy": _written_into_a_copy,
    "indexed writes": _indexed_writes,
    "outer": lambda x, y: torch.outer(x[0], y[1]),
}


@dataclass(frozen=True)
class Local:
    """An operation that each rank does alone; `axis` is whose rank it reads."""

    name: str
    operands: tuple[int, ...]
    axis: str | None = None

    def run(self, machine: Machine, values: Sequence[Any]) -> Any:
        operands = [values[i] for i in self.operands]
        if self.axis is not None:
            return machine.local(RANKED[self.name], *operands, machine.index(self.axis))
        tables = (LINEAR, CURVED, CUTTING) if len(operands) == 1 else (BINARY,)
        f = next(table[self.name] for table in tables if self.name in table)
        return machine.local(f, *operands)


@dataclass(frozen=True)
class Closed:
    """A tensor of the body's surroundings, times a value."""

    operand: int
    number: int = 0

    def run(self, machine: Machine, values: Sequence[Any]) -> Any:
        return machine.local(torch.mul, values[self.operand], machine.closed_over(self.number))


@dataclass(frozen=True)
class Communicate:
    """A collective; `times` is 1 but in a mutant, `again` computes it once more in backward."""

    call: Communication
    operand: int
    times: int = 1
    again: bool = False

    def run(self, machine: Machine, values: Sequence[Any]) -> Any:
        value = values[self.operand]
        for _ in range(self.times):
            moved = machine.communicate(self.call, value, self.again)
            value = machine.local(match, moved)
        return value


@dataclass(frozen=True)
class Gradient:
    """The gradient of a loss: the steps' last value, summed up, and the sum perhaps reduced.

    The inner steps read the outer values by their numbers, then the operand, then each other.
    """

    how: str
    operand: int
    steps: tuple["Step", ...]
    reduce: Communication | None = None
    times: int = 1

    def run(self, machine: Machine, values: Sequence[Any]) -> Any:
        # Autograd would go on into the outer graph, and free it.
        detaching = self.how in DETACHING
        outer = [machine.local(torch.detach, x) for x in values] if detaching else values

        def loss(operand: Any) -> Any:
            inner = [*outer, operand]
            for step in self.steps:
                inner.append(step.run(machine, inner))
            total = machine.local(_weighed, inner[-1])
            for _ in range(self.times if self.reduce is not None else 0):
                assert self.reduce is not None
                total = machine.communicate(self.reduce, total)
            return total

        return machine.gradient(self.how, loss, values[self.operand])


def _weighed(x: Tensor) -> Tensor:
    """A sum in which no two elements count alike."""
    return (x * torch.cos(torch.arange(LENGTH, dtype=x.dtype))).sum()


Step: TypeAlias = Local | Closed | Communicate | Gradient


# ---------------------------------------------------------------------------------- mutants


def mutants_of(step: Step, axes: Sequence[str]) -> Iterator[tuple[str, Step]]:
    """The step with one collective removed, doubled, or told something else."""
    if isinstance(step, Communicate):
        yield from _of_communication(step, axes)
    if isinstance(step, Gradient):
        for number, inner in enumerate(step.steps):
            for what, other in mutants_of(inner, axes):
                steps = (*step.steps[:number], other, *step.steps[number + 1 :])
                yield what, replace(step, steps=steps)
        if step.reduce is not None:
            yield "removed", replace(step, reduce=None)
            yield "doubled", replace(step, times=2)
            for what, call in _other_calls(step.reduce, axes):
                yield what, replace(step, reduce=call)


def _of_communication(step: Communicate, axes: Sequence[str]) -> Iterator[tuple[str, Step]]:
    yield "removed", replace(step, times=0)
    yield "doubled", replace(step, times=2)
    for what, call in _other_calls(step.call, axes):
        yield what, replace(step, call=call)


def _other_calls(call: Communication, axes: Sequence[str]) -> Iterator[tuple[str, Communication]]:
    from shardmap_torch import I, R

    swapped = {I: R, R: I}
    asked = ("all_reduce", "all_gather", "broadcast")
    if call.name in asked and call.dst in swapped:
        yield "wrong dst", replace(call, dst=swapped[call.dst])
    if call.name == "convert" and call.src in swapped and call.dst not in swapped:
        yield "wrong src", replace(call, src=swapped[call.src])
    if call.name == "convert" and call.src in swapped and call.dst in swapped:
        yield "wrong dst", replace(call, src=call.dst, dst=call.src)
    for other in axes:
        if call.axes != (other,):
            yield "wrong axis", replace(call, axes=(other,))
    splits = call.name in ("all_gather", "reduce_scatter", "all_to_all") or (
        call.name == "convert" and "V" in (str(call.src), str(call.dst))
    )
    if splits:
        yield "wrong dim", replace(call, dim=1 - call.dim)
