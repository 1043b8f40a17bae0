"""`shard_map`: maps a per-rank function over the ranks of a mesh."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import CellType
from typing import Any, Final, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, get_args, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import (
    Match,
    SignatureCache,
    Spec,
    check_inputs,
    input_signature,
    is_spec,
    kinds_of,
    place_arguments,
)
from shardmap_torch.checker.api import shapes_of, stand_ins, verdict_on
from shardmap_torch.checker.ir.repairs import rejection_of
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.collectives.autograd import is_transformed
from shardmap_torch.collectives.scope import Scope, current_scope
from shardmap_torch.control.start import current as control
from shardmap_torch.core.caching import Memo, constant
from shardmap_torch.core.closures import Closures
from shardmap_torch.core.progress import telling
from shardmap_torch.core.source_location import users_part
from shardmap_torch.core.torch_private.engine import (
    forward_level,
    functorch,
    leave_uncompiled,
    set_compiler,
)
from shardmap_torch.core.tree import Placed, Structure, Tree, broadcast_prefix, flatten
from shardmap_torch.errors import (
    MeshError,
    ShardTypeError,
    SpecError,
    TransformError,
    read_names,
    show,
)
from shardmap_torch.mesh import PROCESS_KINDS, Mesh, as_mesh
from shardmap_torch.run.checked import Checked
from shardmap_torch.run.compiled import (
    Asked,
    Found,
    Root,
    Shapes,
    UncompiledError,
    check_traced,
    compare_traced,
    give_up,
)
from shardmap_torch.run.donation import donating, require_donatable, taking
from shardmap_torch.run.recorded.schedule import Schedule
from shardmap_torch.run.runtimes import runtime_of
from shardmap_torch.run.safety.one_device import OneDevice
from shardmap_torch.run.unchecked import Unchecked, run_in
from shardmap_torch.spec import P

Check: TypeAlias = bool | Literal["local", "global"] | Mapping[str, Literal["local", "global"]]
"""Strictness of `shard_map`, of all axes or by axis; True is "local"."""

A = ParamSpec("A")
Y = TypeVar("Y")


@overload
def shard_map(
    f: Callable[A, Y],
    /,
    *,
    in_specs: Tree,
    out_specs: Tree,
    mesh: Mesh | DeviceMesh | None = None,
    axis_names: Collection[str] | None = None,
    check: Check | None = None,
    debug: bool = False,
    replay: bool = False,
    schedule: Schedule = "overlap",
    donate: Sequence[str] = (),
    check_vma: bool | None = None,
) -> Callable[A, Y]: ...


@overload
def shard_map(
    f: None = None,
    /,
    *,
    in_specs: Tree,
    out_specs: Tree,
    mesh: Mesh | DeviceMesh | None = None,
    axis_names: Collection[str] | None = None,
    check: Check | None = None,
    debug: bool = False,
    replay: bool = False,
    schedule: Schedule = "overlap",
    donate: Sequence[str] = (),
    check_vma: bool | None = None,
) -> Callable[[Callable[A, Y]], Callable[A, Y]]: ...


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Tree,
    out_specs: Tree,
    mesh: Mesh | DeviceMesh | None = None,
    axis_names: Collection[str] | None = None,
    check: Check | None = None,
    debug: bool = False,
    replay: bool = False,
    schedule: Schedule = "overlap",
    donate: Sequence[str] = (),
    check_vma: bool | None = None,
) -> Callable[..., Any]:
    """Maps a function over the ranks of a mesh: it runs on local shards, collectives are explicit.

    Use it as a function or as a decorator. The result takes and returns global values: on a
    simulated mesh plain tensors, on a process-group mesh plain tensors that are equal on all ranks
    or DTensors, and a result is a DTensor unless it is replicated on every rank.

    Args:
        f: the per-rank function, of any pytrees of tensors.
        in_specs: one `P` per argument, in a tuple or in a dict by parameter name, each a pytree
            prefix of its argument; or one `P` for all. None marks a static argument, which is
            passed as it is. An axis that the spec of an input does not mention is typed by the
            checker; with `check=False` it must be named in `replicate=` or `invariant=` if the
            input can receive a gradient.
        out_specs: pytree prefix of specs of the result. An axis that a spec neither mentions nor
            names in `replicate=` is invariant: all ranks return the same, by the same computation.
        mesh: the mesh; by default that of the enclosing body, or else of `use_mesh`. It is looked
            up in each call.
        axis_names: the axes that this function is mapped over; by default all that the enclosing
            body has not bound. The others are automatic: values are of global shape over them, and
            specs do not name them. On processes a DTensor that they shard stays so in the body,
            where torch's sharding propagation runs its operations, and so do the results; see
            docs/automatic_axes.md. On simulated meshes, under torch.compile, under `torch.func`
            from outside and in an inner `shard_map` values are global over them. An empty one
            leaves all axes automatic, as `auto` does; in JAX it stands for all axes.
        check: verify, before a signature runs for the first time, that the body is well-typed and
            that the backward which autograd derives computes right gradients: "local", or True. So
            does the default, which warns of a function, by a `OneDeviceWarning`, if random numbers
            tell it from the same program on one device; "local" says that this is meant.
            "global" requires in addition that the forward is that of the same program on one
            device, its collectives left out; per-rank code goes into `local_region`. A dict, as in
            `{"tp": "global", "dp": "local"}`, requires that over some axes: the program is compared
            with itself where these have one rank, and axes that it leaves out are "local". With
            False specs must name every axis of inputs that can receive a gradient.
        debug: on processes, compare all bits of plain inputs, of tensors that the body closes over
            and of copies of DTensors in each call; else a sample of the first two, and all in every
            hundredth call. The environment variable SHARDMAP_DEBUG decides for all functions: 1
            compares all bits always, 0 nothing.
        replay: run the body's Python once for a signature, record the operators and collectives
            that it calls, and run these in later calls, as `jax.jit` does; see docs/replay.md. What
            Python does beside them, such as to print, is not done again. Calls whose derivatives
            are taken from outside, and calls under transforms or modes, run the body.
        schedule: the order in which processes run what `replay` has recorded. With "overlap" each
            collective starts as soon as its operand is there, and is waited for where its result
            is read; values are the same bit for bit. "program" keeps the order of the body.
        donate: names of parameters whose tensors are given up: the body may write into them and
            return them, so that an optimizer with `in_place=True` needs no second copy of
            parameters and moments. After the call any use of these tensors raises; what else has
            their memory, such as a view made before, changes with it. On simulated meshes of
            several ranks the body gets copies. Calls that are differentiated, compiled or inside of
            another body cannot donate, nor can functions that replay.
        check_vma: JAX's word for `check`: True is "local", False is False.

    Raises:
        SpecError: in a call, if arguments or results do not match the specs, or if plain inputs
            differ between processes; names all offenders.
        MeshError: in a call, if there is no mesh.
        ShardTypeError: in a call, if the program is not well-typed or would compute wrong
            gradients; names the line.
        TransformError: in a call, if `replay` cannot record the body; says why.

    Source: `jax.shard_map`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
        ... def matmul(x, w):
        ...     return all_reduce(x @ w, "tp", dst=I)
        >>> matmul(torch.ones(1, 4), torch.arange(4.0).reshape(4, 1))
        tensor([[6.]])
    """
    if f is None:
        return partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check=check,
            debug=debug,
            replay=replay,
            schedule=schedule,
            donate=donate,
            check_vma=check_vma,
        )
    check = _read_check_vma(check_vma, check)
    if not callable(f):
        raise SpecError(f"shard_map takes a function, not {show(f)}; specs are keyword arguments.")
    _check_in_specs(in_specs)
    strictness = _read_check(check)
    replayed = _read_replay(replay, schedule, strictness, donate)
    body = _Body(f, in_specs, out_specs, mesh, axis_names, strictness, debug, replayed, donate)
    body.asks(check is None)

    @wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if body.donates:
                _reject_compiled(body.name)
            return body.trace(args, kwargs)
        compiler = set_compiler(None)  # or torch.compile would look into what is called here
        try:
            if compiler is None or body.donates:
                return body.run(args, kwargs)
            return body.run_by(compiler, args, kwargs)
        except Exception as error:  # frames of this package say nothing
            error.__traceback__ = users_part(error)
            raise
        finally:
            if compiler is not None:
                set_compiler(compiler)

    if not torch.compiler.is_dynamo_compiling():
        leave_uncompiled(mapped, nested=False)
    # `check_program` and its like call the checker by this.
    mapped._shardmap_verdict = body.verdict_on  # type: ignore[attr-defined]
    mapped._shardmap_call = body.call  # type: ignore[attr-defined]
    # `planning` calls these.
    mapped._shardmap_shapes = body.shapes_call  # type: ignore[attr-defined]
    mapped._shardmap_dry = body._checked.without_data  # type: ignore[attr-defined]
    mapped._shardmap_is_local = strictness in (None, "local")  # type: ignore[attr-defined]
    return mapped


def check_rank_program(
    f: Callable[..., Any],
    *args: Any,
    mesh: Mesh | DeviceMesh,
    in_specs: Tree,
    out_specs: Tree,
    check: Check = "global",
    **kwargs: Any,
) -> Verdict:
    """Checks a function that is written for one rank, as for torchrun, without running it.

    It may call `torch.distributed` on groups that `axis_group` returns, ask these for ranks and
    sizes, and return early for one rank. The specs of its arguments and results are all that it
    says about sharding.

    Args:
        f: the function of one rank.
        args: global arguments, of which tensors may be replaced by `ShapeDtype`.
        mesh: the mesh, which may be abstract.
        in_specs: as of `shard_map`.
        out_specs: as of `shard_map`.
        check: how strictly; "global" compares the ranks with one device.
        kwargs: more global arguments.

    Returns:
        The verdict, as `check_program`.

    Raises:
        ShardTypeError: the program is not well-typed, would compute wrong gradients, or is not that
            of one device.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from shardmap_torch import P, axis_group, check_rank_program, make_mesh
        >>> mesh = make_mesh((4,), ("tp",), kind="abstract")
        >>> group = axis_group(mesh, "tp")
        >>> def product(x, w):
        ...     size, rank = dist.get_world_size(group), dist.get_rank(group)
        ...     y = x.chunk(size, dim=1)[rank] @ w
        ...     dist.all_reduce(y, group=group)
        ...     return y
        >>> x, w = torch.ones(2, 8), torch.ones(8, 2)
        >>> specs = {"in_specs": (P(), P("tp")), "out_specs": P()}
        >>> check_rank_program(product, x, w, mesh=mesh, **specs)
        <Verdict: product on the abstract mesh (tp=4) is accepted>

    Source: `torch.distributed.run`, for which such functions are written.
    """
    mapped = shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
    return verdict_on(mapped, args, kwargs)


def _read_check(check: object) -> Strictness | None:
    """Reads `check`; None if nothing is checked.

    Raises:
        SpecError: it is no strictness.
    """
    if check is None or isinstance(check, bool):
        return None if check is False else "local"
    if isinstance(check, str) and check in _STRICTNESS:
        return _STRICTNESS[check]
    if isinstance(check, Mapping) and all(
        isinstance(axis, str) and isinstance(each, str) and each in _STRICTNESS
        for axis, each in check.items()
    ):
        return frozenset(axis for axis, each in check.items() if each == "global") or "local"
    raise SpecError(
        "check is True, False, 'local' or 'global', or a dict from axes to 'local' or 'global', "
        f"not {show(check)}."
    )


def _check_in_specs(in_specs: Tree) -> None:
    if not (is_spec(in_specs) or isinstance(in_specs, tuple | dict)):
        raise SpecError(
            f"in_specs takes one P for all arguments, a tuple with one spec per argument, or a "
            f"dict by parameter name, not {show(in_specs)}."
            + (f" Write P({in_specs!r})." if isinstance(in_specs, str) else "")
        )


def _read_replay(
    replay: object, schedule: Schedule, strictness: Strictness | None, donate: Sequence[str]
) -> Schedule | None:
    """Returns the order in which calls are replayed; None where they are not."""
    if not isinstance(replay, bool):
        raise SpecError(f"replay is True or False, not {show(replay)}.")
    if replay and strictness is None:
        raise SpecError("replay=True needs check=True or check='global', not check=False.")
    if replay and donate:
        raise SpecError("replay=True and donate= exclude each other: a replay writes into nothing.")
    if schedule not in get_args(Schedule):
        raise SpecError(f"schedule is 'overlap' or 'program', not {show(schedule)}.")
    return schedule if replay else None


_STRICTNESS: Final[Mapping[str, Strictness]] = {"local": "local", "global": "global"}


def _read_check_vma(check_vma: object, check: Check | None) -> Check | None:
    """Reads JAX's word for `check`, which the caller may use in its place."""
    if check_vma is None:
        return check
    if not isinstance(check_vma, bool) or check is not None:
        raise SpecError(
            f"check_vma={show(check_vma)} is JAX's word for check: it takes a bool, and stands in "
            "the place of check."
        )
    return check_vma


class _Body:
    """A function with its specs, the cached matches of its signatures, and its verdicts."""

    def __init__(
        self,
        function: Callable[..., Any],
        in_specs: Tree,
        out_specs: Tree,
        mesh: Mesh | DeviceMesh | None,
        axis_names: Collection[str] | None,
        strictness: Strictness | None,
        debug: bool,
        replay: Schedule | None,
        donate: Sequence[str],
    ) -> None:
        self._function, self._signature = function, _signature(function)
        self.name = self._name = getattr(function, "__name__", type(function).__name__)
        self.donates = _read_donate(donate, self._signature)
        self._in_specs, self._out_specs = in_specs, out_specs
        self._mesh, self._axis_names, self._check = mesh, axis_names, strictness is not None
        # Annotated, since Dynamo cannot call the generic alias Memo[Match].
        self._in_matches: Memo[_Bound] = Memo()
        self._bound_calls: SignatureCache[_Bound] = SignatureCache()
        self._kinds: Memo[_Bound] = Memo()
        self._out_matches: Memo[Match] = Memo()
        self._checked = Checked(self._name, function, strictness or "local", debug, replay)
        self._unchecked = Unchecked(debug)
        self._asked = Asked(self._name, self._call_and_verdict)
        self._root: Root | None = None
        self._lifted: dict[int, CellType] = {}

    def asks(self, is_default: bool) -> None:
        """Has a function that is checked by default warn where it is not that of one device."""
        self._checked.one_device = OneDevice(self._name) if is_default else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        scope = current_scope()
        # An inner function is checked as part of the body around it.
        if scope is None and self._check:
            return self._run_checked(args, kwargs)
        call = self._call(scope, args, kwargs, scope is not None and scope.monitor is not None)
        if self.donates and scope is not None:
            raise SpecError(f"{self._name}: a call inside of a body cannot donate its arguments.")
        if scope is None and not torch.compiler.is_compiling():
            run = runtime_of(call.mesh).run
            if not call.donated or call.mesh.kind == "abstract":
                return self._unchecked.run(call, run)
            require_donatable(call, ())
            return donating(call, partial(self._unchecked.run, taking(call), run))
        return run_in(call, scope)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        """Runs a call that Dynamo traces."""
        if current_scope() is not None or not self._check:
            return self.run(args, kwargs)
        try:  # in which Dynamo breaks no graph: where the check gives up, this runs uncompiled
            return run_in(self._traced(args, kwargs), None)
        finally:
            pass

    def run_by(self, compiler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        """Runs a call in which `compiler` compiles all, or the body alone, on local tensors."""
        if current_scope() is not None or not self._check:
            set_compiler(compiler)
            return self.run(args, kwargs)
        if forward_level() >= 0:  # a compiled call would drop its tangents
            return self._run_checked(args, kwargs)
        with suppress(UncompiledError):
            if self._root is not None:
                return self._compiled(self._root, compiler, args, kwargs)
            self._root = Root(self._name)
            with telling("compiling", self._name):
                return self._compiled(self._root, compiler, args, kwargs)
        return self._run_checked(args, kwargs)

    def _compiled(
        self, root: Root, compiler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tree:
        mesh = _resolve_mesh(self._mesh, None)
        if mesh.kind in PROCESS_KINDS and not (self._lifted or is_transformed()):
            call = self._call(None, args, kwargs, infers=True)
            if call.mapped == mesh.axis_names:
                return self._run_body(compiler, root, call)
        return root.run(compiler, self.trace, args, kwargs)

    def _run_body(self, compiler: Any, root: Root, call: Call) -> Tree:
        """Runs a call of which the body alone is compiled."""
        runtime = runtime_of(call.mesh)
        body = partial(root.run_body, compiler, self._trace_body, call)
        compiled = partial(runtime.run, replace(call, compiled=body))
        if control() is None:
            return compiled()
        try:
            return self._checked.run(call, runtime.run, compiled)
        except ShardTypeError as error:
            if not self._lifts(error):
                raise
            raise UncompiledError from error

    def _run_checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        while True:
            try:
                call = self._call(None, args, kwargs, infers=True)
            except SpecError as error:
                self._checked.refuse(_resolve_mesh(self._mesh, None), error)
            try:
                runtime = runtime_of(call.mesh)
                if not runtime.has_data:
                    return shapes_of(self._checked.verdict(call))
                if call.donated:
                    return donating(call, partial(self._checked.run, call, runtime.run))
                return self._checked.run(call, runtime.run)
            except ShardTypeError as error:
                if not self._lifts(error):
                    raise

    def _lifts(self, error: ShardTypeError) -> bool:
        """Makes arguments of the closed-over tensors whose gradients have to be summed, if any."""
        tensor = rejection_of(error).closure
        cells = {} if tensor is None else self._cells_to_lift(tensor)
        self._lifted |= cells
        return bool(cells)

    def _cells_to_lift(self, tensor: Tensor) -> dict[int, CellType]:
        if torch.compiler.is_compiling():
            return {}
        cells = Closures(self._function).cells_with(tensor)
        return {} if cells.keys() <= self._lifted.keys() else cells

    def verdict_on(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], strictness: Strictness | None = None
    ) -> Verdict:
        """Checks a call without running it."""
        args, kwargs = stand_ins((args, kwargs))
        while True:
            call = self._call(None, args, kwargs, infers=True, runs=False)
            try:
                return self._checked.verdict(call, strictness)
            except ShardTypeError as error:
                if not self._lifts(error):
                    raise

    def shapes_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Returns a call on tensors without data that is neither checked nor run."""
        args, kwargs = stand_ins((args, kwargs))
        return self._call(None, args, kwargs, infers=True, runs=False)

    def call(self, args: tuple[Any, ...]) -> Call:
        """Returns a call that is neither checked nor run."""
        return self._call(None, args, {}, infers=True)

    def _call_and_verdict(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Verdict]:
        call = self._call(None, args, kwargs, infers=True)
        return call, self._checked.traced(call)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Makes a call that Dynamo traces of what a check of it finds."""
        mesh = _resolve_mesh(self._mesh, None)
        leaves, structure = flatten((args, kwargs))
        found = check_traced(self._asked, mesh, leaves, structure)
        compare_traced(found, leaves)
        return self._found(mesh, leaves, structure, found)

    def _trace_body(self, shapes: Shapes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        """Runs the body alone, on local tensors, while Dynamo traces."""
        mesh = _resolve_mesh(self._mesh, None)
        leaves, structure = flatten((args, kwargs))
        found = check_traced(self._asked, mesh, leaves, structure, shapes)
        return runtime_of(mesh).run_local(self._found(mesh, leaves, structure, found))

    def _found(self, mesh: Mesh, leaves: list[Any], structure: Structure, found: Found) -> Call:
        """Makes a call of what a check of it finds."""
        function = self._function
        if found.averages:
            from shardmap_torch.run.safety.ignored_targets import counting_all

            function = counting_all(self._name, function)
        return Call(
            function,
            self._name,
            mesh,
            found.bound,
            found.mapped,
            leaves,
            found.match,
            structure,
            self._out_specs,
            self._out_matches,
            found.exits,
            found.follow,
            sharing=found.sharing,
        )

    def _closures(self) -> Closures | None:
        """Finds closed-over values that a transform outside tracks, or a backward reduces."""
        if torch.compiler.is_dynamo_compiling():
            return None
        if functorch.peek_interpreter_stack() is not None:
            closures = Closures(self._function)
            leaves, _ = flatten(closures.values())
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            if any(map(functorch.is_functorch_wrapped_tensor, tensors)):
                return closures
        return Closures(self._function, self._lifted) if self._lifted else None

    def _call(
        self,
        scope: Scope | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        infers: bool,
        runs: bool = True,
    ) -> Call:
        mesh = _resolve_mesh(self._mesh, scope)
        if not runtime_of(mesh).has_data:
            runs = False
            args, kwargs = stand_ins((args, kwargs))
        closures = self._closures() if scope is None and infers else None
        function = self._function if closures is None else _with_argument(closures)
        hidden = {} if closures is None else {_HIDDEN: closures.values()}
        leaves, structure = flatten((args, kwargs | hidden))

        outer = None if scope is None else scope.axes

        def bind() -> _Bound:
            axes = _resolve_axes(self._name, mesh, self._axis_names, scope)
            placed = place_arguments(self._signature, args, kwargs, self._in_specs)
            placed += [] if closures is None else _placed(closures)
            match = Match.of(check_inputs(self._name, mesh, axes, placed, infers, runs))
            donated = _positions_of(self.donates, match)
            return _Bound(match, axes, frozenset(axes) | (outer or frozenset()), donated)

        # Not the mesh itself, whose groups a cached key would keep alive.
        rest = structure, mesh.layout or mesh, outer, infers, runs

        def resize() -> _Bound:
            kinds = kinds_of(leaves, runs)
            if kinds is None:
                return bind()
            known = self._kinds.get((*rest, *kinds), bind)
            match = known.match.resized(leaves, mesh)
            if match is None:
                return bind()
            return _Bound(match, known.mapped, known.axes, known.donated)

        def find() -> _Bound:
            return self._in_matches.get((*rest, *map(input_signature, leaves)), resize)

        bound = self._bound_calls.get(rest, leaves, find)
        return Call(
            function,
            self._name,
            mesh,
            bound.axes,
            bound.mapped,
            leaves,
            bound.match,
            structure,
            self._out_specs,
            self._out_matches,
            lifts=self._cells_to_lift,
            donated=bound.donated,
        )


_HIDDEN: Final = "~closed over"
"""Keyword of closed-over values that are arguments; it sorts after all names of Python."""


def _with_argument(closures: Closures) -> Callable[..., Any]:
    """Returns the function with the values that it closes over as an argument, as JAX has them."""

    def converted(*args: Any, **kwargs: Any) -> Any:
        return closures.put(kwargs.pop(_HIDDEN))(*args, **kwargs)

    return converted


def _placed(closures: Closures) -> Iterator[Placed[Spec]]:
    """Places closed-over values, which are equal on all ranks."""
    for name, value in zip(closures.names, closures.values(), strict=True):
        for leaf in broadcast_prefix(P(), value, name, is_spec):
            assert isinstance(leaf, Placed)  # one spec matches every tree
            yield leaf if isinstance(leaf.value, Tensor) else replace(leaf, spec=None)


@dataclass(frozen=True)
class _Bound:
    """The match of one signature, the axes that it maps, and all that are bound in the body."""

    match: Match
    mapped: tuple[str, ...]
    axes: frozenset[str]
    donated: frozenset[int]


def _read_donate(donate: Sequence[str], signature: inspect.Signature | None) -> tuple[str, ...]:
    """Reads the names of parameters that are donated."""
    known = () if signature is None else tuple(signature.parameters)
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    wrong = [show(name) for name in names if name not in known]
    if wrong:
        raise SpecError(
            f"donate= takes names of parameters, of {', '.join(known)}, not {', '.join(wrong)}."
        )
    return names


def _positions_of(names: Sequence[str], match: Match) -> frozenset[int]:
    """Returns the positions of the tensors in the arguments of these names."""
    return frozenset(
        at for at in match.crossing if names and re.split(r"[.\[]", match.paths[at])[0] in names
    )


# A constant, so that Dynamo calls it: an error raised in traced code loses its text.
@constant
def _reject_compiled(name: str) -> NoReturn:
    give_up(TransformError(f"{name}: torch.compile cannot compile a call that donates arguments."))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; arguments go by position then
        return None


def _resolve_mesh(mesh: Mesh | DeviceMesh | None, scope: Scope | None) -> Mesh:
    if scope is None:
        return as_mesh(mesh)
    own: Mesh = scope.backend.mesh
    if mesh is not None and as_mesh(mesh) not in (own, own.full):
        raise MeshError(
            f"A shard_map inside the body of another one runs on its mesh, the "
            f"{own.full or own}; it cannot use the {as_mesh(mesh)}."
        )
    return own


def _resolve_axes(
    name: str, mesh: Mesh, axis_names: Collection[str] | None, scope: Scope | None
) -> tuple[str, ...]:
    bound: Collection[str] = scope.axes if scope is not None else ()
    if axis_names is None:
        axes: Sequence[str] = [axis for axis in mesh.axis_names if axis not in bound]
    else:
        axes = mesh.finest(sorted(_read_axis_names(name, axis_names)))
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown:
        raise SpecError(f"{name}: axis_names has {unknown}, but the axes are {mesh.axis_names}.")
    again = [axis for axis in axes if axis in bound]
    if again or (axis_names is None and not axes):
        what = f"axis_names has {again}" if again else "no axis is left"
        raise SpecError(f"{name}: {what}; the enclosing body has bound {sorted(bound)}.")
    return tuple(axis for axis in mesh.axis_names if axis in axes)


def _read_axis_names(name: str, axis_names: Collection[str]) -> tuple[str, ...]:
    names = read_names(axis_names)
    if names is None:
        raise SpecError(f"{name}: axis_names takes axis names, not {show(axis_names)}.")
    return names
