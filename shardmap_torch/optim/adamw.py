"""AdamW on lists of tensors."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardmap_torch.errors import OptimizerError, show
from shardmap_torch.optim.lists import Tensors, as_number, foreach, fused_adamw
from shardmap_torch.optim.optimizer import Decays, Elementwise, Optimizer, Rate, Step, check_range


def adamw(
    lr: Rate = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decays: Decays = True,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Makes the AdamW optimizer: decoupled weight decay, then a step along normalised moments.

    Its `update` equals `torch.optim.AdamW`, entry by entry, on any shards. Parameters of one dtype
    take one pass of torch's fused kernel, on copies, and others some fourteen fused calls. State:
    the step and two moments, `exp_avg` and `exp_avg_sq`, each as large as the parameters and
    sharded as they are; nothing is communicated.

    Args:
        lr: the learning rate, or a function of the step such as `warmup_cosine(...)`.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
        decays: which parameters decay: a function of the parameter, as `lambda p: p.ndim > 1`, or a
            pytree prefix of bools.
        state_dtype: the dtype of the moments and of the arithmetic; by default each parameter's.

    Raises:
        OptimizerError: an argument is out of range.

    Source: Loshchilov and Hutter 2019; `torch.optim.AdamW`, `optax.adamw`.

    Example:
        >>> from shardmap_torch.optim import adamw
        >>> optimizer, params = adamw(0.1, weight_decay=0.0), {"w": torch.ones(2)}
        >>> params, state = optimizer.update(params, {"w": torch.ones(2)}, optimizer.init(params))
        >>> params["w"], state["step"].item()
        (tensor([0.9000, 0.9000]), 1)
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise OptimizerError(f"adamw: betas={show(betas)} is no pair of numbers.")
    check_range(
        "adamw",
        lr=(0.0 if callable(lr) else lr, 0.0, float("inf")),
        beta1=(betas[0], 0.0, 1.0),
        beta2=(betas[1], 0.0, 1.0),
        eps=(eps, 0.0, float("inf")),
        weight_decay=(weight_decay, 0.0, float("inf")),
    )
    return _AdamW(lr, weight_decay, decays, state_dtype, betas, eps)


@dataclass(frozen=True, repr=False)
class _AdamW(Elementwise):
    betas: tuple[float, float]
    eps: float

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def step(
        self, params: Tensors, grads: Tensors, moments: list[Tensors], at: Step
    ) -> tuple[Tensors, list[Tensors]]:
        moved, (beta1, beta2) = _decayed(params, at), self.betas
        options = (at.lr, *self.betas, self.eps)
        fused = fused_adamw((moved, grads, *moments), at.number, options, at.in_place)
        if fused is not None:
            return fused[0], fused[1:]
        mean = foreach("lerp", moments[0], grads, 1 - beta1)
        square = foreach("mul", moments[1], beta2)
        square = foreach("addcmul", square, grads, grads, value=1 - beta2)
        scale = torch.rsqrt(1 - beta2**at.number)
        denominator = foreach("mul", foreach("sqrt", square), scale)
        denominator = foreach("add", denominator, self.eps)
        amount = as_number(-at.lr / (1 - beta1**at.number))
        scalars = {"value": amount} if isinstance(amount, float) else {}
        change = mean if scalars else foreach("mul", mean, amount)
        return foreach("addcdiv", moved, change, denominator, **scalars), [mean, square]


def _decayed(params: Tensors, at: Step) -> Tensors:
    """Returns copies of the parameters, or themselves, multiplied by 1 - lr * decay."""
    result = list(params)
    for decays in (True, False):
        places = [place for place, decay in enumerate(at.decays) if bool(decay) == decays]
        own = [params[place] for place in places]
        if decays and places:
            factor = 1 - at.lr * at.decays[places[0]]
            own = [x.mul_(factor) for x in own] if at.in_place else foreach("mul", own, factor)
        elif at.in_place:
            continue
        else:
            own = foreach("clone", own)
        for place, value in zip(places, own, strict=True):
            result[place] = value
    return result
