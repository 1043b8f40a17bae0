"""`grad`, `value_and_grad` and `vjp`: gradients at autograd's cost where ranks run eager code.

`torch.func.grad` opens a functorch level, under which an autograd Function, as each collective is,
costs about ten times as much. Where no level is active, and no second derivative can follow, plain
autograd on detached leaves gives the same: that is how a train step runs on a process group. In a
batched body it differentiates the program of all ranks; see `batched`. All else (the checker,
nested transforms, inputs that are differentiated from outside) goes through `torch.func`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import optree
import torch
from torch import Tensor

from shardmap_torch.autodiff.batched import ranks_of
from shardmap_torch.backends.vmap import markers_of
from shardmap_torch.checker.queries import adjoint_of_ranks, loss_by_repair
from shardmap_torch.collectives.autograd import is_transformed, reject_second_derivative
from shardmap_torch.collectives.protocol import Note, is_checker
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.contracts import call_given
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.caching import constant
from shardmap_torch.core.functorch import can_receive_gradient, is_smooth
from shardmap_torch.core.tree import NAMESPACE, Structure, Tree, flatten, put, unflatten
from shardmap_torch.errors import TransformError, listing, show_shape

A = ParamSpec("A")
X = TypeVar("X")
Y = TypeVar("Y")
Aux = TypeVar("Aux")


@overload
def grad(
    f: Callable[Concatenate[X, A], Tensor],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
) -> Callable[..., X]: ...


@overload
def grad(
    f: Callable[Concatenate[X, A], tuple[Tensor, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
) -> Callable[..., tuple[X, Aux]]: ...


@overload
def grad(
    f: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool = False
) -> Callable[..., Any]: ...


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function that computes the gradient of `f`; cheaper than `torch.func.grad` in bodies.

    As `value_and_grad` without the value: the gradient, or `(gradient, aux)` with `has_aux`.

    Args:
        f: returns a real floating scalar, with `has_aux` a pair of it and any pytree.
        argnums: the positional arguments to differentiate with respect to; any pytrees of
            floating or complex tensors.
        has_aux: whether `f` returns more than the scalar.

    Raises:
        TransformError: as `value_and_grad`.

    Source: `jax.grad`; `torch.func.grad`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, R, all_reduce, convert, grad, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> def loss(w, x):
        ...     return all_reduce((convert(w, "dp", src=I, dst=R) * x).sum(), "dp", dst=I)
        >>> step = shard_map(grad(loss), mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
        >>> step(torch.tensor(1.0), torch.arange(4.0))
        tensor(6.)
    """
    both = value_and_grad(f, argnums, has_aux)

    @wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


@overload
def value_and_grad(
    f: Callable[Concatenate[X, A], Y], argnums: Literal[0] = 0, has_aux: bool = False
) -> Callable[..., tuple[Y, X]]: ...


@overload
def value_and_grad(
    f: Callable[..., Y], argnums: int | Sequence[int], has_aux: bool = False
) -> Callable[..., tuple[Y, Any]]: ...


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function that computes `f` and its gradient, at autograd's cost where that is safe.

    The result returns `(value, gradient)`, or `((value, aux), gradient)` with `has_aux`. The
    gradient has the structure of the argument; for a sequence of `argnums` it is a tuple. An
    argument that `f` does not use has the gradient zero. In a body that runs as plain eager code,
    on a process group or as simulated ranks, it is computed by `torch.autograd.grad` on detached
    leaves, and its graph is freed with the call. Under a transform, in a batched body, or where a
    tensor is differentiated from outside, by `torch.func.grad_and_value`: nested derivatives are
    those of `torch.func`.

    Shape: the gradient's is the argument's. Types: those of a gradient that is taken in the body:
    of an invariant argument I, of a replicate one Partial, of a varying one V. Sends what the
    collectives of `f` and their transposes send.

    Args:
        f: returns a real floating scalar, with `has_aux` a pair of it and any pytree.
        argnums: the positional arguments to differentiate with respect to; any pytrees of
            floating or complex tensors.
        has_aux: whether `f` returns more than the scalar.

    Raises:
        TransformError: `argnums` names no argument; a leaf to differentiate with respect to is no
            floating tensor; `f` does not return a real floating scalar.

    Source: `jax.value_and_grad`; `torch.func.grad_and_value`.

    Example:
        >>> import torch
        >>> from shardmap_torch import value_and_grad
        >>> loss = lambda params, x: (params["w"] * x + params["b"]).square().sum()
        >>> params = {"w": torch.tensor(2.0), "b": torch.tensor(1.0)}
        >>> value_and_grad(loss)(params, torch.tensor([1.0, 2.0]))
        (tensor(34.), {'w': tensor(26.), 'b': tensor(16.)})
    """

    @wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        call = _Call(f, args, kwargs, _read_argnums(f, argnums, args), has_aux, scalar=True)
        outs, aux, gradients = _gradients(call)
        value = call.result(outs, aux)
        return value, call.arguments(gradients, single=isinstance(argnums, int))

    return differentiated


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Computes `f(*primals)`, and makes the function that pulls cotangents back through it.

    Returns `(out, pull_back)`, or `(out, pull_back, aux)` with `has_aux`. `pull_back(cotangents)`
    takes what has the structure of `out`, and returns a tuple with a gradient for each primal; it
    may be called more than once. The graph lives as long as `pull_back`. What runs is chosen as in
    `value_and_grad`.

    Shape: the gradients' are the primals'. Types: those of gradients that are taken in the body.
    Sends what the collectives of `f` send, and `pull_back` what their transposes send.

    Args:
        f: returns a pytree of tensors, with `has_aux` a pair of it and any pytree.
        *primals: pytrees of floating or complex tensors.
        has_aux: whether `f` returns more than what is differentiated.

    Raises:
        TransformError: a leaf of the primals is no floating tensor; `f` returns a leaf that is no
            tensor; cotangents of another structure than the result.

    Source: `jax.vjp`; `torch.func.vjp`.

    Example:
        >>> import torch
        >>> from shardmap_torch import vjp
        >>> out, pull_back = vjp(lambda x, y: x * y, torch.tensor(2.0), torch.tensor(3.0))
        >>> out, pull_back(torch.tensor(1.0))
        (tensor(6.), (tensor(3.), tensor(2.)))
    """
    call = _Call(f, primals, {}, tuple(range(len(primals))), has_aux, scalar=False)
    outs, aux, pull = _pulling_back(call)

    def pull_back(cotangents: Any) -> tuple[Any, ...]:
        gradients = pull(call.read_cotangents(cotangents))
        pulled: tuple[Any, ...] = call.arguments(gradients, single=False)
        return pulled

    result = call.result(outs, aux)
    return (result[0], pull_back, result[1]) if has_aux else (result, pull_back)


def _read_argnums(
    f: Callable[..., Any], argnums: int | Sequence[int], args: Sequence[Any]
) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    wrong = [at for at in numbers if not -len(args) <= at < len(args)]
    if wrong or not numbers:
        raise TransformError(
            f"grad of {_name(f)}: argnums={argnums!r} names no argument among the {len(args)} "
            "positional ones of this call."
        )
    positions = tuple(at % len(args) for at in numbers)
    if len(set(positions)) < len(positions):
        raise TransformError(f"grad of {_name(f)}: argnums={argnums!r} names an argument twice.")
    return positions


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)


@dataclass(eq=False)
class _Call:
    """One call of a function that is differentiated: its leaves, and what they are put into.

    Attributes:
        leaves: the tensors to differentiate with respect to.
        structure: puts them back into the arguments at `positions`.
        out_structure: that of the result of `f`, known once it has run.
        aux_leaves: leaves of its second result that are no tensors.
        aux_structure: of its second result.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...]
    has_aux: bool
    scalar: bool
    leaves: list[Tensor] = field(init=False)
    structure: Structure = field(init=False)
    out_structure: Any = None
    aux_leaves: list[Any] = field(default_factory=list)
    aux_structure: Any = None

    @property
    def verb(self) -> str:
        """Returns the name of the transform in errors."""
        return "grad" if self.scalar else "vjp"

    def __post_init__(self) -> None:
        moving = tuple(self.args[at] for at in self.positions)
        self.leaves, self.structure = flatten(moving)
        if not all(map(is_smooth, self.leaves)):
            raise TransformError(self._explain_leaves(moving))

    def run(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Calls `f`: the tensors of its result, and those of its second result."""
        args = put(self.args, self.positions, unflatten(self.structure, leaves))
        given = call_given(self.f, args, self.kwargs, TransformError, self.verb)
        out, aux = self._split(given)
        outs, self.out_structure = flatten(out)
        if self.scalar:
            self._require_scalar(out)
            outs = [loss_by_repair(out)]
        elif not all(isinstance(leaf, Tensor) for leaf in outs):
            names = sorted({type(leaf).__name__ for leaf in outs if not isinstance(leaf, Tensor)})
            raise TransformError(
                f"vjp of {_name(self.f)}: the result has leaves of type {', '.join(names)}; return "
                "tensors only, and the rest with has_aux=True."
            )
        found, self.aux_structure = flatten(aux)
        self.aux_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
        return outs, [leaf for leaf in found if isinstance(leaf, Tensor)]

    def _split(self, out: Any) -> tuple[Any, Any]:
        if not self.has_aux:
            return out, None
        if isinstance(out, tuple) and len(out) == 2:
            return out
        raise TransformError(
            f"{_name(self.f)} is differentiated with has_aux=True, so it must return a pair, the "
            f"result and the rest; it returned a {type(out).__name__}."
        )

    def _require_scalar(self, out: Any) -> None:
        if not isinstance(out, Tensor):
            what = f"a {type(out).__name__}"
        elif out.numel() == 1 and out.ndim == 0 and out.is_floating_point():
            return
        else:
            what = show_shape(out.dtype, out.shape)
        raise TransformError(
            f"{self.verb} of {_name(self.f)}: it must return a floating scalar, a tensor of shape "
            f"[], not {what}." + ("" if self.has_aux else " With has_aux=True it may return more.")
        )

    def result(self, outs: Sequence[Tensor], aux: Sequence[Tensor]) -> Any:
        """Rebuilds the function's result from these tensors."""
        out = unflatten(self.out_structure, outs)
        if not self.has_aux:
            return out
        tensors = iter(aux)
        # None is an empty node, so it stands for the tensors.
        leaves = [next(tensors) if leaf is None else leaf for leaf in self.aux_leaves]
        return out, unflatten(self.aux_structure, leaves)

    def arguments(self, gradients: Sequence[Tensor], single: bool) -> Any:
        """Gradients in the structure of the arguments that they belong to."""
        trees = unflatten(self.structure, gradients)
        return trees[0] if single else trees

    def read_cotangents(self, cotangents: Any) -> list[Tensor]:
        """The leaves of cotangents."""
        leaves, structure = flatten(cotangents)
        if structure != self.out_structure:
            raise TransformError(
                f"vjp of {_name(self.f)}: the cotangents have the structure {structure}, the "
                f"result has {self.out_structure}."
            )
        return leaves

    def _explain_leaves(self, moving: Tree) -> str:
        problems = []
        paths = optree.tree_paths(moving, namespace=NAMESPACE)
        for path, leaf in zip(paths, self.leaves, strict=True):
            if not is_smooth(leaf):
                what = _describe(leaf)
                place = "".join(f"[{entry!r}]" for entry in path[1:])
                problems.append(f"argument {self.positions[path[0]]}{place}: is {what}")
        head = (
            f"{_name(self.f)} can be differentiated with respect to floating tensors only; leave "
            "these out, or name other argnums:"
        )
        return listing(head, problems)


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return show_shape(leaf.dtype, leaf.shape)
    return f"a {type(leaf).__name__}"


def _gradients(call: _Call) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor]]:
    """The results of a call, and the gradients of its first one."""
    note = _note(call)
    if _is_plain(call, note):
        leaves, outs, aux = _forward(call)
        if not _is_attached(note, outs, aux, leaves):
            gradients = _pull(outs, leaves, None, again=False)
            return _detached(outs), _detached(aux), _placed(gradients, leaves)

    def run(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        outs, aux = call.run(leaves)
        return outs[0], aux

    ranks = ranks_of(current_scope(), note, call.leaves)
    if ranks is not None:
        value, aux, gradients = ranks.gradients(run, call.leaves)
        return [value], aux, gradients
    with adjoint_of_ranks(note) as write_types:
        gradients, (value, aux) = torch.func.grad_and_value(run, has_aux=True)(call.leaves)
        write_types((*call.leaves, *gradients, value))
    _write(note, (value, *aux, *gradients))
    return [value], aux, _placed(gradients, call.leaves)


_functorch_vjp: Callable[..., Any] = torch.func.vjp
_PullBack = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _pulling_back(call: _Call) -> tuple[list[Tensor], list[Tensor], _PullBack]:
    """The results of a call, and what pulls cotangents of the first ones back."""
    note = _note(call)
    if _is_plain(call, note):
        leaves, outs, aux = _forward(call)
        if not _is_attached(note, outs, aux, leaves):
            return (
                _detached(outs),
                _detached(aux),
                lambda gs: _placed(_pull(outs, leaves, gs, again=True), leaves),
            )
    outs, pull, aux = _functorch_vjp(call.run, call.leaves, has_aux=True)
    _write(note, (*outs, *aux))
    return outs, aux, lambda gs: _placed(pull(list(gs))[0], call.leaves)


def _placed(gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Places gradients like what they belong to, in a body with automatic axes."""
    scope = current_scope()
    return gradients if scope is None else scope.backend.place_gradients(gradients, leaves)


def _note(call: _Call) -> Note | None:
    """Returns whether others differentiate what a call computes: the checker has seen it."""
    scope = current_scope()
    if scope is None or scope.monitor is None:
        return None
    return scope.monitor.note((call.verb, _name(call.f)))


def _write(note: Note | None, results: Sequence[Tensor]) -> None:
    scope = current_scope()
    if note is not None and scope is not None and is_checker(scope.backend):
        note.value |= any(map(can_receive_gradient, results))


def _is_plain(call: _Call, note: Note | None) -> bool:
    """Returns whether plain autograd may be used, as far as one can see before the call.

    The checker must see the level of the transform, and a batched body is one.
    """
    scope = current_scope()
    if torch.compiler.is_dynamo_compiling() and markers_of(scope):
        return False
    if is_transformed() or _is_inference() or (note is not None and note.value):
        return False
    # Only a check tells then if others differentiate the results: Dynamo knows no graphs.
    if torch.compiler.is_dynamo_compiling() and note is None and torch.is_grad_enabled():
        return False
    if scope is not None and is_checker(scope.backend):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in call.leaves))


def _forward(call: _Call) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Runs the function on leaves of its own."""
    leaves = [x.detach().requires_grad_() for x in call.leaves]
    with torch.enable_grad():
        outs, aux = call.run(leaves)
    return leaves, outs, aux


def _is_attached(
    note: Note | None, outs: Sequence[Tensor], aux: Sequence[Tensor], leaves: Sequence[Tensor]
) -> bool:
    """Returns whether a graph of a function that is not checked leads to what others differentiate.

    The walk costs more than 2 us a node. Where it finds something, the call is made again under
    `torch.func`, whose results lead there and not to leaves that nobody knows.
    """
    if note is not None or not torch.is_grad_enabled():
        return False
    own = {id(x) for x in leaves}
    return any(
        not node.next_functions and id(getattr(node, "variable", None)) not in own
        for node in graph_nodes(y.grad_fn for y in (*outs, *aux))
    )


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach() if x.requires_grad else x for x in tensors]


def _pull(
    outs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None,
    again: bool,
) -> Sequence[Tensor]:
    """Gradients; zeros where nothing leads to a leaf. `again`: it may be asked for once more."""
    seeds = [None] * len(outs) if cotangents is None else cotangents
    pairs = [(y, g) for y, g in zip(outs, seeds, strict=True) if y.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    ys, gs = zip(*pairs, strict=True)
    twice = any(map(can_receive_gradient, gs))
    if torch.compiler.is_dynamo_compiling():
        if twice:
            reject_second_derivative()
        _allow_in_graph()
        return _pull_in_graph(ys, leaves, gs)
    return torch.autograd.grad(
        ys, leaves, gs, create_graph=twice, retain_graph=again, materialize_grads=True
    )


def _pull_in_graph(
    ys: Sequence[Tensor], leaves: Sequence[Tensor], gs: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Computes gradients in code that Dynamo takes into its graph without looking into it.

    Dynamo itself traces torch.autograd.grad only by a switch that holds for all code. What it would
    check holds here: the leaves are made in the body, and nothing attached to them is returned.
    """
    return torch.autograd.grad(ys, leaves, gs, retain_graph=True, materialize_grads=True)


@constant
def _allow_in_graph() -> None:
    torch.compiler.allow_in_graph(_pull_in_graph)


@constant
def _is_inference() -> bool:
    return torch.is_inference_mode_enabled()
