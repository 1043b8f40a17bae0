"""Fake tensors for checks, whose memory in torch is bounded."""

from typing import Final

from torch._subclasses.fake_tensor import FakeTensorMode

REMEMBERED: Final = 4096


def fake_mode() -> FakeTensorMode:
    """Makes a mode for one check.

    torch remembers the shapes of every operation that any mode has seen, a kilobyte each, and
    forgets none, also those of signatures that were evicted long ago; beyond `REMEMBERED` it has to
    begin anew.
    """
    if len(FakeTensorMode.cache) > REMEMBERED:
        FakeTensorMode.cache_clear()
    return FakeTensorMode(allow_non_fake_inputs=True)
