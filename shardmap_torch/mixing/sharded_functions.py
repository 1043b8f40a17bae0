"""Torch functions that run on shards, by name; all others run on global values.

Default deny: torch's sharding rules give wrong gradients of losses that are means (`mse_loss`), of
maxima and of `torch.linalg`, and wrong values of what follows `any`. The functions here were
compared with one device, values and gradients.
"""

from typing import Final

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
    "is_floating_point is_complex len get_device element_size is_contiguous hash repr format str "
    "get set delete backward register_hook retain_grad requires_grad type result_type"
).split()
_WRITES: Final = (
    "add sub mul div neg sqrt copy zero fill clamp masked_fill lerp addcmul addcdiv bernoulli "
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
    ["setitem", "iadd", "isub", "imul", "itruediv", *_WRITES, *(f"foreach_{n}" for n in _FOREACH)]
)
"""Names of those that write."""
