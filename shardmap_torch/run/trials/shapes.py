"""Shapes that kernels of torch trust, because the public functions before them have compared them.

A trial calls the operators of a record with operands that a repair has reshaped. Some kernels read
and write past the end of operands that do not fit.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

_ATTENTION: Final = (
    "query bhtd, key bgsd, value bgse, grad_out bhte, grad_out_ bhte, out bhte, attn_mask *BHTS, "
    "attn_bias *BHTS"
)
_BATCH_NORM: Final = (
    "input nc*, grad_out nc*, weight c, bias c, running_mean c, running_var c, save_mean c, "
    "save_invstd c"
)
CONTRACTS: Final[Mapping[str, str]] = {
    f"_scaled_dot_product_{kind}_attention{suffix}": _ATTENTION
    for kind in ("flash", "efficient", "cudnn")
    for suffix in ("", "_for_cpu", "_backward", "_for_cpu_backward")
} | {
    "native_batch_norm": _BATCH_NORM,
    "_native_batch_norm_legit": _BATCH_NORM,
    "native_batch_norm_backward": _BATCH_NORM,
    "_softmax_backward_data": "grad_output =, output =",
    "_log_softmax_backward_data": "grad_output =, output =",
    "_cdist_backward": "grad *pr, x1 *pm, x2 *rm, cdist *pr",
    "grid_sampler_2d_backward": "grad_output nc*, input nc*, grid n*",
    "grid_sampler_3d_backward": "grad_output nc*, input nc*, grid n*",
}
"""The dims of operands by letters; a capital one may be 1, `*` is any dims, `=` all of them."""


def compare(name: str, arguments: Mapping[str, Any]) -> None:
    """Compares the shapes of the operands of a kernel.

    Raises:
        RuntimeError: they do not fit, as torch's public function would say.
    """
    lengths: dict[str, Any] = {}
    for operand, _, dims in (each.partition(" ") for each in CONTRACTS[name].split(", ")):
        x = arguments.get(operand)
        if isinstance(x, Tensor) and not _fits(x, dims, lengths):
            raise RuntimeError(f"{name}: {operand} of shape {[*x.shape]} does not fit {lengths}")
    if lengths.get("h", 0) % (lengths.get("g") or 1):
        raise RuntimeError(f"{name}: {lengths['h']} heads of queries for {lengths['g']} of keys")


def _fits(x: Tensor, dims: str, lengths: dict[str, Any]) -> bool:
    """Returns whether dims have the lengths met before, and takes down the others."""
    is_open = "*" in dims or dims == "="
    known = all(
        (dim.isupper() and length == 1) or lengths.setdefault(dim.lower(), length) == length
        for dim, length in _named(x, dims)
    )
    return known and (is_open or x.ndim == len(dims))


def _named(x: Tensor, dims: str) -> Iterable[tuple[str, Any]]:
    if dims == "=":
        return [(dims, x.shape)]
    if dims.startswith("*"):
        return zip(reversed(dims[1:]), reversed(x.shape), strict=False)
    return zip(dims.removesuffix("*"), x.shape, strict=False)
