"""`checkpoint`: saves only a function's arguments, and computes it again in the backward.

torch's own cannot run under `torch.func.grad`, cannot recompute once a batched body has ended, and
recomputes without the mesh. Here all that the recomputation needs is an operand or is kept with
it: the mesh and its axes, the random state, autocast, function modes. In a batched body the markers
of the axes are operands (see `backends.vmap`), and at each vmap level, the mesh's or the user's,
the function to run again becomes `vmap` of itself; so it can be run again after the levels are
closed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch.backends.threads import PAUSES
from shardmap_torch.backends.vmap import markers_of, rebound
from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope
from shardmap_torch.contracts import call_given
from shardmap_torch.core.ambient import setting
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.closures import Closures
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.modes import autocast_state, with_autocast, with_function_modes
from shardmap_torch.core.torch_private.engine import (
    OpOverload,
    TorchDispatchMode,
    TransformType,
    forward_level,
    function_mode_stack,
    functorch,
    restore_vmap,
)
from shardmap_torch.core.tree import flatten, map_tensors, put, unflatten
from shardmap_torch.errors import TransformError, listing, show

Y = TypeVar("Y")
Run = Callable[..., tuple[Tensor, ...]]


def checkpoint(function: Callable[..., Y], /, *args: Any, **kwargs: Any) -> Y:
    """Calls `function` and saves only its arguments; backward calls it again.

    Works inside a body on every mesh and outside of any, under autograd and `torch.func`
    transforms, also when backward runs after the body has ended or on another thread. Collectives
    of the function are sent once more in backward. Random draws, autocast and function modes are
    those of the first call; forward mode and second derivatives recompute as well.

    Tensors that the function closes over are treated as arguments where they can be found: in the
    closures of Python functions and of functions that these close over. Tensors in modules and
    other objects, or in globals, cannot get a gradient.

    In code that torch.compile compiles, what is saved is the compiler's choice: its own budget,
    `torch._functorch.config.activation_memory_budget`, says how much.

    Shape and types: those of `function`. Backward: that of `function`, after running it again;
    memory between the two: the arguments.

    Args:
        function: takes and returns pytrees of tensors and other values. It must compute the same
            when it is called again.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Raises:
        TransformError: in backward, if a hidden tensor needs a gradient, or the function computed
            something else the second time.

    Source: `jax.checkpoint`, `torch.utils.checkpoint.checkpoint`; Chen et al. 2016, "Training Deep
    Nets with Sublinear Memory Cost".

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, checkpoint, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> layer = lambda x, w: all_reduce(torch.tanh(x * w).sum(), "tp", dst=I)
        >>> @shard_map(mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P())
        ... def loss(x, w):
        ...     return checkpoint(layer, x, w)
        >>> torch.func.grad(loss)(torch.zeros(2), torch.ones(2))
        tensor([1., 1.])
    """
    if not callable(function):
        raise TransformError(f"checkpoint takes a function, not {show(function)}.")
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), function.keywords | kwargs
        function = function.func
    if torch.compiler.is_dynamo_compiling():
        # The compiler decides what to save of its whole graph, and would merge what is computed
        # twice in it.
        _forked(function)
        return function(*args, **kwargs)
    closures = Closures(function)
    leaves, structure = flatten((closures.values(), args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(can_receive_gradient(x) for x in tensors):
        plain: Y = call_given(function, args, kwargs, TransformError, "checkpoint")
        return plain
    scope = _forked(function)
    region = _Region(closures, leaves, structure, scope)
    outputs: tuple[Tensor, ...] = _apply(region, region.run, *markers_of(scope), *tensors)
    region.results = _Results()  # the graph has them, and frees them in the backward
    result: Y = region.rebuild(outputs)
    return result


def save_results(
    function: Callable[..., Y], operators: Mapping[OpOverload, int]
) -> Callable[..., Y]:
    """Returns `function`, of which a `checkpoint` around it saves what some operators compute.

    The backward takes these results in place of computing them again, and computes all others: it
    is selective activation checkpointing. Outside of a checkpoint, under torch.compile, under
    forward mode and where ranks are simulated as one batch everything is computed again.

    Shape and types: as `function`. Backward: as that of `checkpoint`; memory between the two: its
    arguments and the results.

    Args:
        function: is called in a function that `checkpoint` runs, as by `nn.fsdp_layers`. Within
            another such function that one decides what is saved.
        operators: ATen operators, and of each the number n of which every n-th call is saved, the
            first one included: `{torch.ops.aten.mm.default: 2}` saves every second matmul.

    Raises:
        TransformError: in backward, if the function calls an operator with other shapes.

    Source: `torch.utils.checkpoint.create_selective_checkpoint_contexts`; the policy "op" of
    torchtitan.

    Example:
        >>> import torch
        >>> from shardmap_torch import checkpoint, save_results
        >>> layer = save_results(lambda x, w: torch.tanh(x @ w), {torch.ops.aten.mm.default: 1})
        >>> x, w = torch.zeros(1, 1), torch.ones(1, 1, requires_grad=True)
        >>> checkpoint(layer, x + 1, w).backward()
        >>> w.grad
        tensor([[0.4200]])
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Y:
        results = None if torch.compiler.is_dynamo_compiling() else _RESULTS.get()
        with nullcontext() if results is None else results.saving(operators):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class _Result:
    """Tensors that an operator has computed, how often they were written, and operands' shapes."""

    value: Any
    versions: list[int]
    shapes: list[torch.Size]


_Key = tuple[int, OpOverload, int]
"""Number of the call of a function that saves, operator, and number of its call in that."""


class _Results:
    """The results that a region saves."""

    def __init__(self) -> None:
        self.of: dict[_Key, _Result] = {}
        self.is_complete = False
        self._num_calls = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Records or reads them; does neither where tangents are computed by the same operators."""
        self._num_calls = 0
        with setting(_RESULTS, self if forward_level() < 0 else None):
            yield

    @contextmanager
    def saving(self, operators: Mapping[OpOverload, int]) -> Iterator[None]:
        """Saves results of a function, or reads them; functions within it leave that to it."""
        self._num_calls += 1
        with setting(_RESULTS, None), _Saving(self, self._num_calls, operators):
            yield

    def end(self) -> None:
        """Ends the first run; what was written into after it was computed is not saved."""
        self.is_complete = True
        written = [key for key, each in self.of.items() if _versions(each.value) != each.versions]
        for key in written:
            del self.of[key]

    def tensors(self) -> list[Tensor]:
        """Returns what autograd saves."""
        return [x for each in self.of.values() for x in _tensors(each.value)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "_Results":
        """Returns results that have what autograd has saved."""
        saved, results = iter(tensors), _Results()
        results.is_complete = True
        for key, each in self.of.items():
            value = map_tensors(lambda _: next(saved), each.value)
            results.of[key] = _Result(value, [], each.shapes)
        return results

    def without_tensors(self) -> "_Results":
        """Returns what `with_tensors` needs."""
        results = _Results()
        for key, each in self.of.items():
            results.of[key] = _Result(map_tensors(_empty, each.value), [], each.shapes)
        return results


_RESULTS: Final[ContextVar[_Results | None]] = ContextVar("results", default=None)
"""Those of the region that runs."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _versions(tree: Any) -> list[int]:
    return [0 if x.is_inference() else x._version for x in _tensors(tree)]


def _empty(x: Tensor) -> Tensor:
    return torch.empty(0, device="meta")


class _Saving(TorchDispatchMode):
    """Dispatch mode that records results in a first run, and returns them in later ones."""

    def __init__(self, results: _Results, number: int, operators: Mapping[OpOverload, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._results, self._number, self._operators = results, number, operators
        self._calls: Counter[OpOverload] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        every = self._operators.get(func)
        if every is None:
            return func(*args, **kwargs or {})
        key = self._number, func, self._calls[func]
        shapes = [x.shape for x in _tensors((args, kwargs))]
        self._calls[func] += 1
        if self._results.is_complete:
            saved = self._results.of.get(key)
            return func(*args, **kwargs or {}) if saved is None else _read(key, saved, shapes)
        value = func(*args, **kwargs or {})
        if key[-1] % every == 0:
            self._results.of[key] = _Result(value, _versions(value), shapes)
        return value


def _read(key: _Key, saved: _Result, shapes: list[torch.Size]) -> Any:
    if shapes != saved.shapes:
        first, again = ([list(each) for each in every] for every in (saved.shapes, shapes))
        raise TransformError(
            f"checkpoint: call {key[2]} of {key[1]} had operands of shapes {first} at first and "
            f"{again} when the function was run again; it must compute the same."
        )
    return map_tensors(Tensor.detach, saved.value)


def _forked(function: Callable[..., Any]) -> Scope | None:
    """Reports that a function may run again, and returns the scope that it runs in."""
    scope = current_scope()
    if scope is None:
        return None
    return scope.fork(("checkpoint", getattr(function, "__name__", type(function).__name__)))


class _Region:
    """One call of `checkpoint`: the state that its first run and its recomputations share."""

    def __init__(
        self, closures: Closures, leaves: list[Any], structure: Any, scope: Scope | None
    ) -> None:
        self.closures = closures
        function = closures.function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        # The tensors are operands: kept here as well, they would never be freed.
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.structure = structure
        self.scope = scope
        self.autocast, self.modes = autocast_state(), function_mode_stack()
        self.draws = _Draws({leaf.device for leaf in leaves if isinstance(leaf, Tensor)})
        self.out_leaves: list[Any] = []
        self.out_places: list[int] = []
        self.out_structure: Any = None
        self.results = _Results()

    def run(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Calls the function on markers and tensors, in the scope of the first call."""
        num_markers = len(operands) - len(self.places)
        leaves = put(self.leaves, self.places, operands[num_markers:])
        captured, args, kwargs = unflatten(self.structure, leaves)
        with enter_scope(rebound(self.scope, operands[:num_markers])):
            out = self.closures.put(captured)(*args, **kwargs)
        found, self.out_structure = flatten(out)
        self.out_places = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor)]
        self.out_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
        return tuple(found[i] for i in self.out_places)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The result as the function returned it."""
        return unflatten(self.out_structure, put(self.out_leaves, self.out_places, tensors))

    def first(self, run: Run, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the function for its value, without saving anything for autograd."""
        # torch drops the modes in Functions under its transforms.
        with with_function_modes(self.modes), self.draws.recorded():
            with self._seen_first(), self._saving():
                outputs = run(*operands)
        self.results.end()
        own = {id(x) for x in operands}
        return tuple(y.view_as(y) if id(y) in own else y for y in outputs)

    def _seen_first(self) -> AbstractContextManager[object]:
        if self.scope is None or not is_checker(self.scope.backend):
            return nullcontext()
        return self.scope.backend.first_run()

    def _saving(self) -> AbstractContextManager[None]:
        is_checked = self.scope is not None and is_checker(self.scope.backend)
        return nullcontext() if is_checked else self.results.used()

    def again(self, run: Run, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the function again with the autocast, modes and random states of the first run."""
        with with_autocast(self.autocast), with_function_modes(self.modes):
            with self.draws.replayed(), self._following():
                return run(*operands)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Makes the monitor compare this context with the recomputation that the checker saw."""
        if self.scope is None:
            yield
            return
        first, self.scope = self.scope, self.scope.rerun("again")
        backend = first.backend
        try:
            with backend.seeing() if is_checker(backend) else nullcontext():
                yield
            self.scope.end()
        finally:
            self.scope = first

    def pull_back(
        self,
        run: Run,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Runs the function again with a graph, and pulls the cotangents back through it."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # An alias of its own for each operand: only its use as this operand counts, and second
            # derivatives find their way on from it.
            operands = [x.view_as(x) if x.requires_grad else x for x in saved]
            if any(need and not _is_tracked(x) for need, x in zip(needed, operands, strict=True)):
                return self._pull_back_late(run, saved, grads, needed)
            outputs = self._select(self.again(run, operands), grads)
        pairs = [(y, g) for y, g in outputs if y.requires_grad]
        differentiable = [x for x in operands if x.requires_grad]
        self._reject_closures([y for y, _ in pairs], differentiable)
        if not pairs or not differentiable:
            return [None] * len(operands)
        ys, gs = zip(*pairs, strict=True)
        gradients = iter(
            torch.autograd.grad(
                ys, differentiable, gs, create_graph=create_graph, allow_unused=True
            )
        )
        return [next(gradients) if x.requires_grad else None for x in operands]

    def _pull_back_late(
        self,
        run: Run,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Pulls back after the `torch.func.vjp` around the forward has ended.

        Nothing requires a gradient then, and inside other transforms nothing can be made to.
        """
        moving = [i for i, need in enumerate(needed) if need]

        def along(*primals: Tensor) -> Tensor:
            """Returns a number whose gradients are those that `pull_back` has to return."""
            outputs = self.again(run, put(saved, moving, primals))
            return sum((_inner(y, g) for y, g in self._select(outputs, grads)), torch.zeros(()))

        gradients = torch.func.grad(along, argnums=tuple(range(len(moving))))
        return put([None] * len(saved), moving, gradients(*[saved[i] for i in moving]))

    def _select(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns the outputs that have a cotangent, each with it."""
        if len(outputs) != len(grads):
            raise TransformError(
                f"checkpoint: {self.name} returned {len(grads)} tensors at first and "
                f"{len(outputs)} when it was run again; it must compute the same."
            )
        return [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]

    def push_forward(
        self, run: Run, saved: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Runs it again on the tangents as well."""
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def along(*primals: Tensor) -> tuple[Tensor, ...]:
            return self.again(run, put(saved, moving, primals))

        directions = tuple(tangent for tangent in tangents if tangent is not None)
        primals = tuple(saved[i] for i in moving)
        pushed: tuple[Tensor, ...] = torch.func.jvp(along, primals, directions)[1]
        return pushed

    def _reject_closures(self, outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
        """Rejects leaves of the new graph that are not operands: they were closed over."""
        closed = [
            f"a tensor of shape {list(node.variable.shape)}"  # type: ignore[attr-defined]
            for node in graph_nodes((y.grad_fn for y in outputs), (x.grad_fn for x in operands))
            if node.name() == "torch::autograd::AccumulateGrad"
        ]
        if closed:
            raise TransformError(_closed_over(self.name, sorted(closed)))


def _is_tracked(x: Tensor) -> bool:
    """Returns whether the innermost level differentiates it.

    Under a level of vmap a level further out does not serve: it adds up what the ranks have.
    """
    top = functorch.peek_interpreter_stack()
    if top is None:
        return x.requires_grad
    tracked = top.key() == TransformType.Grad and functorch.is_gradtrackingtensor(x)
    return tracked and functorch.maybe_get_level(x) == top.level() and x.requires_grad


def _inner(y: Tensor, grad: Tensor) -> Tensor:
    """Returns a real number whose gradient is that of `y` pulled back from `grad`."""
    product = y * grad.conj()
    return (product.real if product.is_complex() else product).sum()


class _Checkpoint(torch.autograd.Function):
    """Autograd Function of a region, under every transform."""

    @staticmethod
    def forward(region: _Region, run: Run, *operands: Tensor) -> tuple[Tensor, ...]:
        return region.first(run, operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        region, run, *operands = inputs
        ctx.set_materialize_grads(False)
        ctx.region, ctx.run, ctx.num_operands = region, run, len(operands)
        ctx.results = region.results.without_tensors()
        ctx.save_for_backward(*operands, *region.results.tensors())
        ctx.save_for_forward(*operands)
        ctx.mark_non_differentiable(
            *[y for y in output if not (y.is_floating_point() or y.is_complex())]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, saved = ctx.needs_input_grad[2:], ctx.saved_tensors
        operands, results = saved[: ctx.num_operands], saved[ctx.num_operands :]
        with ctx.results.with_tensors(results).used():
            return None, None, *ctx.region.pull_back(ctx.run, operands, grads, needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        pushed: tuple[Tensor, ...] = ctx.region.push_forward(
            ctx.run, ctx.saved_tensors, tangents[2:]
        )
        return pushed

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], region: _Region, run: Run, *operands: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        level = _Level(run, in_dims[2:], info.batch_size, info.randomness)
        outputs: tuple[Tensor, ...] = _apply(region, level, *operands)
        return outputs, level.out_dims


_apply: Callable[..., Any] = _Checkpoint.apply


class _Level:
    """`vmap` of a function that runs again: opens a level like that of the first run."""

    def __init__(
        self, run: Run, in_dims: tuple[int | None, ...], batch_size: int, randomness: str
    ) -> None:
        self.run, self.in_dims = run, in_dims
        self.batch_size, self.randomness = batch_size, randomness
        self.out_dims: tuple[int | None, ...] = ()

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        mapped = restore_vmap(self.run, self.in_dims, self.batch_size, self.randomness)
        outputs, out_dims = mapped(*operands)
        self.out_dims = tuple(out_dims)
        return tuple(outputs)


# ----------------------------------------------------------------------------- closed over


def _closed_over(name: str, what: Sequence[str]) -> str:
    head = (
        f"checkpoint: {name} uses tensors that need a gradient and are not its arguments; pass "
        "them (those of a module by torch.func.functional_call):"
    )
    return listing(head, what)


# -------------------------------------------------------------------- random draws, autocast


class _Draws:
    """The states of the random generators in a region: one at its start, one after each pause.

    The ranks of a simulated mesh that are threads share the generators, and in each collective
    others may draw. A replay therefore restores the outer states whenever it pauses.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        self._devices = sorted((d for d in devices if d.type == "cuda"), key=str)
        self._states: list[list[Tensor]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the states of a first run."""
        self._states = [self._get()]
        with PAUSES.holding((_nothing, lambda: self._states.append(self._get()))):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Replays the recorded states, and restores the outer states afterwards."""
        states = iter(self._states)
        outside, own = self._get(), next(states)

        def leave() -> None:
            nonlocal own
            own = self._get()
            self._set(outside)

        def back() -> None:
            nonlocal outside
            outside = self._get()
            self._set(next(states, own))

        self._set(own)
        try:
            with PAUSES.holding((leave, back)):
                yield
        finally:
            self._set(outside)

    def _get(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


def _nothing() -> None:
    pass
