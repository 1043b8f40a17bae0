"""Content of captured state: equal for what is made again alike, and for nothing else."""

import functools
import random
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardmap_torch import P, S
from shardmap_torch.checker.stored.content import UnstableError, digest
from shardmap_torch.core.tree import flatten


class Color(Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    other: list[int] = field(default_factory=list)


class Flagged(float):
    flag = True


class Tall(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.zeros(2))

    @property
    def doubled(self) -> float:
        return 2 * self.scale


def adding(number: int) -> Callable[[int], int]:
    def add(x: int, by: int = number) -> int:
        return x + by + number

    return add


def remembering(*numbers: int) -> Callable[[int], int]:
    @functools.lru_cache(maxsize=8)
    def double(number: int) -> int:
        return 2 * number

    for number in numbers:
        double(number)
    return double


def variable(value: Any) -> "ContextVar[Any]":
    made: ContextVar[Any] = ContextVar("made")
    made.set(value)
    return made


def twice() -> list[torch.Tensor]:
    x = torch.zeros(2)
    return [x, x]


def views() -> list[torch.Tensor]:
    x = torch.zeros(4)
    return [x[:2], x[2:]]


def growing(at: int) -> Any:
    table: dict[str, Any] = {"at": at}
    table["self"] = table
    return table


MADE: Mapping[str, Callable[[], Any]] = {
    "an int": lambda: 1,
    "a bool": lambda: True,
    "a float": lambda: 1.0,
    "a negative zero": lambda: -0.0,
    "a zero": lambda: 0.0,
    "a text": lambda: "1",
    "bytes": lambda: b"1",
    "a dtype": lambda: torch.float64,
    "a device": lambda: torch.device("cpu"),
    "a memory format": lambda: torch.channels_last,
    "a spec": lambda: P("dp", replicate={"tp"}),
    "another spec": lambda: P("dp", invariant={"tp"}),
    "an axis type": lambda: S(1),
    "a tuple": lambda: (1, 2),
    "a list": lambda: [1, 2],
    "a set": lambda: {"x", "y", "z"},
    "a deque": lambda: deque([1, 2]),
    "a dict": lambda: {"a": 1, "b": 2},
    "a dict in another order": lambda: {"b": 2, "a": 1},
    "an ordered dict": lambda: OrderedDict(a=1, b=2),
    "a defaultdict": lambda: defaultdict(int, a=1),
    "another defaultdict": lambda: defaultdict(float, a=1),
    "a namespace": lambda: SimpleNamespace(a=1),
    "a structure": lambda: flatten({"a": 1, "b": (2, None)})[1],
    "another structure": lambda: flatten({"a": 1, "b": [2, None]})[1],
    "a circle": lambda: growing(1),
    "another circle": lambda: growing(2),
    "an enum": lambda: Color.RED,
    "another enum": lambda: Color.BLUE,
    "a named tuple": lambda: Pair(1, 2),
    "slots": lambda: Slotted(1),
    "other slots": lambda: Slotted(2),
    "a number of one's own": lambda: Flagged(1.0),
    "an array": lambda: array("d", [1.0, 2.0]),
    "another array": lambda: array("d", [1.0, 3.0]),
    "a function": lambda: adding(1),
    "a function of another number": lambda: adding(2),
    "a partial": lambda: functools.partial(adding, 1),
    "a cached function": lambda: remembering(),
    "with a result": lambda: remembering(1),
    "with other results": lambda: remembering(1, 2),
    "a variable": lambda: variable(1),
    "of another value": lambda: variable(2),
    "a function of torch": lambda: torch.relu,
    "another of torch": lambda: torch.sigmoid,
    "a method of torch": lambda: torch.Tensor.relu,
    "a module": lambda: Tall(1.0),
    "a module of another scale": lambda: Tall(2.0),
    "a module without training": lambda: Tall(1.0).eval(),
    "a tensor": lambda: torch.zeros(2),
    "that needs a gradient": lambda: torch.zeros(2, requires_grad=True),
    "in float64": lambda: torch.zeros(2, dtype=torch.float64),
    "expanded": lambda: torch.zeros(1).expand(2),
    "two tensors": lambda: [torch.zeros(2), torch.zeros(2)],
    "one tensor twice": twice,
    "two views of one": views,
}


def test_what_is_made_again_has_the_same_content_and_nothing_else_has() -> None:
    first = {name: digest([make()], ()) for name, make in MADE.items()}
    again = {name: digest([make()], ()) for name, make in MADE.items()}
    assert first == again
    names: dict[str, list[str]] = {}
    for name, content in first.items():
        names.setdefault(content, []).append(name)
    assert [group for group in names.values() if len(group) > 1] == []


class Hidden:
    __slots__ = ("__value",)

    def __init__(self) -> None:
        self.__value = 1


class Seeded(random.Random):
    pass


class Wrapped(torch.Tensor):
    pass


UNSTABLE: Mapping[str, Callable[[], Any]] = {
    "a Seeded": lambda: Seeded(1),
    "a Hidden": Hidden,
    "a lock": threading.Lock,
    "a generator": lambda: (x for x in range(3)),
    "a Generator": torch.Generator,
    "a Wrapped": lambda: torch.zeros(2).as_subclass(Wrapped),
    "torch.distributed": lambda: torch.distributed,
    "torch.cuda.current_device": lambda: torch.cuda.current_device,
}


@pytest.mark.parametrize("what", UNSTABLE)
def test_what_has_state_in_c_or_of_its_process_has_no_content(what: str) -> None:
    with pytest.raises(UnstableError, match=what):
        digest([UNSTABLE[what]()], ())


def test_a_module_of_which_names_are_made_counts_as_a_whole() -> None:
    module: Any = ModuleType("users")
    module.scale = 2

    def body() -> Any:
        return getattr(module, "".join(["sc", "ale"]))

    first = digest([body], [])
    module.scale = 3
    assert digest([body], []) != first
