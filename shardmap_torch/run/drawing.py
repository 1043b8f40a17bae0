"""Drawing: seeds a body's draws from torch's default generator according to their types.

`torch.rand` or `F.dropout` in a body would depend on the processes' seeds, and on simulated ranks
on the order of the threads. In a checked body that draws, each draw is seeded again instead: from
one number that the first rank takes from its default generator at the first draw of each call, from
the number of the draw, and from the rank's position along the axes over which the checker has typed
the draw V. So ranks agree over all other axes, every mesh gives the same numbers, and
`torch.manual_seed` before a call decides them.

A dispatch mode, active in such bodies only, finds the ATen operations that draw.
"""

from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.checker.interpreter.result_types import draw_of
from shardmap_torch.checker.rules.infer import draws, may_draw, name_arguments
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Monitor, Redraws
from shardmap_torch.core.threefry import threefry_of_ints
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType, I, V

_LARGEST: Final = 1 << 62
_AGAIN: Final = "again"
"""The key of a recomputation by `checkpoint`, which repeats the draws of the first run."""


class CallSeed:
    """The number from which all draws of one call are seeded; taken at the first draw."""

    def __init__(self, agree: Callable[[Tensor], Tensor] | None = None) -> None:
        """Keeps `agree`, which sends the first process's number to all."""
        self._agree = agree
        self._seed: int | None = None

    def get(self) -> int:
        """Returns the number, drawn from the default generator of the CPU for every device."""
        if self._seed is None:
            own = torch.randint(_LARGEST, (), device="cpu")
            self._seed = int(own if self._agree is None else self._agree(own))
        return self._seed


def agreed(backend: RankBackend) -> CallSeed:
    """Makes the seed of a call on processes: rank 0 broadcasts it, 8 bytes per call."""
    mesh = backend.mesh
    collective = Collective("broadcast", V, I, mesh.axis_names)

    def agree(own: Tensor) -> Tensor:
        return backend.run("broadcast", collective, own.to(mesh.device or "cpu"))

    return CallSeed(agree)


class Drawing:
    """The draws of one run of a body, on one rank; see `collectives.protocol.Drawing`."""

    def __init__(
        self, mesh: Mesh, place: Mapping[str, int], seed: Callable[[], int], count: int = 0
    ) -> None:
        """Keeps the rank's coordinates; draws are numbered from `count`."""
        self._mesh, self._place = mesh, place
        self._seed = seed
        self.monitor: Monitor | None = None
        self._count, self._forks = count, 0
        self._mode, self._depth = _Mode(self), 0

    def enter(self, monitor: Monitor | None) -> None:
        """Seeds the draws from here on; may be entered several times."""
        if self._depth == 0:
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
            self.monitor = monitor
        self._depth += 1

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def fork(self) -> Redraws:
        """Notes the number of draws before code that will run again in a backward."""
        self._forks += 1
        return partial(self._again, self._count, self._forks)

    def _again(self, count: int, fork: int, key: Hashable) -> "Drawing":
        """Returns the drawing of that code: a checkpoint repeats its draws, others draw again."""
        if key == _AGAIN:
            return Drawing(self._mesh, self._place, self._seed, count)
        domain = 1 << 63 | fork
        return Drawing(self._mesh, self._place, lambda: threefry_of_ints(self._seed(), domain))

    def seed(self, types: tuple[AxisType, ...] | None) -> int:
        """Returns the seed of the next draw, of these types along the axes; None is V along all.

        The rank's position is encoded as one number, with 0 along axes where all ranks draw the
        same, and 1 and up along the others.
        """
        index = 0
        sizes = zip(self._mesh.axis_names, self._mesh.axis_sizes, strict=True)
        for at, (axis, size) in enumerate(sizes):
            own = types is None or types[at].varies
            index = index * (size + 1) + (self._place[axis] + 1 if own else 0)
        self._count += 1
        return threefry_of_ints(threefry_of_ints(self._seed(), self._count), index)


class _Mode(TorchDispatchMode):
    """Dispatch mode that seeds the generators for the operations that draw from them."""

    supports_higher_order_operators = True

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func) or _IS_SEEDED.get():
            return func(*args, **kwargs)
        arguments = name_arguments(func, args, kwargs)
        if not draws(func, arguments) or arguments.get("generator") is not None:
            return func(*args, **kwargs)
        drawing = self._drawing
        monitor = drawing.monitor
        seed = drawing.seed(None if monitor is None else monitor.note(draw_of(func)).types)
        generators = _generators(arguments)
        states = [generator.get_state() for generator in generators]
        token = _IS_SEEDED.set(True)
        try:
            for generator in generators:
                generator.manual_seed(seed)
            return func(*args, **kwargs)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            _IS_SEEDED.reset(token)


_IS_SEEDED: Final = ContextVar("is_seeded", default=False)
"""True while an inner mode makes the draw: code that runs again in a gradient of the body."""


def _generators(arguments: Mapping[str, Any]) -> list[torch.Generator]:
    """Returns the default generators of the CPU and of the device of the draw."""
    generators = [torch.default_generator]
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    device = torch.device(
        tensors[0].device if tensors else arguments.get("device") or torch.get_default_device()
    )
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
