"""Layers whose parameters are gathered one after another in the body, the next one early."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.nn.fsdp import LayerGathers, fsdp_gather
from shardmap_torch.parallel.caches import is_cache
from shardmap_torch.parallel.plan import Plan
from shardmap_torch.parallel.pure import BoundModule
from shardmap_torch.parallel.recomputed import within_body
from shardmap_torch.parallel.words import unpack

Values: TypeAlias = Mapping[str, Tensor]


class Units:
    """The parameters of one rank in one run of the body, gathered where a plan shards them."""

    def __init__(self, plan: Plan, parameters: Values) -> None:
        """Gathers those of no unit; those of units stay shards.

        Args:
            plan: the plan.
            parameters: by name; one that has several parts has a dim for them.
        """
        self._plan = plan
        within = {name for own in plan.units.values() for name in own.values()}
        outside = {name: x for name, x in parameters.items() if name not in within}
        axis = plan.data.shards
        if axis is not None:
            outside = fsdp_gather(outside, {name: plan.specs[name] for name in outside}, axis)
            layers = [
                {local: parameters[name] for local, name in own.items()}
                for own in plan.units.values()
            ]
            specs = [
                {local: plan.specs[name] for local, name in own.items()}
                for own in plan.units.values()
            ]
            self._gathers = LayerGathers(layers, specs, axis)
        whole = {name: unpack(x, plan.packed.get(name)) for name, x in outside.items()}
        self.values: Values = {**parameters, **whole}

    def adapt(self, path: str, copy: nn.Module) -> None:
        """Replaces the forward of the bound copy of a unit by one that gathers before."""
        own = self._plan.units.get(path)
        if own is None:
            return
        forward = vars(copy).get("forward") or MethodType(type(copy).forward, copy)
        index = list(self._plan.units).index(path)
        vars(copy)["forward"] = _Unit(self._plan, self._gathers, index, own, copy, forward)


@dataclass(frozen=True)
class _Unit:
    """The forward of a layer on gathered parameters.

    Attributes:
        plan: the plan.
        gathers: what gathers the layers.
        index: which of them this one is.
        own: the names in the root of the parameters that it gathers, by their names in the layer.
        module: its bound copy, whose parameters are shards.
        forward: its own forward.
    """

    plan: Plan
    gathers: LayerGathers
    index: int
    own: Mapping[str, str]
    module: nn.Module
    forward: Callable[..., Any]

    def rebound(self, rebind: Callable[[Any], Any], counterpart: Callable[[Any], Any]) -> "_Unit":
        """Returns the forward of a copy of the layer."""
        return replace(self, module=counterpart(self.module), forward=rebind(self.forward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        others = dict(self.module.named_parameters())
        shards = {name: others.pop(name) for name in self.own}
        if not self.plan.data.reshard:
            return self._run(shards, others, args, kwargs)
        if torch.is_grad_enabled():  # as transformers does where layers are recomputed
            args = tuple(None if is_cache(arg) else arg for arg in args)
            kwargs = {name: None if is_cache(arg) else arg for name, arg in kwargs.items()}
        self.gathers.note(self.index, (shards, others, args, kwargs))
        return checkpoint(self._run, shards, others, args, kwargs)

    def _run(
        self, shards: Values, others: Values, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        gathered = self.gathers.gather(shards, self.index)
        packed = self.plan.packed
        own = {name: unpack(x, packed.get(self.own[name])) for name, x in gathered.items()}
        bound = BoundModule(self.module, {**others, **own}, None, _restore)
        with within_body():  # in a backward too
            out = bound.root.forward(*args, **kwargs)
        bound.check_unwritten()
        return out


def _restore(path: str, copy: nn.Module) -> None:
    """Gives the copy of a unit that has its parameters its own forward."""
    unit = vars(copy).get("forward")
    if not path and isinstance(unit, _Unit):
        vars(copy)["forward"] = unit.forward
