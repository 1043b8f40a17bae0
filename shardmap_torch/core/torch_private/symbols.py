"""Private names of symbolic sizes; apart, since importing SymPy takes a second."""

from shardmap_torch.core.torch_private.names import SYMBOLS, unsupported

try:
    from torch._guards import Source
except ImportError as error:
    raise unsupported(SYMBOLS) from error

__all__ = ("Source",)
