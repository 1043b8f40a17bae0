"""Optimizer: three pure functions on trees, its element-wise subclass, and learning rates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.core.caching import lazy
from shardmap_torch.core.tree import (
    Structure,
    Tree,
    broadcast_prefix_all,
    closed,
    flatten,
    known,
    map_leaves,
    opened,
    rebuilt,
    unflatten,
)
from shardmap_torch.errors import OptimizerError, listing, show
from shardmap_torch.optim.lists import Tensors, as_number, is_number, placed_like
from shardmap_torch.spec import P
from shardmap_torch.spec_patterns import leaf_paths

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the number of the step, a float64 scalar that starts at 1, to the learning rate."""

Rate: TypeAlias = float | Schedule


def rate_at(rate: Rate, step: Tensor) -> Tensor | float:
    """Returns the learning rate of one step."""
    return rate(step) if callable(rate) else rate


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Rises linearly to `peak` over `warmup` steps, and falls as a cosine to `final` at `steps`.

    Args:
        peak: the largest learning rate.
        steps: the step at which `final` is reached, and kept from then on.
        warmup: number of steps of the linear rise, which multiplies the cosine.
        final: the last learning rate.

    Raises:
        OptimizerError: an argument is negative, or there is no step.

    Source: Loshchilov and Hutter 2017 (SGDR), `optax.warmup_cosine_decay_schedule`.

    Example:
        >>> rate = warmup_cosine(1.0, steps=10, final=0.1)
        >>> [round(rate(torch.tensor(float(step))).item(), 3) for step in (0, 5, 10, 20)]
        [1.0, 0.55, 0.1, 0.1]
    """
    rates = {"peak": (peak, 0, math.inf), "final": (final, 0, math.inf)}
    check_range("warmup_cosine", **rates, steps=(steps, 1, math.inf), warmup=(warmup, 0, math.inf))
    middle, amplitude = (peak + final) / 2, (peak - final) / 2

    def rate(step: Tensor) -> Tensor:
        done = (step / steps).clamp(max=1)
        decayed = middle + amplitude * (math.pi * done).cos()
        return decayed * (step / warmup).clamp(max=1) if warmup else decayed

    return rate


X = TypeVar("X")

State: TypeAlias = Any
"""A dict with "step", and for each moment a tree like the parameters."""

Decays: TypeAlias = Callable[[Tensor], bool] | Tree
"""Parameters that decay: a function of the parameter, or a pytree prefix of bools."""


class Optimizer(ABC):
    """An optimizer as pure functions of pytrees: `init`, `update`, and `specs` of its state.

    Made by `adamw`, `sgd` and `zero`. Every function works in the body of a shard_mapped function
    on local tensors, outside on trees of DTensors and plain tensors, and on one device.

    Source: `optax.GradientTransformation`, except that `update` returns the new parameters.
    """

    @abstractmethod
    def init(self, params: Tree) -> State:
        """Returns the state before the first step; moments are sharded like `params`."""

    @abstractmethod
    def specs(self, params: Tree) -> State:
        """Returns the specs of the state, given those of the parameters."""

    @abstractmethod
    def update(
        self, params: X, grads: Tree, state: dict[str, Any], *, in_place: bool = False
    ) -> tuple[X, State]:
        """Returns the parameters and the state after one step.

        With `in_place` these are written into the memory of `params` and of the moments.
        """


@dataclass(frozen=True)
class Elementwise(Optimizer):
    """An optimizer that updates every entry by itself, so that it runs on shards unchanged.

    Attributes:
        lr: the learning rate, or a function of the step.
        weight_decay: coefficient of the weight decay.
        decays: which parameters decay.
        state_dtype: the dtype of moments and of the update; None takes each parameter's.
    """

    lr: Rate
    weight_decay: float
    decays: Decays
    state_dtype: torch.dtype | None

    moments: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        """Formats it as the call that makes it."""
        given = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)]
        return f"{type(self).__name__.strip('_').lower()}({', '.join(given)})"

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The moments that the state has."""
        return self.moments

    @lazy
    def _known_decays(self) -> Tree:
        """The pytree prefix of those that decay, compared by identity."""
        return known(self.decays)

    @abstractmethod
    def step(
        self, params: Tensors, grads: Tensors, moments: list[Tensors], at: "Step"
    ) -> tuple[Tensors, list[Tensors]]:
        """Returns new parameters and moments; lists in the order of the leaves."""

    def init(self, params: Tree) -> State:
        """Returns step 0 and moments that are zero."""
        _reject_complex(params)

        def zeros() -> Tree:
            return map_leaves(lambda p: torch.zeros_like(p, dtype=self.state_dtype), params)

        device = next((p.device for p in flatten(params)[0]), None)
        step = torch.zeros((), dtype=torch.int64, device=device)
        return {"step": step, **{name: zeros() for name in self.moment_names}}

    def specs(self, params: Tree) -> State:
        """Returns the specs of the state: the parameters' for moments, a replicated step."""
        return {"step": P(), **dict.fromkeys(self.moment_names, params)}

    def update(
        self, params: X, grads: Tree, state: dict[str, Any], *, in_place: bool = False
    ) -> tuple[X, State]:
        """Returns parameters and state after one step.

        Shapes, dtypes and types are kept. Nothing is communicated. `grads` must be complete, as
        `sync_gradients` makes them. With `in_place` the results have the memory of `params` and of
        the moments, and no second copy of these is made where torch's fused operator serves; in the
        body of a shard_mapped function that takes `shard_map(..., donate=("params", "state"))`.

        Raises:
            OptimizerError: the trees differ; lists every leaf that does.
        """
        leaves, structure = opened(params)
        trees = [grads, *(state[name] for name in self.moment_names)]
        shapes = [p.shape for p in leaves]
        wheres = ["", *(f" in state[{name!r}]" for name in self.moment_names)]
        columns = [
            _like(tree, params, shapes, structure, where)
            for tree, where in zip(trees, wheres, strict=True)
        ]
        number = state["step"] + 1
        wide_number = number.double()
        rate = as_number(rate_at(self.lr, wide_number))
        at = Step(wide_number, rate, self._decayed(params, structure, leaves))
        is_plain = not _has_dtensors(leaves)
        locals_ = [_locals_like(column, leaves, is_plain) for column in columns]
        own = leaves if is_plain else _locals(leaves)
        dtypes = [p.dtype for p in leaves]
        wide = dtypes if self.state_dtype is None else [self.state_dtype] * len(leaves)
        grads, *moments = [_cast(column, wide) for column in locals_]
        before = [own, *locals_[1:]]
        at = replace(at, in_place=in_place)
        moved, moments = self.step(_cast(own, wide, dtypes), grads, moments, at)
        updated: tuple[Tensors, ...] = (_cast(moved, dtypes), *moments)
        if in_place:
            updated = tuple(map(_written, before, updated))
        if not is_plain:
            updated = tuple([list(map(placed_like, column, leaves)) for column in updated])
        trees = [unflatten(structure, column) for column in updated[1:]]
        new = closed(params, structure, updated[0])
        return new, {"step": number, **dict(zip(self.moment_names, trees, strict=True))}

    def _decayed(self, params: Tree, structure: Structure, leaves: Sequence[Tensor]) -> list[float]:
        """Returns the decay of each leaf."""
        if callable(self.decays):
            chosen = [bool(self.decays(leaf)) for leaf in leaves]
        else:
            prefix = self._known_decays
            matched = broadcast_prefix_all(prefix, structure, params, "params", _is_bool)
            if problems := list(map(str, matched.mismatches)):
                raise OptimizerError(listing("decays= does not match the parameters:", problems))
            chosen = list(matched.specs)
        return [self.weight_decay if decays else 0.0 for decays in chosen]


@dataclass(frozen=True)
class Step:
    """The scalars of one step.

    Attributes:
        number: of the step, from 1, float64.
        lr: the learning rate.
        decays: the weight decay of each leaf.
        in_place: whether parameters and moments may be written into.
    """

    number: Tensor
    lr: Tensor | float
    decays: list[float]
    in_place: bool = False


def _written(before: Tensors, after: Tensors) -> Tensors:
    """Returns the tensors before a step with their values after it."""
    with torch.no_grad():
        return [x if x is y else x.copy_(y) for x, y in zip(before, after, strict=True)]


def check_range(name: str, **values: tuple[float, float, float]) -> None:
    """Requires low <= value < high of each keyword.

    Raises:
        OptimizerError: lists all that are out of range.
    """
    problems = [
        f"{word}={show(value)} is no number"
        if not is_number(value)
        else f"{word}={value} is not in [{low:g}, {high:g})"
        for word, (value, low, high) in values.items()
        if not is_number(value) or not low <= value < high
    ]
    if problems:
        raise OptimizerError(listing(f"{name}:", problems))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _reject_complex(params: Tree) -> None:
    wrong = [
        f"{path}: {leaf.dtype if isinstance(leaf, Tensor) else show(leaf)}"
        for path, leaf in zip(leaf_paths(params), flatten(params)[0], strict=True)
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point()
    ]
    if wrong:
        head = "An optimizer takes real floating parameters; leave others out of the tree:"
        raise OptimizerError(listing(head, wrong))


def _like(
    tree: Tree,
    params: Tree,
    shapes: Sequence[torch.Size],
    expected_structure: Structure,
    where: str = "",
) -> Tensors:
    """Returns the leaves of a tree that must have the structure and shapes of `params`.

    In an error, paths are followed by where they are; nothing for gradients.
    """
    leaves, structure = opened(tree, expected_structure)
    if structure == expected_structure and [x.shape for x in leaves] == shapes:
        return leaves
    paths, names = leaf_paths(rebuilt(tree)), leaf_paths(rebuilt(params))
    parts = enumerate(rebuilt(tree)) if isinstance(rebuilt(tree), tuple) else ()
    for at, part in parts:
        if leaf_paths(part) == names:
            raise OptimizerError(
                f"An optimizer needs gradients and moments like the parameters, not a tuple of "
                f"{len(rebuilt(tree))} whose item {at} is like them.\n"
                "Fix: take it apart, as in value, grads = value_and_grad(loss)(params) and "
                "grads, norm = clip_by_global_norm(grads, specs)."
            )
    fix = ""
    problems = [
        f"{name or 'the parameter'}{where}: is missing" for name in names if name not in paths
    ]
    problems += [f"{path}{where}: is no parameter" for path in paths if path not in names]
    if not problems:
        problems = [
            f"{name}{where}: has shape {tuple(leaf.shape)}, the parameter {tuple(shape)}"
            for name, leaf, shape in zip(names, leaves, shapes, strict=True)
            if leaf.shape != shape
        ]
        fix = _SHARDED if where else ""
    if problems:
        head = "An optimizer needs gradients and moments like the parameters:"
        raise OptimizerError(f"{listing(head, problems)}{fix}")
    return leaves


_SHARDED: Final = (
    "\nFix: in a body they are shards by their specs: let those of the state be "
    "optimizer.specs(specs), with the specs of the parameters, in in_specs and in out_specs."
)
"""Advice for moments of other shapes."""


def _cast(
    column: Tensors, dtypes: Sequence[torch.dtype], own: Sequence[torch.dtype] | None = None
) -> Tensors:
    """Casts to these dtypes; `own` are those of the column, where they are known."""
    if own is dtypes:
        return column
    return [x if x.dtype is to else x.to(to) for x, to in zip(column, dtypes, strict=True)]


# Outside of a body. Entries are treated one by one, so each rank works on its own shards.


def _has_dtensors(column: Sequence[Tensor]) -> bool:
    return any([type(x) is not Tensor and isinstance(x, DTensor) for x in column])


def _locals(column: Sequence[Tensor]) -> Tensors:
    return [x.to_local() if isinstance(x, DTensor) else x for x in column]


def _locals_like(column: Tensors, params: Sequence[Tensor], is_plain: bool) -> Tensors:
    if is_plain and not _has_dtensors(column):
        return column
    return _locals([_placed_as(x, p) for x, p in zip(column, params, strict=True)])


def _placed_as(x: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return x.full_tensor() if isinstance(x, DTensor) else x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, param.device_mesh, run_check=False)
    return x.redistribute(param.device_mesh, param.placements)
