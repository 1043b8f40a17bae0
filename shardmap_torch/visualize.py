"""`visualize_sharding`: prints a coloured table of the ranks that have each shard of a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.boundary.placements import spec_of
from shardmap_torch.errors import SpecError, show
from shardmap_torch.mesh import Mesh, as_mesh
from shardmap_torch.report.page import Page, Shown
from shardmap_torch.report.page import Table as HtmlTable
from shardmap_torch.spec import P, expanded, mismatches

T = TypeVar("T")

COLORS: Final = "red green yellow blue magenta cyan bright_black dark_orange3".split()
MAX_SHOWN: Final = 8
"""Number of ranks of a cell, or of shards along a dim, up to which all are shown."""


@dataclass(frozen=True, repr=False)
class Sharding(Shown):
    """The ranks that have each shard of a value; a notebook shows it as a table.

    Attributes:
        shape: global.
        mesh: the mesh.
        spec: how the value is sharded over it.
        rows: the indices of each row of shards; one empty text if no dim is shown as rows.
        columns: those of each column.
        ranks: the ranks that have each shard, by row and column; `…` for shards left out.
        colors: a number for each shard; neighbours have different ones.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    spec: P
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    ranks: tuple[tuple[str, ...], ...]
    colors: tuple[tuple[int | None, ...], ...]

    @property
    def title(self) -> str:
        """The shape, the spec and the mesh."""
        return f"{self.shape} sharded by {self.spec!r} on {self.mesh}"

    def page(self) -> Page:
        """Returns the page: one table."""
        rows = [(row, *names) for row, names in zip(self.rows, self.ranks, strict=True)]
        table = HtmlTable("Ranks that have each shard", ["", *self.columns], rows, self.colors)
        return Page(self.title, tables=[table])

    def table(self, colon: str = ":") -> Table:
        """Returns the table for a terminal; in a narrow one ranges are broken at their `colon`."""
        table = Table(box=box.SQUARE, show_header=self.columns != ("",), show_lines=True)
        has_rows = self.rows != ("",)
        if has_rows:
            table.add_column("", justify="right", no_wrap=True)
        for head in self.columns:
            table.add_column(head.replace(":", colon), justify="center", no_wrap=True)
        for row, names, colors in zip(self.rows, self.ranks, self.colors, strict=True):
            cells = map(_cell, names, colors)
            table.add_row(*([row] if has_rows else []), *cells)
        return table

    def __repr__(self) -> str:
        """Formats it in one line; `visualize_sharding` has printed the table."""
        return f"<Sharding: {self.title}>"


def _cell(names: str, color: int | None) -> Text:
    return Text(names, style="" if color is None else f"bold white on {COLORS[color]}")


def visualize_sharding(
    x: Tensor | Sequence[int],
    *,
    mesh: Mesh | None = None,
    spec: P | None = None,
    console: Console | None = None,
) -> Sharding:
    """Prints the ranks that have each shard of `x`: a cell per shard, a colour per set of ranks.

    Ranks with the same shard share its cell: `0, 4`. Where the value is a pending sum over ranks,
    they are shown as `0 + 1`. Headers are the indices of a row or column; dims that are not sharded
    are not shown.

    Args:
        x: a DTensor, which knows how it is sharded; or a tensor or a global shape with `spec`.
        mesh: the mesh of `spec`; by default that of `use_mesh`.
        spec: the spec of `x`; for a DTensor by default that of its placements.
        console: where to print; by default the standard output, but nowhere in a notebook, which
            shows the result.

    Returns:
        What it has printed: `html(path)` writes it as a page.

    Raises:
        SpecError: no spec, one that does not match the shape, or more than two sharded dims.
        MeshError: no mesh.

    Source: `jax.debug.visualize_array_sharding`.

    Example:
        >>> from rich.console import Console
        >>> from shardmap_torch import P, make_mesh, visualize_sharding
        >>> mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
        >>> plain = Console(color_system=None, width=60)
        >>> shown = visualize_sharding((128, 512), mesh=mesh, spec=P(None, "tp"), console=plain)
        (128, 512) sharded by P(None, 'tp') on simulated mesh (dp=2, tp=4)
        ┌───────┬─────────┬─────────┬─────────┐
        │ 0:128 │ 128:256 │ 256:384 │ 384:512 │
        ├───────┼─────────┼─────────┼─────────┤
        │ 0, 4  │  1, 5   │  2, 6   │  3, 7   │
        └───────┴─────────┴─────────┴─────────┘
    """
    shape = _shape_of(x)
    on, layout = _layout(x, mesh, spec)
    layout = expanded(layout, on.aliases)
    unknown = sorted(layout.named - set(on.axis_names))
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise SpecError(
            f"visualize_sharding: {layout!r} names {names}, but the axes are {on.axis_names}."
        )
    if not isinstance(console, Console | None):
        raise SpecError(f"visualize_sharding: console={show(console)} is no console of rich.")
    problems = mismatches(layout, shape, on.shape)
    if problems:
        raise SpecError(
            f"visualize_sharding: {shape} does not match its spec: {'; '.join(problems)}"
        )
    sharding = _sharding(shape, on, layout, *_shown_dims(layout, shape))
    out = console if console is not None else Console()
    if console is not None or not out.is_jupyter:
        out.print(sharding.title, highlight=False, soft_wrap=True)
        wide, narrow = sharding.table(), sharding.table(":\n")
        needed = out.measure(wide, options=out.options.update_width(10_000)).maximum
        out.print(wide if needed <= out.width else narrow)
    return sharding


def _shape_of(x: Tensor | Sequence[int]) -> tuple[int, ...]:
    sizes = x.shape if isinstance(x, Tensor) and not x.is_nested else x
    if not isinstance(sizes, tuple | list) or not all(isinstance(size, int) for size in sizes):
        raise SpecError(f"visualize_sharding takes a tensor or a shape, not {show(x)}.")
    return tuple(sizes)


def _layout(x: Tensor | Sequence[int], mesh: Mesh | None, spec: P | None) -> tuple[Mesh, P]:
    if isinstance(x, DTensor):
        on = as_mesh(mesh if mesh is not None else x.device_mesh)
        return on, spec if spec is not None else _spec_of(x, on)
    if spec is None:
        raise SpecError(
            "visualize_sharding: only a DTensor knows how it is sharded; pass spec=P(...)."
        )
    if not isinstance(spec, P):
        raise SpecError(f"visualize_sharding: spec is a P, not {show(spec)}.")
    return as_mesh(mesh), spec


def _spec_of(x: DTensor, mesh: Mesh) -> P:
    spec = spec_of(x, mesh)
    if isinstance(spec, P):
        return spec
    raise SpecError(f"visualize_sharding: cannot show the placement {spec}.")


def _shown_dims(spec: P, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Returns the dims of rows and of columns; a single one is of columns if it is the last."""
    dims = sorted(dim for dim, _ in spec.sharded_dims)
    if len(dims) > 2:
        raise SpecError(
            f"visualize_sharding: {spec!r} shards dims {dims}; a table shows two. "
            "Show x[0], or another slice, with one sharded dim less."
        )
    if len(dims) == 2:
        return dims[0], dims[1]
    if not dims:
        return None, None
    return (None, dims[0]) if dims[0] == len(shape) - 1 else (dims[0], None)


def _sharding(
    shape: tuple[int, ...], mesh: Mesh, spec: P, down: int | None, across: int | None
) -> Sharding:
    axes = dict(spec.sharded_dims)
    ranks_of: dict[tuple[int | None, int | None], list[int]] = {}
    for rank in range(mesh.size):
        place = mesh.coordinates(rank)
        row, column = (0 if dim is None else mesh.index(axes[dim], place) for dim in (down, across))
        ranks_of.setdefault((row, column), []).append(rank)
    row_heads, column_heads = (_heads(shape, mesh, axes, dim) for dim in (down, across))
    rows, columns = (_shown(range(len(heads))) for heads in (row_heads, column_heads))

    def names(row: int | None, column: int | None) -> str:
        ranks = ranks_of.get((row, column))
        return _word(None) if ranks is None else _names(mesh, spec, ranks)

    return Sharding(
        shape,
        mesh,
        spec,
        tuple(_word(None if i is None else row_heads[i]) for i in rows),
        tuple(_word(None if j is None else column_heads[j]) for j in columns),
        tuple(tuple(names(i, j) for j in columns) for i in rows),
        tuple(tuple(_color(i, j) for j in columns) for i in rows),
    )


def _color(row: int | None, column: int | None) -> int | None:
    return None if row is None or column is None else (3 * row + column) % len(COLORS)


def _heads(
    shape: tuple[int, ...], mesh: Mesh, axes: Mapping[int, tuple[str, ...]], dim: int | None
) -> list[str]:
    """Formats the indices of each shard, as slices."""
    if dim is None:
        return [""]
    num_shards = mesh.num_ranks(axes[dim])
    length = shape[dim] // num_shards
    return [f"{i * length}:{(i + 1) * length}" for i in range(num_shards)]


def _names(mesh: Mesh, spec: P, ranks: Sequence[int]) -> str:
    """Formats the ranks of one shard: copies with commas, addends with plus signs."""
    copies: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = mesh.coordinates(rank)
        key = tuple(place[axis] for axis in mesh.axis_names if axis not in spec.partial)
        copies.setdefault(key, []).append(rank)
    sums = [" + ".join(map(_word, _shown(addends))) for addends in copies.values()]
    return ", ".join(map(_word, _shown(sums)))


def _shown(items: Sequence[T]) -> list[T | None]:
    """Returns the items to show; None in place of those left out."""
    if len(items) <= MAX_SHOWN:
        return list(items)
    return [*items[:2], None, items[-1]]


def _word(item: object) -> str:
    return "…" if item is None else str(item)
