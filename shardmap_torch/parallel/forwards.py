"""Forwards of a plan's modules in the body: changes of layout around each module's own forward."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase
from types import MethodType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial as PartialPlacement
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional

from shardmap_torch.checker.queries import typeof
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import CollectiveError, ShardTypeError, SpecError, show_shape
from shardmap_torch.nn.embedding import own_embeddings
from shardmap_torch.nn.region import PerRank, Types, region_types
from shardmap_torch.ops import axis_index, axis_size, convert, redistribute, reinterpret
from shardmap_torch.ops.body import types_of
from shardmap_torch.parallel.plan import Plan
from shardmap_torch.parallel.styles import (
    CONV1D,
    Change,
    ExpertsDispatch,
    ExpertsParallel,
    Layouts,
    Left,
    LocalAttributes,
    ReplicatedParallel,
    SharedResult,
    kind_of,
    normalized,
)
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, S, V, Z

_ACCEPTED: Final[Mapping[str, frozenset[AxisType]]] = {
    "Replicate": frozenset({I, R, K, Z}),
    "Shard": frozenset({V, Z}),
    "Partial": frozenset({V, Partial, Z}),  # local strictness cannot tell an addend from V
}
"""The types that a value of each placement may have along the axis."""

_REPAIRS: Final[Mapping[AxisType, str]] = {
    I: "Replicate()",
    R: "Replicate()",
    K: "Replicate()",
    V: "Shard(dim)",
    Partial: "Partial()",
}


class Shared:
    """The last replicated input of a module whose ranks use it differently.

    Projections to queries, keys and values have one input: with one conversion of it, cotangents
    are added up on each rank first, and then over the ranks once.

    Attributes:
        left: the last module that left its output sharded.
    """

    def __init__(self) -> None:
        self.left = Left()
        self._last: tuple[Tensor, int, Tensor] | None = None

    def convert(self, x: Tensor, axis: str) -> Tensor:
        """Converts an input from I to R, unless it is that of the call before."""
        version = 0 if x.is_inference() else x._version
        if self._last is None or self._last[0] is not x or self._last[1] != version:
            self._last = (x, version, convert(x, axis, src=I, dst=R))
        return self._last[2]


def style_forward(plan: Plan, path: str, module: nn.Module, shared: Shared) -> None:
    """Replaces the forward of the bound copy of the module at `path` by that of its style."""
    layouts = plan.styles.get(path)
    if layouts is None or isinstance(layouts.style, ReplicatedParallel):
        return
    name = repr(path) if path else type(module).__name__
    if isinstance(layouts.style, LocalAttributes):
        _divide(layouts.style.names, axis_size(plan.axis), name, module)
        if not layouts.style.heads:
            return
    own = vars(module).get("forward") or MethodType(type(module).forward, module)
    if isinstance(layouts.style, ExpertsParallel):
        computable(module)
    # Types of replicated inputs: R if the ranks use them differently, I if all do the same.
    differs = isinstance(layouts.style, ColwiseParallel | ExpertsParallel) or (
        not layouts.is_for_one and plan.splits_below(path)
    )
    replicate = R if differs else I
    vars(module)["forward"] = _Forward(layouts, plan.axis, name, module, own, replicate, shared)


def _divide(attributes: Sequence[str], num_ranks: int, name: str, module: nn.Module) -> None:
    for attribute in attributes:
        value = getattr(module, attribute)
        if value % num_ranks:
            raise SpecError(
                f"{name}: {attribute} = {value} does not divide over {num_ranks} ranks.\n"
                "Fix: leave it and what is below it out of the plan; each rank then computes it."
            )
        vars(module)[attribute] = value // num_ranks


@dataclass(frozen=True)
class _Forward:
    """The forward of a module of the plan.

    Attributes:
        layouts: those of its style.
        axis: the mesh axis of the plan.
        name: its name in errors.
        module: its bound copy.
        own: its own forward.
        replicate: type of its replicated inputs.
        shared: the last input of such modules of the body.
    """

    layouts: Layouts
    axis: str
    name: str
    module: nn.Module
    own: Callable[..., Any]
    replicate: AxisType
    shared: Shared

    def rebound(
        self, rebind: Callable[[Any], Any], counterpart: Callable[[Any], Any]
    ) -> "_Forward":
        """Returns the forward of a copy of the module."""
        module, own = counterpart(self.module), rebind(self.own)
        return replace(self, module=module, own=own, shared=Shared())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._inputs(args)
        unknown = sorted(self.layouts.named.keys() - kwargs.keys())
        if unknown:
            raise SpecError(
                f"{self.name}: input_kwarg_layouts names {unknown}, which are not passed."
            )
        for name, change in self.layouts.named.items():
            what = f"the input {name!r}"
            kwargs[name] = self._relayout(kwargs[name], change, self.replicate, what)
        if isinstance(self.layouts.style, LocalAttributes):
            kwargs |= self._of_own_heads(self.layouts.style, kwargs)
        if isinstance(self.layouts.style, RowwiseParallel):
            return self._summed(args, kwargs)
        return self._outputs(self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module's own forward on inputs that have the layouts it needs."""
        module: Any = self.module
        is_columns = isinstance(self.layouts.style, ColwiseParallel)
        if kind_of(module) is CONV1D and is_columns and self._is_of_class():
            return functional.linear(args[0], module.weight.mT, module.bias)
        if isinstance(self.layouts.style, ExpertsDispatch):
            own: Any = self.own
            return dispatched(self.module, own, self.name, self.axis, args)
        return self.own(*args, **kwargs)

    def _inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        changes = self.layouts.inputs
        if isinstance(self.layouts.style, ExpertsParallel):
            both = (Replicate(), Replicate())
            changes = [both if isinstance(x, Tensor) else None for x in args]
        if changes is None:
            return args
        if self.layouts.is_for_one:
            if not args:
                raise SpecError(f"{self.name}: pass the input by position, as its style needs it.")
            changes = [self._source(args[0], changes[0])]
        elif len(changes) != len(args):
            raise SpecError(
                f"{self.name}: input_layouts has {len(changes)} layouts, and {len(args)} "
                "positional inputs are passed; give one for each, or None."
            )
        return self._each(args, changes, self.replicate, "input")

    def _of_own_heads(
        self, style: LocalAttributes, kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the inputs that have rows of all heads, with those of this rank's."""
        count = getattr(self.module, style.names[0]) * axis_size(self.axis)
        for name, dim in style.heads.items():
            x = kwargs.get(name)
            if isinstance(x, Tensor) and x.shape[dim] % count == 0:
                rows, change = x.unflatten(dim, (-1, count)), (Replicate(), Shard(dim + 1))
                own = self._relayout(rows, change, I, f"the input {name!r}")
                yield name, own.flatten(dim, dim + 1)

    def _source(self, x: object, change: Change | None) -> Change | None:
        """Returns the change of the input of a style for one tensor.

        torch assumes that a plain tensor is a shard of the sequence; here its type is known.
        """
        is_sequence = isinstance(self.layouts.style, SequenceParallel)
        if change is None or not is_sequence or not isinstance(x, Tensor):
            return change
        is_replicated = _type_along(self.axis, x) in (I, R, K)
        return (Replicate(), change[1]) if is_replicated else change

    def _outputs(self, out: Any) -> Any:
        changes = self.layouts.outputs
        if changes is None:
            return out
        outputs = out if isinstance(out, tuple) and not self.layouts.is_for_one else (out,)
        if len(outputs) != len(changes):
            raise SpecError(
                f"{self.name}: output_layouts has {len(changes)} layouts, and the module returns "
                f"{len(outputs)} values; give one for each, or None."
            )
        if any(change is not None and isinstance(change[1], Shard) for change in changes):
            self.shared.left = Left.by(self.layouts.style, self.name)
        to = R if isinstance(self.layouts.style, SharedResult) else I
        changed = self._each(outputs, changes, to, "output")
        return changed if outputs is out else changed[0]

    def _each(
        self, values: Sequence[Any], changes: Sequence[Change | None], to: AxisType, word: str
    ) -> tuple[Any, ...]:
        changed = list(values)
        for i, change in enumerate(changes):
            if change is not None and change[0] is not None and change[1] is not None:
                what = f"the {word}" if self.layouts.is_for_one else f"{word} {i}"
                changed[i] = self._relayout(values[i], change, to, what)
        return tuple(changed)

    def _relayout(self, x: object, change: Change, replicate: AxisType, what: str) -> Tensor:
        """Redistributes an input or output between placements, by one typed collective.

        A replicated result is R if the ranks use it differently, I if all repeat one computation.

        Raises:
            ShardTypeError: the type of the value is not that of its placement.
            SpecError: it is no tensor, or has no such dim.
        """
        src, dst = change
        if not isinstance(x, Tensor):
            raise SpecError(
                f"{what} of {self.name}: the plan says {src!r}, but it is a {type(x).__name__}."
            )
        type_ = _type_along(self.axis, x)
        if type_ not in _ACCEPTED[type(src).__name__]:
            raise ShardTypeError(self._explain(what, src, type_, x))
        key = src, dst, type_, replicate, x.ndim, x.is_floating_point() or x.is_complex()
        step = _STEPS.get(key, lambda: _step(*key, self.axis, f"{what} of {self.name}"))
        try:
            return step(x, self.axis, self.shared)
        except CollectiveError as error:
            to, ranks = normalized(dst, x.ndim, self.name), axis_size(self.axis)
            if not isinstance(to, Shard) or not (rest := x.shape[to.dim] % ranks):
                raise
            raise SpecError(
                f"{what} of {self.name}: the plan says {to!r}, and dim {to.dim} of "
                f"{show_shape(x.dtype, x.shape)} does not divide over the {ranks} ranks of "
                f"{self.axis!r}.\n  at {call_site()}\n"
                f"Fix: pad it to {x.shape[to.dim] + ranks - rest} (a class token counts too), with "
                "the mask of an attention; or say Replicate() there."
            ) from error

    def _explain(self, what: str, src: Placement, type_: AxisType, x: Tensor) -> str:
        """Explains that a value has another layout than the plan says, with its shape on a rank."""
        left, is_equal = self.shared.left, type_ in (I, R, K)
        found = typeof(x).get(self.axis, type_).dim if type_ == V else None
        repair = _REPAIRS[type_] if found is None else f"Shard({found})"
        option = f"{'output' if 'output' in what else 'input'}_layouts={repair}"
        if "'" in what:
            option = f"input_kwarg_layouts={{{what.removeprefix('the input ')}: {repair}}}"
        has_option = not isinstance(self.layouts.style, SequenceParallel)
        fixes = [f"say {option} in the style of {self.name}"] * has_option
        shown = "equal on all ranks" if is_equal else f"of type {type_}"
        lines = [
            f"{what} of {self.name}: the plan says {normalized(src, x.ndim, self.name)!r}, but "
            f"over {self.axis!r} the value, {show_shape(x.dtype, x.shape)} on a rank, is {shown}.",
            f"  at {call_site()}",
        ]
        if left in ("", self.name) or is_equal:
            fixes.append("change the layout of what computes it")
        else:
            lines.append(f"  {left} leaves its output sharded")
            fixes += [left.how] * (not fixes or "output" in left.how)
        return "\n".join([*lines, f"Fix: {', or '.join(fixes)}."])

    def _summed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a module whose rows are sharded: each rank computes an addend of its product."""
        kind = kind_of(self.module)
        is_plain = kind is CONV1D or type(self.module).forward in _PLAIN
        if is_plain and self._is_of_class():
            return self.product(args[0], getattr(self.module, "bias", None))
        with _Products(self) as products:
            out = self.own(*args, **kwargs)
        if not products.count:
            raise SpecError(
                f"{self.name}: RowwiseParallel adds up what a Linear or an Embedding computes, and "
                f"the forward of {type(self.module).__name__} does not do that with its weight."
            )
        return out

    def _is_of_class(self) -> bool:
        """Returns whether the module's own forward is that of its class: nobody has patched it."""
        return getattr(self.own, "__func__", None) is type(self.module).forward

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns what the module computes with its weight, summed over the ranks, and a bias."""
        module: Any = self.module
        if isinstance(module, nn.Embedding):
            rows: Tensor = own_embeddings(self.axis)(x, module.weight)
            padding = module.padding_idx
            if padding is not None:  # which gets no gradient
                rows = rows.where((x != padding).unsqueeze(-1), rows.detach())
            result: Tensor = self._outputs(rows)
            return result
        weight = module.weight.mT if kind_of(module) is CONV1D else module.weight
        y = self._outputs(functional.linear(x, weight))
        return y if bias is None else self._with_bias(y, bias)

    def _with_bias(self, y: Tensor, bias: Tensor) -> Tensor:
        """Adds the bias once, to the finished sum, or to the addend of one rank."""
        bias = bias.to(y.dtype)  # autocast may have changed the dtype of y
        outputs: Any = self.layouts.outputs
        layout = normalized(outputs[0][1], y.ndim, self.name)
        if layout == Shard(y.ndim - 1):
            layout = Shard(0)
        elif isinstance(layout, Shard):
            return y + bias
        return y + self._relayout(bias, (Replicate(), layout), I, "the bias")


_PLAIN: Final = (nn.Linear.forward, nn.Embedding.forward)
_TRANSPOSES: Final = (
    *(Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t),  # type: ignore[attr-defined]
    *(Tensor.transpose, torch.transpose),
)
_PRODUCTS: Final = (Tensor.matmul, Tensor.__matmul__, torch.matmul)


class _Products(FunctionMode):
    """Within a forward of a module's own, its product with its weight is that of all ranks."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()
        self._forward, self.count = forward, 0
        self._weight: Any = forward.module.weight
        self._transposed: Any = None

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind, by = kind_of(self._forward.module), args[1] if len(args) > 1 else None
        is_own = kind is not None and func is kind.function and by is self._weight
        if not is_own and (by is not self._transposed or by is None or func not in _PRODUCTS):
            result = func(*args, **kwargs)
            if func in _TRANSPOSES and args and args[0] is self._weight:
                self._transposed = result
            return result
        self.count += 1
        return self._forward.product(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))


Step: TypeAlias = Callable[[Tensor, str, Shared], Tensor]

_STEPS: Final = Memo[Step]()
"""The way from one placement to another, decided once: modules ask for the same in each call."""


def _step(
    src: Placement,
    dst: Placement,
    type_: AxisType,
    replicate: AxisType,
    ndim: int,
    is_smooth: bool,
    axis: str,
    name: str,
) -> Step:
    src, dst = (normalized(placement, ndim, name) for placement in (src, dst))
    if isinstance(src, PartialPlacement) and isinstance(dst, PartialPlacement):
        if type_ == V:
            return lambda x, axis, _: reinterpret(x, axis, src=V, dst=Partial)
        return lambda x, axis, _: x
    if isinstance(src, Replicate) and isinstance(dst, Replicate):
        # Integers have no gradient, so that nothing depends on their type.
        if is_smooth and replicate == R and type_ != R:
            return lambda x, axis, shared: shared.convert(x, axis)
        return lambda x, axis, _: x
    source, target = _type_of(src, R if type_ == R else I), _type_of(dst, replicate)
    return lambda x, axis, _: redistribute(x, axis, src=source, dst=target)


def _type_along(axis: str, x: Tensor) -> AxisType:
    """Returns the type of `x` along `axis` that the checker found: V, I, R, K, Z or Partial.

    An axis of a view may stand for several, along one of which a value may differ: then it does so
    along the axis. Uncommitted values and zeros take the other axis' type.
    """
    types = types_of(x, (axis,))
    if types is None:  # a parallelized module is always checked
        raise SpecError(
            "a module below a parallelized one runs outside of its forward, where no ranks are.\n"
            "Fix: call the parallelized module; recompute with torch.utils.checkpoint within it."
        )
    if len(types) == 1:
        return types[0] if types[0].dim is None else V
    kinds = {V if type_.dim is not None else type_ for type_ in types}
    return next(type_ for type_ in (V, Partial, R, I, K, Z) if type_ in kinds)


def _type_of(placement: Placement, replicated: AxisType) -> AxisType:
    if isinstance(placement, Shard):
        return S(placement.dim)
    return Partial if isinstance(placement, PartialPlacement) else replicated


def computable(module: nn.Module) -> None:
    """Gives the bound copy of experts an implementation whose shapes do not depend on data.

    The eager one of transformers takes the rows of one expert after another.
    """
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) == "eager":
        config = copy.copy(config)
        vars(config)["_experts_implementation_internal"] = "batched_mm"
        vars(module)["config"] = config


def dispatched(
    module: nn.Module, forward: MethodType, name: str, axis: str, args: tuple[Any, ...]
) -> Tensor:
    """Runs the experts of this rank on the rows that go to them; returns an addend of the output.

    A row that goes to another rank's expert has a number that no expert has, and no weight, as in
    the all-reduce form of transformers. That experts treat their weights one by one is a promise
    (a `local_region`).

    Args:
        module: the bound copy of the experts, with this rank's weights.
        forward: its own forward.
        name: its name in errors.
        axis: the mesh axis over which experts are sharded.
        args: rows [t, d], numbers of experts [t, k] and their weights [t, k], equal on all ranks.

    Raises:
        SpecError: the module has other inputs, or does not say how many experts it has.
    """
    count: Any = getattr(module, "num_experts", None)
    if type(count) is not int or [getattr(arg, "ndim", 0) for arg in args] != [2, 2, 2]:
        raise SpecError(
            f"{name}: ep_dispatch_experts is for a module with an integer num_experts that takes "
            "rows [t, d], numbers of experts [t, k] and their weights [t, k], by position."
        )
    weights = dict(module.named_parameters(recurse=False))

    def experts(rows: Tensor, routes: Tensor, shares: Tensor, *own: Tensor) -> Tensor:
        num_own = count // axis_size(axis)
        is_other = routes // num_own != axis_index(axis)
        routes = torch.where(is_other, num_own, routes % num_own)
        mine = copy.copy(module)
        vars(mine).update(
            num_experts=num_own,
            _is_expert_parallel=num_own != count,  # what routes without an expert need there
            _parameters=dict(zip(weights, own, strict=True)),
        )
        out: Tensor = forward.__func__(mine, rows, routes, shares.masked_fill(is_other, 0.0))
        return out

    def types(layouts: Sequence[P], ranks: Sequence[int]) -> Types:
        others = iter(ascii_lowercase)
        terms = ["t" + next(others), "tk", "tk"]
        letters = (each for each in others if each not in "ekt")
        terms += ["e" + "".join(next(letters) for _ in range(rank - 1)) for rank in ranks[3:]]
        equation = f"{','.join(terms)}->ta"
        return region_types(equation, {"e": axis}, axis, layouts, ranks)

    out: Tensor = PerRank(experts, types)(*args, *weights.values())
    return out
