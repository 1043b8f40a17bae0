"""Runs a call, and its backward, with one thread per rank of a simulated mesh.

Autograd outside sees one Function. Inside, every rank has a graph of its own, as every process
would have; in the backward each rank pulls its cotangents back through its own graph, and meets the
others in the collectives that autograd runs there.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.threads import Rendezvous, ThreadBackend, show_tensor
from shardmap_torch.boundary.call import Call, Result, Untouched, run_body
from shardmap_torch.boundary.matching import crosses
from shardmap_torch.boundary.shards import global_of, locals_of
from shardmap_torch.checker.guards.state import State
from shardmap_torch.collectives.autograd import TypedFunction
from shardmap_torch.collectives.scope import Scope, backward_in
from shardmap_torch.control.messages import by_ranks
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.functorch import can_receive_gradient, reject_batched_gradients
from shardmap_torch.core.storage import unviewed
from shardmap_torch.core.torch_private.engine import functorch
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import (
    CollectiveMismatchError,
    MeshError,
    ShardTypeError,
    TransformError,
    listing,
)
from shardmap_torch.ops.asking import ANSWERING
from shardmap_torch.run.drawing import CallSeed, Drawing
from shardmap_torch.spec import P

MAX_THREADS: Final = 2_048
"""Maximal number of ranks that run as threads of one process."""


def run(call: Call) -> Tree:
    """Runs all ranks and joins their results.

    Raises:
        MeshError: there are too many for threads.
    """
    if call.mesh.size > MAX_THREADS:
        raise MeshError(
            f"{call.name} runs as one thread a rank, of which there may be {MAX_THREADS:,}, on "
            f"the {call.mesh}. Check it on an abstract mesh, or simulate fewer ranks."
        )
    tensors = [call.leaves[i] for i in call.crossing]
    ranks = _Ranks(call, [can_receive_gradient(x) for x in tensors])
    if functorch.peek_interpreter_stack() is None:
        # Closed-over tensors are known only after the run, and are operands of the Function too.
        ranks.forward(tensors)
        tensors += ranks.find_closures()
    else:
        _reject_wrapped(call)
    outputs = _RanksFunction.apply(ranks, *tensors)
    ranks.outputs = None  # they refer to the Function, which refers to `ranks`: a cycle
    result = ranks.results[0]
    return result.rebuild(outputs)


def _reject_wrapped(call: Call) -> None:
    """Rejects closures over a transform's tensors: on other threads their gradient is lost."""
    wrapped = functorch.is_functorch_wrapped_tensor
    if any(map(wrapped, State(call.function).tensors)):
        raise TransformError(
            f"{call.name}: the body closes over a tensor that a torch.func transform outside "
            "differentiates or batches. Pass it as an argument."
        )


def _leaf(x: Tensor) -> Tensor:
    """A tensor without history that can require gradients, as one of inference mode cannot."""
    detached = x.detach()
    is_readonly = x.is_inference() and not torch.is_inference_mode_enabled()
    return detached.clone() if is_readonly else detached


class _Ranks:
    """All ranks of one call: their local inputs, results and graphs."""

    def __init__(self, call: Call, differentiable: list[bool]) -> None:
        self.call = call
        self.specs = [call.match.spec(i) for i in call.crossing]
        self.differentiable = differentiable
        self.backends: list[ThreadBackend] = []
        self.leaves: list[list[Tensor]] = []
        self.results: list[Result] = []
        self.joined: tuple[int, ...] = ()
        self.outputs: tuple[Tensor, ...] | None = None
        self.closures: list[Tensor] = []
        self.seed = CallSeed()

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mesh = self.call.mesh
        shards = [locals_of(_leaf(x), s, mesh) for x, s in zip(tensors, self.specs, strict=True)]
        self.leaves = [
            [
                shard[rank].requires_grad_() if needs_grad else shard[rank]
                for shard, needs_grad in zip(shards, self.differentiable, strict=True)
            ]
            for rank in range(mesh.size)
        ]
        rendezvous = Rendezvous(mesh)
        self.backends = [ThreadBackend(mesh, rank, rendezvous) for rank in range(mesh.size)]
        watch = Untouched(self.call, self.leaves[0])
        ANSWERING.begin()
        self.results = rendezvous.run(self._body)
        watch.check()
        self._reject_different()
        self.joined = self.results[0].match.crossing
        self._reject_unequal()
        self.outputs = tuple(
            unviewed(
                global_of([value.detach() for value in self._values(i)], self._out_spec(i), mesh)
            )
            for i in self.joined
        )
        return self.outputs

    def _body(self, rank: int) -> Result:
        # Gradients are computed inside whenever one can be asked for outside.
        with torch.set_grad_enabled(any(self.differentiable) or torch.is_grad_enabled()):
            return run_body(self.call, self.backends[rank], self.leaves[rank], self._drawing(rank))

    def _drawing(self, rank: int) -> Drawing | None:
        if not self.call.draws:
            return None
        return Drawing(self.call.mesh, self.backends[rank].place, self.seed.get)

    def _values(self, position: int) -> list[Tensor]:
        return [result.leaves[position] for result in self.results]

    def _out_spec(self, position: int) -> P:
        return self.results[0].match.spec(position)

    def _reject_different(self) -> None:
        """Rejects results whose structures or shapes differ between ranks."""
        shown = [_describe(result) for result in self.results]
        if len(set(shown)) > 1:
            head = f"{self.call.name}: the ranks returned different results:"
            raise CollectiveMismatchError(listing(head, list(by_ranks(dict(enumerate(shown))))))

    def _reject_unequal(self) -> None:
        """Rejects results that differ, beyond rounding, over an axis that their spec has equal."""
        mesh, problems = self.call.mesh, []
        for position in self.joined:
            spec, path = self._out_spec(position), self.results[0].match.paths[position]
            values = [value.detach() for value in self._values(position)]
            for axis in self.call.mapped:
                if axis in spec.mentioned or axis in spec.partial:
                    continue
                firsts = [
                    mesh.rank_at({**mesh.coordinates(rank), axis: 0}) for rank in range(mesh.size)
                ]
                if not all(
                    close(values[f], value) for f, value in zip(firsts, values, strict=True)
                ):
                    problems.append(unequal(path, spec, axis))
        if problems:
            head = f"{self.call.name}: the result does not match out_specs:"
            raise ShardTypeError(listing(head, problems))

    def leading_in(self) -> list[bool]:
        """Returns, for each joined output, whether its value requires a gradient on any rank."""
        return [any(value.requires_grad for value in self._values(i)) for i in self.joined]

    def find_closures(self) -> list[Tensor]:
        """Finds the leaves of the ranks' graphs that come from outside, and are no inputs.

        In a program that has been checked all ranks take the same steps, so that a leaf which one
        rank alone has met is one that it has made.
        """
        own = {id(leaf) for leaves in self.leaves for leaf in leaves}
        found: dict[int, Tensor] = {}
        met = Counter[int]()
        for result in self.results:
            nodes = graph_nodes([result.leaves[i].grad_fn for i in self.joined])
            leaves = [getattr(node, "variable", None) for node in nodes]
            closures = {id(x): x for x in leaves if isinstance(x, Tensor) and id(x) not in own}
            found.update(closures)
            met.update(closures.keys())
        is_alike = self.call.follow is not None and len(self.results) > 1
        self.closures = [x for key, x in found.items() if met[key] > 1 or not is_alike]
        return self.closures

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        mesh = self.call.mesh
        present = [(i, g) for i, g in zip(self.joined, grads, strict=True) if g is not None]
        # The cotangent of a partial sum is the same for every addend.
        cotangents = [(i, locals_of(g, P(*self._out_spec(i).entries), mesh)) for i, g in present]
        differentiable = [i for i, yes in enumerate(self.differentiable) if yes]
        rendezvous = Rendezvous(mesh)
        for backend in self.backends:
            backend.rendezvous = rendezvous

        def pull(rank: int) -> tuple[Tensor | None, ...]:
            pairs = [(self.results[rank].leaves[i], shards[rank]) for i, shards in cotangents]
            pairs = [(y, g) for y, g in pairs if y.requires_grad]
            into = [self.leaves[rank][i] for i in differentiable] + self.closures
            if not pairs or not into:
                return (None,) * len(into)
            ys, gs = zip(*pairs, strict=True)
            with backward_in(Scope(self.backends[rank], self.call.bound)):
                return torch.autograd.grad(ys, into, gs, retain_graph=True, allow_unused=True)

        with self.call.separate() as wrap:
            pulled = rendezvous.run(wrap(pull))
        gradients: list[Tensor | None] = [None] * (len(self.specs) + len(self.closures))
        for k, i in enumerate(differentiable):
            gradients[i] = self._global_gradient([grads[k] for grads in pulled], self.specs[i])
        for k in range(len(self.closures)):
            gradients[len(self.specs) + k] = self._closure_gradient(
                [grads[len(differentiable) + k] for grads in pulled]
            )
        return gradients

    def _global_gradient(self, grads: Sequence[Tensor | None], spec: P) -> Tensor | None:
        shaped = next((g for g in grads if g is not None), None)
        if shaped is None:
            return None
        filled = [torch.zeros_like(shaped) if g is None else g for g in grads]
        # Partial in, replicate out: the cotangent is equal over the axes that no dim mentions.
        return global_of(filled, P(*spec.entries), self.call.mesh)

    def _closure_gradient(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        first = grads[0]
        agree = all(
            (g is None and first is None)
            or (g is not None and first is not None and close(g, first))
            for g in grads
        )
        if not agree:
            raise ShardTypeError(
                f"{self.call.name}: a closed-over tensor gets a different gradient on each rank, "
                "and outside there is one. Pass the tensor as an argument whose spec names the "
                "axes in replicate=."
            )
        return first


def _describe(result: Result) -> str:
    """Formats it as `returned out['x'] float32[4], out['n'] int`."""
    shown = [
        f"{leaf.path} {show_tensor(leaf.value) if crosses(leaf) else type(leaf.value).__name__}"
        for leaf in result.outputs
    ]
    return f"returned {', '.join(shown) or 'nothing'}"


def unequal(path: str, spec: P, axis: str) -> str:
    """Formats the error of an output that varies over an axis that its spec does not mention."""
    return (
        f"{path}: {spec!r} promises one value on all ranks of {axis!r}, but the result varies over "
        f"it; reduce or gather it over {axis!r}, or name {axis!r} in the spec"
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Compares up to rounding: ranks that repeat one computation may round differently."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a is b or a.is_meta:
        return True
    is_rounded = a.is_floating_point() or a.is_complex()
    tolerance = torch.finfo(a.dtype).eps ** 0.5 if is_rounded else 0.0
    if a.dtype is torch.complex32 or (is_rounded and a.dtype.itemsize == 1):  # torch knows little
        a, b = (x.to(torch.complex64 if a.is_complex() else torch.float32) for x in (a, b))
    if torch.equal(a, b):
        return True
    if not is_rounded:
        return False
    scale = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class _FirstOrder(TypedFunction):
    """Autograd Function that has first-order reverse mode only."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise TransformError(_FIRST_ORDER)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise TransformError(_FIRST_ORDER)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        raise TransformError(_FIRST_ORDER)


class _RanksFunction(_FirstOrder):
    """Autograd Function of one call of all ranks."""

    @staticmethod
    def forward(ranks: _Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        return ranks.forward(tensors) if ranks.outputs is None else ranks.outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.ranks, *tensors = inputs
        # Others may be written after the call, as running statistics.
        kept = [*ctx.ranks.differentiable, *[True] * len(ctx.ranks.closures)]
        ctx.save_for_backward(*compress(tensors, kept))
        ctx.mark_non_differentiable(
            *[y for y, leads in zip(output, ctx.ranks.leading_in(), strict=True) if not leads]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reject_batched_gradients()
        return None, *_RanksBackward.apply(ctx.ranks, len(grads), *grads, *ctx.saved_tensors)


class _RanksBackward(_FirstOrder):
    """Backward of `_RanksFunction`: a Function too, so that functorch unwraps its operands.

    It has the inputs as operands so that a second derivative reaches it, and fails, rather than
    being silently zero.
    """

    @staticmethod
    def forward(ranks: _Ranks, num_grads: int, *operands: Tensor | None) -> tuple[Any, ...]:
        return tuple(ranks.backward(operands[:num_grads]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)


_FIRST_ORDER: Final = (
    "Simulated ranks that run as threads give first-order reverse gradients only. For forward "
    "mode, vmap from outside and higher orders check the function, on a mesh of make_mesh(..., "
    'simulate="vmap"), which says why a body cannot run as one batched program.'
)
