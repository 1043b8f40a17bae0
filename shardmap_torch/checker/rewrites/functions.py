"""Torch functions that are interpreted as others: positions that tensors give, einsum, losses.

Their steps are the same whatever the sizes are, so that those of the ranks can be compared with
those of one device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from inspect import Signature, signature
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.checker.rewrites.copies import Host
from shardmap_torch.core.modes import autocast_state
from shardmap_torch.core.torch_private.engine import (
    TransformType,
    retrieve_all_functorch_interpreters,
)

_WHOLE: Final = slice(None)
_MASKS: Final = (torch.bool, torch.uint8)


def read(host: Host, x: Tensor, index: Any) -> Any:
    """Computes `x[index]`, or NotImplemented where torch needs no number to do so."""
    parts = parts_of(index)
    if any(map(_has_tensor_bounds, parts)):
        host.numbers.branches.refuse(
            "the size of a slice whose bounds are tensors depends on data.",
            "use torch.narrow(x, dim, start, length), whose start may be a tensor; or take all of "
            "it, and mask.",
        )
    if not any(map(_is_number, parts)):
        is_general = any(type(size) is not int for size in x.shape)
        return _read_views(x, parts) if is_general else NotImplemented
    selected, rest = x, list(parts)
    for position, part in enumerate(rest):
        if _is_number(part):
            dim = dim_of_part(x, rest, position)
            selected = host.copies.pick(host, selected, dim, part.reshape(1))
            rest[position] = 0
    return host.copies.remember_pick(selected[tuple(rest)], x, index)


def _read_views(x: Tensor, parts: Sequence[Any]) -> Any:
    """Computes `x[parts]` at symbols for sizes by the views that torch makes at a size.

    There it takes no slice of a whole dim, and here it does, as it does not know the dim's size.
    """
    if _WHOLE not in parts or not all(p is None or type(p) in (int, slice) for p in parts):
        return NotImplemented
    view, dim = x, 0
    for part in parts:
        if part is None:
            view = view.unsqueeze(dim)
        elif type(part) is int:
            view = view.select(dim, part)
        elif part != _WHOLE:
            bounds = (part.start, part.stop, 1 if part.step is None else part.step)
            view = torch.ops.aten.slice.Tensor(view, dim, *bounds)
        dim += type(part) is not int
    return NotImplemented if view is x else view


def narrow(host: Host, x: Tensor, dim: int, start: Any, length: int) -> Any:
    """Computes `torch.narrow` from a tensor's number on; NotImplemented for other starts."""
    if not isinstance(start, Tensor) or type(length) is not int:
        return NotImplemented
    return host.copies.pick(host, x, dim, start + torch.arange(length, device=x.device))


def write(host: Host, x: Tensor, index: Any, value: Any) -> Any:
    """Does `x[index] = value`, or returns NotImplemented where torch does it."""
    parts = parts_of(index)
    if any(map(_has_tensor_bounds, parts)):
        return _write_range(host, x, parts, value)
    if not all(map(_is_known, parts)):
        return NotImplemented
    if any(isinstance(part, Tensor) for part in parts):
        with host.copies.writing_back(host, x, index, value):
            _write_at(host, x, parts, value)
        return None
    target = x[index]
    if not isinstance(value, Tensor) or value.ndim > target.ndim:
        return NotImplemented
    target.copy_(value)
    return None


def _write_at(host: Host, x: Tensor, parts: Sequence[Any], value: Any) -> None:
    """Writes at the entries that tensors of integers or booleans give."""
    numbers = [part for part in parts if _is_number(part)]
    indices = [part for part in parts if isinstance(part, Tensor)]
    if numbers:
        host.needs_ranks()
        if len(numbers) < len(indices):
            host.numbers.branches.refuse(
                "a write at a position that a number and other tensors give together is not known "
                "to the checker.",
                "use index_put.",
            )
    basic = [[_WHOLE] * _consumed(part) if isinstance(part, Tensor) else [part] for part in parts]
    target = x[tuple(part for group in basic for part in group)]
    index: list[Tensor | None] = []
    for part in parts:
        index += _entries(part, x.ndim - sum(map(_consumed, parts)))
    row = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    num_others = target.ndim - sum(map(_consumed, indices))
    num_dims = num_others + max(1 if part.dtype in _MASKS else part.ndim for part in indices)
    while row.ndim > num_dims and row.shape[0] == 1:
        row = row.squeeze(0)
    torch.ops.aten.index_put_.default(target, index, row)


def _write_range(host: Host, x: Tensor, parts: Sequence[Any], value: Any) -> None:
    """Does `x[parts] = value`, where one part is a slice whose bounds are tensors."""
    ranges = [at for at, part in enumerate(parts) if _has_tensor_bounds(part)]
    at, others = ranges[0], [*parts]
    bounds, others[at] = parts[at], _WHOLE
    is_simple = all(p is None or p is Ellipsis or type(p) in (int, slice) for p in others)
    if len(ranges) > 1 or bounds.step not in (None, 1) or not is_simple:
        host.numbers.branches.refuse(
            "a write between bounds that are tensors is known to the checker beside integers and "
            "slices only.",
            "use index_copy, or torch.where with a mask.",
        )
    host.needs_ranks()
    target = x[tuple(others)]
    after = any(part is Ellipsis for part in others[:at])
    dim = target.ndim - _count_dims(others[at:]) if after else _count_dims(others[:at])
    row = torch.as_tensor(value, dtype=target.dtype, device=target.device)
    behind = target.ndim - 1 - dim
    length = row.shape[-1 - behind] if row.ndim > behind else 1
    if length == 1:  # one value everywhere: how many entries there are is not known
        target.copy_(torch.where(_mask(target, dim, bounds), row, target))
        return
    index = torch.arange(length, device=target.device)
    if bounds.start is not None:
        index = bounds.start + index
    if isinstance(bounds.stop, Tensor):
        index = index + 0 * bounds.stop  # what is written depends on it
    torch.ops.aten.index_put_.default(target, [None] * dim + [index], row)


def _count_dims(parts: Sequence[Any]) -> int:
    """Counts the result's dims that these parts give; none is a tensor or an ellipsis."""
    return len([part for part in parts if part is None or isinstance(part, slice)])


def _mask(target: Tensor, dim: int, bounds: slice) -> Tensor:
    """Marks the positions between the bounds, along a dim."""
    positions = torch.arange(target.shape[dim], device=target.device)
    limits = [] if bounds.start is None else [positions >= bounds.start]
    limits += [] if bounds.stop is None else [positions < bounds.stop]
    inside = limits[0] if len(limits) == 1 else limits[0] & limits[1]
    mask: Tensor = inside.reshape(-1, *(1,) * (target.ndim - 1 - dim))
    return mask


def _has_tensor_bounds(part: Any) -> bool:
    """Returns whether a slice begins or ends where a tensor says."""
    return isinstance(part, slice) and any(
        isinstance(bound, Tensor) for bound in (part.start, part.stop)
    )


def _entries(part: Any, num_free: int) -> list[Tensor | None]:
    """The entries that `index_put_` takes for one part of an index."""
    if isinstance(part, Tensor):
        return [part]
    if part is Ellipsis:
        return [None] * num_free
    return [None] if part is None or isinstance(part, slice) else []


def _is_known(part: Any) -> bool:
    """Returns whether a part of an index is one of those that are written here."""
    if isinstance(part, Tensor):
        return part.ndim > 0 or part.dtype not in _MASKS
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop))
    return part is None or part is Ellipsis or type(part) is int


def dim_of_part(x: Tensor, parts: Sequence[Any], position: int) -> int:
    """The dim that a part of an index is about."""
    if any(part is Ellipsis for part in parts[:position]):
        return x.ndim - sum(map(_consumed, parts[position:]))
    return sum(map(_consumed, parts[:position]))


def _consumed(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in _MASKS:
        return part.ndim
    return 1


def parts_of(index: Any) -> Sequence[Any]:
    """The parts of an index, one for each dim or dims that it is about."""
    return index if isinstance(index, tuple) else (index,)


def _is_number(part: Any) -> bool:
    """Returns whether torch takes the index for a number; uint8 is a mask."""
    return isinstance(part, Tensor) and part.ndim == 0 and part.dtype not in _MASKS


_ELLIPSIS: Final = "..."

_Labels = list[str]
"""A letter for each dim; what an ellipsis stands for is numbered from the last dim on."""


class _InvalidError(Exception):
    """Raised for an equation that torch refuses, and says why."""


def einsum(host: Host, equation: Any, *operands: Any) -> Any:
    """Computes `torch.einsum`; NotImplemented for lists of dims."""
    tensors = operands[0] if operands and isinstance(operands[0], list | tuple) else operands
    if not (tensors and isinstance(equation, str) and all(isinstance(x, Tensor) for x in tensors)):
        return NotImplemented
    try:
        labels, result = _read(equation.replace(" ", ""), [x.ndim for x in tensors])
    except _InvalidError:
        return NotImplemented
    (out, letters), *others = [_diagonal(*pair) for pair in zip(tensors, labels, strict=True)]
    for at, other in enumerate(others):
        later = {*result, *(letter for _, each in others[at + 1 :] for letter in each)}
        out, letters = _product(out, letters, *other, later)
    out, letters = _sum(out, letters, {*result})
    return _with_dims_of(out, letters, result)


def _read(equation: str, ranks: Sequence[int]) -> tuple[list[_Labels], _Labels]:
    """Returns the labels of the dims of each operand, and of the result."""
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if len(parts) != len(ranks):
        raise _InvalidError
    labels = [_labels(part, rank) for part, rank in zip(parts, ranks, strict=True)]
    letters = [letter for each in labels for letter in each]
    dotted = sorted({each for each in letters if each.isdecimal()}, key=int, reverse=True)
    once = sorted({each for each in letters if letters.count(each) == 1} - {*dotted})
    before, dots, after = output.partition(_ELLIPSIS)
    result = [*before, *(dotted if dots else ()), *after] if arrow else [*dotted, *once]
    if len({*result}) != len(result) or not {*result} <= {*letters}:
        raise _InvalidError
    return labels, result


def _labels(part: str, rank: int) -> _Labels:
    before, dots, after = part.partition(_ELLIPSIS)
    rest = rank - len(before) - len(after)
    others = [letter for letter in before + after if not letter.isalpha()]
    if others or rest < 0 or (rest and not dots):
        raise _InvalidError
    return [*before, *(str(at) for at in reversed(range(rest))), *after]


def _diagonal(x: Tensor, letters: _Labels) -> tuple[Tensor, _Labels]:
    """Takes the diagonal of dims of the same letter."""
    for letter in dict.fromkeys(letters):
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            x = x.diagonal(dim1=first, dim2=second)
            others = [each for at, each in enumerate(letters) if at not in (first, second)]
            letters = [*others, letter]
    return x, letters


def _sum(x: Tensor, letters: _Labels, later: set[str]) -> tuple[Tensor, _Labels]:
    """Sums over dims whose letters do not come later."""
    over = [at for at, letter in enumerate(letters) if letter not in later]
    remaining = [letter for letter in letters if letter in later]
    return (x.sum(over, dtype=x.dtype) if over else x), remaining


def _product(
    x: Tensor, x_letters: _Labels, y: Tensor, y_letters: _Labels, later: set[str]
) -> tuple[Tensor, _Labels]:
    """Multiplies two operands, and sums over what both have and does not come later."""
    x, x_letters = _sum(x, x_letters, later | {*y_letters})
    y, y_letters = _sum(y, y_letters, later | {*x_letters})
    sizes = dict(zip(y_letters, y.shape, strict=True)) | dict(zip(x_letters, x.shape, strict=True))
    both = [letter for letter in x_letters if letter in y_letters]
    summed = [letter for letter in both if letter not in later]
    expanded = any(sizes[each] != y.shape[y_letters.index(each)] for each in both)
    if expanded or not summed:
        order = [*dict.fromkeys([*x_letters, *y_letters])]
        made = _with_dims_of(x, x_letters, order) * _with_dims_of(y, y_letters, order)
        return _sum(made, order, later)
    batch = [letter for letter in both if letter in later]
    left = [letter for letter in x_letters if letter not in both]
    right = [letter for letter in y_letters if letter not in both]
    made = torch.bmm(
        _grouped(x, x_letters, (batch, left, summed)),
        _grouped(y, y_letters, (batch, summed, right)),
    )
    letters = [*batch, *left, *right]
    if not len(batch) == len(left) == len(right) == 1:
        made = made.reshape([sizes[letter] for letter in letters])
    return made, letters


def _grouped(x: Tensor, letters: _Labels, groups: Sequence[_Labels]) -> Tensor:
    """Returns the operand with one dim for each group of letters."""
    x = x.permute([letters.index(letter) for group in groups for letter in group])
    if all(len(group) == 1 for group in groups):
        return x
    sizes = iter(x.shape)
    return x.reshape([prod(next(sizes) for _ in group) for group in groups])


def _with_dims_of(x: Tensor, letters: _Labels, order: _Labels) -> Tensor:
    """Returns a view of the operand with one dim for each letter, in order."""
    x = x.permute([letters.index(letter) for letter in order if letter in letters])
    for at, letter in enumerate(order):
        if letter not in letters:
            x = x.unsqueeze(at)
    return x


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


def linear_cross_entropy(
    host: Host, x: Tensor, w: Tensor, target: Tensor, *, linear_bias: Any = None, **how: Any
) -> Any:
    """Computes it at once: the operator that does so in pieces, by `options`, has no rule."""
    if w.ndim != 2:
        return NotImplemented
    how = {name: value for name, value in how.items() if value is not None}
    if how.pop("options", None):
        host.needs_ranks("the backward of linear_cross_entropy with options")
    logits = functional.linear(x, w, linear_bias)
    smoothed = cross_entropy(host, logits, target, **how)
    if smoothed is NotImplemented:
        return functional.cross_entropy(logits, target, **how)
    return smoothed


def lstm(host: Host, *args: Any) -> Any:
    """Computes `torch.lstm` in steps, not by oneDNN's kernel, which no rule describes.

    On simulated meshes each rank calls it by itself: `torch.func.vmap` cannot.
    """
    host.needs_ranks()
    with torch.backends.mkldnn.flags(False, None, None, None):  # None: others stay as they are
        return torch.lstm(*args)


def average_of(num_dims: int) -> Rewrite:
    """Makes the rewrite of a pooling to one entry, whose strides torch chooses by local sizes."""

    def pool(host: Host, x: Tensor, output_size: Any) -> Any:
        sizes = tuple(output_size) if isinstance(output_size, list | tuple) else (output_size,)
        return x.mean([*range(-num_dims, 0)], keepdim=True) if {*sizes} == {1} else NotImplemented

    return pool


def instance_norm(
    host: Host,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Computes it as the norm of groups of one channel; torch makes channels of all samples."""
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    return functional.group_norm(x, x.shape[1], weight, bias, eps)


def dropout(host: Host, x: Tensor, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Any:
    """Computes it by a mask made like `x`; under functorch torch makes it by local sizes."""
    is_fused = x.is_cuda and not inplace  # native_dropout, which draws like its operand itself
    if is_fused or not training or not 0 < p < 1 or not retrieve_all_functorch_interpreters():
        return NotImplemented
    return _dropped(x, x, p, inplace)


def channel_dropout(num_dims: Mapping[int, int], is_alpha: bool = False) -> Rewrite:
    """Makes the rewrite of a dropout of channels, whose mask torch makes by local sizes.

    `num_dims` says how many dims the mask has, by how many the operand has.
    """

    def drop(
        host: Host, x: Tensor, p: Any = 0.5, training: Any = not is_alpha, inplace: Any = False
    ) -> Any:
        if x.ndim not in num_dims or not training or not 0 < p < 1:
            return NotImplemented
        first = x
        for dim in range(num_dims[x.ndim], x.ndim):
            first = first.narrow(dim, 0, 1)
        return _dropped(x, first, p, inplace, is_alpha)

    return drop


def _dropped(x: Tensor, model: Tensor, p: float, inplace: bool, is_alpha: bool = False) -> Tensor:
    """Drops entries of `x` by a mask that is drawn like `model`."""
    mask = torch.empty_like(model).bernoulli_(1 - p)
    if is_alpha:
        scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
        out = x * (mask * scale) + (mask - 1 + p) * (_ALPHA * scale)
    else:
        out = x * mask.div_(1 - p)
    return x.copy_(out) if inplace else out


_ALPHA: Final = 1.7580993408473766
"""Minus the limit of selu, by which alpha dropout replaces what it drops."""
_FEATURES: Final = {2: 2, 3: 2, 4: 2, 5: 2}


def bilinear(host: Host, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Tensor:
    """Computes it in two products: torch's operator for all three has no rule."""
    products = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return products if bias is None else products + bias


def linear(host: Host, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Copies rows that lie apart in memory, for which torch has other steps where there is a bias.

    A slice of one row is contiguous, as a rank may have it, and one of several rows is not.
    """
    if bias is None or x.ndim < 3 or x.is_contiguous():
        return NotImplemented
    return functional.linear(x.contiguous(), weight, bias)


def embedding_bag(
    host: Host,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Reduces the rows of a table that each row of indices looks up, where that is all."""
    is_plain = x.ndim == 2 and x.numel() > 0 and not (scale_grad_by_freq or sparse)
    if not is_plain or any(each is not None for each in (offsets, max_norm, padding_idx)):
        return NotImplemented
    if mode not in _BAGS or not (per_sample_weights is None or mode == "sum"):
        return NotImplemented
    rows = functional.embedding(x, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return _BAGS[mode](rows)


_BAGS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "sum": lambda rows: rows.sum(1),
    "mean": lambda rows: rows.mean(1),
    "max": lambda rows: rows.max(1).values,
}


REWRITES: Final[Mapping[Any, Rewrite]] = {
    Tensor.__getitem__: read,
    Tensor.__setitem__: write,
    torch.einsum: einsum,
    torch.lstm: lstm,
    torch.adaptive_avg_pool1d: average_of(1),
    functional.adaptive_avg_pool2d: average_of(2),
    functional.adaptive_avg_pool3d: average_of(3),
    functional.instance_norm: instance_norm,
    functional.bilinear: bilinear,
    functional.linear: linear,
    functional.embedding_bag: embedding_bag,
    **dict.fromkeys((functional.dropout, torch.dropout), dropout),
    functional.dropout1d: channel_dropout({2: 1, 3: 2}),
    functional.dropout2d: channel_dropout({3: 2, 4: 2}),
    functional.dropout3d: channel_dropout({4: 1, 5: 2}),
    torch.feature_dropout: channel_dropout(_FEATURES),
    **dict.fromkeys(
        (functional.alpha_dropout, torch.alpha_dropout),
        channel_dropout({ndim: ndim for ndim in range(9)}, is_alpha=True),
    ),
    **dict.fromkeys(
        (functional.feature_alpha_dropout, torch.feature_alpha_dropout),
        channel_dropout(_FEATURES, is_alpha=True),
    ),
    functional.one_hot: one_hot,
    functional.cross_entropy: cross_entropy,
    functional.linear_cross_entropy: linear_cross_entropy,
    **dict.fromkeys((torch.narrow, Tensor.narrow), narrow),
}


_CAST_AT_ONCE: Final = frozenset(
    (torch.einsum, torch.bilinear, functional.instance_norm, functional.adaptive_avg_pool3d)
)
"""Functions that autocast casts by themselves: where it is on, torch computes them."""


def rewritten(host: Host, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the function to call in place of `func` with these arguments, which does the same."""
    rewrite = REWRITES.get(func)
    if rewrite is None or (func in _CAST_AT_ONCE and any(on for _, on, _ in autocast_state())):
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


_NAMES: Final = {"input": "x", "tensor": "x", "self": "x", "linear_weight": "w"}
"""Names of the first argument."""

_ATTRIBUTES: Final = "dtype shape ndim itemsize nbytes layout".split()
METADATA: Final = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
    + [Tensor.numel, Tensor.dim, Tensor.element_size, Tensor.is_floating_point]
    + [Tensor.is_complex, torch.is_floating_point, torch.is_complex]
)
"""Functions of one tensor that read nothing of its values: most calls that a body makes."""
