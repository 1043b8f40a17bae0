"""`best_mesh`: estimates a step on every mesh of so many ranks, and ranks them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from multiprocessing import get_context
from typing import Any, TypeAlias

from shardmap_torch.checker.guards.monitor import Departure
from shardmap_torch.core.caching import lazy
from shardmap_torch.errors import ShardMapError, SpecError, show
from shardmap_torch.mesh import Mesh, make_mesh
from shardmap_torch.planning.dry_run import Dry, DryRun, checked, run_dry
from shardmap_torch.planning.estimate import Estimate, estimate
from shardmap_torch.planning.hardware import Hardware
from shardmap_torch.report.units import show_bytes, show_seconds

Build: TypeAlias = Callable[[Mesh], tuple[Callable[..., Any], Sequence[Any]]]
"""Makes a step for a mesh: a mapped function, and its arguments or their shapes."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One mesh.

    Attributes:
        mesh: abstract, of the ranks asked for.
        build: makes the step on it.
        hardware: on which it is estimated.
        figures: those of `Estimate.to_json`; None where there is no such step.
        why: the reason, the first line of an error; empty where there is an estimate.
    """

    mesh: Mesh
    build: Build = field(repr=False)
    hardware: Hardware = field(repr=False)
    figures: Mapping[str, Any] | None = None
    why: str = ""

    @lazy
    def estimate(self) -> Estimate | None:
        """The whole estimate, made anew: those of all candidates would be gigabytes."""
        if self.figures is None:
            return None
        step, args = self.build(self.mesh)
        return estimate(step, *args, hardware=self.hardware)

    def refused(self) -> str:
        """Checks the step; returns the first line of the error, empty where there is none."""
        try:
            step, args = self.build(self.mesh)
            checked(step, args, {})
        except ShardMapError as error:
            return _first_line(error)
        return ""

    @property
    def seconds(self) -> float:
        """The time of a step; infinite where it does not fit, or there is none."""
        found = self.figures
        return float(found["seconds"]) if found is not None and found["fits"] else inf

    def __str__(self) -> str:
        """Formats it as a row."""
        sizes = "x".join(map(str, self.mesh.axis_sizes))
        found = self.figures
        if found is None:
            return f"{sizes:>12}  {self.why}"
        memory = show_bytes(found["peak_bytes"]) + ("" if found["fits"] else " (does not fit)")
        sent = ", ".join(f"{axes} {show_bytes(n)}" for axes, n in sorted(found["sent"].items()))
        time, part = show_seconds(found["seconds"]), found["utilization"]
        return f"{sizes:>12}  {time:>8}  {part:>4.0%}  {memory:>8}  {sent}"


@dataclass(frozen=True, repr=False)
class Ranking:
    """All meshes, the fastest first; those that do not fit or exist come last.

    Attributes:
        axes: names of their axes.
        hardware: on which they are estimated.
        candidates: in order.
    """

    axes: tuple[str, ...]
    hardware: Hardware
    candidates: tuple[Candidate, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Returns each candidate as data that JSON can express, in order."""
        return [
            {"mesh": dict(each.mesh.shape)}
            | ({"why": each.why} if each.figures is None else dict(each.figures))
            for each in self.candidates
        ]

    @property
    def best(self) -> Candidate:
        """The first one.

        Raises:
            SpecError: no mesh has a step that fits.
        """
        first = self.candidates[0]
        if first.seconds == inf:
            raise SpecError(f"best_mesh: no mesh has a step that fits.\n{self}")
        return first

    def __str__(self) -> str:
        """Formats a line for each mesh."""
        head = f"{'x'.join(self.axes):>12}  {'time':>8}  peak  {'memory':>8}  sent by each rank"
        return "\n".join([f"{self.hardware.name}:", head, *map(str, self.candidates)])

    __repr__ = __str__


def best_mesh(
    build: Build,
    num_ranks: int,
    *,
    axes: Sequence[str],
    hardware: Hardware,
    processes: int = 1,
) -> Ranking:
    """Ranks the meshes of `num_ranks` ranks by the estimated time of a step that fits.

    Every factorization of the ranks over the axes, in this order, is tried: the step is built,
    checked and estimated. Steps that call the same operators on the same operands, on the same
    lines and up to sizes, are checked once, for types do not depend on other sizes; global
    strictness checks each, and the best one is checked in any case. What cannot be built, such as
    heads that do not divide, is listed with its reason.

    Args:
        build: makes the step for a mesh, with a batch of the same global size on each.
        num_ranks: the number of ranks.
        axes: names of the axes; the ranks of the last one are neighbours on a host.
        hardware: on which steps are estimated.
        processes: how many estimate at a time; they are forked from this one, which must not have
            used a GPU.

    Raises:
        SpecError: wrong arguments; what `build` raises that is no error of this library.

    Source: the mesh searches of Alpa (Zheng et al. 2022), by estimates alone.

    Example:
        >>> from shardmap_torch import I, P, ShapeDtype, all_reduce, shard_map
        >>> from shardmap_torch.planning import H100, best_mesh
        >>> def build(mesh):
        ...     def loss(x, w):
        ...         return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)
        ...     step = shard_map(
        ...         loss, mesh=mesh, in_specs=(P("dp"), P(None, "tp")), out_specs=P()
        ...     )
        ...     return step, (ShapeDtype((4096, 4096)), ShapeDtype((4096, 2)))
        >>> ranking = best_mesh(build, 4, axes=("dp", "tp"), hardware=H100)
        >>> [candidate.mesh.axis_sizes for candidate in ranking.candidates]
        [(4, 1), (2, 2), (1, 4)]
        >>> ranking.candidates[-1].why
        'loss: the arguments do not match in_specs on the abstract mesh (dp=1, tp=4):'
    """
    names = tuple(axes)
    if not (isinstance(num_ranks, int) and num_ranks > 0 and names):
        raise SpecError(f"best_mesh takes a number of ranks and axes, not {show(num_ranks)}.")
    if not isinstance(processes, int) or processes < 1:
        raise SpecError(f"best_mesh takes a positive number of processes, not {show(processes)}.")
    search = _Search(build, names, hardware)
    sizes = [*shapes(num_ranks, len(names))]
    if processes == 1:
        found = [search.candidate(each) for each in sizes]
    else:
        found = _on_processes(search, sizes, processes)
    found.sort(key=_order)
    while found[0].seconds < inf and (error := found[0].refused()):
        first = found.pop(0)
        found.append(Candidate(first.mesh, build, hardware, why=error))
    return Ranking(names, hardware, tuple(found))


def _order(candidate: Candidate) -> tuple[float, float]:
    """Sorts by time; what does not fit by the memory it takes."""
    found = candidate.figures
    return candidate.seconds, inf if found is None else found["peak_bytes"]


@dataclass
class _Search:
    """Estimates steps on one mesh after another.

    Attributes:
        build: makes a step for a mesh.
        axes: names of the axes.
        hardware: on which steps are estimated.
        checked: calls that were checked, by the axes that have several ranks.
        programs: what these did, up to sizes.
    """

    build: Build
    axes: tuple[str, ...]
    hardware: Hardware
    checked: dict[tuple[bool, ...], Dry] = field(default_factory=dict)
    programs: set[int] = field(default_factory=set)

    def candidate(self, sizes: tuple[int, ...]) -> Candidate:
        """Estimates a step."""
        mesh = make_mesh(sizes, self.axes, kind="abstract")
        found = partial(Candidate, mesh, self.build, self.hardware)
        try:
            step, args = self.build(mesh)
            return found(Estimate(self._run(step, args, mesh), self.hardware).to_json())
        except ShardMapError as error:
            return found(why=_first_line(error))

    def _run(self, step: Callable[..., Any], args: Sequence[Any], mesh: Mesh) -> DryRun:
        """Runs a step after a check of it, or of one that does the same in other sizes."""
        several = tuple(size > 1 for size in mesh.axis_sizes)
        alike = checked(step, args, {}, self.checked.get(several))
        if alike.resized:
            with suppress(Departure):
                run = run_dry(alike.call, self.hardware.counts, compares=True)
                if run.program in self.programs:
                    return run
        dry = checked(step, args, {}) if alike.resized else alike
        run = run_dry(dry.call, self.hardware.counts, compares=True)
        self.checked[several] = dry
        self.programs.add(run.program)
        return run


def _on_processes(
    search: _Search, sizes: Sequence[tuple[int, ...]], processes: int
) -> list[Candidate]:
    """Estimates steps on forked processes, which have `build` without that it is sent."""
    fork = get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (search,)) as pool:
        results = pool.map(_figures_of, sizes)
        found = zip(sizes, results, strict=True)
        return [
            Candidate(
                make_mesh(each, search.axes, kind="abstract"),
                search.build,
                search.hardware,
                *result,
            )
            for each, result in found
        ]


_SEARCH: list[_Search] = []
"""That of a forked process."""


def _begin(search: _Search) -> None:
    _SEARCH.append(search)


def _figures_of(sizes: tuple[int, ...]) -> tuple[Mapping[str, Any] | None, str]:
    found = _SEARCH[0].candidate(sizes)
    return found.figures, found.why


def _first_line(error: ShardMapError) -> str:
    return str(error).partition("\n")[0]


def shapes(num_ranks: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Yields the factorizations of a number of ranks over axes.

    Example:
        >>> list(shapes(4, 2))
        [(1, 4), (2, 2), (4, 1)]
    """
    if num_axes == 1:
        yield (num_ranks,)
        return
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0:
            yield from ((size, *rest) for rest in shapes(num_ranks // size, num_axes - 1))
