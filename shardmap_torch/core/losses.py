"""Losses of torch: what their means divide by."""

from collections.abc import Callable, Mapping
from inspect import Signature, signature
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

_AVERAGES: Final = tuple(
    getattr(functional, name)
    for name in (
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss "
        "gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss "
        "mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
        "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss "
        "triplet_margin_with_distance_loss"
    ).split()
)
"""Losses whose mean is over all entries, or all rows."""

_WEIGHTED: Final = (functional.l1_loss, functional.mse_loss)
"""Those of them that divide by the sum of the weights, where there are any."""

_IGNORING: Final = (functional.cross_entropy, functional.nll_loss)
"""Losses whose mean is over the entries that are not ignored."""

_SIGNATURES: Final[Mapping[Callable[..., Any], Signature]] = {
    loss: signature(loss) for loss in (*_AVERAGES, *_IGNORING)
}


def options_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Returns all arguments of a call of a loss by name; None for other functions of torch.

    Legacy calls, by `size_average` and `reduce`, count as others.
    """
    if func not in _SIGNATURES:
        return None
    bound = _SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    is_legacy = any(options.get(name) is not None for name in ("size_average", "reduce"))
    return None if is_legacy else options


def count_of(func: Callable[..., Any], options: Mapping[str, Any]) -> Tensor | None:
    """Returns what a mean divides by; None for a number of entries, which is equal on all ranks."""
    weight = options.get("weight")
    if func in _WEIGHTED and weight is not None:
        divisor: Tensor = weight.sum()
        return divisor
    if func in _AVERAGES or (target := options["target"]).is_floating_point():
        return None
    counted: Tensor = target != options["ignore_index"]
    return (counted if weight is None else weight[target.where(counted, 0)] * counted).sum()
