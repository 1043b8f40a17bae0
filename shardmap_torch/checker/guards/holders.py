"""Holders: what has a value that code may change, which can be read, kept and put back.

So a check leaves no change behind, and ranks that share a process have each a state of their own,
as processes have.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from operator import is_
from types import CellType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, NamedTuple

from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.closures import is_empty

ABSENT: Final = object()
"""Stands for the value of a name that nothing has."""

Holder = tuple[Any, Any]
"""Place of a value: an object, and a name, a slot of its class, or None for all that is in it."""


class Whole(NamedTuple):
    """All that is in a container: the values, and the keys of a dict."""

    keys: list[Any]
    values: list[Any]


def builtin_of(kind: type) -> Any:
    """Returns the builtin type of containers of which a class is one; its methods read them."""
    builtins = (dict, list, tuple, set, frozenset, deque)
    return next(each for each in builtins if issubclass(kind, each))


def held(owner: Any, name: Any) -> Any:
    """Returns what a holder has.

    Example:
        >>> table = {"count": 1}
        >>> held(table, "count"), held(table, None).values
        (1, [1])
    """
    if type(owner) is CellType:
        return ABSENT if is_empty(owner) else owner.cell_contents
    if name is None:
        kind = builtin_of(type(owner))
        items = [*kind.__iter__(owner)]
        return Whole(items, [*dict.values(owner)]) if kind is dict else Whole([], items)
    if type(name) is MemberDescriptorType:
        try:
            return name.__get__(owner)
        except AttributeError:
            return ABSENT
    table = vars(owner) if isinstance(owner, type) else owner
    return table.get(name, ABSENT)


def hold(owner: Any, name: Any, value: Any) -> None:
    """Makes a holder have what `held` returned."""
    if isinstance(value, Whole):
        kind = builtin_of(type(owner))
        if kind is dict:
            _table_of(owner).clear(owner)
            for key, item in zip(*value, strict=True):
                _table_of(owner).__setitem__(owner, key, item)
            return
        kind.clear(owner)
        fill = kind.extend if kind in (list, deque) else kind.update
        fill(owner, value.values)
        return
    where: tuple[Any, ...] = (owner, name)
    put: Callable[..., Any]
    drop: Callable[..., Any]
    if type(owner) is CellType:
        where, put, drop = (owner, "cell_contents"), setattr, delattr
    elif type(name) is MemberDescriptorType:
        where, put, drop = (owner,), name.__set__, name.__delete__
    elif isinstance(owner, type):
        put, drop = type.__setattr__, type.__delattr__
    else:
        put, drop = _table_of(owner).__setitem__, _table_of(owner).__delitem__
    if value is not ABSENT:
        put(*[*where, value])
    elif held(owner, name) is not ABSENT:
        drop(*where)


def _table_of(owner: Any) -> Any:
    """Returns the class whose methods write into a dict: an OrderedDict has an order of its own."""
    return OrderedDict if issubclass(type(owner), OrderedDict) else dict


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values that were read are the same objects."""
    if type(one) is Whole and type(other) is Whole:
        return _are_same(one.keys, other.keys) and _are_same(one.values, other.values)
    return one is other


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def dict_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object, or None, without a call of code of its class."""
    bases = (vars(base).get("__dict__") for base in type(value).__mro__)
    own = next((each for each in bases if each is not None), None)
    is_python_s = type(own) in (GetSetDescriptorType, MemberDescriptorType)
    return own.__get__(value) if is_python_s and own is not None else None


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """Returns the slots of the objects of a class that is written in Python."""
    tables = [vars(base) for base in kind.__mro__]
    members = (each for table in tables if "__slots__" in table for each in table.values())
    return [each for each in members if type(each) is MemberDescriptorType]


LOOKS: Final[ThreadStack[Callable[[], None]]] = ThreadStack()
"""Calls to make wherever a body that is checked meets other ranks."""


def look() -> None:
    """Looks at the holders, where ranks that share a process let others run."""
    for each in LOOKS.items:
        each()
