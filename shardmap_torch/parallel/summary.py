"""Summaries of parallelized modules: what a plan shards and sends, and what it leaves out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from shardmap_torch.errors import SpecError
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.reshard import plan as reshard_plan
from shardmap_torch.parallel.plan import Plan
from shardmap_torch.parallel.styles import (
    EMBEDDING,
    Layouts,
    SharedResult,
    kind_of,
    normalized,
    spec_of,
)
from shardmap_torch.parallel.words import Split
from shardmap_torch.spec import P

_Bytes: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """A module of the plan, or several of equal layers.

    Attributes:
        name: its path; * stands for the number of a layer.
        count: the number of modules of that name.
        style: its style as the plan has it.
        shards: the dims by which its parameters are sharded, by name.
        forward: the bytes that a rank sends in a forward for each row, as a token, of its input.
        backward: the same in a backward; modules of one input send its gradient once.
    """

    name: str
    count: int
    style: str
    shards: str
    forward: int
    backward: int


@dataclass(frozen=True)
class Summary:
    """A summary of what `parallelize` made of a module; its text is a table.

    Attributes:
        rows: the modules and parameters of the plan.
        replicated: numbers of entries of the parameters that every rank has whole.
        sharded: the number of entries of all others.
        unused: keys of a plan that the module carries which match nothing in it.
    """

    rows: tuple[Row, ...]
    replicated: dict[str, int]
    sharded: int
    unused: tuple[str, ...]

    def __str__(self) -> str:
        """Formats it as a table, and lists what the plan leaves out."""
        table = [("module", "style", "shards", "sends a row", "backward")]
        for row in self.rows:
            name = f"{row.name} ({row.count})" if row.count > 1 else row.name
            table.append((name, row.style, row.shards, f"{row.forward} B", f"{row.backward} B"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        lines.append(
            f"sharded: {self.sharded:,} entries; on every rank: {sum(self.replicated.values()):,}"
        )
        lines += [f"  {name}: {size:,}" for name, size in self.replicated.items()]
        if self.unused:
            lines.append(f"entries that match nothing: {', '.join(map(repr, self.unused))}")
        return "\n".join(lines)


def parallel_summary(module: nn.Module) -> Summary:
    """Summarizes what `parallelize` made of a module: styles, shards and bytes, and what it left.

    Bytes are those of the collectives of the styles on a ring, for each row of the input of a
    module, as the hidden state of a token; `explain` on inputs lists all that a call sends.

    Args:
        module: a module that `parallelize` has changed.

    Raises:
        SpecError: it has not.

    Example:
        >>> from torch import nn
        >>> from shardmap_torch import make_mesh, parallelize
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> print(parallel_summary(parallelize(mlp, mesh, {"0": "colwise", "2": "rowwise"})))
        module  style    shards              sends a row  backward
        0       colwise  weight: 0, bias: 0  0 B          16 B
        2       rowwise  weight: 1           16 B         0 B
        sharded: 72 entries; on every rank: 4
          2.bias: 4
    """
    call: Any = vars(module).get("forward")
    plan: Plan | None = getattr(call, "plan", None)
    if plan is None:
        raise SpecError(
            f"parallel_summary takes a module that parallelize has changed, not "
            f"{type(module).__name__}."
        )
    found: dict[tuple[Any, ...], int] = {}
    for path, style in plan.words.items():
        title = style if isinstance(style, str) else type(style).__name__
        cells = (_layered(path), title, *_cells(module, plan, path, call.mesh))
        found[cells] = found.get(cells, 0) + 1
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    replicated: dict[str, int] = {}
    for name, size in sizes.items():
        if plan.splits[name] is None:
            replicated[_layered(name)] = replicated.get(_layered(name), 0) + size
    rows = tuple(Row(name, count, *rest) for (name, *rest), count in found.items())
    sharded = sum(size for name, size in sizes.items() if plan.splits[name] is not None)
    return Summary(rows, replicated, sharded, tuple(plan.unused))


def _layered(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _cells(module: nn.Module, plan: Plan, path: str, mesh: Mesh) -> tuple[str, int, int]:
    """Returns the shards of a module or parameter, and the bytes that it sends."""
    if path in plan.splits:
        return _in_words(plan.splits[path]), 0, 0
    target = module.get_submodule(path)
    names = {id(value): name for name, value in module.named_parameters()}
    shards = {
        own: plan.splits[names[id(value)]] for own, value in target.named_parameters(recurse=False)
    }
    words = [f"{own}: {_in_words(split)}" for own, split in shards.items() if split is not None]
    layouts = plan.styles[path]
    sent = list(_sent(target, layouts, plan, mesh))
    forward, backward = (sum(each[i] for each in sent) for i in (0, 1))
    return ", ".join(words) or "-", forward, backward


def _in_words(split: Split | None) -> str:
    if split is None:
        return "-"
    return f"{split.dim}" if split.parts == 1 else f"{split.dim} in {split.parts} parts"


def _sent(target: nn.Module, layouts: Layouts, plan: Plan, mesh: Mesh) -> Iterator[_Bytes]:
    """Yields the bytes of each change of layout, in a forward and in its backward."""
    kind, weight = kind_of(target), getattr(target, "weight", None)
    if kind is None or weight is None:
        return
    summed = P(replicate=plan.axis)  # its gradient is
    own = summed if isinstance(layouts.style, ColwiseParallel) else P()
    result = summed if isinstance(layouts.style, SharedResult) else P()
    ends = [(layouts.inputs, kind.inputs, own)] if kind is not EMBEDDING else []
    for changes, dim, replicated in [*ends, (layouts.outputs, kind.outputs, result)]:
        for src, dst in filter(None, changes or ()):
            size = weight.shape[dim] * weight.element_size()
            specs = _spec(src, plan.axis, P()), _spec(dst, plan.axis, replicated)
            shard = size // mesh.shape[plan.axis] if specs[0].sharded_dims else size
            steps = reshard_plan(*specs, mesh)
            forward, backward = sum(x.sent for x in steps), sum(x.sent_back for x in steps)
            yield int(forward * shard), int(backward * shard)


def _spec(placement: Placement, axis: str, replicated: P) -> P:
    """Returns the spec of a matrix: `replicated` where all ranks have all of it."""
    if isinstance(placement, Replicate):
        return replicated
    return spec_of(normalized(placement, 2, "a layout"), axis)
