"""Types and layouts, asked for and asserted in a body while it is interpreted.

`typeof` and `assert_type` are public; layers and optimizers ask the rest, at no cost in a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Final, TypeVar

from torch import Tensor

from shardmap_torch.checker.interpreter import messages, proposals
from shardmap_torch.checker.interpreter.interpreter import Interpreter, Setting, current_interpreter
from shardmap_torch.checker.ir.program import Asserted, Equation
from shardmap_torch.checker.ir.repairs import Insert, propose
from shardmap_torch.checker.region import local_region, note_region
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.collectives.protocol import Note
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.functorch import base_of, dims_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import CollectiveError, ShardTypeError, show
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, S, TypeLike, V, Z, as_type

X = TypeVar("X", bound=Tensor)


def typeof(x: Tensor) -> Mapping[str, AxisType]:
    """Returns the type of `x` along each mesh axis, as the checker found it.

    A run has no types: it gets what was found when the body was checked. K is the type of what is
    equal on all ranks and neither I nor R yet. Shape of `x`: any. Sends nothing.

    Raises:
        ShardTypeError: outside a body, with check=False, or where paths through the body differ.

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
    _tensor("typeof", x)
    scope = current_scope()
    if scope is None or scope.monitor is None:
        where = "outside a body" if scope is None else "in a body that is not checked"
        raise ShardTypeError(f"typeof was called {where}, and values have types in checked ones.")
    note = scope.monitor.note("typeof")
    interpreter = current_interpreter()
    if interpreter is not None:
        found = tuple(types_in_check(interpreter, x).values())
        interpreter.note_types(note, found, "typeof finds", "call it on one of the paths.")
    return dict(zip(scope.backend.mesh.axis_names, note.types, strict=True))


def dims_over(x: Tensor, axes: Sequence[str]) -> tuple[Sequence[AxisType], Sequence[AxisType]]:
    """Returns S(dim) for each of the axes that divides a dim of `x`, as code under vmap counts it.

    K for other axes, and in a region, whose code is each rank's own; V where layouts do not tell.
    Second, the same if shards are always those of the first dim. Runs get what the check has found.
    """
    scope = current_scope()
    if scope is None or scope.monitor is None:
        return (K,) * len(axes), (K,) * len(axes)
    note, interpreter = scope.monitor.note("dims"), current_interpreter()
    if interpreter is not None:
        types, (dims, _) = types_in_check(interpreter, x), dims_of(x)
        own = [K if interpreter.is_apart else types[axis] for axis in axes]
        found = tuple([each if each == V else _divided(each, dims, each.dim or 0) for each in own])
        found += tuple([_divided(each, dims) for each in own])
        interpreter.note_types(note, found, "a value is divided by", "reduce it on one path.")
    return note.types[: len(axes)], note.types[len(axes) :]


def _divided(found: AxisType, dims: Sequence[int], dim: int = 0) -> AxisType:
    return S(dims.index(dim)) if found.kind in "VS" and dim in dims else K


def _tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise ShardTypeError(f"{name} takes a tensor of the body, not {show(x)}.")
    return x


def types_in_check(interpreter: Interpreter, x: Tensor) -> dict[str, AxisType]:
    """Returns the types along each axis; under global strictness with the sharded dims."""
    types = interpreter.by_axis(interpreter.types_of(x))
    spec = interpreter.observer.spec_of(interpreter.fakify(x))
    return types if spec is None else {**types, **spec.types}


def assert_type(x: X, types: Mapping[str, TypeLike] | TypeLike) -> X:
    """Requires that `x` has these types, checked when the body is interpreted; returns `x`.

    A single type, without an axis, is required along every bound axis. An input whose spec leaves
    an axis open is compared with the type that its gradient gives it in the end. Other values that
    are equal on all ranks and get no gradient are neither I nor R, and pass for both.
    Shape of `x`: any. Sends nothing; at run time it does nothing.

    Raises:
        ShardTypeError: a type differs; while the body is interpreted.

    Source: `spmd_types.assert_type`.

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
    have = types_in_check(interpreter, x)
    shards = interpreter.observer.spec_of(interpreter.fakify(x)) is not None
    for axis, like in _by_axis(interpreter, types).items():
        expected = _counted_from_front(as_type(like), x)
        if expected.kind == "S" and not shards:
            raise CollectiveError(
                f"assert_type: {expected} over {axis!r} cannot be distinguished from V: shards "
                "are tracked only with check='global'. Use V."
            )
        storage_type = interpreter.storage_type(interpreter.fakify(x))
        is_shard = expected.kind == "S" and interpreter.mesh.shape[axis] == 1  # all of it
        if not _matches(have[axis], V if is_shard else expected):
            wrong = messages.error(
                interpreter,
                f"assert_type expects {expected} over {axis!r}, but the value is {have[axis]}.",
                [f"  the value is from {storage_type.origin()}"],
                "",
                types=[have[axis]],
            )
            interpreter.numbers.branches.fail(wrong)
        if storage_type.leaf is not None and have[axis] == K:
            asserted = Asserted(storage_type.leaf, axis, expected, interpreter.site()[0])
            interpreter.asserted.append(asserted)
    return x


def _counted_from_front(expected: AxisType, x: Tensor) -> AxisType:
    """Returns a type whose dim is counted from the front, as in S(-1) of a matrix."""
    if expected.kind != "S" or expected.dim is None:
        return expected
    if not -x.ndim <= expected.dim < x.ndim:
        raise CollectiveError(
            f"assert_type: {expected} names dim {expected.dim} of a tensor of {x.ndim} dims."
        )
    return S(expected.dim % x.ndim)


def _by_axis(interpreter: Interpreter, types: object) -> Mapping[str, TypeLike]:
    """The expected type along each axis."""
    if isinstance(types, AxisType | str):
        scope = current_scope()
        bound = interpreter.axes if scope is None else scope.axes
        return {axis: types for axis in interpreter.axes if axis in bound}
    if not isinstance(types, Mapping):
        raise CollectiveError(
            f"assert_type takes a type, or a dict from axes to types, not {show(types)}."
        )
    mesh = interpreter.mesh
    unknown = [show(axis) for axis in types if axis not in mesh.shape]
    if unknown:
        raise CollectiveError(f"assert_type: no axis {min(unknown)} in the {mesh}.")
    return {axis: like for name, like in types.items() for axis in mesh.finest([name])}


def _matches(have: AxisType, expected: AxisType) -> bool:
    if expected.kind == "S":
        return have == expected
    have = plain(have)
    if have == K:
        return expected in (I, R)
    return have == expected or (have == Z and expected in (I, R, V, Partial))


# ---------------------------------------------------------------- of layers and optimizers


def types_now(x: Tensor) -> Mapping[str, AxisType] | None:
    """Returns the types of `x` along each axis in a check; None in a run, and on one device.

    Unlike `typeof`, it is no step of the program.
    """
    interpreter = current_interpreter()
    if interpreter is None or not interpreter.observer.judges:
        return None
    return types_in_check(interpreter, x)


def closed_over() -> frozenset[int]:
    """Returns the ids of the tensors that the body has read and that are no arguments."""
    interpreter = current_interpreter()
    met = () if interpreter is None else interpreter.traits.closed_over
    return frozenset(number for number, _ in met)


def loss_by_repair(loss: Tensor) -> Tensor:
    """Returns what the repair that is tried makes of a loss, and notes one that is a local mean."""
    interpreter = current_interpreter()
    if interpreter is None:
        return loss
    site, axis = call_site(), means_over(loss, interpreter.axes)
    if axis is not None and site is not None:
        interpreter.means[site] = Insert("all_reduce", axis, (("dst", I), ("op", "mean")))
    mean = interpreter.repair.losses.get(site)
    return loss if mean is None else mean.apply(loss)


def means_over(x: Tensor, axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Returns those of `axes` over which a pending sum would add up means of each rank's part.

    None where it adds up parts, in a run, and under local strictness, which cannot tell.
    """
    interpreter = current_interpreter()
    scale = 1 if interpreter is None else interpreter.observer.scale_of(interpreter.fakify(x))
    if interpreter is None or scale <= 1:
        return None
    sizes = interpreter.mesh.shape
    one = [axis for axis in axes if sizes[axis] == scale]
    several = tuple(axes) if prod(sizes[axis] for axis in axes) == scale else None
    return one[0] if one else several


def propose_means(error: ShardTypeError) -> None:
    """Proposes to average the losses that are means of each rank's part, or sums of these."""
    interpreter = current_interpreter()
    assert interpreter is not None  # it has found the means
    propose(error, proposals.mean_losses(interpreter))
    propose(error, proposals.other_ops(interpreter.traits.reductions, ["sum"]))


def in_place_of_batched() -> AbstractContextManager[object]:
    """Returns a context for operators in a check that batched bodies do without."""
    interpreter = current_interpreter()
    if interpreter is None:
        return nullcontext()
    # What they have in place of an operator of their own is no reason to run ranks.
    return Setting(interpreter.traits, rank_only=interpreter.traits.rank_only)


def call_region(
    function: Callable[..., Any],
    types: Callable[[Sequence[P], Sequence[int]], tuple[Any, Any]],
    *args: Tensor,
) -> Any:
    """Calls a `local_region` whose types follow from the layouts of its arguments.

    Args:
        function: takes tensors.
        types: computes `in_types` and `out_types` from the arguments' layouts and numbers of dims.
        args: the tensors.
    """
    interpreter = current_interpreter()
    if interpreter is None:
        return function(*args)
    observer = interpreter.observer
    # Not under global strictness, or computed again in a backward: layouts are unknown.
    if not observer.compares or observer.is_ignored:
        out = function(*args)
        note_region(interpreter, function.__name__, args, flatten(out)[0])
        return out
    layouts = [observer.spec_of(interpreter.fakify(x)) or P() for x in args]
    in_types, out_types = types(layouts, [x.ndim for x in args])
    return local_region(function, in_types, out_types, trusted=True)(*args)


_NEVER: Final[tuple[AxisType, ...]] = (Z,)
"""Noted where they are not, or differ from path to path; fewer than those of one value."""


@contextmanager
def adjoint_of_ranks(note: Note | None) -> Iterator[Callable[[Sequence[Tensor]], None]]:
    """Gives what notes the types of leaves, their gradients and the value that is differentiated.

    It notes them where the gradients that are computed in this context, by the transposes of the
    collectives, are also the derivative of the program of all ranks.
    """
    interpreter = current_interpreter()
    start = 0 if interpreter is None else len(interpreter.equations)

    def write(values: Sequence[Tensor]) -> None:
        if interpreter is None or note is None:
            return
        found = _NEVER
        if not interpreter.traits.applies_functions and all(
            map(_is_derivative, interpreter.equations[start:])
        ):
            fakes = [interpreter.fakify(base_of(x)) for x in values]
            found = tuple(each for x in fakes for each in interpreter.storage_type(x).types)
        # Paths that look the same to a run share the note.
        note.types = found if note.types in ((), found) else _NEVER

    yield write


def _is_derivative(equation: Equation) -> bool:
    """Returns whether the transpose of a collective, if it is one, is its derivative.

    One from R to I keeps the gradient of a single rank, and others may round it.
    """
    collective = equation.collective
    if collective is None:
        return True
    is_rounded = (collective.comm_dtype, collective.grad_comm_dtype) != (None, None)
    return not is_rounded and (collective.src, collective.dst) != (R, I)
