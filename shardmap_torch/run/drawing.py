"""Draws from torch's default generator in a body: ranks share them as the checker types them.

`torch.rand` or `F.dropout` in a body would give on processes what their seeds happen to say, and
on simulated ranks what the order of the threads says. In a checked body that draws, each draw is
seeded anew instead: from one number that the first rank takes from its default generator at the
first draw of each call, from the number of the draw, and from the rank's place along the axes over
which the checker has typed the draw V. So ranks agree over all other axes, every mesh gives the
same numbers, and `torch.manual_seed` before a call decides them.

Which operations draw is seen at the ATen level, by a mode that is on in such bodies only.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.checker.interpreter.draws import DRAW
from shardmap_torch.checker.rules.infer import draws, may_draw, name_arguments
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Monitor
from shardmap_torch.core.threefry import threefry_of_ints
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType, I, V

_LARGEST: Final = 1 << 62
_AGAIN: Final = "again"
"""The key of the run again of a `checkpoint`, which draws what its first run drew."""


class CallSeed:
    """The number from which all ranks of one call draw; taken at the first draw."""

    def __init__(self, agree: Callable[[Tensor], Tensor] | None = None) -> None:
        """`agree` gives all processes the number of the first."""
        self._agree = agree
        self._seed: int | None = None

    def get(self) -> int:
        """Takes it from the default generator of the CPU, for every device."""
        if self._seed is None:
            taken = torch.randint(_LARGEST, (), device="cpu")
            self._seed = int(taken if self._agree is None else self._agree(taken))
        return self._seed


def agreed(backend: RankBackend) -> CallSeed:
    """The number of the first process, sent to all at the first draw: 8 bytes a call."""
    mesh = backend.mesh
    collective = Collective("broadcast", V, I, mesh.axis_names)

    def agree(taken: Tensor) -> Tensor:
        return backend.run("broadcast", collective, taken.to(mesh.device or "cpu"))

    return CallSeed(agree)


class Drawing:
    """The draws of one run of a body, on one rank; see `collectives.protocol.Drawing`."""

    def __init__(
        self, mesh: Mesh, place: Mapping[str, int], seed: Callable[[], int], count: int = 0
    ) -> None:
        """`place` is the rank's; draws are numbered from `count`."""
        self._mesh, self._place = mesh, place
        self._seed = seed
        self.monitor: Monitor | None = None
        self._count, self._forks = count, 0
        self._mode, self._depth = _Mode(self), 0

    def enter(self, monitor: Monitor | None) -> None:
        """Seeds what is drawn from here on; may be entered several times."""
        if self._depth == 0:
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
            self.monitor = monitor
        self._depth += 1

    def leave(self) -> None:
        """Ends the newest `enter`."""
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def fork(self) -> "_Fork":
        """Notes the place of code that will run again in a backward."""
        self._forks += 1
        return _Fork(self, self._count, self._forks)

    def later(self, key: object, count: int, fork: int) -> "Drawing":
        """For that code: the same draws where it is a checkpoint's, else others."""
        if key == _AGAIN:
            return Drawing(self._mesh, self._place, self._seed, count)
        domain = 1 << 63 | fork
        return Drawing(self._mesh, self._place, lambda: threefry_of_ints(self._seed(), domain))

    def seed(self, types: tuple[AxisType, ...] | None) -> int:
        """The seed of the next draw, of these types along the axes; None is V along all.

        One number says the place: along each axis 0 where all ranks draw the same, else 1 and up.
        """
        index = 0
        for at, (axis, size) in enumerate(self._mesh.shape.items()):
            own = types is None or types[at].varies
            index = index * (size + 1) + (self._place[axis] + 1 if own else 0)
        self._count += 1
        return threefry_of_ints(threefry_of_ints(self._seed(), self._count), index)


class _Fork:
    """A `Drawing` as code sees it that will run again."""

    def __init__(self, origin: Drawing, count: int, fork: int) -> None:
        self._origin, self._count, self._fork = origin, count, fork

    def enter(self, monitor: Monitor | None) -> None:
        self._origin.enter(monitor)

    def leave(self) -> None:
        self._origin.leave()

    def fork(self) -> "_Fork":
        return self._origin.fork()

    def rerun(self, key: object) -> Drawing:
        return self._origin.later(key, self._count, self._fork)


class _Mode(TorchDispatchMode):
    """Sees every ATen operation, and seeds the generator for those that draw from it."""

    supports_higher_order_operators = True

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        arguments = name_arguments(func, args, kwargs)
        if not draws(func, arguments) or arguments.get("generator") is not None:
            return func(*args, **kwargs)
        drawing = self._drawing
        monitor = drawing.monitor
        seed = drawing.seed(None if monitor is None else monitor.note((DRAW, str(func))).types)
        generators = _generators(arguments)
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            return func(*args, **kwargs)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _generators(arguments: Mapping[str, Any]) -> list[torch.Generator]:
    """Those of the CPU and of the device on which is drawn."""
    found = [torch.default_generator]
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    device = torch.device(
        tensors[0].device if tensors else arguments.get("device") or torch.get_default_device()
    )
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found
