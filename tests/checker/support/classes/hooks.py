"""Random bodies with hooks of every sort, in both strictnesses and both simulated strategies."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import checkpoint as torch_checkpoint

import shardmap_torch
from shardmap_torch import P, ShardMapError, shard_map
from tests.checker.support.classes.backs import BACKS, BY_ENTRY, Back, Context
from tests.checker.support.classes.backwards import (
    ENDS,
    MESHES,
    ONE,
    OPERANDS,
    OPERATIONS,
    SPECS,
    Place,
    hooked,
    row_axes,
)
from tests.checker.support.classes.trials import (
    EQUAL,
    REFUSED,
    WRONG,
    differentiated,
    fate_against,
    is_same,
)

Step = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def _on_operand(back: Back, axes: tuple[str, ...]) -> Step:
    def step(x: Tensor) -> Tensor:
        context = Context(x.detach(), axes)
        if x.requires_grad:
            x.register_hook(lambda g: back(context, g))
        return x.sin()

    return step


def _after_node(back: Back, axes: tuple[str, ...]) -> Step:
    def step(x: Tensor) -> Tensor:
        y, context = x.sin(), Context(x.detach(), axes)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(lambda given, _: tuple(back(context, g) for g in given))
        return y

    return step


def _before_node(back: Back, axes: tuple[str, ...]) -> Step:
    def step(x: Tensor) -> Tensor:
        y, context = x.sin(), Context(x.detach(), axes)
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda given: tuple(back(context, g) for g in given))
        return y

    return step


def _before_layer(back: Back, axes: tuple[str, ...]) -> Step:
    layer = Layer()
    layer.register_forward_pre_hook(lambda _, args: (back(Context(args[0], axes), args[0]),))
    return layer


def _after_layer(back: Back, axes: tuple[str, ...]) -> Step:
    layer = Layer()
    layer.register_forward_hook(lambda _, args, out: back(Context(args[0], axes), out))
    return layer


def _after_every_layer(back: Back, axes: tuple[str, ...]) -> Step:
    def step(x: Tensor) -> Tensor:
        def change(_: nn.Module, args: Any, out: Tensor) -> Any:
            return back(Context(args[0], axes), out)

        handle = register_module_forward_hook(change)
        try:
            return Layer()(x)  # type: ignore[no-any-return]
        finally:
            handle.remove()

    return step


def _backward_of_layer(back: Back, axes: tuple[str, ...]) -> Step:
    layer = Layer()

    def step(x: Tensor) -> Tensor:
        context = Context(x.detach(), axes)

        def change(_: nn.Module, given: Any, __: Any) -> tuple[Tensor, ...]:
            return tuple(back(context, g) for g in given)

        handle = layer.register_full_backward_hook(change)
        y: Tensor = layer(x)
        handle.remove()
        return y

    return step


def _kept_on_layer(back: Back, axes: tuple[str, ...]) -> Step:
    layer = Layer()

    def change(_: nn.Module, given: Any) -> tuple[Tensor, ...]:
        return tuple(back(Context(g, axes), g) for g in given)

    layer.register_full_backward_pre_hook(change)
    return layer


def _while_saved(back: Back, axes: tuple[str, ...]) -> Step:
    """Hooks that give back what autograd saves, beside one on the gradient."""
    step = hooked(back, axes)

    def saving(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
            return step(x)

    return saving


def _in_checkpoint(back: Back, axes: tuple[str, ...]) -> Step:
    step = hooked(back, axes)
    return lambda x: shardmap_torch.checkpoint(lambda x: step(x).tanh(), x)


def _in_torch_checkpoint(back: Back, axes: tuple[str, ...]) -> Step:
    step = hooked(back, axes)

    def run(x: Tensor) -> Tensor:
        y: Tensor = torch_checkpoint.checkpoint(lambda x: step(x).tanh(), x, use_reentrant=False)
        return y

    return run


def _in_reentrant_checkpoint(back: Back, axes: tuple[str, ...]) -> Step:
    step = hooked(back, axes)

    def run(x: Tensor) -> Tensor:
        y: Tensor = torch_checkpoint.checkpoint(lambda x: step(x).tanh(), x, use_reentrant=True)
        return y

    return run


HOOKS: Final[Mapping[str, Callable[[Back, tuple[str, ...]], Step]]] = {
    "on a value": hooked,
    "on an operand": _on_operand,
    "after a node": _after_node,
    "before a node": _before_node,
    "before a layer": _before_layer,
    "after a layer": _after_layer,
    "after every layer": _after_every_layer,
    "of a layer's backward": _backward_of_layer,
    "before a layer's backward": _kept_on_layer,
    "while tensors are saved": _while_saved,
    "in a checkpoint": _in_checkpoint,
    "in torch's checkpoint": _in_torch_checkpoint,
    "in torch's reentrant checkpoint": _in_reentrant_checkpoint,
}


def _field(chain: Place, x: Tensor, w: Tensor, axes: Any) -> Any:
    """A hook on `.grad`, which doubles what the backward has put there."""
    leaf = x.detach().clone().requires_grad_()

    def double(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.mul_(2)

    leaf.register_post_accumulate_grad_hook(double)
    ENDS["sum"](chain, leaf, w.detach(), axes).backward()
    return leaf.grad


ALL_ENDS: Final = {**ENDS, "backward": _field}


@dataclass(frozen=True)
class Hooked:
    """A body with a hook, registered by the body or, if `outside`, before it.

    Attributes:
        check: under "local" both strategies have to agree, under "global" one device has to.
    """

    spec: P
    hook: str
    back: str
    then: str
    end: str
    outside: bool
    check: Any

    @property
    def right(self) -> bool:
        return self.back in BY_ENTRY

    def __call__(self, step: Step, x: Tensor, w: Tensor) -> Any:
        """Runs as the body of one rank."""
        then = OPERATIONS[self.then]
        axes = tuple(self.spec.mentioned)
        return ALL_ENDS[self.end](lambda x, w: then(step(x), w), x, w, axes)

    def _run(self, mesh: Any, check: Any) -> list[Tensor]:
        out = P() if self.end == "sum" else self.spec
        make, axes = HOOKS[self.hook], row_axes(self.spec)
        kept = make(BACKS[self.back], axes)

        def body(x: Tensor, w: Tensor) -> Any:
            return self(kept if self.outside else make(BACKS[self.back], axes), x, w)

        mapped = shard_map(body, mesh=mesh, in_specs=(self.spec, P()), out_specs=out, check=check)
        return differentiated(mapped, OPERANDS)

    def _outcome(self, strategy: str) -> list[Tensor] | str:
        try:
            return self._run(MESHES[strategy], self.check)
        except (ShardMapError, RuntimeError) as error:
            return type(error).__name__

    def fate(self) -> str:
        if self.check == "global":
            return fate_against(
                lambda: self._run(MESHES["auto"], "global"), lambda: self._run(ONE, True)
            )
        one, other = self._outcome("ranks"), self._outcome("auto")
        if isinstance(one, str) or isinstance(other, str):
            return REFUSED if one == other else WRONG
        return EQUAL if all(map(is_same, one, other)) else WRONG


def drawn(rng: random.Random) -> Hooked:
    """Draws a body; in about half of them the hook is right."""
    spec = rng.choice(SPECS)
    then = rng.choice(sorted(OPERATIONS) if spec.entries[1:] == () else ["tanh", "weighed"])
    return Hooked(
        spec,
        rng.choice(sorted(HOOKS)),
        rng.choice(sorted(BY_ENTRY if rng.random() < 0.4 else BACKS)),
        then,
        rng.choice(sorted(ALL_ENDS)),
        rng.random() < 0.3,
        rng.choice(["local", "global"]),
    )
