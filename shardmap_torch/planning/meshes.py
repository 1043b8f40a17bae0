"""`best_mesh`: estimates a step on every mesh of so many ranks, and ranks them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from shardmap_torch.errors import ShardMapError, SpecError, show
from shardmap_torch.mesh import Mesh, make_mesh
from shardmap_torch.planning.estimate import Estimate, estimate
from shardmap_torch.planning.hardware import Hardware
from shardmap_torch.planning.units import show_bytes, show_seconds

Build: TypeAlias = Callable[[Mesh], tuple[Callable[..., Any], Sequence[Any]]]
"""Makes a step for a mesh: a mapped function, and its arguments or their shapes."""


@dataclass(frozen=True)
class Candidate:
    """One mesh.

    Attributes:
        mesh: abstract, of the ranks asked for.
        estimate: of the step on it; None where there is no such step.
        why: the reason, the first line of an error; empty where there is an estimate.
    """

    mesh: Mesh
    estimate: Estimate | None = None
    why: str = ""

    @property
    def seconds(self) -> float:
        """The time of a step; infinite where it does not fit, or there is none."""
        found = self.estimate
        return found.seconds if found is not None and found.fits else inf

    def __str__(self) -> str:
        """Formats it as a row."""
        sizes = "x".join(map(str, self.mesh.axis_sizes))
        found = self.estimate
        if found is None:
            return f"{sizes:>12}  {self.why}"
        memory = show_bytes(found.peak) + ("" if found.fits else " (does not fit)")
        sent = ", ".join(f"{axes} {show_bytes(n)}" for axes, n in sorted(found.sent.items()))
        time = show_seconds(found.seconds)
        return f"{sizes:>12}  {time:>8}  {found.utilization:>4.0%}  {memory:>8}  {sent}"


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
            | ({"why": each.why} if each.estimate is None else each.estimate.to_json())
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


def best_mesh(build: Build, num_ranks: int, *, axes: Sequence[str], hardware: Hardware) -> Ranking:
    """Ranks the meshes of `num_ranks` ranks by the estimated time of a step that fits.

    Every factorization of the ranks over the axes, in this order, is tried: the step is built,
    checked and estimated. What cannot be built, such as heads that do not divide, is listed with
    its reason.

    Args:
        build: makes the step for a mesh, with a batch of the same global size on each.
        num_ranks: the number of ranks.
        axes: names of the axes; the ranks of the last one are neighbours on a host.
        hardware: on which steps are estimated.

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
    meshes = [make_mesh(sizes, names, kind="abstract") for sizes in shapes(num_ranks, len(names))]
    found = [_candidate(build, mesh, hardware) for mesh in meshes]
    return Ranking(names, hardware, tuple(sorted(found, key=_order)))


def _order(candidate: Candidate) -> tuple[float, float]:
    """Sorts by time; what does not fit by the memory it takes."""
    found = candidate.estimate
    return candidate.seconds, inf if found is None else found.peak


def _candidate(build: Build, mesh: Mesh, hardware: Hardware) -> Candidate:
    try:
        step, args = build(mesh)
        return Candidate(mesh, estimate(step, *args, hardware=hardware))
    except ShardMapError as error:
        return Candidate(mesh, why=str(error).partition("\n")[0])


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
