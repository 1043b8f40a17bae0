"""Assertions for tests of sharded layers; `testing.plugin` has fixtures for pytest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.matching import is_spec
from shardmap_torch.checker.api import trace
from shardmap_torch.contracts import call_given, export
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.tree import Placed, Tree, broadcast_prefix, map_leaves
from shardmap_torch.divergence import find_divergence
from shardmap_torch.errors import ShardTypeError, TransformError, show
from shardmap_torch.mesh import Mesh, use_mesh
from shardmap_torch.spec import P
from shardmap_torch.transform import Check, shard_map
from shardmap_torch.validate.numbers import differ, gradients_for, tolerance_of

__all__ = ["assert_bytes", "assert_equals_one_device"]


def assert_equals_one_device(
    f: Callable[..., Any],
    one_device: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    in_specs: Tree = None,
    out_specs: Tree = None,
    check: Check = True,
    seed: int = 0,
    gradients: bool = True,
) -> None:
    """Asserts that a sharded function has the results and gradients of one on one device.

    Both run in float64, where rounding hides nothing: tensors of `args` are converted, torch's
    default dtype is float64 meanwhile, and all that can have a gradient get one, for random
    cotangents of the results. Use a mesh of `simulate="ranks"`, as the fixture `simulated_mesh`
    makes, for what each real rank computes.

    Args:
        f: a shard_mapped function; or a body, with `in_specs` and `out_specs`.
        one_device: the same function without collectives, in any code.
        args: global arguments of both: trees of tensors, and other values.
        mesh: the mesh of a body, or of a function that has none; by default that of `use_mesh`.
        in_specs: as of `shard_map`, of a body.
        out_specs: likewise.
        check: likewise; "global" also proves, or tries, that it is so for all numbers.
        seed: of the cotangents.
        gradients: whether gradients are compared too; False for steps that take them themselves,
            of which most cannot be differentiated again.

    Raises:
        AssertionError: results or gradients differ; lists all leaves with the worst difference, and
            names the line at which the programs part.
        ShardTypeError: the checker refuses `f`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, make_mesh
        >>> def row(x, w):
        ...     return all_reduce(x @ w, "tp", dst=I)
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
        >>> x, w = torch.randn(3, 4), torch.randn(4, 5)
        >>> specs = {"mesh": mesh, "in_specs": (P(None, "tp"), P("tp")), "out_specs": P()}
        >>> assert_equals_one_device(row, torch.matmul, x, w, **specs)
    """
    __tracebackhide__ = True  # pytest shows the test's line
    if out_specs is not None:
        f = shard_map(f, in_specs=in_specs, out_specs=out_specs, mesh=mesh, check=check)
    with ExitStack() as after:
        if mesh is not None:
            after.enter_context(use_mesh(mesh))
        after.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        wide = partial(map_leaves, partial(_widened, gradients))
        expected = _values(one_device, map(wide, args), seed, gradients)
        found = _values(f, map(wide, args), seed, gradients)
        faults = _faults(found, expected)
        if faults:
            parting = _parting(f, one_device, args) if "result" in faults[0] else ""
            head = f"{getattr(f, '__name__', type(f).__name__)} is not what one device computes:"
            raise AssertionError("\n  ".join(filter(None, [head, *faults, parting])))


def _values(f: Callable[..., Any], wide: Iterable[Any], seed: int, learns: bool) -> dict[str, Any]:
    """Returns the results by path and, if it `learns`, the gradients of all arguments."""
    args = [*wide]
    results = _by_path(call_given(f, args, {}, TransformError, "The call"), "result")
    values = {path: x.detach() if isinstance(x, Tensor) else x for path, x in results.items()}
    inputs = {
        f"gradient of {path}": leaf
        for number, arg in enumerate(args)
        for path, leaf in _by_path(arg, f"args[{number}]").items()
    }
    try:
        return values | gradients_for([*results.values()], inputs if learns else {}, seed)
    except ShardTypeError as error:
        error.add_note(_ALONE)
        raise
    except RuntimeError as error:  # torch has freed the graph
        why = str(error).partition(". ")[0]
        raise TransformError(f"The results have no gradients: {why}.\n{_ALONE}") from error


_ALONE: Final = "With gradients=False assert_equals_one_device compares the results alone."


def _by_path(tree: Tree, name: str) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths."""
    leaves = broadcast_prefix(P(), tree, name, is_spec)
    return {leaf.path: leaf.value for leaf in leaves if isinstance(leaf, Placed)}


def _widened(learns: bool, leaf: Any) -> Any:
    if not is_smooth(leaf):
        return leaf
    dtype = torch.complex128 if leaf.is_complex() else torch.float64
    return leaf.detach().to(dtype).clone().requires_grad_(learns or leaf.requires_grad)


def _faults(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    if found.keys() != expected.keys():
        names = ", ".join(sorted(found.keys() ^ expected.keys()))
        return [f"only one of them has: {names}"]
    tolerance = tolerance_of([torch.float64])
    faults = []
    for path, value in expected.items():
        if isinstance(value, Tensor) and isinstance(found[path], Tensor):
            fault = differ(found[path], value, tolerance, path)
            faults += [] if fault is None else [str(fault)]
        elif found[path] is not value and found[path] != value:
            faults.append(f"{path}: {found[path]!r}, and {value!r} on one device")
    return faults


def _parting(f: Callable[..., Any], one_device: Callable[..., Any], args: Sequence[Any]) -> str:
    try:
        found = find_divergence(
            f, one_device, *(map_leaves(partial(_widened, True), arg) for arg in args)
        )
    except TransformError:  # more ranks than it runs, or ranks that run different code
        return ""
    return "" if found is None else str(found).rpartition("\n")[0].replace("\n", "\n  ")


def assert_bytes(f: Callable[..., Any], args: Sequence[Any], expected: Mapping[str, int]) -> None:
    """Asserts how many bytes each rank sends, by axis, forward and backward together.

    Nothing runs: arguments may be `ShapeDtype`, and the mesh abstract. Gradients count for the
    arguments that require one. A collective over several axes counts under `"dp,tp"`.

    Args:
        f: a shard_mapped function.
        args: its arguments.
        expected: the bytes by axis; an axis that it leaves out must send none.

    Raises:
        AssertionError: an axis sends another number of bytes; lists what it sends.
        ShardTypeError: the checker refuses `f`.

    Example:
        >>> from shardmap_torch import I, P, ShapeDtype, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((8,), ("tp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
        ... def row(x, w):
        ...     return all_reduce(x @ w, "tp", dst=I)
        >>> x, w = ShapeDtype((16, 64)), ShapeDtype((64, 32))
        >>> assert_bytes(row, (x, w), {"tp": 2 * 7 * 16 * 32 * 4 // 8})
    """
    __tracebackhide__ = True
    if not isinstance(args, Sequence):
        raise TransformError(f"assert_bytes takes a sequence of arguments, not {show(args)}.")
    sent = (program := trace(f, *args)).bytes_sent()
    wrong = [axis for axis in {**sent, **expected} if sent.get(axis, 0) != expected.get(axis, 0)]
    lines = [f"{program.name} sends other bytes than expected:"]
    for axis in wrong:
        lines.append(f"  {axis}: {sent.get(axis, 0)}, not {expected.get(axis, 0)}")
        for row in program.explained().collectives:
            if ",".join(row.axes) == axis and row.bytes_sent:
                times = f" {row.times} times" if row.times > 1 else ""
                place = "for a gradient" if row.site is None else f"at {row.site}"
                lines.append(f"    {row.operation} sends {row.bytes_sent}{times}, {place}")
    if wrong:
        raise AssertionError("\n".join(lines))


export(globals(), __all__, TransformError)
