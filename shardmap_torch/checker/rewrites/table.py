"""The table of torch functions that are interpreted as others, and small ones of these."""

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from inspect import Signature, signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.checker.rewrites import indexing
from shardmap_torch.checker.rewrites.copies import Host
from shardmap_torch.checker.rewrites.einsum import einsum
from shardmap_torch.core.torch_private.engine import (
    TransformType,
    retrieve_all_functorch_interpreters,
)

Rewrite = Callable[..., Any]


def one_hot(host: Host, x: Tensor, num_classes: int = -1) -> Any:
    """Computes `one_hot` where a torch.func transform makes torch look for the largest class."""
    transforms = {transform.key() for transform in retrieve_all_functorch_interpreters()}
    is_asked = transforms and TransformType.Vmap not in transforms
    if not is_asked or type(num_classes) is not int or num_classes < 0:
        return NotImplemented
    host.needs_ranks()  # torch cannot look where torch.func.vmap batches it
    classes = torch.arange(num_classes, device=x.device)
    return (x.unsqueeze(-1) == classes).long()


def cross_entropy(
    host: Host,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes a mean with smoothed labels as one of two means; equal where no entry is ignored.

    torch divides by the number of entries that are not ignored, which global strictness cannot
    follow; it has the targets of each run read.
    """
    is_mean = reduction == "mean" and size_average is None and reduce is None
    if not (label_smoothing and is_mean and weight is None) or target.is_floating_point():
        return NotImplemented
    dim = min(1, x.ndim - 1)
    log_probabilities = x.log_softmax(dim)
    picked = functional.nll_loss(log_probabilities, target, ignore_index=ignore_index)
    spread = log_probabilities.mean(dim).mean()
    return (1 - label_smoothing) * picked - label_smoothing * spread


REWRITES: Final[Mapping[Any, Rewrite]] = {
    Tensor.__getitem__: indexing.read,
    Tensor.__setitem__: indexing.write,
    torch.einsum: einsum,
    functional.one_hot: one_hot,
    functional.cross_entropy: cross_entropy,
    **dict.fromkeys((torch.narrow, Tensor.narrow), indexing.narrow),
}


def rewritten(host: Host, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the function to call in place of `func` with these arguments, which does the same."""
    rewrite = REWRITES.get(func)
    if rewrite is None:
        return func

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {_NAMES.get(name, name): value for name, value in kwargs.items()}
        try:
            _signature(rewrite).bind(host, *args, **named)
        except TypeError:
            return func(*args, **kwargs)  # torch says what is wrong
        out = rewrite(host, *args, **named)
        return func(*args, **kwargs) if out is NotImplemented else out

    return call


@lru_cache
def _signature(rewrite: Rewrite) -> Signature:
    return signature(rewrite)


_NAMES: Final = {"input": "x", "tensor": "x", "self": "x"}
"""Names of the first argument."""

METADATA: Final = frozenset(
    (
        *(
            getattr(Tensor, name).__get__
            for name in ("dtype", "shape", "ndim", "itemsize", "nbytes", "layout")
        ),
        *(Tensor.numel, Tensor.dim, Tensor.element_size, Tensor.is_floating_point),
        *(Tensor.is_complex, torch.is_floating_point, torch.is_complex),
    )
)
"""Functions of one tensor that read nothing of its values: most calls that a body makes."""
