"""Plans: what a collective runs on one process, once its line and its movement are looked up."""

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from shardmap_torch.collectives.operations import Bind, Collective, Linear, Operation, Saved
from shardmap_torch.core.caching import lazy


class Plan(Linear):
    """A collective on the backend of one process, as an operation: the fast form of the same one.

    Monitors, transforms and compiled code see the collective itself.

    Attributes:
        backend: a weak reference to its backend, which keeps it: so a mesh that is dropped ends its
            process groups at once.
        collective: what it runs.
        run: moves the data, called as `Operation.run`.
        native: does the same by operations of torch, whose derivatives are those of the collective,
            as over axes of one rank; None where a collective needs a derivative of its own.
    """

    def __init__(
        self,
        backend: Any,
        collective: Collective,
        run: Callable[[Any, Tensor], Tensor],
        native: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.backend: Callable[[], Any] = ref(backend)
        self.collective = collective
        self.run, self.native = run, native

    @property
    def axes(self) -> tuple[str, ...]:
        return self.collective.axes

    @lazy
    def transpose(self) -> Operation:
        """The collective that carries a cotangent back, as a plan where it has one."""
        back = self.collective.transpose
        planned: Operation | None = self.backend().plan(back)
        return back if planned is None else planned

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        return bind(self.transpose, grad)
