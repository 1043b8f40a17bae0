"""Types in the body: asked for and asserted while it is interpreted, free at run time."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.interpreter.modes import current_interpreter
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.errors import CollectiveError, ShardTypeError, show
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V, Z, as_type

X = TypeVar("X", bound=Tensor)


def typeof(x: Tensor) -> Mapping[str, AxisType]:
    """The type of `x` along each mesh axis; only in a body that is being checked.

    Raises:
        ShardTypeError: outside the interpretation: types are erased at run time.

    Source: `jax.typeof`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, check_program, make_mesh, shard_map, typeof
        >>> mesh = make_mesh((8,), ("tp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=(P("tp"),), out_specs=P())
        ... def total(x):
        ...     print(typeof(x))
        ...     return all_reduce(x.sum(), "tp", dst=I)
        >>> _ = check_program(total, torch.ones(16))
        {'tp': V}
    """
    interpreter = current_interpreter()
    if interpreter is None:
        raise ShardTypeError(
            "typeof works while the checker interprets a body; at run time values have no types."
        )
    return _types(interpreter, _tensor("typeof", x))


def _tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise ShardTypeError(f"{name} takes a tensor of the body, not {show(x)}.")
    return x


def _types(interpreter: Interpreter, x: Tensor) -> dict[str, AxisType]:
    """Its type along each axis; under global strictness with the dims that are cut."""
    found = dict(zip(interpreter.axes, interpreter.types_of(x), strict=True))
    spec = interpreter.observer.spec_of(interpreter.fakify(x))
    return found if spec is None else {**found, **spec.types}


def assert_type(x: X, types: Mapping[str, TypeLike]) -> X:
    """Requires that `x` has these types, checked when the body is interpreted; returns `x`.

    A value that is equal on all ranks and through which no gradient flows is neither I nor R yet
    and passes for both. At run time it does nothing.

    Raises:
        ShardTypeError: a type differs; while the body is interpreted.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, V, assert_type, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: assert_type(x, {"tp": V}) * 2
        >>> shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P("tp"))(torch.ones(2))
        tensor([2., 2.])
    """
    interpreter = current_interpreter()
    if interpreter is None or not interpreter.observer.judges:
        return x
    _tensor("assert_type", x)
    if not isinstance(types, Mapping):
        raise CollectiveError(f"assert_type takes a dict from axes to types, not {show(types)}.")
    unknown = [show(axis) for axis in types if axis not in interpreter.axes]
    if unknown:
        raise CollectiveError(f"assert_type: no axis {min(unknown)} in the {interpreter.mesh}.")
    have = _types(interpreter, x)
    cuts = interpreter.observer.spec_of(interpreter.fakify(x)) is not None
    for axis, like in types.items():
        wanted = as_type(like)
        if wanted.kind == "S" and not cuts:
            raise CollectiveError(
                f"assert_type: {wanted} over {axis!r} cannot be distinguished from V: shards "
                "are tracked "
                "only with check='global'. Use V."
            )
        if not _fits(have[axis], wanted):
            storage_type = interpreter.storage_type(interpreter.fakify(x))
            wrong = messages.error(
                interpreter,
                f"assert_type expects {wanted} over {axis!r}, but the value is {have[axis]}.",
                [f"  the value is from {storage_type.origin()}"],
                "",
            )
            interpreter.numbers.branches.fail(wrong)
    return x


def _fits(have: AxisType, wanted: AxisType) -> bool:
    if wanted.kind == "S":
        return have == wanted
    have = plain(have)
    if have == K:
        return wanted in (I, R)
    return have == wanted or (have == Z and wanted in (I, R, V, Partial))
