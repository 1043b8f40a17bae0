"""Operators by what random operands can tell of them.

Two analytic functions that are equal on random operands are equal, but for chance. A function in
pieces is so where each of its pieces was met. An operator that stands in no table is refused.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.torch_private.engine import OpOverload


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MADE: Final = _names(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "new_empty_strided isnan isinf isfinite isposinf isneginf lift_fresh lift_fresh_copy "
    "is_same_size _has_same_storage_numel _new_zeros_with_same_feature_meta"
)
"""Those whose results do not depend on the entries of operands, as long as these are finite."""

ASK_FINITE: Final = _names("isnan isinf isfinite isposinf isneginf nan_to_num")
"""Those that tell what is finite."""

MOVED: Final = _names(
    "view _unsafe_view reshape _reshape_alias view_as_real view_as_complex expand permute "
    "transpose t squeeze unsqueeze select slice split split_with_sizes unbind unfold diagonal "
    "movedim cat stack clone contiguous alias detach flip roll repeat constant_pad_nd tril triu "
    "slice_scatter select_scatter copy fill zero where masked_fill real imag conj "
    "_conj resolve_conj as_strided _to_copy col2im im2col _wrap_tensor_autograd wait_tensor "
    "broadcast_tensors unsafe_split unsafe_chunk chunk swapaxes narrow flatten _conj_physical "
    "to"
)
"""Those that move entries, of any dtype."""

VIEWED: Final = _names(
    "view _unsafe_view reshape _reshape_alias expand permute transpose t squeeze unsqueeze select "
    "slice split unbind clone alias detach flip"
)
"""Those of them whose results have entries of their one operand alone."""

CARRYING: Final = VIEWED | _names("cat stack unfold roll constant_pad_nd contiguous")
"""Those of them of which each entry is one of an operand, at a place that no number decides."""

SELECTED: Final = _names("argmax argmin sort argsort topk")
"""Those that choose among entries: in as many pieces as orders."""

ANALYTIC: Final = _names(
    "add sub rsub mul div neg reciprocal square sqrt rsqrt pow exp exp2 expm1 log log2 log10 log1p "
    "sin cos tan sinh cosh tanh asin acos atan atan2 asinh acosh atanh erf erfc sigmoid "
    "log_sigmoid_forward silu gelu softplus mish logit lerp addcmul addcdiv sum mean prod cumsum "
    "var std var_mean logsumexp logaddexp mm bmm mv dot vdot addmm addmv addbmm baddbmm addr "
    "matmul linear trace "
    "_softmax _log_softmax _safe_softmax native_layer_norm native_group_norm _fused_rms_norm "
    "convolution linalg_inv_ex linalg_solve_ex mse_loss binary_cross_entropy_with_logits xlogy "
    "linalg_solve_triangular linalg_cholesky_ex cholesky_solve "
    "cumprod avg_pool1d avg_pool2d upsample_nearest1d upsample_nearest2d upsample_linear1d "
    "upsample_bilinear2d _fft_r2c _fft_c2c _fft_c2r "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
    "_scaled_dot_product_efficient_attention"
)
"""Analytic functions of floating operands; booleans among these count as 0 and 1."""

Lookup = Callable[[Mapping[str, Any]], Sequence[tuple[int, Tensor]]]
"""From arguments to the indices among them, each with the length of the dim that it goes into."""


def _along(name: str) -> Lookup:
    def found(a: Mapping[str, Any]) -> Sequence[tuple[int, Tensor]]:
        x = a["self"]
        return [(x.shape[a["dim"]] if x.ndim else 1, a[name])]

    return found


def _each(a: Mapping[str, Any]) -> Sequence[tuple[int, Tensor]]:
    pairs = zip(a["self"].shape, a["indices"], strict=False)
    return [(length, index) for length, index in pairs if index is not None]


CLASS_LOSSES: Final = _names("nll_loss_forward nll_loss2d_forward")
"""Losses whose targets are classes, or to be ignored: as many as entries along dim 1."""


def _classes(a: Mapping[str, Any]) -> Sequence[tuple[int, Tensor]]:
    x = a["self"]
    return [(x.shape[min(1, x.ndim - 1)], a["target"])]


BAGS: Final = ("_embedding_bag", "_embedding_bag_forward_only")
"""Sums of rows of a table; the second where no gradient flows."""

_GROUPED: Final[Mapping[tuple[int, int], tuple[str, int, int]]] = {
    (2, 3): ("mk,gkn,gm->mn", 0, 0),
    (3, 2): ("gmk,kn,gn->mn", 1, 1),
    (2, 2): ("mk,kn,gk->gmn", 0, 1),
}
"""Equations of grouped products by dims of operands, and which dim of which one has groups."""


def _groups(a: Mapping[str, Any]) -> Sequence[tuple[int, Tensor]]:
    if a.get("offs") is None:
        return []
    pair = a["self"], a["mat2"]
    _, which, dim = _GROUPED[pair[0].ndim, pair[1].ndim]
    return [(pair[which].shape[dim] + 1, a["offs"])]


def _grouped_mm(self: Tensor, mat2: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Multiplies groups of rows, columns or addends, which end at offsets; the others are 0."""
    if offs is None:
        return self @ mat2
    equation, which, dim = _GROUPED[self.ndim, mat2.ndim]
    places = torch.arange((self, mat2)[which].shape[dim])
    starts = torch.cat([offs.new_zeros(1), offs[:-1]])
    inside = (places >= starts[:, None]) & (places < offs[:, None])
    return torch.einsum(equation, self, mat2, inside.to(self))


WIDE: Final[Mapping[str, Callable[..., Any]]] = {"_grouped_mm": _grouped_mm}
"""Functions that compute in 64 bits what torch has in fewer bits alone."""

LOOKUPS: Final[Mapping[str, Lookup]] = {
    "_grouped_mm": _groups,
    "embedding": lambda a: [(a["weight"].shape[0], a["indices"])],
    **dict.fromkeys(("index_select", "gather", "scatter", "scatter_add"), _along("index")),
    **dict.fromkeys(("index_add", "index_copy"), _along("index")),
    **dict.fromkeys(BAGS, lambda a: [(a["weight"].shape[0], a["indices"])]),
    **dict.fromkeys(CLASS_LOSSES, _classes),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _each),
}
"""Those that look entries up by indices."""

LARGEST: Final = 2
"""ATen's number of bags whose largest entries are taken."""

DRAWLESS: Final = _names(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
)
"""Those that draw random numbers only for a dropout."""


Pair = tuple[Any, Any]
"""Two operands, of which either may be the larger one."""

Pieces = Callable[[Mapping[str, Any]], Sequence[Pair]]


def _against(*limits: float) -> Pieces:
    return lambda a: [(a["self"], limit) for limit in limits]


def _named(*names: str) -> Pieces:
    def pairs(a: Mapping[str, Any]) -> Sequence[Pair]:
        return [(a["self"], a[name]) for name in names if a.get(name) is not None]

    return pairs


def _deviation(limit: str) -> Pieces:
    return lambda a: [(a["self"], a["target"]), ((a["self"] - a["target"]).abs(), a[limit])]


LARGER: Final[Mapping[str, Pieces]] = {
    **dict.fromkeys(
        ("relu", "abs", "sgn", "sign", "leaky_relu", "elu", "celu", "selu", "_prelu_kernel"),
        _against(0),
    ),
    **dict.fromkeys(("hardswish", "hardsigmoid"), _against(-3, 3)),
    "relu6": _against(0, 6),
    "threshold": _named("threshold"),
    "hardtanh": _named("min_val", "max_val"),
    "smooth_l1_loss": _deviation("beta"),
    "huber_loss": _deviation("delta"),
    "clamp": _named("min", "max"),
    "clamp_min": _named("min"),
    "clamp_max": _named("max"),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), _named("other")),
}
"""Those in two pieces, which meet where two operands are equal."""

COMPARED: Final[Mapping[str, Callable[[Any, Any], Tensor]]] = {
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.eq,
}
"""Comparisons of `self` with `other`, each with its condition."""

MODERATE: Final[Mapping[str, float]] = {
    **dict.fromkeys(("exp", "expm1", "sigmoid", "softplus", "log_sigmoid_forward"), 20.0),
    "binary_cross_entropy_with_logits": 20.0,
    **dict.fromkeys(("exp2", "silu", "mish"), 20.0),
    **dict.fromkeys(("tanh", "erf", "erfc", "gelu"), 5.0),
}
"""Analytic functions that are constant but for rounding beyond some size of their operand."""

SHARES: Final = _names("_softmax _log_softmax _safe_softmax")
"""Functions whose results, or their exponentials, are constant but for rounding near 0 and 1."""

LOG_SUMS: Final = _names("logsumexp logaddexp")
"""Logarithms of sums, which are one of their operands but for rounding where that is larger."""

LIMITED: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(COMPARED, ("self", "other")),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin", "logaddexp"), ("self", "other")),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), ("min", "max")),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold",),
}
"""Those that compare with numbers, by the names of arguments that these may be."""

FILLED: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("full", "new_full", "full_like"), ("fill_value",)),
    "fill": ("value",),
    "lift_fresh_copy": ("self",),
}
"""Those that make a tensor of one number, by the names of arguments that it may be."""

LARGE: Final = 1e3
"""Numbers from which on some mean infinity by them."""

INFINITE: Final = 1e30
"""Limits that no entry reaches: infinities, and what stands for them."""

EXTREMA: Final = _names("amax amin max min")
"""Those in as many pieces as entries may be the extremum."""

LOGICAL: Final = _names(
    "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not "
    "bitwise_xor any all"
)
"""Functions of booleans."""

SUMMARIES: Final = _names("any all amax amin max min")
"""Those that make one boolean or integer of many: what ranks make of these has to be met."""

DIVIDED: Final = _names("floor_divide remainder div fmod")
"""Quotients and rests of integers."""

Condition = tuple[Tensor, Tensor]
"""A mask of where it is true, and one of where it is open."""

Bounds = tuple[int, int]
"""The least and the largest that integers or booleans can be, whatever the inputs are."""

BoundsOf = Callable[[Any], Bounds | None]
"""From a number or tensor to its bounds; None if nothing is known."""


def name_of(func: OpOverload) -> str:
    """Returns the name of an overload, without what says that it writes."""
    name = func._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_analytic(name: str, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call is of an analytic function."""
    if name in ("linalg_vector_norm", "_foreach_norm"):
        return bool(arguments["ord"] == 2)
    is_smooth = arguments.get("rounding_mode") is None and not arguments.get("dropout_p")
    own, is_listed = name.removeprefix("_foreach_"), name.startswith("_foreach_")
    own = own.removesuffix("_backward")  # whose pieces are those of the forward
    return own in ANALYTIC and is_smooth and not (is_listed and own in MODERATE)


def conditions(
    name: str, arguments: Mapping[str, Any], out: Any, masks: Set[float], of: BoundsOf
) -> Sequence[Condition] | None:
    """Returns the conditions on which an operator's pieces depend, and where they are open.

    They are not open where an operand is infinite, or one of the large numbers that the program
    writes where something is hidden. None if the operator has no known pieces.
    """
    if name in COMPARED:
        return [_open(arguments["self"], arguments["other"], COMPARED[name], masks)]
    if name in LARGER:
        # Integers are often equal, which says nothing of those that are smaller.
        sides = ("gt",) if arguments["self"].is_floating_point() else ("gt", "lt")
        return [
            _open(a, b, COMPARED[side], masks)
            for a, b in LARGER[name](arguments)
            for side in sides
            if not _is_certain(side, of(a), of(b))
        ]
    if name in EXTREMA:
        return _of_extrema(arguments, out, masks)
    if name in LOGICAL and _is_boolean(arguments):
        return [(out, torch.ones_like(out))]
    if name in ("bucketize", "searchsorted"):
        buckets = range(int(out.max()) + 1) if out.numel() else ()
        return [(out == n, torch.ones_like(out, dtype=torch.bool)) for n in buckets]
    if name in DIVIDED and not arguments["self"].is_floating_point():
        return [(out == 0, torch.ones_like(out, dtype=torch.bool))]
    return None


CUT: Final = _names("tril triu")
"""Those that hide entries by their places."""


def of_sizes(name: str, arguments: Mapping[str, Any], out: Any) -> Sequence[Condition]:
    """Returns the conditions of numbers that no input has, which other sizes may decide."""
    if name in CUT:
        x, kept = arguments["self"], torch.ones_like(arguments["self"], dtype=torch.bool)
        kept = getattr(kept, name)(arguments.get("diagonal", 0))
        return [(kept, torch.ones_like(kept))] if x.numel() else []
    if name not in COMPARED.keys() | LARGER.keys():
        return []
    return conditions(name, arguments, out, frozenset(), lambda _: None) or []


def moderate(
    name: str, arguments: Mapping[str, Any], out: Any, masks: Set[float]
) -> Condition | None:
    """Returns where a function is not constant but for rounding, and where that is open.

    It is not open at differences with the large numbers that stand for infinity.
    """
    if name in SHARES:
        shares = out.exp() if name == "_log_softmax" else out
        alone = arguments["self"].ndim == 0 or arguments["self"].shape[arguments["dim"]] == 1
        return (shares - 0.5).abs() < 0.5 - 1e-6, torch.full_like(
            shares, not alone, dtype=torch.bool
        )
    if name in LOG_SUMS:
        return _of_log_sum(arguments, out)
    if name not in MODERATE:
        return None
    x = arguments["self"].abs()
    condition, finite = _open(x, MODERATE[name], torch.lt)
    return condition, finite & (x < min(map(abs, masks), default=INFINITE) / 2)


def has_ties(name: str, arguments: Mapping[str, Any]) -> bool:
    """Returns whether equal numbers make a difference, also to a gradient."""
    x, other = arguments["self"], arguments.get("other")
    if name in ("eq", "ne"):
        return x.is_floating_point() and isinstance(other, Tensor)
    return name in EXTREMA and other is None and is_smooth(x)


def summary(name: str, arguments: Mapping[str, Any], out: Any) -> Tensor | None:
    """Returns booleans or integers that a rank makes of many entries; None for other calls.

    Comparisons of integers are among them, which may have been counted.
    """
    x = arguments.get("self")
    made = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(x, Tensor) or not isinstance(made, Tensor):
        return None
    if name in SUMMARIES and arguments.get("other") is None and not is_smooth(made):
        return made
    return made if name in COMPARED and not (is_smooth(x) or x.dtype == torch.bool) else None


def chosen(name: str, arguments: Mapping[str, Any], out: Any, parts: int) -> Sequence[Condition]:
    """Returns for each part of a dim where all that is chosen of the dim lies in that part.

    What ranks choose of their own parts may be too few there. There are none where nothing is left
    out, and of sorted entries.
    """
    x, dim = arguments["self"], arguments.get("dim")
    if name not in ("topk", "argmax", "argmin") or not x.numel():
        return []
    places = out[1] if name == "topk" else out
    x, places = (x, places) if dim is not None and x.ndim else (x.flatten(), places.reshape(1))
    dim = -1 if dim is None else dim
    is_kept = name == "topk" or places.ndim == x.ndim
    places = places.movedim(dim, -1) if is_kept else places.unsqueeze(-1)
    size, is_last = x.shape[dim], dim % x.ndim == x.ndim - 1
    is_sorted = is_last and bool((x.diff(dim=-1) <= 0).all())
    if places.shape[-1] == size or is_sorted:
        return []
    own = places[..., : -(-size // parts)] * parts // size
    found = [(own == part).all(-1) for part in range(min(parts, size))]
    return [(alone, torch.ones_like(alone)) for alone in found]


def is_ambiguous(name: str, arguments: Mapping[str, Any]) -> bool:
    """Returns whether equal entries may be sorted, or chosen, in another order."""
    x, dim = arguments["self"], arguments.get("dim", -1)
    if name not in ("topk", "sort", "argsort") or not x.ndim or arguments.get("stable"):
        return False
    values = x.sort(dim, descending=arguments.get("largest", True)).values.movedim(dim, -1)
    first = values[..., : arguments.get("k", x.shape[dim]) + 1]  # and what is left out next
    return bool((first[..., 1:] == first[..., :-1]).any())


def order(arguments: Mapping[str, Any], out: Any) -> Condition:
    """Returns where what comes first of a dim, among entries that are chosen, is in its half."""
    x, dim = arguments["self"], arguments.get("dim")
    places = out[1] if isinstance(out, tuple | list) else out
    size = x.numel() if dim is None or not x.ndim else x.shape[dim]
    if dim is not None and places.ndim == x.ndim > 0:
        places = places.narrow(dim, 0, min(1, places.shape[dim]))
    first = 2 * places < size
    return first, torch.full_like(first, size > 1)


def _is_certain(side: str, mine: Bounds | None, other: Bounds | None) -> bool:
    """Returns whether a comparison is the same for all inputs."""
    if mine is None or other is None:
        return False
    least, largest = BOUNDED[side](*mine, *other)
    return least == largest


def _open(
    a: Any, b: Any, compare: Callable[[Any, Any], Tensor], masks: Set[float] = frozenset()
) -> Condition:
    condition = compare(a, b)
    finite = torch.ones_like(condition)
    for each in (a, b):
        if not isinstance(each, Tensor):
            finite &= abs(each) < INFINITE and each not in masks
        elif each.is_floating_point():
            finite &= each.abs() < INFINITE
            for number in masks:
                finite &= each != number
    return condition, finite


def mask_numbers(name: str, arguments: Mapping[str, Any]) -> frozenset[float]:
    """Returns the large number that a call writes where a mask is true: it stands for infinity."""
    number = arguments.get("value") if name == "masked_fill" else None
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return frozenset({float(number)} if number is not None and abs(number) >= LARGE else ())


def integers_of(value: Any) -> frozenset[int]:
    """Returns the least and the largest of integers; none of other numbers."""
    if isinstance(value, int):
        return frozenset({value})
    if isinstance(value, Tensor) and value.numel() and not is_smooth(value):
        return frozenset({int(value.min()), int(value.max())})
    return frozenset()


Near = Callable[[int], Sequence[int]]
"""From a number to those near it for which something else may happen."""


def _itself(n: int) -> Sequence[int]:
    return (n,)


def _around(n: int) -> Sequence[int]:
    return n - 1, n, n + 1


def meeting(n: int) -> Sequence[int]:
    """Returns numbers that are equal only modulo `n`, or once they are rounded to its digits."""
    return 0, 1, n, n + 1


def period(op: OpOverload, x: Tensor, dtype: torch.dtype | None) -> int | None:
    """Returns from which number on entries of an operand are equal to others in its result.

    None where a result of that dtype keeps all integers apart, or has none of them. Numbers of 64
    bits count as exact.
    """
    if dtype in (None, torch.bool, torch.float64) or not is_integer(x.dtype):
        return None
    assert dtype is not None
    is_moved = name_of(op) in MOVED
    if dtype.is_complex or not (is_moved or torch.Tag.pointwise in op.tags):
        return None
    if dtype.is_floating_point:
        first = int(2 / torch.finfo(dtype).eps)
    else:
        first = 1 << (torch.iinfo(dtype).bits if is_moved else 64)
    own = torch.iinfo(x.dtype)
    return first if own.max - own.min >= first else None


def is_integer(dtype: torch.dtype) -> bool:
    """Returns whether numbers of a dtype are integers; booleans are none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def limits(name: str, arguments: Mapping[str, Any]) -> Sequence[tuple[Tensor, Any, Near]]:
    """Returns operands with the numbers near which an operator does something else with them."""
    if name in ("embedding", *BAGS) and arguments["padding_idx"] >= 0:
        return [(arguments["indices"], arguments["padding_idx"], _itself)]
    if name in DIVIDED and is_integer(arguments["self"].dtype):
        return [(arguments["self"], arguments["other"], meeting)]
    if name not in COMPARED:
        return []
    around = _itself if name in {"eq", "ne"} else _around
    sides = arguments["self"], arguments["other"]
    return [
        (x, other, around)
        for x, other in (sides, sides[::-1])
        if isinstance(x, Tensor) and not x.is_floating_point()
    ]


def bounds(name: str, arguments: Mapping[str, Any], of: BoundsOf) -> Bounds | None:
    """Returns between which integers all entries of a result are, whatever the inputs are.

    So indices of the largest entries are between those of a dim, and a condition on these that is
    always true has one piece. None if that is not known.
    """
    x = arguments.get("self")
    if name in SELECTED and isinstance(x, Tensor):
        dim = arguments.get("dim")
        return 0, (x.numel() if dim is None or not x.ndim else x.shape[dim]) - 1
    mine, other = of(x), of(arguments.get("other"))
    if mine is None:
        return None
    if name == "clamp":
        low, high = of(arguments["min"]) or mine, of(arguments["max"]) or mine
        return max(mine[0], low[0]), min(max(mine[1], low[1]), high[1])
    if name in VIEWED:
        return mine
    if name in ("bitwise_not", "logical_not") and isinstance(x, Tensor) and x.dtype == torch.bool:
        return 1 - mine[1], 1 - mine[0]
    if other is None or arguments.get("alpha", 1) != 1:
        return None
    combine = BOUNDED.get(name)
    is_bitwise = name in LOGICAL and not {*mine, *other} <= {0, 1}
    return None if combine is None or is_bitwise else combine(*mine, *other)


BOUNDED: Final[Mapping[str, Callable[[int, int, int, int], tuple[int, int]]]] = {
    "add": lambda a, b, c, d: (a + c, b + d),
    "sub": lambda a, b, c, d: (a - d, b - c),
    "lt": lambda a, b, c, d: (b < c, a < d),
    "le": lambda a, b, c, d: (b <= c, a <= d),
    "gt": lambda a, b, c, d: (a > d, b > c),
    "ge": lambda a, b, c, d: (a >= d, b >= c),
    **dict.fromkeys(("bitwise_and", "logical_and"), lambda a, b, c, d: (min(a, c), min(b, d))),
    **dict.fromkeys(("bitwise_or", "logical_or"), lambda a, b, c, d: (max(a, c), max(b, d))),
}
"""From the bounds of two operands, those of conditions and sums; `and` and `or` of booleans."""


_MEAN: Final = 1
"""ATen's number of a reduction to a mean."""


def ignored_by(name: str, arguments: Mapping[str, Any]) -> frozenset[int]:
    """Returns the targets that an averaged loss leaves out."""
    is_mean = name in CLASS_LOSSES and arguments["reduction"] == _MEAN
    return frozenset({arguments["ignore_index"]} if is_mean else ())


def is_masked_fill(name: str, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call writes one number where a mask is true."""
    return "index_put" in name and arguments["values"].numel() == 1


def _of_log_sum(arguments: Mapping[str, Any], out: Tensor) -> tuple[Tensor, Tensor]:
    x, dims = arguments["self"], arguments.get("dim")
    if dims is None:
        finite = (x.abs() < INFINITE) & (arguments["other"].abs() < INFINITE)
    else:
        finite = x.abs() < INFINITE
        finite = finite & (finite.sum(dims, keepdim=True) > 1)
        out = x.logsumexp(dims, keepdim=True)
    return ((x - out).exp() - 0.5).abs() < 0.5 - 1e-6, finite


def _of_extrema(arguments: Mapping[str, Any], out: Any, masks: Set[float]) -> Sequence[Condition]:
    x, other = arguments["self"], arguments.get("other")
    if other is not None:
        return [_open(x, other, torch.gt, masks)]
    extreme = _kept(arguments, out[0] if isinstance(out, tuple) else out)
    condition, finite = _open(x, extreme, torch.eq, masks)
    dims = arguments.get("dim")
    others = finite.sum([*range(x.ndim)] if dims is None or dims == [] else dims, keepdim=True) > 1
    return [(condition, finite & others)]  # but for maxima of one entry


def tied(arguments: Mapping[str, Any], out: Any, parts: int) -> Sequence[Condition]:
    """Returns for each dim where several of its parts have the extremum, one of them more often.

    Then entries share its gradient in other parts if those of each part share it first. Some axes
    of the ranks may divide the dim, into a number of parts that divides `parts`.
    """
    x = arguments["self"]
    is_largest = x == _kept(arguments, out[0] if isinstance(out, tuple) else out)
    dims = arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.ndim)
    found = []
    several = [number for number in range(2, parts + 1) if parts % number == 0]
    for dim, number in [pair for pair in product(dims, several) if x.shape[pair[0]] > pair[1]]:
        counts = torch.stack([part.sum(dim) for part in is_largest.tensor_split(number, dim)])
        most, least = counts.amax(0), torch.where(counts > 0, counts, counts.amax(0)).amin(0)
        found.append((most > least, torch.ones_like(most, dtype=torch.bool)))
    return found


def _kept(arguments: Mapping[str, Any], extreme: Tensor) -> Tensor:
    """Returns extrema with the dims that have been reduced."""
    x, dims = arguments["self"], arguments.get("dim")
    if dims is not None and dims != [] and not arguments.get("keepdim"):
        for dim in sorted([d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]):
            extreme = extreme.unsqueeze(dim)
    return extreme


def _is_boolean(arguments: Mapping[str, Any]) -> bool:
    values = [x for x in arguments.values() if isinstance(x, Tensor)]
    return all(x.dtype == torch.bool for x in values)
