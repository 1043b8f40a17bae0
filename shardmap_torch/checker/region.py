"""`local_region`: per-rank code in a program that is otherwise compared with one device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from torch import Tensor

from shardmap_torch.checker.interpreter import messages, proposals
from shardmap_torch.checker.interpreter.interpreter import Interpreter, Setting, current_interpreter
from shardmap_torch.checker.ir.observer import REGION
from shardmap_torch.checker.ir.program import Equation, use_of
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.core.torch_private.engine import sequence_number
from shardmap_torch.core.tree import Mismatch, Placed, Tree, broadcast_prefix, flatten
from shardmap_torch.errors import ShardTypeError, SpecError, listing, show
from shardmap_torch.ops.arguments import finest_spec
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z

A = ParamSpec("A")
Y = TypeVar("Y")

Specs: TypeAlias = Sequence[P]


@overload
def local_region(
    f: Callable[A, Y], in_types: Tree, out_types: Tree, *, trusted: bool = False
) -> Callable[A, Y]: ...


@overload
def local_region(
    f: None = None, *, in_types: Tree, out_types: Tree, trusted: bool = False
) -> Callable[[Callable[A, Y]], Callable[A, Y]]: ...


def local_region(
    f: Callable[..., Any] | None = None,
    in_types: Tree = None,
    out_types: Tree = None,
    *,
    trusted: bool = False,
) -> Callable[..., Any]:
    """Declares what a per-rank function means on one device.

    With `check="global"` the forward has to be that of the same program on one device. Code that
    depends on its rank, or computes on a shard what it would not compute on the global tensor,
    cannot be: lookups in a table with sharded rows, positions of a sharded sequence, masks under
    context parallelism. In a region it is checked with local strictness only, and its results are
    taken to be sharded as `out_types` says; the global value is what the function computes where
    every axis has one rank. That is a promise: the program is run with random numbers on ranks and
    on one device, and refused where they differ. A promise that numbers cannot decide, as where the
    body draws random numbers, is believed, and `explain` lists it. `validate_rule` tries it with
    arguments of your choice. At run time it does nothing.

    Args:
        f: the function, which takes and returns pytrees of tensors; other leaves are not checked.
        in_types: one `P` per positional argument, each a pytree prefix of it: how it must be
            sharded, `partial=` included; None for what is no tensor.
        out_types: the same for the result.
        trusted: believes the promise, which is not tried: for a function of arguments that are no
            free choice, as a sequence that is permuted before it is sharded. `explain` lists it.

    Returns:
        A function that does what `f` does.

    Raises:
        SpecError: in a checked call, types that do not match the arguments or results.
        ShardTypeError: in a checked call, an argument that is sharded otherwise, a result that is
            not equal on the ranks of an axis over which `out_types` neither shards nor sums, or a
            promise that numbers refute.

    Source: the role of `spmd_types.local_map` in spmd_types.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, axis_index, make_mesh, shard_map
        >>> @local_region(in_types=(P("tp"), P()), out_types=P(partial={"tp"}))
        ... def rows(table, ids):  # table [v/tp, d], ids [n] -> [n, d], a part of the sum
        ...     local = ids - axis_index("tp") * table.shape[0]
        ...     owned = (local >= 0) & (local < table.shape[0])
        ...     return table[local * owned] * owned.unsqueeze(1)
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check="global")
        ... def embed(table, ids):
        ...     return all_reduce(rows(table, ids), "tp", dst=I)
        >>> embed(torch.arange(8.0).reshape(4, 2), torch.tensor([3, 0]))
        tensor([[6., 7.],
                [0., 1.]])
    """
    if f is None:
        return partial(local_region, in_types=in_types, out_types=out_types, trusted=trusted)
    if not callable(f):
        raise SpecError(f"local_region takes a function, not {show(f)}.")
    name = getattr(f, "__name__", type(f).__name__)

    @wraps(f)
    def region(*args: Any, **kwargs: Any) -> Any:
        interpreter = current_interpreter()
        if interpreter is None:
            return f(*args, **kwargs)
        inputs, in_specs = _placed(name, in_types, args, "argument")
        observer = interpreter.observer
        axes = _named_axes([*flatten(in_types)[0], *flatten(out_types)[0]])
        if not trusted:
            interpreter.traits.promises |= {(f"{REGION} {name}", axes)}
        try:
            observer.on_region_start(name, inputs, in_specs)
        except ShardTypeError as error:
            proposals.at_region(interpreter, error, inputs)
            raise
        first = sequence_number()
        try:
            with Setting(interpreter, observer=observer.aside, is_apart=True):
                out = f(*args, **kwargs)
        finally:  # the declaration covers the backward as well
            interpreter.regions.append(range(first, sequence_number()))
        outputs, out_specs = _placed(name, out_types, out, "result")
        checked = set(interpreter.axes)
        if not observer.compares:
            checked -= _varying(interpreter, inputs) - axes
        for tensor, spec in zip(outputs, out_specs, strict=True):
            _check_result(interpreter, name, tensor, spec, checked)
        observer.on_region_end(name, outputs, out_specs)
        note_region(interpreter, name, inputs, outputs)
        return out

    # Read by `validate_rule`.
    region._shardmap_region = (f, in_types, out_types)  # type: ignore[attr-defined]
    return region


def _placed(name: str, types: Tree, value: Any, what: str) -> tuple[list[Tensor], Specs]:
    """Returns the tensors of a tree, and the spec of each."""
    leaves = list(
        broadcast_prefix(types, value, what, lambda leaf: leaf is None or isinstance(leaf, P))
    )
    problems = [str(leaf) for leaf in leaves if isinstance(leaf, Mismatch)]
    placed = [leaf for leaf in leaves if isinstance(leaf, Placed)]
    for leaf in placed:
        if isinstance(leaf.value, Tensor) and not isinstance(leaf.spec, P):
            problems.append(f"{leaf.path}: is a tensor, which needs a P")
        elif isinstance(leaf.value, Tensor) and len(leaf.spec.entries) > leaf.value.ndim:
            problems.append(f"{leaf.path}: {leaf.spec!r} is for more than {leaf.value.ndim} dims")
    if problems:
        raise SpecError(listing(f"local_region {name}: the types do not match:", problems))
    crossing = [leaf for leaf in placed if isinstance(leaf.value, Tensor)]
    return [leaf.value for leaf in crossing], [finest_spec(leaf.spec) for leaf in crossing]


_PROMISES: Mapping[str, tuple[frozenset[AxisType], str]] = {
    "S": (frozenset({V, K, Z}), "shards."),
    "P": (frozenset({V, Partial, Z}), "a pending sum."),
}
_EQUAL: tuple[frozenset[AxisType], str] = (frozenset({I, R, K, Z}), "one value on all ranks.")
"""Local types of a result that is sharded over an axis, a sum over it, or neither, in words."""


def _named_axes(types: Sequence[Any]) -> frozenset[str]:
    """Returns the axes that the types of a region say something about."""
    specs = [finest_spec(spec) for spec in types if isinstance(spec, P)]
    return frozenset(axis for spec in specs for axis in (*spec.mentioned, *spec.named))


def _varying(interpreter: Interpreter, inputs: Sequence[Tensor]) -> set[str]:
    """Returns the axes over which some input is a shard or a pending sum."""
    interpreter.copies.reject_stale(interpreter, inputs)
    types = [interpreter.storage_type(interpreter.fakify(x)).types for x in inputs]
    return {
        axis
        for each in types
        for axis, axis_type in interpreter.by_axis(each).items()
        if axis_type.varies
    }


def _check_result(
    interpreter: Interpreter, name: str, tensor: Tensor, spec: P, axes: Collection[str]
) -> None:
    tensor = interpreter.fakify(tensor)
    promised = spec.types
    for axis, axis_type in interpreter.by_axis(interpreter.storage_type(tensor).types).items():
        if axis not in axes or interpreter.mesh.shape[axis] == 1:
            continue
        expected, what = _PROMISES.get(promised[axis].kind if axis in promised else "I", _EQUAL)
        if plain(axis_type) not in expected:
            wrong = messages.error(
                interpreter,
                f"local_region {name}: over {axis!r} a result is {axis_type}, and {spec!r} "
                f"promises {what}",
                [f"  it is from {interpreter.storage_type(tensor).origin()}"],
                f"shard it over {axis!r} in out_types, or name {axis!r} in its partial=.",
                types=[axis_type],
            )
            interpreter.numbers.branches.fail(wrong)


def note_region(
    interpreter: Interpreter, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Adds the region to the typed program."""
    site, backward = interpreter.site()
    fakes = (map(interpreter.fakify, tensors) for tensors in (inputs, outputs))
    read, written = (
        tuple([use_of("", x, interpreter.storage_type(x)) for x in xs]) for xs in fakes
    )
    interpreter.add(Equation(f"{REGION} {name}", read, written, site, backward))
