"""Backend of one process while a run is recorded: each movement between processes is one step."""

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from shardmap_torch.backends.local_movements import on_one_rank
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.backends.recorder import Recorder
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.source_location import Site


@dataclass(frozen=True, eq=False)
class Sending:
    """A movement of a recorded run, on the backend of the mesh on which it runs again.

    Attributes:
        move: its name.
        collective: what it is part of.
        site: the user's line, for errors.
    """

    move: str
    collective: Collective
    site: Site | None

    def __call__(self, x: Tensor) -> Tensor:
        """Moves the data."""
        scope: Any = current_scope()
        scope.monitor.site = self.site
        moved: Tensor = scope.backend.communicate(self.move, self.collective, x)
        return moved


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
        backend = self._backend
        later = Sending(move, collective, backend.site())

        def moved(x: Tensor) -> Tensor:
            return backend.communicate(move, collective, x)

        return self._recorder.opaque(moved, x, later)
