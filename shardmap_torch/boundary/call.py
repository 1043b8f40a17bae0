"""The boundary of a shard_mapped function: one call of it, and one run of its body.

Every runtime calls `run_body`; meshes differ only in how global values are sharded and joined.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.casts import apply_all
from shardmap_torch.boundary.matching import Match, Spec, place_results, unsupported
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend, Casts, Drawing, Edge, Monitor
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope
from shardmap_torch.core.caching import Memo, lazy
from shardmap_torch.core.source_location import error_site, is_raised_by_call
from shardmap_torch.core.tree import Placed, Structure, Tree, flatten, unflatten
from shardmap_torch.errors import (
    CollectiveError,
    CollectiveMismatchError,
    OptimizerError,
    ShardTypeError,
    SpecError,
    listing,
)
from shardmap_torch.mesh import Mesh

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _unwrapped() -> AbstractContextManager[Wrap]:
    return nullcontext(lambda function: function)


def _never(closure: Tensor) -> bool:
    return False


@dataclass(eq=False)  # not frozen: that would add a microsecond to each call
class Call:
    """One call of a shard_mapped function with checked arguments; immutable after construction.

    Attributes:
        function: the body.
        name: its name in errors.
        mesh: the mesh of this call.
        bound: all axes bound in the body, including those of outer bodies.
        mapped: the axes that this call binds.
        leaves: every leaf of the arguments.
        match: their paths and specs.
        structure: puts leaves back into `(args, kwargs)`.
        out_specs: prefix tree of the specs of the result.
        out_matches: cache of the matches of results.
        exits: for results by position, conversions to the type that the spec promises, which the
            checker found necessary.
        follow: makes the monitor that compares one run of the body with the checked program; None
            where the checker has not seen the call, or only as part of an outer one.
        draws: whether the checker has seen the body draw from torch's default generator.
        sharing: the input whose memory a result may have, by their positions, where only a check
            can tell; None where nothing is known.
        rank_only: what the checker has seen that a batched body would drop or lack, and where.
        separate: within it, what it wraps runs on each rank with a state of that rank's own.
        recordings: runs the recorded operators of the body in its place; see `run.recorded`.
        lifts: returns whether the caller would make an argument of a tensor that the body closes
            over, for its gradient to be summed.
        compiled: runs the body as torch.compile compiles it; see `run.compiled`.
        donated: positions of the leaves that the body may write into; see `run.donation`.
        takes: whether it writes into their memory, or into copies, as while it is checked.
    """

    function: Callable[..., Tree]
    name: str
    mesh: Mesh
    bound: frozenset[str]
    mapped: tuple[str, ...]
    leaves: Sequence[Any]
    match: Match
    structure: Structure
    out_specs: Tree
    out_matches: Memo[Match]
    exits: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)
    follow: Callable[[], Monitor] | None = None
    draws: bool = False
    sharing: Mapping[int, int] | None = None
    rank_only: str | None = None
    separate: Callable[[], AbstractContextManager[Wrap]] = _unwrapped
    recordings: Any = None
    lifts: Callable[[Tensor], object] = _never
    compiled: Callable[[Any, Sequence[Tensor]], Tree] | None = None
    donated: frozenset[int] = frozenset()
    takes: bool = False

    def checked(
        self,
        leaves: Sequence[Any],
        match: Match,
        exits: Mapping[int, tuple[Collective, ...]],
        follow: Callable[[], Monitor],
        draws: bool,
        rank_only: str | None,
    ) -> "Call":
        """Returns the same call with what a check of it has found."""
        # Not dataclasses.replace, which looks every field up, nor an update of `vars`, after which
        # each attribute takes longer: two microseconds of each call.
        return Call(
            self.function,
            self.name,
            self.mesh,
            self.bound,
            self.mapped,
            leaves,
            match,
            self.structure,
            self.out_specs,
            self.out_matches,
            exits,
            follow,
            draws,
            rank_only=rank_only,
            donated=self.donated,
        )

    @property
    def crossing(self) -> tuple[int, ...]:
        """Positions of the leaves that are tensors and cross by a spec."""
        return self.match.crossing


@dataclass(eq=False)  # not frozen, as `Call`
class Result:
    """The result of one run of a body, flattened like the arguments in `Call`."""

    leaves: list[Any]
    match: Match
    structure: Structure

    @lazy
    def outputs(self) -> tuple[Placed[Spec], ...]:
        """Every leaf with its path and spec."""
        return self.match.place(self.leaves)

    @property
    def crossing(self) -> list[Tensor]:
        """The leaves that are tensors and cross by a spec."""
        return [self.leaves[position] for position in self.match.crossing]

    def rebuild(self, crossing: Sequence[Tensor]) -> Tree:
        """Returns the result with other values of the leaves that cross."""
        leaves = list(self.leaves)
        for position, value in zip(self.match.crossing, crossing, strict=True):
            leaves[position] = value
        return unflatten(self.structure, leaves)


def run_body(
    call: Call, backend: Backend, tensors: Sequence[Tensor], drawing: Drawing | None = None
) -> Result:
    """Runs the body on local values: types them, calls the function, checks and types the result.

    Args:
        call: the checked call.
        backend: runs the collectives in it.
        tensors: the local values of the leaves that cross, in order.
        drawing: seeds what the body draws; by default that of the body around it.
    """
    outer = current_scope()  # an inner body has the monitor of the program around it
    monitor = outer.monitor if call.follow is None and outer is not None else None
    monitor = monitor if call.follow is None else call.follow()
    drawing = outer.drawing if drawing is None and outer is not None else drawing
    with enter_scope(Scope(backend, call.bound, monitor, drawing)):
        values = list(call.leaves)
        for position, local in zip(call.match.crossing, tensors, strict=True):
            values[position] = local
        if call.match.entries:
            apply_all(backend, call.match.entries, values)
        if monitor is not None and call.follow is None:
            apply_all(backend, _enter(call, monitor).items(), values)
        for position in call.donated:  # after conversions, whose results share memory with these
            local = values[position]
            values[position] = local.detach() if call.takes else local.clone()
        args, kwargs = unflatten(call.structure, values)
        out = _apply(call, args, kwargs)
        result = result_of(call, out)
        match, leaves = result.match, result.leaves
        promised = _leave(call, monitor, match, leaves)
        if match.exits:
            apply_all(backend, match.exits, leaves)
        if promised:
            crossing = [(at, promised[at]) for at in match.crossing if at in promised]
            apply_all(backend, crossing, leaves)
    return result


def result_of(call: Call, out: Tree) -> Result:
    """Matches what a body has returned with its specs."""
    leaves, structure = flatten(out)
    if call.follow is None:  # the checker types dense tensors alone
        for x in leaves:
            if type(x) is Tensor and x.layout is torch.strided and not x.is_nested:
                is_dense = not x.is_quantized
            else:
                is_dense = not (isinstance(x, Tensor) and unsupported(x))
            if not is_dense:
                _place(call, out)  # which says so
    ranks = [x.ndim if type(x) is Tensor else _output_signature(x) for x in leaves]
    match = call.out_matches.get((structure, call.mapped, *ranks), lambda: _place(call, out))
    return Result(leaves, match, structure)


def _apply(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    try:
        return call.function(*args, **kwargs)
    except TypeError as error:
        if is_raised_by_call(error):
            raise SpecError(f"{call.name} cannot be called like this: {error}.") from None
        raise
    except (CollectiveError, OptimizerError) as error:
        site, (first, *rest) = error_site(error), f"{error}".split("\n")
        is_told = isinstance(error, CollectiveMismatchError) or "\n  at " in f"{error}"
        if site is not None and not is_told and site.place not in first:
            error.args = ("\n".join([first, f"  at {site}", *rest]),)
        raise


def _place(call: Call, out: Tree) -> Match:
    return place_results(call.name, call.mesh, call.mapped, call.out_specs, out)


def is_checked(call: Call) -> bool:
    """Returns whether the checker has seen the call, alone or in the program around it."""
    scope = current_scope()
    return call.follow is not None or (scope is not None and scope.monitor is not None)


def _enter(call: Call, monitor: Monitor) -> Casts:
    return monitor.enter(
        ("shard_map", call.mapped, call.match.specs), _edge(call, call.match, call.leaves)
    )


def _leave(call: Call, monitor: Monitor | None, match: Match, leaves: list[Any]) -> Casts:
    if monitor is None:
        return call.exits
    if call.follow is None:
        return monitor.leave(("return", match.specs), _edge(call, match, leaves))
    monitor.end(leaves)
    return call.exits


def _edge(call: Call, match: Match, leaves: Sequence[Any]) -> Edge:
    return Edge(call.name, call.mapped, leaves, match.paths, match.specs, match.crossing)


def _output_signature(leaf: Any) -> Any:
    return leaf.ndim if isinstance(leaf, Tensor) else type(leaf)


class Untouched:
    """Detects writes of a body into its inputs, which views of the caller's tensors would show."""

    def __init__(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Records the versions of the input tensors, before the body runs."""
        self._call, self._tensors = call, tensors
        self._versions = _versions(tensors)

    def check(self) -> None:
        """Compares the versions after the body has run.

        Raises:
            ShardTypeError: names every input that was written to.
        """
        versions = _versions(self._tensors)
        if versions == self._versions:
            return
        call = self._call
        pairs = zip(call.crossing, self._versions, versions, strict=True)
        written = [
            call.match.paths[at]
            for at, before, after in pairs
            if before != after and at not in call.donated
        ]
        if not written:
            return
        head = f"{call.name}: the body wrote into its inputs, which are read-only; clone them:"
        raise ShardTypeError(listing(head, written))


_VERSION: Final[Callable[[Tensor], int]] = attrgetter("_version")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    # Under torch.compile versions are not known yet; there the writes are not seen.
    if torch.compiler.is_dynamo_compiling():
        return []
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors of inference mode have none
        return [0 if x.is_inference() else x._version for x in tensors]
