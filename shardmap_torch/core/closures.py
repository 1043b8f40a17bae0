"""Names of the tensors that a function closes over, for messages."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


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
        found = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # no function of Python
        return None
    named = ((path, leaf) for name, value in _both(found) for path, leaf in _leaves(name, value))
    return next((path for path, leaf in named if leaf is tensor), None)


def _both(found: inspect.ClosureVars) -> Iterator[tuple[str, Any]]:
    yield from found.nonlocals.items()
    yield from found.globals.items()


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
