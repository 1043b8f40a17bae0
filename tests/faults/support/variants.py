"""Random programs that one rank runs with a change: a call left out, other data, another mode."""

import os
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from unittest import mock

import torch
from torch import Tensor

from shardmap_torch import I, P, all_reduce, device_put, full, make_mesh, value_and_grad
from tests.faults.support.cases import Kit, bad_data

BATCHES: Final = [
    torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for seed in range(4)
]
ONES: Final = torch.ones(4, dtype=torch.float64)
LENGTH: Final = 5
FUNCTIONS: Final = (
    *("sum", "gather", "step", "closed over", "replayed", "compiled", "gradient", "placed"),
    "may fail",
)

Function = Callable[[Tensor], Tensor]


class Programs:
    """Functions of a batch on a mesh, each with what it is on one device."""

    def __init__(self, kit: Kit) -> None:
        axes, self.kit, self.scale = kit.axes, kit, ONES.clone()

        def loss(w: Tensor, x: Tensor) -> Tensor:
            return all_reduce((w * x).square().mean(), axes, op="mean", dst=I)

        def step(w: Tensor, x: Tensor) -> Tensor:
            grad: Tensor
            _, grad = value_and_grad(loss)(w, x)
            return w - all_reduce(grad, axes, dst=I)

        def total(x: Tensor) -> Tensor:
            return all_reduce(x.sum(0), axes, dst=I, src="P")

        def scaled(x: Tensor) -> Tensor:
            return all_reduce((x * self.scale).sum(0), axes, dst=I)

        train = kit.map(step, in_specs=(P(), P(axes)))
        replayed = kit.map(lambda x: all_reduce(x.exp().sum(0), axes, dst=I), replay=True)
        (compiled,) = kit.compiled(kit.map(lambda x: all_reduce(x.cos().sum(0), axes, dst=I)))
        self.known: Mapping[str, tuple[Function, Function]] = {
            "sum": (kit.sum, lambda x: x.sum(0)),
            "gather": (lambda x: full(kit.gather(x)), lambda x: x),
            "step": (lambda x: train(ONES, x), lambda x: 1 - x.square().mean(0) / 2),
            "closed over": (kit.map(scaled), lambda x: x.sum(0)),
            "replayed": (replayed, lambda x: x.exp().sum(0)),
            "compiled": (compiled, lambda x: x.cos().sum(0)),
            "gradient": (self._gradient, lambda x: x.sum(0)),
            "placed": (lambda x: full(device_put(x, kit.mesh, P(axes))), lambda x: x),
            "may fail": (kit.failing, lambda x: x.sum(0)),
            "unchecked": (kit.map(total, check=False), lambda x: x.sum(0)),
        }
        self.placed: Function = lambda x: device_put(x, kit.mesh, P(axes))
        for run, _ in self.known.values():
            for x in BATCHES:
                run(x)

    def _gradient(self, x: Tensor) -> Tensor:
        w = ONES.clone().requires_grad_()
        self.kit.weighted(w, x).backward()
        assert w.grad is not None
        return w.grad


@dataclass
class Turn:
    """One rank's run of a program.

    Attributes:
        calls: functions, and the numbers of the batches that they take.
        wrong: results that differ from one device.
        at: the call that is about to be made.
    """

    programs: Programs
    calls: list[tuple[str, int]]
    wrong: list[str]
    at: int = 0

    def call(self, name: str = "", change: Function = lambda x: x) -> None:
        """Makes the call, perhaps of another function or with a changed batch."""
        own, batch = self.calls[self.at]
        x = BATCHES[batch]
        run, truth = self.programs.known[name or own]
        got, want = run(change(x)), truth(x)
        if got.shape != want.shape or not torch.allclose(
            got.to(want.dtype), want, rtol=1e-10, atol=1e-10
        ):
            self.wrong.append(f"{name or own}: {got.tolist()} for {want.tolist()}")


def _next_function(turn: Turn) -> None:
    turn.call(FUNCTIONS[(FUNCTIONS.index(turn.calls[turn.at][0]) + 1) % len(FUNCTIONS)])


def _swap(turn: Turn) -> None:
    later = (turn.at + 1) % LENGTH
    turn.calls[turn.at], turn.calls[later] = turn.calls[later], turn.calls[turn.at]
    turn.call()


def _fail(turn: Turn) -> None:
    with suppress(ValueError), bad_data(turn.programs.kit):
        turn.call("may fail")


def _close_over_another(turn: Turn) -> None:
    turn.programs.scale += 1
    turn.call("closed over")
    turn.call()


def _with_setting(turn: Turn) -> None:
    with mock.patch.dict(os.environ, SHARDMAP_DEBUG="1"):
        turn.call()


def _in_a_thread(turn: Turn) -> None:
    thread = threading.Thread(target=turn.call)
    thread.start()
    thread.join()
    turn.call()


def _without_gradients(turn: Turn) -> None:
    with torch.no_grad():
        turn.call("step")


def _once_more(turn: Turn) -> None:
    turn.call()
    turn.call()


def _another_mesh(turn: Turn) -> None:
    mesh = turn.programs.kit.mesh
    make_mesh(tuple(reversed(mesh.axis_sizes)), ("u", "v")[: len(mesh.axis_sizes)])
    turn.call()


CHANGES: Final[Mapping[str, Callable[[Turn], None]]] = {
    "left out": lambda turn: None,
    "once more": _once_more,
    "another function": _next_function,
    "in another order": _swap,
    "another batch": lambda turn: turn.call(change=lambda x: x.flip(0)),
    "one number": lambda turn: turn.call(change=lambda x: x + torch.eye(8, 4) * (x == x[3, 3])),
    "the last bit": lambda turn: turn.call(change=lambda x: x.nextafter(x + 1)),
    "a shape": lambda turn: turn.call(change=lambda x: torch.cat([x, x])),
    "a dtype": lambda turn: turn.call(change=lambda x: x.float()),
    "needs a gradient": lambda turn: turn.call(change=lambda x: x.clone().requires_grad_()),
    "strides": lambda turn: turn.call(change=lambda x: x.t().contiguous().t()),
    "a DTensor": lambda turn: turn.call(change=turn.programs.placed),
    "an error": _fail,
    "what is closed over": _close_over_another,
    "unchecked": lambda turn: turn.call("unchecked"),
    "a setting": _with_setting,
    "a thread": _in_a_thread,
    "no gradients": _without_gradients,
    "a mesh": _another_mesh,
}
"""The ways in which the odd rank departs at one call."""


def run_variant(programs: Programs, seed: int, wrong: list[str]) -> None:
    """Runs the variant of a seed on this rank; appends the results that are wrong."""
    drawn = random.Random(seed)
    calls = [(drawn.choice(FUNCTIONS), drawn.randrange(len(BATCHES))) for _ in range(LENGTH)]
    changed, change = drawn.randrange(LENGTH), name_of(seed)
    turn = Turn(programs, calls, wrong)
    for turn.at in range(LENGTH):
        if turn.at == changed and programs.kit.odd:
            CHANGES[change](turn)
        else:
            turn.call("may fail" if turn.at == changed and change == "an error" else "")
    for _ in range(2):  # a call that was left out is seen
        turn.call("sum")


def name_of(seed: int) -> str:
    """Returns the change that a seed stands for: they take turns."""
    return list(CHANGES)[seed % len(CHANGES)]
