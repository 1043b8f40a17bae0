"""Fake tensors for checks, whose memory in torch is bounded."""

from typing import TYPE_CHECKING, Final

from shardmap_torch.core.torch_private.engine import FakeTensorMode

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

REMEMBERED: Final = 4096


def fake_mode(env: "ShapeEnv | None" = None) -> FakeTensorMode:
    """Makes a mode for one check; `env` has the sizes that are symbols.

    torch remembers the shapes of every operation that any mode has seen, a kilobyte each, and
    forgets none, also those of signatures that were evicted long ago; beyond `REMEMBERED` it has to
    begin anew.
    """
    if len(FakeTensorMode.cache) > REMEMBERED:
        FakeTensorMode.cache_clear()
    # What a body closes over has the sizes that it has.
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
