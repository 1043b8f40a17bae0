"""Names of torch.distributed that bodies ask or call: who a rank is, and its collectives.

torch answers for the process that asks, and has derivatives of its own. In a body a `World` is
asked first.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # it registers operators
from torch.autograd import Function
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.core.ambient import SCOPES
from shardmap_torch.core.torch_private.engine import differentiable_collectives


class World(ABC):
    """Answers in torch's place; None leaves a question to torch."""

    @abstractmethod
    def world(self, known: Any) -> Any:
        """Returns the default group, whose value for torch is `known`."""

    @abstractmethod
    def groups(self, table: str, known: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns one of the tables of groups, which for torch is `known`."""

    @abstractmethod
    def rank(self, group: Any) -> Any:
        """Returns the rank in a group of torch's."""

    @abstractmethod
    def size(self, group: Any) -> int | None:
        """Returns the size of a group of torch's."""

    @abstractmethod
    def method(self, group: Any, name: str) -> Callable[..., Any] | None:
        """Returns what is called in place of a method of a group of torch's."""

    @abstractmethod
    def called(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns what an operator, or a Function, of torch.distributed gives in a body.

        NotImplemented leaves it to torch.
        """

    @abstractmethod
    def coordinate(self, mesh: DeviceMesh) -> list[Any] | None:
        """Returns the coordinate on a mesh of torch's."""

    @abstractmethod
    def variable(self, name: str) -> str | None:
        """Returns a variable of the environment."""


TABLES: Final = ("pg_group_ranks", "pg_map", "pg_names")
"""Tables of the members, the backends and the names of groups."""

METHODS: Final[Mapping[str, Any]] = {
    name: vars(dist.ProcessGroup)[name]
    for name in (
        *("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base"),
        *("all_gather_single", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
        *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "barrier"),
        *("reduce", "gather", "scatter", "allgather_coalesced"),
    )
    if name in vars(dist.ProcessGroup)
}
"""Methods of groups that move values, as torch has them; names differ between its releases."""

OPERATORS: Final = tuple(
    getattr(getattr(torch.ops, namespace), name)
    for namespace in ("_c10d_functional", "_c10d_functional_autograd")
    for name in (
        *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
        *("broadcast", "all_reduce_coalesced", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter_tensor_coalesced", "wait_tensor", "_wrap_tensor_autograd"),
    )
    if hasattr(getattr(torch.ops, namespace), name)
)
"""Functional collectives, as torch's functions of them call them."""

FUNCTIONS: Final[tuple[type[Function], ...]] = tuple(
    each
    for each in vars(differentiable_collectives).values()
    if isinstance(each, type) and issubclass(each, Function) and each is not Function
)
"""Functions of `torch.distributed.nn.functional`."""

_PLACES: Final[tuple[tuple[Any, str], ...]] = (
    (type(dist.group), "WORLD"),
    *((type(distributed_c10d._world), table) for table in TABLES),
    *((dist.ProcessGroup, name) for name in ("rank", "size", *METHODS)),
    *((each, "_op") for packet in OPERATORS for each in (packet, packet.default)),
    *((function, "apply") for function in FUNCTIONS),
    (DeviceMesh, "get_coordinate"),
    (type(os.environ), "__getitem__"),
)
"""Places where torch and Python answer, which functions of torch ask under any name of theirs."""


class _Asked(threading.local):
    now = False


_ASKED: Final = _Asked()


class Aside:
    """A context in which this thread calls torch's groups themselves."""

    def __enter__(self) -> None:
        self._before, _ASKED.now = _ASKED.now, True

    def __exit__(self, *error: object) -> None:
        _ASKED.now = self._before


class Answering:
    """Has torch's questions, and collectives, in bodies go to a `World` first.

    What asks it stays in torch's place after the first body: Python 3.13 goes on to call an old
    `__getitem__` of a class that has been changed a thousand times.
    """

    def __init__(self, world: World) -> None:
        """Asks `world` from `begin` on."""
        self._world, self._lock, self._is_in_place = world, threading.Lock(), False

    def begin(self) -> None:
        """Puts what asks the world in torch's place, once."""
        with self._lock:
            for owner, name in () if self._is_in_place else _PLACES:
                setattr(owner, name, self._answer(owner, name))
            self._is_in_place = True

    def _answer(self, owner: Any, name: str) -> Any:
        """Returns what asks the world, and then what torch has held."""
        world = self._world
        if name == "apply":
            return partial(self._called, owner.__name__, _base_apply(owner))
        held = vars(owner)[name]
        if name == "_op":
            return _Operator(held, partial(self._called, owner.__name__.split(".")[0], held))
        if name == "WORLD" or name in TABLES:

            def known(own: Any) -> Any:
                found = held.fget(own)
                return world.world(found) if name == "WORLD" else world.groups(name, found)

            return property(known, held.fset)

        def answer(asked: Any, *args: Any, **kwargs: Any) -> Any:
            own = held.__get__(asked)
            if not _in_body():
                return own(*args, **kwargs)
            if name in METHODS:
                method = self._ask(lambda: world.method(asked, name))
                return (method or own)(*args, **kwargs)
            found = self._ask(lambda: _ASKS[name](world, asked, *args))
            return own(*args, **kwargs) if found is None else found

        return answer

    def _called(self, name: str, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if _in_body() and not kwargs and not _ASKED.now and not torch.compiler.is_compiling():
            out = self._world.called(name, args)
            if out is not NotImplemented:
                return out
        return own(*args, **kwargs)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Returns the answer; None to what is asked in order to give one."""
        if _ASKED.now:
            return None
        with Aside():
            return question()


class _Operator:
    """Calls a function in place of what an operator of torch calls, and is that for all else."""

    def __init__(self, held: Any, call: Callable[..., Any]) -> None:
        self.held, self.call = held, call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)

    def __hash__(self) -> int:  # an operator's own, by which tables know it
        return hash(self.held)

    def __eq__(self, other: object) -> bool:
        return bool(self.held == getattr(other, "held", other))


def _base_apply(function: Any) -> Any:
    return super(function, function).apply


def _in_body() -> bool:
    return bool(SCOPES.stack) or SCOPES.backward is not None


_ASKS: Final[Mapping[str, Callable[..., Any]]] = {
    "rank": lambda world, group: world.rank(group),
    "size": lambda world, group: world.size(group),
    "get_coordinate": lambda world, mesh: world.coordinate(mesh),
    "__getitem__": lambda world, variables, name: world.variable(name),
}
"""The question for each name that is no method of groups which moves values."""
