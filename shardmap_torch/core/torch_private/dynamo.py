"""Private names of Dynamo; apart, since importing it takes a second."""

from shardmap_torch.core.torch_private.names import DYNAMO, unsupported

try:
    from torch._dynamo.exc import Unsupported
except ImportError as error:
    raise unsupported(DYNAMO) from error

__all__ = ("Unsupported",)
