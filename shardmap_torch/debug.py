"""`debug_print`: prints the values of all ranks in their order, with types and shape."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import product
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.backends.threads import Rendezvous, ThreadBackend
from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.checker.interpreter.interpreter import current_interpreter
from shardmap_torch.checker.ir.program import show_types
from shardmap_torch.checker.queries import types_in_check
from shardmap_torch.collectives.scope import Scope, current_scope
from shardmap_torch.control.messages import by_ranks
from shardmap_torch.core.ambient import SILENT
from shardmap_torch.core.functorch import base_of, dims_of, levels
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    default_store,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.errors import ShardMapError, show, show_shape
from shardmap_torch.types import AxisType

X = TypeVar("X", bound=Tensor)
Texts = Mapping[int, str]
"""The text about each rank's value."""

_ENTRIES: Final = 6
"""Number of entries up to which all are shown."""

_LINES: Final = 16
"""Number of different values that are shown."""

_PATIENCE: Final = timedelta(seconds=10)
"""Time that rank 0 of a process group waits for the texts of the others."""


def debug_print(name: str, x: X, *, grad: bool = False) -> X:
    """Prints the values of `x` on all ranks, in their order, and returns `x`.

    Ranks with equal values share a line; of many entries the first ones are shown, with mean,
    deviation and range. Types are those that the checker found. In a body it works on every mesh:
    batched, as threads, and on process groups, where rank 0 prints; on an abstract mesh, which has
    no values, it prints the types. It changes neither the verdict nor a number, also under
    `torch.func`. Nothing is printed while `torch.compile` traces, nor by recorded calls
    (`replay=True`), which do not run Python again.

    Args:
        name: what to call it.
        x: a tensor in a body, or outside of any. Shape: any.
        grad: whether to print the gradients of `x` too, when a backward has computed them. Where
            `x` is equal on ranks, each has an addend; one batched program has their sum.

    Raises:
        ShardMapError: `x` is no tensor.

    Source: `jax.debug.print`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, debug_print, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
        ... def total(x):
        ...     debug_print("x", x)
        ...     return debug_print("sum", all_reduce(x.sum(), "tp", dst=I))
        >>> total(torch.arange(4.0))
        x: float32[2] {tp: V}
          rank 0: [0, 1]
          rank 1: [2, 3]
        sum: float32[] {tp: K}
          ranks 0, 1: 6
        tensor(6.)
    """
    if not isinstance(x, Tensor):
        raise ShardMapError(f"debug_print takes a tensor, not {show(x)}.")
    if torch.compiler.is_compiling():
        return x
    scope = current_scope()
    shape = f"{name}: {show_shape(x.dtype, x.shape)}"
    head = f"{shape}{_types(scope, x)}"
    interpreter = current_interpreter()
    if interpreter is not None:
        if interpreter.mesh.kind == "abstract" and interpreter.observer.judges:
            print(head, flush=True)
    elif not SILENT.get():
        texts_of = _reader(scope, x)
        _show(scope, head, texts_of(x))
        if grad:
            _follow(x, lambda g: _show(scope, f"gradient of {shape}", texts_of(g)))
    return x


def _types(scope: Scope | None, x: Tensor) -> str:
    """Formats the types of a value; empty where the checker has not seen it."""
    if scope is None or scope.monitor is None:
        return ""
    note = scope.monitor.note("debug_print")
    interpreter = current_interpreter()
    if interpreter is not None:
        note.types = tuple(types_in_check(interpreter, x).values())
    types: tuple[AxisType, ...] = note.types
    return f" {show_types(types, scope.backend.mesh.axis_names)}" if types else ""


def _reader(scope: Scope | None, x: Tensor) -> Callable[[Tensor], Texts]:
    """Returns what formats the values of this process' ranks, of `x` or of its gradient."""
    backend = None if scope is None else scope.backend
    if isinstance(backend, BatchedBackend):
        at = dims_of(x)[1]
        dims = {axis: at[level] for axis, level in backend.levels.items() if level in at}
        mesh = backend.mesh
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        return lambda value: _of_all(value, dims, places)
    rank = backend.rank if isinstance(backend, RankBackend) else 0
    return lambda value: {rank: _summary(base_of(value))}


def _of_all(value: Tensor, dims: Mapping[str, int], places: Sequence[Mapping[str, int]]) -> Texts:
    """Formats the values of all ranks, which the dims of these axes stack."""
    base = base_of(value)
    order = sorted(dims, key=dims.__getitem__)
    with temporarily_clear_interpreter_stack(), DisableTorchFunction(), torch.no_grad():
        stacked = base.detach().movedim([dims[axis] for axis in order], list(range(len(order))))
        counts = stacked.shape[: len(order)]
        texts = {at: _summary(stacked[at]) for at in product(*map(range, counts))}
    return {rank: texts[tuple(place[axis] for axis in order)] for rank, place in enumerate(places)}


def _summary(x: Tensor) -> str:
    """Formats a value: all of its entries, or the first ones and what they are like."""
    with temporarily_clear_interpreter_stack(), DisableTorchFunction(), torch.no_grad():
        flat = x.detach().flatten().cpu()
        if x.ndim == 0 and x.numel():
            return _number(flat[0].item())
        first = ", ".join(_number(entry.item()) for entry in flat[:_ENTRIES])
        if flat.numel() <= _ENTRIES:
            return f"[{first}]"
        return f"[{first}, ...]{_statistics(flat)}"


def _statistics(flat: Tensor) -> str:
    if flat.dtype == torch.bool or flat.is_complex():
        return f", {int(torch.count_nonzero(flat))} of {flat.numel()} are not zero"
    flat = (flat.dequantize() if flat.is_quantized else flat).double()
    finite = flat[flat.isfinite()]
    lost = flat.numel() - finite.numel()
    words = [f", {lost} not finite"] if lost else []
    if finite.numel():
        mean, deviation = finite.mean().item(), finite.std(correction=0).item()
        low, high = finite.min().item(), finite.max().item()
        words += [f", mean {mean:.4g}, std {deviation:.4g}, from {low:.4g} to {high:.4g}"]
    return "".join(words)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _follow(x: Tensor, show_gradient: Callable[[Tensor], None]) -> None:
    """Shows the gradient of a value at each level of transforms that differentiates it."""

    def hook(gradient: Tensor) -> None:
        show_gradient(gradient)

    for each in levels(x):
        if each.requires_grad:
            with DisableTorchFunction():
                each.register_hook(hook)


def _show(scope: Scope | None, head: str, texts: Texts) -> None:
    """Prints the values of all ranks, once they are known."""
    backend = None if scope is None else scope.backend
    if isinstance(backend, ThreadBackend):
        _collect(backend, head, texts)
    elif isinstance(backend, ProcessGroupBackend) and backend.mesh.size > 1:
        _gather(backend, head, texts)
    else:
        _print(head, texts)


def _print(head: str, texts: Texts) -> None:
    lines = [f"  {line}" for line in by_ranks(texts, ": ")]
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = [f"  and {len(lines) - _LINES + 1} more values"]
    print("\n".join([head, *lines]), flush=True)


_WAITING: Final[WeakKeyDictionary[Rendezvous, dict[str, list[dict[int, str]]]]] = (
    WeakKeyDictionary()
)
"""Texts of the ranks that have come to a print, while others have not."""


def _collect(backend: ThreadBackend, head: str, texts: Texts) -> None:
    """Adds this rank's text, and prints those of all ranks once they have come."""
    meeting = backend.rendezvous
    if meeting not in _WAITING:
        _WAITING[meeting] = {}
        meeting.at_end.append(lambda: _print_rest(_WAITING.pop(meeting, {})))
    calls = _WAITING[meeting].setdefault(head, [])
    call = next((each for each in calls if backend.rank not in each), None)
    if call is None:
        call = {}
        calls.append(call)
    call.update(texts)
    if len(call) == backend.mesh.size:
        calls.remove(call)
        _print(head, dict(sorted(call.items())))


def _print_rest(waiting: Mapping[str, Sequence[Texts]]) -> None:
    """Prints what not all ranks have come to, as where one of them has failed."""
    for head, calls in waiting.items():
        for texts in calls:
            _print(head, dict(sorted(texts.items())))


_COUNTS: Final[dict[tuple[str, str], int]] = {}
"""The number of times that this process has printed something on a mesh."""


def _gather(backend: ProcessGroupBackend, head: str, texts: Texts) -> None:
    """Leaves this rank's text in the store; rank 0 waits for all of them, and prints."""
    mesh, store = backend.mesh, default_store()
    count = _COUNTS[str(mesh), head] = _COUNTS.get((str(mesh), head), 0) + 1
    key = f"shardmap_torch/debug_print/{mesh}/{head}/{count}"
    if backend.rank:
        store.set(f"{key}/{backend.rank}", texts[backend.rank])
        return
    found = dict(texts)
    for rank in range(1, mesh.size):
        try:
            store.wait([f"{key}/{rank}"], _PATIENCE)
            found[rank] = store.get(f"{key}/{rank}").decode()
            store.delete_key(f"{key}/{rank}")
        except (RuntimeError, NotImplementedError) as error:
            found.setdefault(rank, f"nothing has come: {error}".splitlines()[0])
    _print(head, found)
