"""Inputs and outputs of a parallelized module: their specs, conversions from and to DTensors."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardmap_torch.checker.queries import typeof
from shardmap_torch.core.tree import (
    Mismatch,
    Tree,
    broadcast_prefix,
    flatten,
    map_leaves,
    unflatten,
)
from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.mesh import PROCESS_KINDS, Mesh
from shardmap_torch.ops.body import axis_size, types_of
from shardmap_torch.parallel.caches import spec_of_cached
from shardmap_torch.parallel.equal_rows import warn_of_equal_rows
from shardmap_torch.parallel.plan import Plan
from shardmap_torch.parallel.styles import Left, normalized, spec_of
from shardmap_torch.placing import from_local
from shardmap_torch.spec import P
from shardmap_torch.types import V


@dataclass(frozen=True)
class Known:
    """Knowledge of the outputs of a body, which a run of it gives.

    Attributes:
        specs: those of the outputs, if they depend on these.
        cached: the specs of tensors in caches, by path.
        sums: the axes that divide the dims of sums, by place, where rows are not the first dim.
        sums_shards: whether sums of shards are those of the whole, and not each rank's own.
    """

    specs: Tree = None
    cached: Mapping[str, P] = field(default_factory=dict)
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sums_shards: bool = False


class UnknownError(Exception):
    """Stops the first run of a body whose output specs depend on the outputs."""

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self.known = known


class Inputs:
    """Specs and casts of the inputs of a parallelized module."""

    def __init__(
        self,
        module: str,
        mesh: Mesh,
        plan: Plan,
        in_specs: Tree,
        names: Sequence[str],
        is_part: bool,
    ) -> None:
        """Keeps `in_specs` as for `shard_map`, or None for the root style's layouts.

        Plain inputs of a part that is called from outside are whole.
        """
        self._mesh, self._axis, self._names = mesh, plan.axis, names
        self._module, self.is_compared = module, False
        self._is_whole = is_part or in_specs is not None
        self._in_specs, self._data = in_specs, plan.data
        root = plan.root
        changes = (root.inputs or ()) if root else ()
        self._layouts = [None if change is None else change[0] for change in changes]
        self._named = {name: src for name, (src, _) in root.named.items()} if root else {}

    def specs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Returns the spec of every leaf; None for a leaf that is no tensor.

        Raises:
            SpecError: names every input that has no spec, or another structure than its spec.
        """
        problems: list[str] = []
        positional = [
            self._expand(self._path(i), x, self._prefix(i, self._path(i), x), problems)
            for i, x in enumerate(args)
        ]
        named = {
            name: self._expand(name, x, self._prefix(self._place(name), name, x), problems)
            for name, x in kwargs.items()
        }
        if problems:
            raise SpecError(listing("The inputs do not match in_specs:", problems))
        return tuple(positional), named

    def enter(self, tree: Tree, specs: Tree) -> Tree:
        """Makes DTensors of plain tensors that are this rank's shards by the plan."""
        if self._mesh.kind not in PROCESS_KINDS or self._is_whole:
            return tree
        leaves, structure = flatten(tree)
        self._compare(tree, specs)
        entered = [
            from_local(leaf, self._mesh, spec)
            if isinstance(spec, P) and spec.named and not isinstance(leaf, DTensor)
            else leaf
            for leaf, spec in zip(leaves, _spec_leaves(specs, tree), strict=True)
        ]
        return unflatten(structure, entered)

    def _compare(self, tree: Tree, specs: Tree) -> None:
        """Has the ranks compare the rows that they have in the first call."""
        axes = tuple([axis for axis in self._data.axes if self._mesh.shape[axis] > 1])
        if not axes or self.is_compared:
            return
        self.is_compared = True
        (args, named, *_), (arg_specs, named_specs, *_) = tree, specs
        given = [(self._path(i), *pair) for i, pair in enumerate(zip(args, arg_specs, strict=True))]
        given += [(name, x, named_specs[name]) for name, x in named.items()]
        rows = {
            leaf.path: leaf.value
            for path, x, spec in given
            for leaf in broadcast_prefix(spec, x, path, _is_spec)
            if not isinstance(leaf, Mismatch) and isinstance(leaf.spec, P)
            if {*axes} <= leaf.spec.named and not isinstance(leaf.value, DTensor)
        }
        warn_of_equal_rows(self._module, self._mesh, axes, rows)

    def _path(self, position: int) -> str:
        return self._names[position] if position < len(self._names) else f"input {position}"

    def _place(self, name: str) -> int:
        return self._names.index(name) if name in self._names else -1

    def _prefix(self, position: int, name: str, value: Any) -> Tree:
        """Returns the spec tree of one input; a Mismatch if there is none."""
        specs = self._in_specs
        if specs is None:
            return self._by_layout(position, name, value)
        if isinstance(specs, Mapping) and name in specs:
            return specs[name]
        if isinstance(specs, tuple) and 0 <= position < len(specs):
            return specs[position]
        if _is_spec(specs):
            return specs
        return Mismatch(name, f"in_specs={show(specs)} has no spec for this input")

    def _by_layout(self, position: int, name: str, value: Any) -> Tree:
        layout = self._named.get(name)
        if layout is None and 0 <= position < len(self._layouts):
            layout = self._layouts[position]
        if not _is_tensor(value):
            return P() if layout is not None or not self._data.axes else self._rows(value)
        ndim = len(value.shape)
        spec = P() if layout is None else spec_of(normalized(layout, ndim, name), self._axis)
        return self._data.rows(spec, ndim)

    def _rows(self, tree: Tree) -> Tree:
        """Returns the specs of inputs in a tree."""
        leaves, structure = flatten(tree)
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        return unflatten(structure, [self._data.rows(P(), len(shape)) for shape in shapes])

    def _expand(self, name: str, value: Any, prefix: Tree, problems: list[str]) -> Tree:
        leaves = (
            [prefix]
            if isinstance(prefix, Mismatch)
            else broadcast_prefix(prefix, value, name, _is_spec)
        )
        specs = []
        for leaf in leaves:
            if isinstance(leaf, Mismatch):
                problems.append(str(leaf))
            else:
                specs.append(leaf.spec if _is_tensor(leaf.value) else None)
        if problems or len({*specs}) == 1:  # a node of a library may not take specs for its values
            return None if problems else specs[0]
        return unflatten(flatten(value)[1], specs)


class Outputs:
    """Specs and casts of the outputs of a parallelized module on a `mesh`."""

    def __init__(
        self, mesh: Mesh, plan: Plan, out_specs: Tree, is_carried: bool, is_part: bool
    ) -> None:
        """Keeps `out_specs` as for `shard_map`, or None for the root style's layouts.

        A plan that the module carries leaves some results sharded, as attentions by their heads.
        """
        self.mesh, self._axis, self._out_specs = mesh, plan.axis, out_specs
        is_open = out_specs is None and plan.root is None and plan.axis in mesh.axis_names
        self._finds = is_open and (is_carried or plan.leaves_shards)
        self._refuses, self._is_part = is_open and not self._finds, is_part
        changes = (plan.root.outputs or ()) if plan.root else ()
        self._layouts = [None if change is None else change[1] for change in changes]
        self._data = plan.data
        is_local = plan.root.is_local if plan.root else not plan.data.axes
        self._is_local = out_specs is None and is_local

    def check(self, out: Tree, cached: Mapping[str, Tensor], known: Known, left: Left) -> None:
        """Stops the run if the specs depend on the outputs and more is known of these now.

        `left` names the last module that has left its output sharded.

        Raises:
            UnknownError: has what is known.
            SpecError: an output is sharded, by a plan that says nothing of it.
        """
        if self._refuses and left:
            self._reject_sharded(out, left)
        from_end = any(isinstance(x, Shard) and x.dim < 0 for x in self._layouts)
        specs = None
        is_alone = bool(self._data.axes) and axis_size(self._data.axes) == 1
        is_alike = known.specs is not None and flatten(known.specs)[1] == flatten(out)[1]
        if is_alike and (self._finds or is_alone):
            specs = known.specs  # what records the program of one device knows no shards
        elif self._out_specs is None and (from_end or self._data.axes or self._finds):
            specs = self._specs(out)
            specs = None if specs == P() else specs
        found = {
            path: self._data.of_result(x, spec_of_cached(x, self._axis) if self._axis else P())
            for path, x in cached.items()
        }
        if (now := replace(known, specs=specs, cached=found)) != known:
            raise UnknownError(now)

    def _reject_sharded(self, out: Tree, left: Left) -> None:
        tensors = [x for x in flatten(out)[0] if isinstance(x, Tensor) and x.ndim]
        if any(V in (types_of(x, (self._axis,)) or ()) for x in tensors):
            raise SpecError(
                f"parallelize: the result differs over {self._axis!r}: {left} leaves its output "
                "sharded, and the plan does not say that the whole module does.\n"
                f"Fix: gather it, by {left.how}; or leave it a DTensor, by "
                "use_local_output=False there, or by out_specs= of parallelize."
            )

    def specs(self, known: Known) -> Tree:
        """Returns the specs for `shard_map`, given what is known of the outputs."""
        cached = tuple(known.cached.values())
        if self._out_specs is not None or known.specs is not None:
            own = known.specs if self._out_specs is None else self._out_specs
            return own, P(), cached, None, P()
        specs = tuple(self._spec(layout, 1) for layout in self._layouts)
        return specs if len(specs) > 1 else (*specs, P())[0], P(), cached, None, P()

    def _specs(self, out: Tree) -> Tree:
        """Returns the specs of outputs that are there."""
        if len(self._layouts) > 1 and isinstance(out, tuple):
            pairs = zip(out, self._layouts, strict=False)
            return tuple(self._specs_of(each, layout) for each, layout in pairs)
        return self._specs_of(out, self._layouts[0] if self._layouts else None)

    def _specs_of(self, out: Tree, layout: Placement | None) -> Tree:
        leaves, structure = flatten(out)
        specs = [self._data.of_result(x, self._found(layout, x)) for x in leaves]
        return specs[0] if len({*specs}) == 1 else unflatten(structure, specs)

    def _found(self, layout: Placement | None, x: object) -> P:
        """Returns the spec of an output over the plan's axis, where it is there."""
        types = types_of(x, (self._axis,)) if self._finds and isinstance(x, Tensor) else None
        if not isinstance(x, Tensor) or V not in (types or ()):
            return self._spec(layout, getattr(x, "ndim", 0))
        dim = typeof(x)[self._axis].dim
        return P() if dim is None else P(*[None] * dim, self._axis)

    def _spec(self, layout: Placement | None, ndim: int) -> P:
        return P() if layout is None else spec_of(_from_front(layout, ndim), self._axis)

    def leave(self, out: Tree) -> Tree:
        """Converts outputs to DTensors or to this rank's tensors, as the plan says."""
        # What is sharded stays a DTensor; so do rows, whose mean on one rank is not the batch's. A
        # loss stays plain, unless the root's style wants DTensors.
        is_plain = self._is_local or not self._layouts
        is_whole = self._is_part or (is_plain and bool(self._finds or self._data.axes))
        if self.mesh.kind not in PROCESS_KINDS or self._out_specs is not None or is_whole:
            return out
        return map_leaves(self._to_local if self._is_local else self._to_dtensor, out)

    def _to_local(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        # The cotangent of a sum is the same for every addend.
        grads = [Replicate() if p.is_partial() else p for p in leaf.placements]
        return leaf.to_local(grad_placements=grads)

    def _to_dtensor(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return leaf
        placements = [Replicate()] * len(self.mesh.axis_names)
        return DTensor.from_local(leaf, self.mesh.device_mesh, placements, run_check=False)


def _is_tensor(value: Any) -> bool:
    """Returns whether it has a spec: a tensor, or a `ShapeDtype` that stands for one."""
    return isinstance(value, Tensor) or hasattr(value, "dtype")


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, P)


def input_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the positional inputs of a forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def _spec_leaves(specs: Tree, tree: Tree) -> list[Any]:
    return [
        leaf.spec
        for leaf in broadcast_prefix(specs, tree, "", _is_spec)
        if not isinstance(leaf, Mismatch)
    ]


def _from_front(layout: Placement, ndim: int) -> Placement:
    negative = isinstance(layout, Shard) and layout.dim < 0
    return normalized(layout, max(ndim, 1), "the output") if negative else layout
