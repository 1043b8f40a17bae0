"""`best_mesh`: estimates a step on every mesh of so many ranks, and ranks them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from multiprocessing import get_context
from typing import Any, TypeAlias

from shardmap_torch.checker.guards.monitor import Departure
from shardmap_torch.core.caching import lazy
from shardmap_torch.errors import ShardMapError, SpecError, show
from shardmap_torch.mesh import MAX_RANKS, Mesh, make_mesh
from shardmap_torch.planning.dry_run import Dry, DryRun, checked, run_dry
from shardmap_torch.planning.estimate import Estimate, estimate
from shardmap_torch.planning.hardware import Hardware
from shardmap_torch.report.units import show_bytes, show_seconds

Build: TypeAlias = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]
"""Makes a step for a mesh and options: a mapped function, and its arguments or their shapes."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One mesh, with one choice of options.

    Attributes:
        mesh: abstract, of the ranks asked for.
        build: makes the step on it.
        hardware: on which it is estimated.
        options: with which `build` is called.
        figures: those of `Estimate.to_json`; None where there is no such step.
        why: the reason, the first line of an error; empty where there is an estimate.
        checked: whether this step itself was checked, and not one like it.
        extended: whether the figures are carried on from those of fewer layers.
    """

    mesh: Mesh
    build: Build = field(repr=False)
    hardware: Hardware = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] | None = None
    why: str = ""
    checked: bool = False
    extended: bool = False

    @lazy
    def estimate(self) -> Estimate | None:
        """The whole estimate, made anew: those of all candidates would be gigabytes."""
        return None if self.figures is None else self._estimate()

    def _estimate(self) -> Estimate:
        step, args = self.build(self.mesh, **self.options)
        return estimate(step, *args, hardware=self.hardware)

    def alone(self) -> "Candidate":
        """Checks and estimates the step itself, with all of its layers."""
        try:
            figures, why = self._estimate().to_json(), ""
        except ShardMapError as error:
            figures, why = None, _cause(error)
        return replace(self, figures=figures, why=why, checked=True, extended=False)

    @property
    def seconds(self) -> float:
        """The time of a step; infinite where it does not fit, or there is none."""
        found = self.figures
        return float(found["seconds"]) if found is not None and found["fits"] else inf

    def __str__(self) -> str:
        """Formats it as a row."""
        sizes = "x".join(map(str, self.mesh.axis_sizes))
        chosen = ", ".join(f"{name}={value}" for name, value in self.options.items())
        found = self.figures
        if found is None:
            return f"{sizes:>12}  {'; '.join(filter(None, (chosen, self.why)))}"
        memory = show_bytes(found["peak_bytes"]) + ("" if found["fits"] else " (does not fit)")
        sent = ", ".join(f"{axes} {show_bytes(n)}" for axes, n in sorted(found["sent"].items()))
        time, part = "~" * self.extended + show_seconds(found["seconds"]), found["utilization"]
        row = f"{sizes:>12}  {time:>8}  {part:>4.0%}  {memory:>8}  {sent}"
        return "; ".join(filter(None, (row, chosen)))


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
            {"mesh": dict(each.mesh.shape), "options": dict(each.options)}
            | {"extended": each.extended}
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
    choices: Mapping[str, Sequence[Any]] | None = None,
    layers: int | None = None,
) -> Ranking:
    """Ranks the meshes of `num_ranks` ranks by the estimated time of a step that fits.

    Every factorization of the ranks over the axes, in this order, is tried: the step is built,
    checked and estimated. Steps of equal options that call the same operators on the same operands,
    on the same lines and up to sizes, are checked once, for types do not depend on other sizes;
    global strictness checks each, and the best one is checked in any case. What cannot be built,
    such as heads that do not divide, is listed with its reason.

    Equal layers cost the same each. With `layers`, steps of few layers are estimated, of twice and
    of four times as many as the mesh needs, and the figures carried on to all layers, marked by
    "~". The step that comes first is then checked and estimated with all of its layers, until one
    of those is first.

    Args:
        build: makes the step for a mesh, with a batch of the same global size on each.
        num_ranks: the number of ranks.
        axes: names of the axes; the ranks of the last one are neighbours on a host.
        hardware: on which steps are estimated.
        processes: how many estimate at a time; they are forked from this one, which must not have
            used a GPU.
        choices: values of keyword arguments of `build`, such as microbatches and what to recompute;
            every combination is tried on every mesh.
        layers: the number of equal layers; `build` takes it, and smaller ones, as `layers`.

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
        >>> ranking.candidates[-1].why[-28:]
        "'tp' = 4 ranks (2 = 0*4 + 2)"
    """
    names = tuple(axes)
    if not (isinstance(num_ranks, int) and 0 < num_ranks <= MAX_RANKS and names):
        raise SpecError(f"best_mesh takes 1 to {MAX_RANKS:,} ranks, not {show(num_ranks)}.")
    if not isinstance(processes, int) or processes < 1:
        raise SpecError(f"best_mesh takes a positive number of processes, not {show(processes)}.")
    cases = [
        (sizes, options)
        for options in _combinations(choices or {}, layers)
        for sizes in shapes(num_ranks, len(names))
    ]
    search = _Search(build, names, hardware, layers)
    if processes == 1:
        found = [search.candidate(*case) for case in cases]
    else:
        found = _on_processes(search, cases, processes)
    found.sort(key=_order)
    while found[0].seconds < inf and not found[0].checked:
        found[0] = found[0].alone()
        found.sort(key=_order)
    return Ranking(names, hardware, tuple(found))


def _combinations(choices: Mapping[str, Sequence[Any]], layers: int | None) -> list[dict[str, Any]]:
    """Returns every choice of the keyword arguments of `build`."""
    if not (isinstance(choices, Mapping) and all(map(_is_choice, choices.items()))):
        raise SpecError(
            f"best_mesh takes choices as a dict of names and lists of values, not {show(choices)}."
        )
    if layers is not None:
        if not isinstance(layers, int) or layers < 1 or "layers" in choices:
            raise SpecError(f"best_mesh takes one number of layers, not {show(layers)}.")
        choices = {**choices, "layers": (layers,)}
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _is_choice(item: tuple[Any, Any]) -> bool:
    name, values = item
    return isinstance(name, str) and isinstance(values, list | tuple) and bool(values)


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
        layers: of the step; None where `build` takes no number.
        known: calls that were checked, by their options and the axes that have several ranks.
        programs: what these did, up to sizes.
    """

    build: Build
    axes: tuple[str, ...]
    hardware: Hardware
    layers: int | None
    known: dict[str, Dry] = field(default_factory=dict)
    programs: set[tuple[str, int]] = field(default_factory=set)

    def candidate(self, sizes: tuple[int, ...], options: Mapping[str, Any]) -> Candidate:
        """Estimates a step."""
        mesh = make_mesh(sizes, self.axes, kind="abstract")
        found = Candidate(mesh, self.build, self.hardware, options)
        try:
            return self._extended(found) or self._estimated(found)
        except ShardMapError as error:
            return replace(found, why=_cause(error))

    def _extended(self, candidate: Candidate) -> Candidate | None:
        """Carries the figures of few layers on; None where all are few."""
        layers = self.layers or 0
        for few in range(1, min((layers - 1) // 4, candidate.mesh.size) + 1):
            if layers % few:  # as many as stages of a pipeline, which divide them
                continue
            with suppress(ShardMapError):
                two, four = (
                    self._estimated(replace(candidate, options={**candidate.options, "layers": n}))
                    for n in (2 * few, 4 * few)
                )
                figures = _carried_on(two.figures, four.figures, (layers - 2 * few) / (2 * few))
                figures["fits"] = figures["peak_bytes"] <= self.hardware.memory
                return replace(candidate, figures=figures, extended=True)
        return None

    def _estimated(self, candidate: Candidate) -> Candidate:
        """Estimates a step after a check of it, or of one that does the same in other sizes."""
        mesh, options = candidate.mesh, candidate.options
        step, args = self.build(mesh, **options)
        # Types that a body asserts or declares are in no program: other options, another check.
        key = repr((options, [size > 1 for size in mesh.axis_sizes]))
        dry = checked(step, args, {}, self.known.get(key))
        run = self._repeated(key, dry) if dry.resized else None
        if run is None:
            dry = checked(step, args, {}) if dry.resized else dry
            run = run_dry(dry.call, self.hardware.counts, compares=True)
            self.known[key] = dry
            self.programs.add((key, run.program))
        figures = Estimate(run, self.hardware).to_json()
        return replace(candidate, figures=figures, checked=not dry.resized)

    def _repeated(self, key: str, dry: Dry) -> DryRun | None:
        """Runs a step of other sizes; None where it does something else than what was checked."""
        with suppress(Departure):
            run = run_dry(dry.call, self.hardware.counts, compares=True)
            if (key, run.program) in self.programs:
                return run
        return None


def _carried_on(two: Any, four: Any, times: float) -> Any:
    """Adds to figures of few layers so often what twice as many have more."""
    if isinstance(two, Mapping):
        if "utilization" in two:  # the part of a time
            two, four = ({**x, "utilization": x["utilization"] * x["seconds"]} for x in (two, four))
        names = [*two, *(name for name in four if name not in two)]
        found = {name: _carried_on(two.get(name, 0), four.get(name, 0), times) for name in names}
        if "utilization" in found:
            found["utilization"] /= found["seconds"]
        return found
    found = two + times * (four - two)
    return round(found) if isinstance(two, int) and isinstance(four, int) else found


_Case: TypeAlias = tuple[tuple[int, ...], Mapping[str, Any]]


def _on_processes(search: _Search, cases: Sequence[_Case], processes: int) -> list[Candidate]:
    """Estimates steps on forked processes, which have `build` without that it is sent."""
    fork = get_context("fork")
    with ProcessPoolExecutor(min(processes, len(cases)), fork, _begin, (search, cases)) as pool:
        # In pieces, for each process checks what its own cases need.
        piece = -(-len(cases) // (4 * processes))
        results = pool.map(_found_by_process, range(len(cases)), chunksize=piece)
        found = zip(cases, results, strict=True)
        return [
            Candidate(
                make_mesh(sizes, search.axes, kind="abstract"),
                search.build,
                search.hardware,
                options,
                *result,
            )
            for (sizes, options), result in found
        ]


_OF_PROCESS: list[tuple[_Search, Sequence[_Case]]] = []
"""The search of a forked process, and its cases."""


def _begin(search: _Search, cases: Sequence[_Case]) -> None:
    _OF_PROCESS.append((search, cases))


def _found_by_process(number: int) -> tuple[Mapping[str, Any] | None, str, bool, bool]:
    search, cases = _OF_PROCESS[0]
    found = search.candidate(*cases[number])
    return found.figures, found.why, found.checked, found.extended


def _cause(error: ShardMapError) -> str:
    """Returns the first line of an error, and the next one where it only announces a list."""
    first, *rest = str(error).splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


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
