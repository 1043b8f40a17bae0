"""Modes of bodies with automatic axes: plain operands are replicated, and what torch cannot place.

Bodies make plain tensors, and close over them: they are equal on all ranks of the automatic axes.
DTensor takes no plain operands, and does not give them right gradients where it does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from shardmap_torch.checker.rules.infer import draws, may_draw, name_arguments
from shardmap_torch.collectives.autograd import FunctorchForm
from shardmap_torch.collectives.protocol import Drawing, Monitor, Redraws
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of, levels
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.torch_private.engine import (
    OpOverload,
    TorchDispatchMode,
    custom_function_call,
)
from shardmap_torch.core.tree import flatten, map_tensors, unflatten
from shardmap_torch.errors import ShardMapError
from shardmap_torch.mixing.backend import SharingBackend
from shardmap_torch.mixing.functions import (
    HANDLERS,
    IN_PLACE,
    RUN_ON_SHARDS,
    on_global,
    tensors_of_index,
)
from shardmap_torch.mixing.layouts import replicated, settled
from shardmap_torch.mixing.values import local_of, moved
from shardmap_torch.mixing.writes import (
    here,
    is_reshape_in_place,
    refused_write,
    reshape_in_place,
    write_global,
    written,
)

_NO_OPERANDS: Final = frozenset({"__set__", "__get__", "__delete__", "backward", "register_hook"})
_NOT_MIXED: Final = frozenset({torch.autograd.grad, torch.autograd.backward})


class _Replicate(FunctionMode):
    """Function mode that makes the plain operands of calls with DTensors DTensors too."""

    def __init__(self, backend: SharingBackend) -> None:
        super().__init__()
        self._backend = backend

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]  # of an overload without its own
        if name == "__getitem__":
            args = args[0], tensors_of_index(args[1])
        leaves, structure = flatten((args, kwargs))
        mixed = {is_dtensor(base_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor)}
        is_ours = func is custom_function_call and args[0] is FunctorchForm
        if True not in mixed or is_ours or func in _NOT_MIXED:
            return func(*args, **kwargs)
        if _is_write(name, kwargs):
            _refuse_lost_write(name, args, kwargs)
        elif name.strip("_") not in RUN_ON_SHARDS:
            return HANDLERS.get(name, on_global)(self._backend, func, args, kwargs)
        if len(mixed) == 2 and name not in _NO_OPERANDS:
            lift = self._backend.replicated
            leaves = [lift(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = unflatten(structure, leaves)
        return func(*args, **kwargs)


_SETTERS: Final = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})


def _is_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a torch function of this name writes into an operand."""
    if kwargs.get("out") is not None or name in _SETTERS:
        return True
    return name.endswith("_") and not name.endswith("__")


def _refuse_lost_write(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses the writes that shards cannot do, or whose gradient DTensor gets wrong.

    Its backward of a write into a view writes into that view of the gradient, which is a copy
    where another dim of the gradient is sharded.

    Raises:
        ShardMapError: it writes into a plain tensor, into entries or a view of a value, or by a
            function that has not been compared with one device.
    """
    out = kwargs.get("out")
    x = args[0] if out is None and args else out
    if isinstance(x, Tensor) and not is_dtensor(base_of(x)):
        raise ShardMapError(
            f"{name} writes a value that is a sharded DTensor into a plain tensor, "
            f"{here()}. Make the tensor from the value, as by x.new_zeros(...), or return a new "
            "one instead of writing."
        )
    is_view = isinstance(x, Tensor) and any(layer._is_view() for layer in levels(x))
    if is_view or out is not None or name.strip("_") not in IN_PLACE:
        raise refused_write(name, "a view of a value" if is_view else "a value")


class _Fallback(TorchDispatchMode):
    """Dispatch mode that runs on global values what torch cannot run on shards, and draws there.

    Of random numbers all shards would get the same. Views that had to be redistributed are copies:
    where there has been one, writes are refused.
    """

    def __init__(self, backend: SharingBackend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = flatten((args, kwargs))
        shared = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not shared:
            return func(*args, **kwargs)
        for x in written(func, args, kwargs):
            self._backend.copies.check_write(func, x)
        if len(shared) < sum(isinstance(leaf, Tensor) for leaf in leaves) and not _is_lost(
            func, leaves
        ):
            leaves = [self._lifted(leaf) for leaf in leaves]
            args, kwargs = unflatten(structure, leaves)
        draws = _draws(func, args, kwargs)
        is_run, out = False, None
        if not draws and func not in _READS:
            is_run, out = _try(func, args, kwargs)
        if not is_run and func._schema.is_mutable and not draws:
            return write_global(func, args, kwargs)
        if not is_run:
            plain = [self._global(leaf, func, draws) for leaf in leaves]
            args, kwargs = unflatten(structure, plain)
            out = self._wrapped(func, func(*args, **kwargs), shared[0], draws)
        if func.is_view and isinstance(first := flatten(out)[0][0], DTensor):
            self._backend.copies.add(f"{func} {here()}", shared[0], first)
        return map_tensors(_unmasked, out)

    def _lifted(self, leaf: Any) -> Any:
        is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
        return self._share(leaf, None) if is_plain else leaf

    def _global(self, leaf: Any, func: OpOverload, draws: bool) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        name = str(func._schema.name).removeprefix("aten::")
        if draws and (func._schema.is_mutable or name.endswith("_like")):  # it reads no value
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return local_of(moved(leaf, replicated(self._backend.shared.ndim), name))

    def _wrapped(self, func: OpOverload, out: Any, x: DTensor, draws: bool) -> Any:
        """Makes results DTensors: what was drawn for a value is sharded like it."""
        if func._schema.is_mutable:  # of those only draws come here
            x._local_tensor.copy_(self._share(out, x)._local_tensor)
            return x
        return map_tensors(
            lambda y: self._share(y, x if draws and y.shape == x.shape else None), out
        )

    def _share(self, y: Tensor, like: DTensor | None) -> DTensor:
        shared = self._backend.shared
        new = DTensor.from_local(y, shared, replicated(shared.ndim), run_check=False)
        return new if like is None else moved(new, settled(like.placements))


_READS: Final = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose")
)
"""Operations that return numbers; torch reads those of the shard, or of a rank's addend."""


def _try(func: OpOverload, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Runs an operation on shards, if torch can place it; nothing has been sent if it cannot."""
    try:
        if is_reshape_in_place(func):
            return True, reshape_in_place(func, args, kwargs)
        return True, func(*args, **kwargs)
    except NotImplementedError:  # it has no sharding rule
        return False, None
    except (RuntimeError, AssertionError) as error:
        if not any(text in str(error) for text in _UNPLACED):
            raise
        return False, None


_UNPLACED: Final = (
    "Sharding propagation failed",
    "not supported with DTensor",
    "not supported yet",
    # aten.to.dtype_layout on 2.13, which has "out" in its name, and to the meta device on 2.14:
    "out variant should have at least one out arg",
    "Attempted to set the storage of a tensor on device",
)
"""In torch's errors about operations that it cannot place."""


def _is_lost(func: OpOverload, leaves: list[Any]) -> bool:
    """Returns whether an operation writes into a plain tensor, as the first of its operands."""
    first = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return func._schema.is_mutable and not isinstance(first, DTensor)


def _unmasked(x: Any) -> Any:
    """Makes an embedding's sum with a mask global: what takes it later may not know of masks."""
    if isinstance(x, DTensor) and any(map(_is_masked, x.placements)):
        return moved(x, settled(x.placements), "embedding")
    return x


def _is_masked(placement: Placement) -> bool:
    return isinstance(placement, Partial) and type(placement) is not Partial


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    return may_draw(func) and draws(func, name_arguments(func, args, kwargs))


class Outside(_Replicate):
    """Runs one function outside of a body as both modes would in one."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _Fallback(self._backend):
            return super().call(func, args, kwargs)


class Sharing:
    """The modes of one run of a body, and its drawing; a `collectives.protocol.Drawing`.

    So they are active again where a backward runs the body's code once more.
    """

    def __init__(self, backend: SharingBackend, drawing: Drawing | None) -> None:
        """Keeps the drawing of a body, or of code that runs again; None if it draws nothing."""
        self._backend, self._drawing = backend, drawing
        self._modes, self._depth = (_Fallback(backend), _Replicate(backend)), 0

    def enter(self, monitor: Monitor | None) -> None:
        """Activates the modes; may be entered several times."""
        if self._depth == 0:
            for mode in self._modes:
                mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._depth += 1
        if self._drawing is not None:
            self._drawing.enter(monitor)

    def leave(self) -> None:
        if self._drawing is not None:
            self._drawing.leave()
        self._depth -= 1
        if self._depth == 0:
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def fork(self) -> Redraws:
        """Returns what makes the modes of code that runs again in a backward."""
        redraws = None if self._drawing is None else self._drawing.fork()
        return lambda key: Sharing(self._backend, None if redraws is None else redraws(key))
