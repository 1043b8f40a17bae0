"""Torch functions in bodies with automatic axes: those that run on shards, and all others.

Default deny: torch's sharding rules give wrong gradients of losses that are means (`mse_loss`), of
maxima and of `torch.linalg`, and wrong values of what follows `any`. The functions that run on
shards were compared with one device, values and gradients. The others run on global values, with
differentiable steps around: a body's backward may run after it has ended, where nothing can take
an operation over, so it has to be one of plain values.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.losses import count_of, options_of
from shardmap_torch.core.storage import memory_of
from shardmap_torch.core.tree import flatten, map_tensors
from shardmap_torch.mixing.backend import SharingBackend
from shardmap_torch.mixing.layouts import evenly, settled
from shardmap_torch.mixing.values import Share, Unshare
from shardmap_torch.mixing.writes import refused_write

_POINTWISE: Final = (
    "add radd sub rsub mul rmul div rdiv truediv rtruediv true_divide neg abs exp log sqrt rsqrt "
    "square pow rpow sin cos tanh sigmoid relu gelu silu reciprocal clamp where masked_fill lerp "
    "addcmul addcdiv gt lt ge le eq ne"
).split()
_MATMULS: Final = "matmul rmatmul mm bmm linear einsum addmm baddbmm".split()
_REDUCTIONS: Final = "sum mean softmax log_softmax layer_norm rms_norm".split()
_VIEWS: Final = (
    "view reshape view_as flatten unflatten transpose permute movedim t unsqueeze squeeze expand "
    "expand_as getitem contiguous clone detach to float double half bfloat16 type_as "
    "long cat stack tril triu embedding"
).split()
_FACTORIES: Final = (
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full rand_like "
    "randn_like dropout bernoulli"
).split()
_READS: Final = (
    "item bool float int index equal allclose is_nonzero size dim ndimension numel nelement stride "
    "is_floating_point is_complex len get_device element_size is_contiguous hash repr str "
    "get set delete backward register_hook retain_grad requires_grad type result_type"
).split()
_WRITES: Final = (
    "add sub mul div neg sqrt relu copy zero fill clamp masked_fill lerp addcmul addcdiv bernoulli "
    "uniform normal requires_grad"
).split()
_FOREACH: Final = "add sub mul div neg sqrt lerp addcmul addcdiv pow".split()

RUN_ON_SHARDS: Final = frozenset(
    [
        *_POINTWISE,
        *_MATMULS,
        *_REDUCTIONS,
        *_VIEWS,
        *_FACTORIES,
        *_READS,
        *(f"foreach_{name}" for name in _FOREACH),
    ]
)
"""Names without underscores around them, so that operators are named like methods."""

IN_PLACE: Final = frozenset(
    ["iadd", "isub", "imul", "itruediv", *_WRITES, *(f"foreach_{n}" for n in _FOREACH)]
)
"""Names of those that write."""

Handler = Callable[[SharingBackend, Any, Any, Any], Any]


def on_global(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on values that are global over the automatic axes."""
    name = getattr(func, "__name__", "a function")
    known: dict[int | None, Tensor] = {}
    versions: list[tuple[Tensor, int]] = []

    def unshared(x: Tensor) -> Tensor:
        y = backend.unshared(x)
        if y is not x:
            known[memory_of(y)] = x
            versions.append((y, _version(y)))
        return y

    def replicated(y: Tensor) -> Tensor:
        out, x = backend.replicated(y), known.get(memory_of(y))
        if x is not None:  # a view for which autograd does not know the value that it is of
            backend.copies.add(name, x, out, autograd=True)
        return out

    args, kwargs = map_tensors(unshared, (args, kwargs))
    found = func(*args, **kwargs)
    if any(_version(y) != before for y, before in versions):
        raise refused_write(name)
    return map_tensors(replicated, found)


def _version(x: Tensor) -> int:
    """Returns how often a tensor was written; tensors of inference mode do not count it."""
    base = base_of(x)
    return 0 if base.is_inference() else base._version


def _attention(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs attention on shards where these are of batches or heads, which it treats one by one."""
    operands = (*args[:3], *(kwargs.pop(n) for n in ("query", "key", "value") if n in kwargs))
    rest = (*args[3:], *kwargs.values())
    is_plain = not any(isinstance(x, Tensor) for x in rest) and not any(map(is_batched, operands))
    if len(operands) != 3 or not is_plain or not all(is_dtensor(base_of(x)) for x in operands):
        return on_global(backend, func, (*operands, *args[3:]), kwargs)
    placements = _alike([base_of(x) for x in operands], backend)  # type: ignore[misc]  # DTensors
    unshare = Unshare(backend.shared, placements, "scaled_dot_product_attention")
    local = [bind(backend, unshare, x) for x in operands]
    return bind(backend, Share(backend.shared, placements), func(*local, *args[3:], **kwargs))


def _alike(operands: list[DTensor], backend: SharingBackend) -> tuple[Placement, ...]:
    """Returns the shards of batch and head dims that the operands have in common."""
    query, shapes = operands[0], [x.shape for x in operands]

    def stays(at: int, p: Placement) -> bool:
        return (
            type(p) is Shard
            and p.dim < query.ndim - 2
            and all(x.placements[at] == p and x.ndim == query.ndim for x in operands)
            and len({shape[p.dim] for shape in shapes}) == 1
        )

    kept = tuple(p if stays(at, p) else Replicate() for at, p in enumerate(query.placements))
    return evenly(kept, query.shape, tuple(backend.shared.shape))


def _by_dim(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> Any:
    """Counts a dim from the front: torch's rules of the backward take it as it is."""
    if len(args) > 1 and is_dtensor(base_of(args[0])) and isinstance(args[1], int):
        args = args[0], args[1] % args[0].ndim, *args[2:]
    elif isinstance(dim := kwargs.get("dim"), int) and args and is_dtensor(base_of(args[0])):
        kwargs = kwargs | {"dim": dim % args[0].ndim}
    return func(*args, **kwargs)


def _parts(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the parts of a value one by one: torch's backward of all makes plain zeros."""
    if not args or not is_dtensor(base_of(args[0])):
        return on_global(backend, func, args, kwargs)
    x, *rest = args
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0) % x.ndim
    sizes = [part.shape[dim] for part in func(torch.empty(x.shape, device="meta"), *rest, **kwargs)]
    starts = accumulate(sizes, initial=0)
    return tuple(x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _items(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % x.ndim
    return tuple(x.select(dim, at) for at in range(x.shape[dim]))


_ALONG: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys("argmax argmin max min amax amin all any logsumexp var std".split(), (1, None)),
    **dict.fromkeys("prod median cumsum count_nonzero".split(), (1, None)),
    **dict.fromkeys("sort argsort".split(), (1, -1)),
    "topk": (2, -1),
    "norm": (2, None),
    "normalize": (2, 1),
}
"""Functions along a dim: the position of that argument, and what stands for it."""


def _along(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function along a dim on shards of the dims in front of it; others are gathered."""
    at, default = _ALONG[getattr(func, "__name__", "")]
    dim = kwargs.get("dim", args[at] if len(args) > at else default)
    x = base_of(args[0]) if args and isinstance(args[0], Tensor) else None
    others = [leaf for leaf in flatten((args[1:], kwargs))[0] if isinstance(leaf, Tensor)]
    if not isinstance(x, DTensor) or type(dim) is not int or others or is_batched(args[0]):
        return on_global(backend, func, args, kwargs)
    placements = settled(x.placements, range(dim % x.ndim, x.ndim))
    placements = evenly(placements, x.shape, tuple(backend.shared.shape))
    if not any(isinstance(p, Shard) for p in placements):
        return on_global(backend, func, args, kwargs)
    local = bind(backend, Unshare(backend.shared, placements, func.__name__), args[0])
    share = Share(backend.shared, placements)
    return map_tensors(lambda y: bind(backend, share, y), func(local, *args[1:], **kwargs))


def _loss(backend: SharingBackend, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a loss on shards: entries by torch's rule, and means as sums over a count of all.

    torch's rules divide a mean, or its gradient, by the entries that one rank has or counts.
    """
    options = options_of(func, args, kwargs)
    if options is None:
        return on_global(backend, func, args, kwargs)
    options = map_tensors(backend.replicated, options)
    reduction = options["reduction"]
    if reduction not in ("mean", "batchmean"):
        return func(**options)
    each, count = func(**options | {"reduction": "none"}), count_of(func, options)
    if reduction == "batchmean":
        count = each.shape[0]
    return each.mean() if count is None else each.sum() / count


def tensors_of_index(index: Any) -> Any:
    """Makes tensors of an index' lists: torch would make plain ones, unseen, for the backward."""
    if isinstance(index, tuple):
        return tuple(map(tensors_of_index, index))
    is_listed = isinstance(index, list) and all(isinstance(i, int) for i in flatten(index)[0])
    return torch.tensor(index) if is_listed else index


HANDLERS: Final[Mapping[str, Handler]] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        (
            "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div "
            "binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss cross_entropy "
            "nll_loss"
        ).split(),
        _loss,
    ),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), _parts),
    "unbind": _items,
    "select": _by_dim,
    "narrow": _by_dim,
    "__iter__": lambda *call: iter(_items(*call)),
}
"""Handlers by the name of the function."""
