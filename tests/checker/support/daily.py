"""Lists programs that people write every day, and abbreviates what they share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch import I, P, R, all_reduce, convert

Body = TypeVar("Body", bound=Callable[..., Any])

DP: Final = P("dp")
TP0: Final = P("tp")
TP1: Final = P(None, "tp")
TP2: Final = P(None, None, "tp")
BOTH: Final = P("dp", "tp")
N: Final = P()


@dataclass(frozen=True)
class Program:
    """A body, its arguments, specs, and whether it is a step that is not differentiated again."""

    body: Callable[..., Any]
    args: Any
    in_specs: Any
    out_specs: Any
    is_step: bool


def registering(programs: dict[str, Program]) -> Callable[..., Callable[[Body], Body]]:
    """Makes the decorator that lists a body among these programs."""

    def program(
        args: Any, in_specs: Any, out_specs: Any, step: bool = False
    ) -> Callable[[Body], Body]:
        def listed(body: Body) -> Body:
            programs[body.__name__] = Program(body, args, in_specs, out_specs, step)
            return body

        return listed

    return program


def mean(x: Any) -> Any:
    return all_reduce(x, "dp", op="mean", dst=I)


def total(x: Any) -> Any:
    return all_reduce(x, "dp", dst=I)


def add_tp(x: Any) -> Any:
    return all_reduce(x, "tp", dst=I)


def to_r(x: Any) -> Any:
    return convert(x, "tp", src=I, dst=R)


def ids(*shape: int, n: int = 8) -> Tensor:
    """Makes whole numbers below n."""
    return torch.arange(prod(shape)).mul(7).add(3).remainder(n).view(*shape)


MASK: Final = torch.arange(6)[None] < torch.tensor([3, 6, 4, 5])[:, None]
