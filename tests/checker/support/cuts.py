"""Steps of which gradients are cut, scaled or taken apart, for random programs.

None of them asks whether a gradient is recorded, so that one program is made of them everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import checkpoint


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    """Returns the identity with a backward that multiplies."""

    class Scaling(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 1

        setup_context = staticmethod(lambda ctx, inputs, output: None)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * factor

    apply: Callable[[Tensor], Tensor] = Scaling.apply
    return apply


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1


def _switched_off(x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    out = x * 1
    torch.set_grad_enabled(before)
    return out


def _inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        out = x * 1
    return out.clone()


def _half_written(x: Tensor) -> Tensor:
    out = x.detach().clone()
    out[:, :2] = x[:, :2]
    return out


def _written_detached(x: Tensor) -> Tensor:
    """Doubles a value behind autograd's back."""
    out = x * 1
    out[:, :2].detach().mul_(0.5)
    return out


def _written_in_no_grad(x: Tensor) -> Tensor:
    out = x * 1
    with torch.no_grad():
        out[:, :2].mul_(0.5)
    return out


def _view_written(x: Tensor) -> Tensor:
    """Reads a view before and after a write."""
    copy = x.clone()
    view = copy[:, :3]
    read = view * 2
    view.mul_(0.5)
    return torch.cat([read + view, copy[:, 3:]], 1)


def _hooked(x: Tensor) -> Tensor:
    out = x * 1
    if out.requires_grad:
        out.register_hook(lambda grad: grad * 2)
    return out


CUTS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "without grad": _without_grad,
    "switched off": _switched_off,
    "inferred": _inferred,
    "half detached": lambda x: x * 0.5 + x.detach() * 0.5,
    "half detached in a checkpoint": lambda x: checkpoint(lambda x: _without_grad(x) * 0.5 + x, x),
    "half written": _half_written,
    "backward drops": _times(0.0),
    "backward doubles": _times(2.0),
    "hook doubles": _hooked,
    "written detached": _written_detached,
    "written without grad": _written_in_no_grad,
    "view written": _view_written,
}
"""Linear functions of one operand."""

PARTS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "term": lambda x, cut: x + cut(x.sin()),
    "factor": lambda x, cut: x * cut(x.cos()),
    "straight through": lambda x, cut: x + cut(x.tanh() - x),
    "where": lambda x, cut: torch.where(x > 0, x, cut(x)),
    "in a gradient": lambda x, cut: torch.func.grad(lambda z: (cut(z).sin() * z).sum())(x),
    "in a checkpoint": lambda x, cut: checkpoint(lambda x: cut(x).tanh() * x, x),
}
"""Functions of a tensor and a cut that are not linear."""
