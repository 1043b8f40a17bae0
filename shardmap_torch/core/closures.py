"""The tensors that a function closes over: their names, and copies of it with other ones."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from shardmap_torch.core.tree import flatten


def name_in(function: Callable[..., Any] | None, tensor: Tensor) -> str | None:
    """Returns the name by which a function's closure or globals have a tensor, or None.

    Example:
        >>> import torch
        >>> params = {"w": torch.ones(2)}
        >>> name_in(lambda x: x @ params["w"], params["w"])
        "params['w']"
    """
    if function is None:
        return None
    try:
        variables = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # no function of Python
        return None
    values = {**variables.nonlocals, **variables.globals}
    named = (pair for name, value in values.items() for pair in _leaves(name, value))
    return next((path for path, leaf in named if leaf is tensor), None)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a value, one level into containers, with their paths."""
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{path}", x) for path, x in value.named_parameters())
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", x) for key, x in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{at}]", x) for at, x in enumerate(value))
    else:
        yield name, value


class Closures:
    """The tensors in the closures of a Python function, and of the functions that it reaches there.

    As operands they get their gradients, and values of the right vmap level in each run.
    """

    def __init__(self, function: Any, only: Collection[int] | None = None) -> None:
        """Looks for them, or for `only` these, by id; values that cells have later are not seen."""
        self.function, self._only = function, only
        self.functions: dict[int, FunctionType] = {}
        self.links: list[tuple[CellType, FunctionType]] = []
        self.holders: dict[int, CellType] = {}
        self.names: list[str] = []
        pending = [function]
        while pending:
            reached = pending.pop()
            if isinstance(reached, FunctionType) and id(reached) not in self.functions:
                self.functions[id(reached)] = reached
                pending += self._visit(reached)

    def _visit(self, function: FunctionType) -> Iterator[FunctionType]:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if is_empty(cell):
                continue
            value = cell.cell_contents
            if isinstance(value, FunctionType):
                self.links.append((cell, value))
                yield value
            elif (self._only is None or id(cell) in self._only) and _has_tensors(value):
                if id(cell) not in self.holders:
                    self.names.append(name)
                self.holders[id(cell)] = cell

    def cells_with(self, tensor: Tensor) -> dict[int, CellType]:
        """Returns the cells whose value is a tensor, or has it in a tree, by their ids."""
        return {
            key: cell
            for key, cell in self.holders.items()
            if any(leaf is tensor for leaf in flatten(cell.cell_contents)[0])
        }

    def values(self) -> list[Any]:
        """Returns the values of the closure cells that hold tensors."""
        return [cell.cell_contents for cell in self.holders.values()]

    def put(self, values: Sequence[Any]) -> Any:
        """Returns a copy of the function with other values in these cells.

        Functions that reach none of them stay as they are: code may compare them by identity.
        """
        if not self.holders:
            return self.function
        cells = {key: CellType(value) for key, value in zip(self.holders, values, strict=True)}
        copied: dict[int, FunctionType] = {}
        while reaching := {
            key: function
            for key, function in self.functions.items()
            if key not in copied and any(id(cell) in cells for cell in function.__closure__ or ())
        }:
            copied |= reaching
            cells |= {id(cell): CellType() for cell, f in self.links if id(f) in reaching}
        copies = {key: with_cells(function, cells) for key, function in copied.items()}
        for cell, function in self.links:
            if id(function) in copies:
                cells[id(cell)].cell_contents = copies[id(function)]
        return copies[id(self.function)]


def is_empty(cell: CellType) -> bool:
    """Returns whether a closure's variable is not assigned yet, or no more."""
    try:
        cell.cell_contents  # noqa: B018 - asked whether it has some
    except ValueError:
        return True
    return False


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in flatten(value)[0])


def with_cells(function: FunctionType, cells: dict[int, CellType]) -> FunctionType:
    """Returns a copy of a function with other cells, by the ids of its own."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells.get(id(cell), cell) for cell in function.__closure__ or ()),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
