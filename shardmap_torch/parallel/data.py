"""Data axes of a plan: rows of the batch over them, parameters whole or sharded over one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardmap_torch.checker.queries import typeof
from shardmap_torch.errors import SpecError, read_names, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.body import types_of
from shardmap_torch.optim import shard_over
from shardmap_torch.parallel.words import Split, spec_of_split
from shardmap_torch.spec import P, sharded_by
from shardmap_torch.types import V


@dataclass(frozen=True)
class Data:
    """The axes over which ranks have other rows of a batch.

    Attributes:
        replicas: those whose ranks have the same parameters.
        shards: the one that shards parameters too; None if there is none.
        reshard: whether the gathered parameters of a layer are dropped after its forward.
    """

    replicas: tuple[str, ...] = ()
    shards: str | None = None
    reshard: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, in the order in which they divide the rows."""
        return (*self.replicas, *([] if self.shards is None else [self.shards]))

    def rows(self, spec: P, ndim: int, dim: int = 0) -> P:
        """Returns the spec of a tensor one of whose dims is that of rows; a number has none."""
        if not self.axes or not ndim:
            return spec
        dims = dict(spec.sharded_dims)
        dims[dim] = (*self.axes, *dims.get(dim, ()))
        return sharded_by((dims.get(dim, ()) for dim in range(ndim)), partial=spec.partial)

    def of_result(self, x: object, spec: P) -> P:
        """Returns the spec of a result in a body, which has rows if it differs over the axes.

        A number has none: it is refused if it differs, with the line that has made it.
        """
        types = types_of(x, self.axes) if isinstance(x, Tensor) and self.axes else None
        if not isinstance(x, Tensor) or not x.ndim or V not in (types or ()):
            return spec
        # Where it is known, the dim that the rows have become, as in states of an RNN.
        found = [dim for axis in self.axes if (dim := typeof(x)[axis].dim) is not None]
        return self.rows(spec, x.ndim, *found[:1])

    def shard(
        self,
        shapes: Mapping[str, Sequence[int]],
        splits: Mapping[str, Split | None],
        axis: str,
        mesh: Mesh,
    ) -> dict[str, P]:
        """Returns the specs of parameters, also over the axis that shards them."""
        specs = {name: spec_of_split(split, axis) for name, split in splits.items()}
        if self.shards is None or mesh.shape[self.shards] == 1:
            return specs
        free = {name: _Shape(_free(shape, splits[name])) for name, shape in shapes.items()}
        found: dict[str, P] = shard_over(free, specs, self.shards, mesh)
        return found


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]


def _free(shape: Sequence[int], split: Split | None) -> tuple[int, ...]:
    """Returns the shape in which a dim of several parts, which nothing else divides, has size 1."""
    if split is None or split.parts == 1:
        return tuple(shape)
    return (*shape[: split.dim], 1, 1, *shape[split.dim + 1 :])


def read_data(
    mesh: Mesh, axis: str | None, dp: object, fsdp: object, reshard: object
) -> tuple[Data, str | None]:
    """Reads the data axes, and the axis of the plan: None is the only other one, if it is one.

    Raises:
        SpecError: they are no axes of the mesh, or one is named twice.
    """
    replicas = () if dp is None else read_names(dp)
    if replicas is None or (fsdp is not None and not isinstance(fsdp, str)):
        raise SpecError(
            "parallelize: dp is an axis or a tuple of axes, and fsdp an axis, not "
            f"{show(dp if replicas is None else fsdp)}."
        )
    if not isinstance(reshard, bool):
        raise SpecError(
            f"parallelize: reshard_after_forward is True or False, not {show(reshard)}."
        )
    data = Data(replicas, fsdp, reshard)
    for name in data.axes:
        if name not in mesh.axis_names:
            raise SpecError(
                f"parallelize: dp and fsdp are axes of the mesh, {', '.join(map(repr, mesh.shape))}"
                f", not {name!r}."
            )
    named = [*data.axes, *([] if axis is None else [axis])]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise SpecError(
            f"parallelize: {twice[0]!r} is named twice; axis, dp and fsdp are different axes."
        )
    others = [name for name in mesh.axis_names if name not in data.axes]
    return data, others[0] if axis is None and data.axes and len(others) == 1 else axis
