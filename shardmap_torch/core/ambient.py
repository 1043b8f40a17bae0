"""The stack of scopes of the bodies that run on this thread; see `collectives.scope`.

It stands here because meshes, which know no collectives, ask it for the rank of a body.
"""

import threading
from typing import Any, Final


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []


SCOPES: Final = _Scopes()
"""The scopes of this thread, the innermost last; None is that of code outside of any body."""
