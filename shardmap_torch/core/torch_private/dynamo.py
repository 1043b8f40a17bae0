"""Private names of Dynamo; apart, since importing it takes a second."""

from typing import NoReturn

from shardmap_torch.core.torch_private.names import DYNAMO, unsupported

try:
    from torch._dynamo import disable
    from torch._dynamo.exc import Unsupported
except ImportError as error:
    raise unsupported(DYNAMO) from error


def give_up(error: Exception) -> NoReturn:
    """Raises the error as one that ends Dynamo's trace, with its own class and its own text.

    Dynamo would wrap any other in an error of its own.
    """
    kind = type(error)
    passed = type(kind.__name__, (kind, Unsupported), {"__module__": kind.__module__})
    raised = passed(str(error))
    raised.__dict__.update(error.__dict__)
    raise raised from None
