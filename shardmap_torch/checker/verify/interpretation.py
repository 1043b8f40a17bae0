"""One interpretation of one path: inputs enter as their specs say, and the body runs on them.

The ranks' program is interpreted so, and the program on one device that it is compared with.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Result, run_body
from shardmap_torch.checker.calls.fake_results import empty
from shardmap_torch.checker.interpreter.collectives import AbstractBackend
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.interpreter.modes import interpreting
from shardmap_torch.checker.ir.paths import Branches
from shardmap_torch.checker.ir.rejections import rejection_of
from shardmap_torch.checker.rules.infer import is_real
from shardmap_torch.checker.verify.boundary_types import enters_as, local_shape
from shardmap_torch.checker.verify.nested import NestedBoundaries
from shardmap_torch.checker.verify.outputs import Uncommitted
from shardmap_torch.checker.verify.record import CheckMonitor
from shardmap_torch.checker.verify.request import Request
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError


class _Like(NamedTuple):
    """The metadata kept of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


class Interpretation:
    """One interpretation of one path through a body.

    Attributes:
        interpreter: types its operations.
        backend: types its collectives.
        uncommitted: the type of its results that are K.
        inner: the boundaries of functions that are mapped in it.
    """

    def __init__(self, request: Request, branches: Branches) -> None:
        """Starts one; its operations are seen from `entered` on."""
        call, env = request.call, request.sizes.env
        self._request, self._branches = request, branches
        self.interpreter = Interpreter(call.name, call.mesh, branches, request.repair, env)
        self.interpreter.body = call.function  # for messages
        self.uncommitted = Uncommitted(self.interpreter, request.reading.results)
        self.inner = NestedBoundaries(self.interpreter, self.uncommitted)
        self.backend = AbstractBackend(self.interpreter, request.repair, request.casts)

    @contextmanager
    def entered(self) -> Iterator[Mapping[int, Tensor]]:
        """Yields the inputs as the body gets them, by position."""
        interpreter = self.interpreter
        likes = self._likes()  # outside of the modes: arguments may be those of a transform
        grad = any(like.grad for like in likes.values()) or torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), interpreting(interpreter):
            with DisableTorchFunction():
                entered = {
                    position: self._enter(position, like) for position, like in likes.items()
                }
            try:
                yield entered
            except ShardTypeError as error:
                rejection_of(error).takes_gradients |= interpreter.traits.takes_gradients
                raise

    def _likes(self) -> Mapping[int, _Like]:
        call, likes = self._request.call, {}
        for at in call.crossing:
            leaf, shape = call.leaves[at], self._request.sizes.of(call.leaves, at)
            grad = can_receive_gradient(leaf) and is_real(leaf.dtype)
            likes[at] = _Like(shape, leaf.dtype, leaf.device, grad)
        return likes

    def _enter(self, position: int, like: _Like) -> Tensor:
        """Makes a fake shard of an input, read-only, with a type along each axis."""
        call, interpreter = self._request.call, self.interpreter
        spec, path = call.match.spec(position), call.match.paths[position]
        shape = local_shape(like.shape, spec, call.mesh)
        with interpreter.paused():
            fake = empty(interpreter.fake, shape, like.dtype, like.device)
        types = tuple(enters_as(spec, axis, call.mapped) for axis in interpreter.axes)
        storage_type = interpreter.bring(
            fake, types, f"input {path} ({spec!r})", f"is the input {path}"
        )
        storage_type.leaf = position
        interpreter.observer.on_argument(fake, spec)
        with interpreter.paused():
            return fake.requires_grad_(like.grad)

    def run_body(self, inputs: Mapping[int, Tensor]) -> Result:
        """Runs the body, and records what runs of it have to do too."""
        monitor = CheckMonitor(self.interpreter, self._request.start, self.inner)
        call = replace(self._request.call, follow=lambda: monitor)
        result = run_body(call, self.backend, list(inputs.values()))
        self._branches.require()
        return result
