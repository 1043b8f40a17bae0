"""Backend of one process while a run is recorded: each movement between processes is one step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor

from shardmap_torch.backends.local_movements import on_one_rank
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.backends.recorder import Recorder, at
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import TransformError

_COUNTS: Final = (
    "{}: replay=True records operators, and how many rows {} sends is read from a tensor{}, which "
    "later calls would not do again. Send equally many to each rank by all_to_all, or leave "
    "replay=True out."
)


@dataclass(frozen=True, eq=False)
class Sending:
    """A movement of a recorded run, on the backend of the mesh on which it runs again.

    Attributes:
        move: its name; "" for a gather whose result is waited for where it is needed.
        collective: what it is part of.
        site: the user's line, for errors.
    """

    move: str
    collective: Collective
    site: Site | None

    def __call__(self, x: Tensor) -> Any:
        """Moves the data, or starts to."""
        scope: Any = current_scope()
        scope.monitor.site = self.site
        backend: ProcessGroupBackend = scope.backend
        if not self.move:
            return backend.start_gather(self.collective, x)
        return backend.communicate(self.move, self.collective, x)


class RecordingBackend(RankBackend):
    """This process as one rank, whose run is recorded."""

    bundles: Final = True  # see `sends_bundles`

    def __init__(self, backend: ProcessGroupBackend, recorder: Recorder) -> None:
        """Communicates by `backend`."""
        super().__init__(backend.mesh, backend.rank)
        self.readings = Memo[Any]()
        self._backend, self._recorder = backend, recorder

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs the movement, and records it."""
        if not collective.axes or self.position(collective.axes)[1] == 1:
            return on_one_rank(move, collective, x)
        if collective.counts:
            raise TransformError(_COUNTS.format(self._recorder.name, collective, at()))
        later = Sending(move, collective, self._backend.site())
        run = partial(self._backend.communicate, move, collective)
        return self._recorder.opaque(run, x, later)

    def start_gather(self, collective: Collective, x: Tensor) -> Callable[[], Tensor] | None:
        """Starts a gather, and records its start; see `ProcessGroupBackend.start_gather`."""
        later = Sending("", collective, self._backend.site())
        start = partial(self._backend.start_gather, collective)
        return self._recorder.opaque_start(start, x, later)
