"""The questions of who a rank is, which torch answers for the process that asks."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


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
    def coordinate(self, mesh: DeviceMesh) -> list[Any] | None:
        """Returns the coordinate on a mesh of torch's."""

    @abstractmethod
    def variable(self, name: str) -> str | None:
        """Returns a variable of the environment."""


TABLES: Final = ("pg_group_ranks", "pg_map", "pg_names")
"""Tables of the members, the backends and the names of groups."""

METHODS: Final = tuple(
    name
    for name in (
        *("allreduce", "broadcast", "allgather", "_allgather_base", "all_gather_single"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall"),
        *("alltoall_base", "all_to_all_single", "send", "recv", "barrier"),
    )
    if name in vars(dist.ProcessGroup)
)
"""Methods of groups that move values; their names differ between releases of torch."""

_PLACES: Final[tuple[tuple[Any, str], ...]] = (
    (type(dist.group), "WORLD"),
    *((type(distributed_c10d._world), table) for table in TABLES),
    *((dist.ProcessGroup, name) for name in ("rank", "size", *METHODS)),
    (DeviceMesh, "get_coordinate"),
    (type(os.environ), "__getitem__"),
)
"""Places where torch and Python answer, which functions of torch ask under any name of theirs."""


class Answering:
    """A context in which torch's questions go to a `World` first; entered on any thread.

    What asks it stays in torch's place after the first entry: Python 3.13 goes on to call an old
    `__getitem__` of a class that has been changed a thousand times.
    """

    def __init__(self, world: World) -> None:
        """Asks `world` from the first entry to the last exit."""
        self._world, self._lock, self._count = world, threading.Lock(), 0
        self._is_in_place = False
        self._asked = threading.local()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            for owner, name in () if self._is_in_place else _PLACES:
                setattr(owner, name, self._answer(name, vars(owner)[name]))
            self._is_in_place = True

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1

    def _answer(self, name: str, held: Any) -> Any:
        """Returns what asks the world, and then what torch has held."""
        world = self._world
        if name == "WORLD" or name in TABLES:

            def known(own: Any) -> Any:
                found = held.fget(own)
                if not self._count:
                    return found
                return world.world(found) if name == "WORLD" else world.groups(name, found)

            return property(known, held.fset)

        def answer(asked: Any, *args: Any, **kwargs: Any) -> Any:
            own = held.__get__(asked)
            if not self._count:
                return own(*args, **kwargs)
            if name in METHODS:
                method = self._ask(lambda: world.method(asked, name))
                return (method or own)(*args, **kwargs)
            found = self._ask(lambda: _ASKS[name](world, asked, *args))
            return own(*args, **kwargs) if found is None else found

        return answer

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Returns the answer; None to what is asked in order to give one."""
        if getattr(self._asked, "now", False):
            return None
        self._asked.now = True
        try:
            return question()
        finally:
            self._asked.now = False


_ASKS: Final[Mapping[str, Callable[..., Any]]] = {
    "rank": lambda world, group: world.rank(group),
    "size": lambda world, group: world.size(group),
    "get_coordinate": lambda world, mesh: world.coordinate(mesh),
    "__getitem__": lambda world, variables, name: world.variable(name),
}
"""The question for each name that is no method of groups which moves values."""
