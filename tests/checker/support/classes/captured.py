"""Random state that a body refers to and that changes between calls."""

import random
import types
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardmap_torch import I, P, ShardMapError, all_reduce, make_mesh, shard_map
from tests.checker.support.classes.trials import EQUAL, WRONG, differentiated, is_same, numbers

MESHES: Final = {
    strategy: make_mesh((2,), ("i",), kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
KEPT: Final[list[Any]] = []
"""Objects to which bodies refer by weak references only."""


@dataclass(frozen=True)
class Holder:
    """One sort of object that holds another: how it is made, read and changed in place."""

    make: Callable[[Any], Any]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


class Plain:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Property:
    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value


class Dynamic:
    """Looks every name up in a dict of its own."""

    def __init__(self, value: Any) -> None:
        self._values = {"value": value}

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_values"][name]
        except KeyError:
            raise AttributeError(name) from None


class Descriptor:
    def __init__(self, value: Any) -> None:
        self.held = value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.held


@dataclass
class Data:
    value: Any


def _subclass(value: Any) -> type:
    return type("Holding", (Plain,), {"value": value, "__init__": lambda self: None})


def _module(value: Any) -> types.ModuleType:
    module = types.ModuleType("captured_settings_of_a_user")
    vars(module)["value"] = value
    return module


def _closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def _cell(function: Any) -> Any:
    return function.__closure__[0]


def _globals(value: Any) -> Any:
    space: dict[str, Any] = {"VALUE": value, "__name__": "script_of_a_user"}
    exec("def get():\n    return VALUE\n", space)
    return space["get"]


def _by_name(value: Any) -> Any:
    space: dict[str, Any] = {"VALUE": value, "__name__": "script_of_a_user"}
    exec("def get():\n    return globals()['VALUE']\n", space)
    return space["get"]


def _imported(value: Any) -> Any:
    import sys

    sys.modules["captured_settings_of_a_user"] = _module(value)
    space: dict[str, Any] = {"__name__": "script_of_a_user"}
    exec("def get():\n    import captured_settings_of_a_user as s\n    return s.value\n", space)
    return space["get"]


def _write_import(_: Any, value: Any) -> None:
    import sys

    vars(sys.modules["captured_settings_of_a_user"])["value"] = value


def _tensor(value: Any) -> Tensor:
    held = torch.ones(2)
    held.value = value  # type: ignore[attr-defined]
    return held


def _layer(value: Any) -> nn.Module:
    layer = nn.Module()
    layer.value = value
    return layer


def _set_local(value: Any) -> local:
    held = local()
    held.value = value
    return held


def _function_with(value: Any) -> Any:
    def get() -> Any:
        return vars(get)["value"]

    vars(get)["value"] = value
    return get


def _default(value: Any) -> Any:
    def get(value: Any = value) -> Any:
        return value

    return get


def _keyword(value: Any) -> Any:
    def get(*, value: Any = value) -> Any:
        return value

    return get


def _attribute(make: Callable[[Any], Any]) -> Holder:
    return Holder(make, lambda o: o.value, lambda o, v: setattr(o, "value", v))


def _item(make: Callable[[Any], Any], key: Any = "key") -> Holder:
    return Holder(make, lambda o: o[key], lambda o, v: o.__setitem__(key, v))


HOLDERS: Final[Mapping[str, Holder]] = {
    "list": _item(lambda v: [v], 0),
    "deque": _item(lambda v: deque([v]), 0),
    "UserList": _item(lambda v: UserList([v]), 0),
    "dict": _item(lambda v: {"key": v}),
    "OrderedDict": _item(lambda v: OrderedDict(key=v)),
    "defaultdict": _item(lambda v: defaultdict(int, key=v)),
    "UserDict": _item(lambda v: UserDict({"key": v})),
    "ChainMap": _item(lambda v: ChainMap({}, {"key": v})),
    "Namespace": _attribute(lambda v: Namespace(value=v)),
    "SimpleNamespace": _attribute(lambda v: types.SimpleNamespace(value=v)),
    "object": _attribute(Plain),
    "slots": _attribute(Slotted),
    "property": _attribute(Property),
    "dataclass": _attribute(Data),
    "class": _attribute(_subclass),
    "module": _attribute(_module),
    "nn.Module": _attribute(_layer),
    "tensor": _attribute(_tensor),
    "function attribute": Holder(
        _function_with, lambda o: o(), lambda o, v: setattr(o, "value", v)
    ),
    "__getattr__": Holder(
        Dynamic, lambda o: o.value, lambda o, v: o._values.__setitem__("value", v)
    ),
    "vars": Holder(Plain, lambda o: vars(o)["value"], lambda o, v: setattr(o, "value", v)),
    "bound method": Holder(
        lambda v: Plain(v).get, lambda o: o(), lambda o, v: setattr(o.__self__, "value", v)
    ),
    "descriptor": Holder(
        lambda v: type("Described", (), {"value": Descriptor(v)})(),
        lambda o: o.value,
        lambda o, v: setattr(type(o).value, "held", v),
    ),
    "closure": Holder(_closure, lambda o: o(), lambda o, v: setattr(_cell(o), "cell_contents", v)),
    "partial": Holder(
        lambda v: partial(_first, [v]), lambda o: o(), lambda o, v: o.args[0].__setitem__(0, v)
    ),
    "default": Holder(_default, lambda o: o(), lambda o, v: setattr(o, "__defaults__", (v,))),
    "keyword": Holder(
        _keyword, lambda o: o(), lambda o, v: setattr(o, "__kwdefaults__", {"value": v})
    ),
    "global": Holder(_globals, lambda o: o(), lambda o, v: o.__globals__.update(VALUE=v)),
    "global by name": Holder(_by_name, lambda o: o(), lambda o, v: o.__globals__.update(VALUE=v)),
    "import": Holder(_imported, lambda o: o(), _write_import),
    "tuple": Holder(lambda v: ([v],), lambda o: o[0][0], lambda o, v: o[0].__setitem__(0, v)),
}


def _first(values: list[Any]) -> Any:
    return values[0]


def _collective(on: bool, x: Tensor, w: Tensor) -> Tensor:
    """Without its collective the result varies."""
    return all_reduce(x.sum(0) * w, "i", dst=I) if on else x.sum(0) * w


def _gradient(on: bool, x: Tensor, w: Tensor) -> Tensor:
    """Depends on the flag in the sum that the gradient of w needs, and in no collective."""
    used = w if on else w.detach()
    return all_reduce((x * used).sum(), "i", dst=I) + 0 * w.sum()


def _mean(on: bool, x: Tensor, w: Tensor) -> Tensor:
    """Wrong under global strictness, and without another collective."""
    return all_reduce((x * w).sum() if on else (x * w).mean(), "i", dst=I)


def _norm(on: bool, x: Tensor, w: Tensor) -> Tensor:
    """Clips by the norm of a rank's part, or not."""
    y = x * w
    return all_reduce((y if on else y / y.detach().norm()).sum(), "i", dst=I)


PROGRAMS: Final[Mapping[str, tuple[Callable[[bool, Tensor, Tensor], Tensor], Any]]] = {
    "collective": (_collective, "local"),
    "gradient": (_gradient, "local"),
    "gradient, global": (_gradient, "global"),
    "mean": (_mean, "global"),
    "norm": (_norm, "global"),
}
OPERANDS: Final = (numbers(4, 3), numbers(3))


@dataclass(frozen=True)
class Captured:
    """A flag at the end of a chain of holders, which is changed several times at some level."""

    program: str
    holders: tuple[str, ...]
    levels: tuple[int, ...]
    values: tuple[Any, Any]
    strategy: str

    right = False

    def fate(self) -> str:
        KEPT.clear()
        program, check = PROGRAMS[self.program]
        on, off = self.values
        holders = [HOLDERS[name] for name in self.holders]
        root = _built(holders, on)

        def body(x: Tensor, w: Tensor) -> Tensor:
            value = root
            for holder in holders:
                value = holder.read(value)
            return program(value == on, x, w)

        def mapped() -> Any:
            specs: Any = {"in_specs": (P("i"), P()), "out_specs": P(), "check": check}
            # A function of its own: verdicts belong to functions.
            return shard_map(lambda x, w: body(x, w), mesh=MESHES[self.strategy], **specs)

        kept = mapped()
        if not _agree(kept, mapped()):
            return WRONG
        for number, level in enumerate(self.levels):
            _change(holders, root, level, off if number % 2 == 0 else on)
            if not (_agree(kept, mapped()) and _agree(kept, mapped())):
                return WRONG
        return EQUAL


def _built(holders: Sequence[Holder], value: Any) -> Any:
    for holder in reversed(holders):
        value = holder.make(value)
    return value


def _change(holders: Sequence[Holder], root: Any, level: int, value: Any) -> None:
    """Replaces what the holder of this level has by others of the same sort, down to the flag."""
    for holder in holders[:level]:
        root = holder.read(root)
    holders[level].write(root, _built(holders[level + 1 :], value))


def _agree(kept: Any, fresh: Any) -> bool:
    one, other = _outcome(kept), _outcome(fresh)
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(is_same, one, other))


def _outcome(f: Any) -> list[Tensor] | str:
    try:
        return differentiated(f, OPERANDS)
    except ShardMapError as error:
        return type(error).__name__


VALUES: Final = ((True, False), (1, 0), (0.5, 0.25), ("sum", "mean"), (None, 3), (b"a", b"b"))


def drawn(rng: random.Random) -> Captured:
    """Draws a chain of one to three holders, and up to three changes."""
    holders = tuple(rng.choices(sorted(HOLDERS), k=rng.choice((1, 1, 2, 3))))
    levels = tuple(rng.randrange(len(holders)) for _ in range(rng.choice((1, 1, 2, 3))))
    values = rng.choice(VALUES)
    return Captured(
        rng.choice(sorted(PROGRAMS)), holders, levels, values, rng.choice(sorted(MESHES))
    )
