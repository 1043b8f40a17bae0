"""`parallelize`: runs a module as one checked per-rank program, by a plan."""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import replace
from dis import opmap
from functools import cached_property, partial
from types import MethodType, TracebackType
from typing import Any, Final, Literal, NoReturn, TypeVar, cast
from warnings import warn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from shardmap_torch.checker.queries import closed_over
from shardmap_torch.core.hashing import hash_text
from shardmap_torch.core.source_location import error_site, users_part
from shardmap_torch.core.torch_private.engine import leave_uncompiled
from shardmap_torch.core.torch_private.fake_modes import CheckMode
from shardmap_torch.core.tree import Tree, flatten, map_leaves
from shardmap_torch.errors import CollectiveError, ShardTypeError, SpecError, show, show_shape
from shardmap_torch.mesh import PROCESS_KINDS, Mesh, as_mesh
from shardmap_torch.mixing.results import guarded
from shardmap_torch.parallel.amended import amend, note_place
from shardmap_torch.parallel.caches import (
    Held,
    Opened,
    closed,
    copied,
    fill,
    known_specs,
    note_specs,
    own,
    put_back,
    take_out,
    write_buffers,
    written_into,
)
from shardmap_torch.parallel.carried import carried_plan
from shardmap_torch.parallel.crossing import Inputs, Known, Outputs, UnknownError, input_names
from shardmap_torch.parallel.data import Data, read_data
from shardmap_torch.parallel.equal_rows import reject_equal_shards
from shardmap_torch.parallel.forwards import Shared, style_forward
from shardmap_torch.parallel.losses import WholeBatch, WholeBatchNorm
from shardmap_torch.parallel.optimizers import note_parameters, warn_of_optimizers
from shardmap_torch.parallel.plan import ROOT, Plan, Style, is_style, make_plan
from shardmap_torch.parallel.pure import BoundModule
from shardmap_torch.parallel.recomputed import is_within_body, untracked, within_body
from shardmap_torch.parallel.scaled import warn_of_scaling
from shardmap_torch.parallel.styles import Left
from shardmap_torch.parallel.units import Units
from shardmap_torch.parallel.words import Split, pack, placements_of_split
from shardmap_torch.placing import compared
from shardmap_torch.spec import P
from shardmap_torch.transform import shard_map

M = TypeVar("M", bound=nn.Module)
Check = Literal["local", "global"]

_MAPPED: Final = "_shardmap_mapped"
"""The attribute by which `check_program`, `estimate` and their like find the mapped function."""


def parallelize(
    module: M,
    mesh: Mesh | DeviceMesh | None,
    plan: Style | Mapping[str, Style] | None = None,
    *,
    axis: str | None = None,
    in_specs: Tree = None,
    out_specs: Tree = None,
    dp: str | tuple[str, ...] | None = None,
    fsdp: str | None = None,
    reshard_after_forward: bool = True,
    check: Check = "global",
    src_data_rank: int | None = 0,
) -> M:
    """Parallelizes a module in place, by a plan in torch's words, and returns it.

    A call of the module runs its forward as the body of one `shard_map`, on this rank's
    shards of the parameters; the modules of the plan change layouts by typed collectives before
    and after their own forward. So all code of the module, between the styles too, is checked
    before it first runs, and `check_program`, `explain` and `trace` take the module. Types are
    known in the body: if the plan says Shard(1) and the value is replicated, that is an error, not
    a wrong result. A forward whose sizes depend on data runs as it is, and each of its parts as a
    program like that, which a warning tells.

    On a process-group mesh every parameter becomes a DTensor parameter, placed as the plan says
    and replicated where it says nothing (buffers stay plain tensors), so `state_dict`, optimizers
    (made after this), `clip_grad_norm_`, `torch.save` of the state and
    torch.distributed.checkpoint work as on torch's parallel modules. Inputs that the style of the
    root (the key "") takes as Shard or Partial are this rank's values, or DTensors, and its
    `use_local_output` decides what is returned, as in torch. Other inputs are equal on all ranks.

    On a simulated mesh parameters, inputs and outputs stay plain global tensors: a Shard layout of
    the root says how they are sharded inside, and a Partial output is its sum. So the module
    computes and trains as the one that was passed in, and has the same `state_dict`. On an abstract
    mesh a call gives the shapes of the outputs, and computes nothing.

    Below the root values are always this rank's tensors: `use_local_output` has no meaning there,
    and code that reshapes by the global number of heads must divide it (`view(b, t, -1, head_dim)`
    needs nothing). A module that is called with other attributes later (`train()`, `eval()`) is
    checked again.

    Shape: that of the module's result; this rank's shard where `use_local_output` asks for it.
    Moves: what the styles move.

    Args:
        module: any module. Its forward must not set attributes or write into buffers.
        mesh: the mesh; None takes that of `use_mesh`.
        plan: a style for the module itself, or styles by module name, as `"layers.*.w1"`, with
            the wildcards of `match_specs`. "" is the module itself.
        axis: the mesh axis of the plan's layouts, or that of a view; may be left out if the mesh
            has one axis.
        in_specs: as for `shard_map`, of the inputs of the forward, in place of the root's
            layouts: also over other axes of the mesh. Plain tensors are then global values.
        out_specs: the same for the outputs, which are then DTensors unless they are replicated.
        dp: axes whose ranks have other rows of the batch, the first dim of inputs and outputs, and
            the same parameters. On processes plain inputs are then this rank's rows, and results
            DTensors, so that a loss of them is that of the batch.
        fsdp: an axis of rows that shards the parameters, their gradients and the optimizer's state
            too. Each layer, an element of the outermost `nn.ModuleList`s and `nn.ModuleDict`s that
            has a forward, is gathered while the one before computes; what is in no layer first;
            for a list in a list its elements are layers. A sharded parameter that nothing uses has
            a gradient of zeros, where one device leaves None.
        reshard_after_forward: whether the parameters of a layer are dropped after its forward, and
            the backward gathers them again and recomputes the layer (ZeRO-3). False keeps them
            until the backward (ZeRO-2).
        check: strictness of the checker. "global": the program is that of the module on one device.
            "local": only that gradients are right, for code that is per-rank by nature.
        src_data_rank: the rank along the axis whose parameters and buffers are kept; None takes
            each rank's own, of which a sample must be equal on all ranks.

    Raises:
        SpecError: names all entries that match no module, modules that a style does not know, and
            parameters that do not divide; or, in a call, inputs that do not match.
        MeshError: there is no mesh.
        ShardTypeError: in a call, plan and values do not match, or gradients would be wrong.

    Source: `torch.distributed.tensor.parallel.parallelize_module`.

    Example:
        >>> from torch import nn
        >>> from shardmap_torch import ColwiseParallel, RowwiseParallel, make_mesh, parallelize
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> x = torch.randn(3, 4)
        >>> y = mlp(x)
        >>> mlp = parallelize(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> torch.allclose(mlp(x), y, atol=1e-6)
        True
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"parallelize takes a torch.nn.Module, not a {type(module).__name__}.")
    if not isinstance(check, str) or check not in ("local", "global"):
        raise SpecError(f"parallelize: check is 'local' or 'global', not {show(check)}.")
    on = as_mesh(mesh)
    _reject_parallel(module)
    data, axis = read_data(on, axis, dp, fsdp, reshard_after_forward)
    styles, over = _styles_over(module, plan, on, axis, data)

    def place(resolved: Plan) -> Plan:
        warn_of_optimizers([*module.parameters()])
        if on.kind in PROCESS_KINDS:
            _place(module, on, resolved, src_data_rank)
            note_parameters(module)
        return resolved

    remake = partial(make_plan, module, on, styles, over, _optional(module, plan, styles), data)
    describe = partial(_described, module, src_data_rank)
    resolved = compared("parallelize", on, remake, describe, place)
    _install_recorders(module)
    call = _ParallelCall(module, on, check, remake, in_specs, out_specs, plan is None)
    call.plan = resolved
    for path, below in module.named_modules():
        if (
            path
            and type(below).forward is not nn.Module.forward
            and any(True for _ in below.parameters())
        ):
            remake = partial(call.plan_below, path)
            vars(below)["forward"] = _ParallelCall(below, on, check, remake, apart=call.apart)
    vars(module)["forward"], vars(module)[_MAPPED] = call, call.use
    if on.kind in PROCESS_KINDS:
        register: Any = module.register_load_state_dict_pre_hook
        register(call.check_state)
        vars(module)["_ddp_params_and_buffers_to_ignore"] = _NotForDdp()
    return module


class _NotForDdp:
    """Names of parameters that torch's DDP asks a module for, and which it does not get."""

    def __iter__(self) -> NoReturn:
        raise SpecError(
            "DistributedDataParallel: the module is parallelized already. parallelize(module, "
            "mesh, dp='dp') gives each rank its rows and sums gradients, as DDP does.\n"
            "Fix: leave DDP out, and name the axis of the rows in dp= or fsdp=."
        )


def _styles_over(
    module: nn.Module,
    plan: Style | Mapping[str, Style] | None,
    mesh: Mesh,
    axis: str | None,
    data: Data,
) -> tuple[Style | Mapping[str, Style], str]:
    """Returns the styles and their axis; a module need not have any where it has data axes.

    Raises:
        SpecError: it has styles, and no axis for them; or it carries no plan.
    """
    is_whole = axis is None and {*mesh.axis_names} == {*data.axes}
    if is_whole and not plan:
        return {}, ""
    styles = carried_plan(module) if plan is None else plan
    if is_whole:
        raise SpecError(
            f"parallelize: the plan has styles, and dp and fsdp take all axes of the {mesh}.\n"
            "Fix: a mesh with an axis for the styles; or no plan."
        )
    return styles, resolve_axis("parallelize", mesh, axis)


def _install_recorders(module: nn.Module) -> None:
    """Gives models of transformers the hooks that record hidden states and attentions.

    They would install them in the first call that asks for these, on copies of the modules. A model
    that has been called has its hooks, which installing those of a model around it would double.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return
    models = [each for each in module.modules() if hasattr(each, "_can_record_outputs")]
    called = [each for each in models if getattr(each, "_output_capturing_hooks_installed", False)]
    kept = {id(x): (x._forward_hooks, {**x._forward_hooks}) for m in called for x in m.modules()}
    for each in models:
        library.maybe_install_capturing_hooks(each)
    for hooks, before in kept.values():
        hooks.clear()
        hooks.update(before)


class _ParallelCall:
    """The forward of a parallelized module, or of one below it that is called from outside.

    So does `generate` with the encoder, peft with the model within, a user with an embedding.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        check: Check,
        remake: Callable[[], Plan],
        in_specs: Tree = None,
        out_specs: Tree = None,
        is_carried: bool = True,
        apart: set[Any] | None = None,
    ) -> None:
        self._module, self._mesh, self._check, self._remake = module, mesh, check, remake
        self._specs, self._is_carried = (in_specs, out_specs), is_carried
        self._original = vars(module).get("forward")
        self.apart: set[Any] = set() if apart is None else apart
        self._mapped: dict[Any, Callable[..., Any]] = {}
        self._cached: dict[str, P] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ParallelCall":
        """Returns the forward of a copy of the module, on the same mesh, by the same plan.

        A module that is copied without the one that has the plan keeps its part of that.
        """
        call = memo[id(self)] = copy(self)
        call._mapped, call._cached = {}, {}
        for name in ("_inputs", "_outputs"):
            vars(call).pop(name, None)
        call._module = deepcopy(self._module, memo)
        call._original = deepcopy(self._original, memo)
        kinds = {kind for kind in self.apart if isinstance(kind, type)}  # not ids of modules
        call.apart = memo.setdefault(id(self.apart), kinds)
        call._remake = self._remade_for(memo)
        return call

    def _remade_for(self, memo: dict[int, Any]) -> Callable[[], Plan]:
        make: Any = self._remake
        root = make.args[0] if not self._is_part else make.func.__self__._module
        if id(root) not in memo:
            return self._remake
        if not self._is_part:
            return partial(make_plan, memo[id(root)], *make.args[1:])
        return partial(deepcopy(make.func.__self__, memo).plan_below, *make.args)

    @cached_property
    def plan(self) -> Plan:
        """The resolved plan."""
        return self._remake()

    @cached_property
    def _planned(self) -> tuple[str, ...]:
        """The axes of which errors are for the plan to mend, see `amended`."""
        axis = self.plan.axis
        is_open = self.plan.styles and not self._is_part and self._mesh.shape[axis] > 1
        return (axis,) if is_open else ()

    @cached_property
    def _inputs(self) -> Inputs:
        name, names = type(self._module).__name__, input_names(self._own)
        return Inputs(name, self._mesh, self.plan, self._specs[0], names, self._is_part)

    @cached_property
    def _outputs(self) -> Outputs:
        return Outputs(self._mesh, self.plan, self._specs[1], self._is_carried, self._is_part)

    @property
    def _own(self) -> Callable[..., Any]:
        return self._original or MethodType(type(self._module).forward, self._module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_part and is_within_body():  # refused below
            return self._own(*args, **kwargs)
        if self._kind not in self.apart:
            try:
                return self._run(args, kwargs)
            except ShardTypeError as error:
                if not self._comes_apart(error):
                    raise
        whole: Any = self._module
        own = {k: x.full_tensor() for k, x in whole._parameters.items() if isinstance(x, DTensor)}
        if not own or self._original is not None:
            return self._own(*args, **kwargs)
        whole = copy(whole)
        whole._parameters = {**whole._parameters, **own}
        return type(whole).forward(whole, *args, **kwargs)

    @property
    def _is_part(self) -> bool:
        return _MAPPED not in vars(self._module)

    @property
    def _kind(self) -> Any:
        """Tells what comes apart alike: modules of a class, and of torch's own this one alone."""
        kind = type(self._module)
        return id(self) if kind.__module__.startswith("torch.") else kind

    def _comes_apart(self, error: ShardTypeError) -> bool:
        """Returns whether the forward runs as it is from now on, between programs of its parts.

        As that of a model with a tower for images, whose sizes depend on data. Its own code has
        whole values then, as on one device: results that a part leaves sharded are DTensors.
        """
        has_root = self.plan.root is not None and not self._is_part
        is_bound = has_root or self._specs != (None, None) or bool(self.plan.data.axes)
        has_parts = any(True for _ in self._module.children())
        if is_bound or not has_parts or not any(text in f"{error}" for text in _OF_DATA):
            return False
        self.apart.add(self._kind)
        name, why = type(self._module).__name__, f"{error}".splitlines()[0]
        warn(f"{name} runs as it is, and each of its parts as a program: {why}", stacklevel=3)
        return True

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caches: list[Any] = []
        given, (args, kwargs) = (args, kwargs), take_out((args, kwargs), caches)
        if caches:
            _reject_caches(self._mesh, self.plan.data)
        try:
            with _WITHOUT_FAST_PATH(), untracked():
                found = self._with_specs(_call, args, kwargs, caches)
        except Exception as error:  # frames of this package say nothing
            if not caches:
                self._amend(error, *given)
            error.__traceback__ = users_part(error)
            raise
        warn_of_scaling(self._mesh)
        write_buffers(self._module, found[-1])
        out, *held = self._outputs.leave(found[:-1])
        filled = fill(caches, closed(*held))
        note_specs(filled, self._cached)
        return guarded(put_back(out, filled))

    def rebound(
        self, rebind: Callable[[Any], Any], counterpart: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """Returns the forward that the module had, of a copy of it."""
        forward: Callable[..., Any] = rebind(self._own)
        return forward

    def check_state(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Requires that a state that is loaded is not that of one rank on all of them.

        Plain values are global ones, as of one device, of which each rank keeps its shard.
        """
        self._keep_shards(f"{type(module).__name__}.load_state_dict", state, prefix)
        sizes = self._mesh.shape
        shards = {
            name: value.to_local()
            for name, spec in self.plan.specs.items()
            if any(sizes[axis] > 1 for axis in spec.mentioned)
            and isinstance(value := state.get(prefix + name), DTensor)
        }
        reject_equal_shards(type(module).__name__, self._mesh, shards)

    def _keep_shards(self, name: str, state: dict[str, Any], prefix: str) -> None:
        found: list[tuple[str, Tensor, Any]]
        found = [(path, x, state.get(prefix + path)) for path, x in self._renewed().items()]
        kinds = Tensor, nn.Parameter
        plain = {path: x for path, own, x in found if type(x) in kinds and x.shape == own.shape}

        def describe(values: dict[str, Tensor]) -> Iterator[str]:
            for path, x in values.items():
                yield f"  {path}: {show_shape(x.dtype, x.shape)}, hash {hash_text(x)}"

        def keep(values: dict[str, Tensor]) -> None:
            for path, x in values.items():
                split, spec = self.plan.splits[path], self.plan.specs[path]
                state[prefix + path] = _put(self._mesh, x, split, spec, None)

        if plain:
            compared(name, self._mesh, lambda: plain, describe, keep)

    def plan_below(self, path: str) -> Plan:
        """Returns the plan of the module at a path, for a call of it alone."""
        names = {id(value): name for name, value in self._renewed().items()}
        below = self._module.get_submodule(path)
        own = {name: names[id(value)] for name, value in below.named_parameters()}
        return self.plan.below(path, own)

    def _renewed(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by name; the plan is made anew if some have been tied since."""
        named = dict(self._module.named_parameters())
        if named.keys() != self.plan.splits.keys():
            self.plan = self._remake()
            self._mapped.clear()
        return named

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._mesh

    def use(
        self,
        use: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns what `use` makes of the mapped function of a call, and of its arguments."""
        caches: list[Any] = []
        if any(parameter.is_meta for parameter in self._module.parameters()):
            args, kwargs = map_leaves(_on_meta, (args, kwargs))
        args, kwargs = take_out((args, kwargs), caches)
        return self._with_specs(use, args, kwargs, caches)

    def _with_specs(
        self,
        use: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caches: Sequence[Any],
    ) -> Any:
        held = Opened(caches)
        known = self._cached | known_specs(caches)
        cached = {path: known[path] for path in held.tensors if path in known}
        in_caches = tuple(cached.get(path, P()) for path in held.tensors)
        specs = (*self._inputs.specs(args, kwargs), P(), in_caches, (None,) * len(held.counts))
        inputs = (args, kwargs, held.frames, tuple(held.tensors.values()), held.counts)
        try:
            return self._use(use, specs, inputs, Known(cached=cached))
        except (RuntimeError, ValueError) as error:
            axes = [axis for axis in (self.plan.axis, *self.plan.data.axes) if axis]
            if not _is_torchs(error) or all(self._mesh.shape[axis] == 1 for axis in axes):
                raise
            # Ours alone is printed, with the lines of the forward: it says what torch's does.
            raise self._explain(error).with_traceback(error.__traceback__) from None

    def _explain(self, error: Exception) -> SpecError:
        """Explains torch's error about shapes of shards to users who wrote global ones."""
        site, left, rows = error_site(error), vars(error).get(_LEFT, ""), self.plan.data.axes
        axis = rows[0] if rows and not left else self.plan.axis
        advice = f"{_GATHER.format(left=left)}; or {_DIVIDE}" if left else _DIVIDE
        advice = vars(error).get("undivided", advice)
        parts, ranks = "rows" if axis in rows else "shards", self._mesh.shape[axis]
        lines = [
            f"{type(self._module).__name__}: the forward fails on the {parts} that one of the "
            f"{ranks} ranks of {axis!r} has: {error}",
            *([] if site is None else [f"  at {site}"]),
            *([f"  {left} leaves its output sharded"] if left else _shards(error)),
            f"Fix: {_ROWS if axis in rows else advice}",
        ]
        return SpecError("\n".join(lines))

    def _amend(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Says of an error about shards of the plan's axis which change of the plan mends it."""
        if self._is_part:
            return
        module, mesh, styles, *rest = cast(Any, self._remake).args

        def accepts(styles: Mapping[str, Style]) -> None:
            call = copy(self)
            call._remake = partial(make_plan, module, mesh, styles, *rest)
            call._mapped, call._cached, call._planned = {}, {}, mesh.axis_names
            for name in ("plan", "_inputs", "_outputs"):
                vars(call).pop(name, None)
            call._inputs.is_compared = True  # other ranks may have no error, and would not answer
            call.use(_check, args, kwargs)

        amend(error, module, {ROOT: styles} if is_style(styles) else styles, accepts)

    def _use(
        self,
        use: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
        specs: tuple[Tree, ...],
        inputs: tuple[Tree, ...],
        known: Known,
    ) -> Any:
        named = self._renewed()
        parameters = {
            name: pack(value, self.plan.packed.get(name), self._mesh, self.plan.specs[name])
            for name, value in named.items()
        }
        buffers = dict(self._module.named_buffers())
        values = (parameters, buffers, *self._inputs.enter(inputs, specs))
        spec_leaves, structure = flatten(specs)
        flags = (each for each in inputs[1].items() if type(each[1]) is bool)
        key = (structure, *spec_leaves, *flags)  # flags as output_attentions decide on results
        settle = partial(self._settled, lambda mapped: use(mapped, values), key, specs)
        if self._check != "global":
            return settle(known)
        # Sums of shards are those of the whole, or each rank's own, which the forward sums by hand.
        # Without data axes that is tried first: a mode that sees all functions takes time.
        ways = [known, replace(known, sums_shards=True)]
        first, second = reversed(ways) if self.plan.data.axes else ways
        try:
            return settle(first)
        except ShardTypeError as error:
            if error.rejection is None:  # of a run, whose other ranks may have none
                raise
            self._mapped.pop(key, None)
            with suppress(ShardTypeError, CollectiveError, SpecError):
                return settle(second)
            self._mapped.pop(key, None)
            error.args = (_in_module(f"{error}", self.plan.axis, vars(error).get(_LEFT, "")),)
            raise error

    def _settled(
        self, use: Callable[[Any], Any], key: Any, specs: tuple[Any, ...], known: Known
    ) -> Any:
        """Uses the mapped function of a call, once all is known that it depends on."""
        mapped = self._mapped.get(key) or self._map(key, specs, known)
        for _ in range(_RUNS - 1):
            try:
                return use(mapped)
            except UnknownError as error:
                self._cached |= error.known.cached
                mapped = self._map(key, specs, error.known)
        return use(mapped)

    def _map(self, key: Any, specs: tuple[Any, ...], known: Known) -> Callable[..., Any]:
        _reject_units(self._module)
        # A partial, not a method: the checker looks through it at the module and its code.
        body = partial(_body, self._module, self.plan, self._outputs, known)
        body.__name__ = type(self._module).__name__  # type: ignore[attr-defined]
        body.planned = self._planned  # type: ignore[attr-defined]
        *_, tensors, counts = specs
        if 0 < len(tensors) == len(known.cached):  # as those of the next call
            body.carried = len(tensors + counts)  # type: ignore[attr-defined]
        mapped = self._mapped[key] = shard_map(
            body,
            mesh=self._mesh,
            in_specs=(dict(self.plan.specs), P(), *specs),
            out_specs=self._outputs.specs(known),
            check=self._check,
        )
        return mapped


leave_uncompiled(
    _ParallelCall.__call__,
    nested=True,
    why="a module that parallelize has changed runs uncompiled; compile functions of shard_map",
)
_OF_DATA: Final = ("depends on data", "taken from a tensor, and may depend on its value")
"""Words of errors about sizes and numbers that depend on values."""

_RUNS: Final = 8
"""After one of them it is known which outputs have rows, after two in which dim, and after others
which sums are over rows that are not their first dim."""


_IN_MODULES: Final[Mapping[str, str]] = {
    r"multiply sizes by axis_size\(axis\)\.": "sizes in a forward are those of this rank's rows or "
    "shards, so write .mean(), which is that of all, in place of .sum() / size.",
    r"; matrices packed in one weight by [^;]*x\.unbind\(-1\)": "; or give a weight that packs "
    "matrices, as q, k and v, the style PackedColwiseParallel(parts=3), and chunk(3)",
    r", each after its all_reduce": ", which are those of all ranks; and of "
    "F.cross_entropy(x[mask], y[mask]) write F.cross_entropy(x, y.masked_fill(~mask, -100))",
    r"(\b(?:var|std)\w* is not what (?:.|\n)*Fix: )gather dim \d+ over '\w+' first, or wrap "
    r"per-rank code in local_region\.": r"\1write it by means, which are those of all ranks: "
    "(x - x.mean(0)).square().mean(0) for a variance with correction=0.",
    r"all_reduce\(x\.square\(\)\.sum\(\), axis, dst=R\)\.sqrt\(\), .*": "write "
    "x.square().sum().sqrt(), whose sum is that of all ranks.",
    r"add the bias after the all_reduce over '\w+'": "call the module that has the weight, as "
    "self.down(x), whose style adds the bias once",
    r"all_reduce\((.*?), axis, op='mean', dst=R\)": r"\1",  # means are those of all ranks
    r"reduce or gather it over ('\w+'), or name '\w+' in the spec\.": r"sums, means and torch's "
    r"losses are those of all ranks; reduce another number over \1 by all_reduce, or return rows.",
    r"(\nTried, [^\n]*\b(?:all_\w+|reduce_scatter|convert|shift)\([^\n]*(?:\n.*one device, by "
    r"numbers)?)": r"\1\n  it needs a mesh: without one the module no longer runs",
}
"""Advice for functions of `shard_map`, by patterns, and what a module says in place of it."""


def _shards(error: Exception) -> list[str]:
    """Returns the notes of an error that tell the shapes of shards."""
    notes = getattr(error, "__notes__", ())
    return [f"  {note}" for note in notes if note.startswith("In the body")]


def _in_module(text: str, axis: str, left: Left) -> str:
    """Returns an error in the words of a module, whose output `left` has sharded over an axis."""
    for pattern, advice in _IN_MODULES.items():
        text = re.sub(pattern, advice, text)
    is_of_parameter = re.search(rf"sharded P\(.*{axis!r}.*from input parameters\[", text)
    if left and f"{axis!r}" in text and not is_of_parameter:
        by = f"  {left} leaves its output sharded\nFix: {_GATHER.format(left=left)}"
        text = re.sub(r"Fix: gather (?:(?!, ).)* first(?:, with all_gather)?", by, text)
    return text


def _call(mapped: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    return mapped(*values)


def _check(mapped: Any, values: tuple[Any, ...]) -> None:
    """Checks a call whose parameters are placed otherwise: of theirs it takes the shapes."""
    parameters, *others = values
    with CheckMode():
        shapes = {
            name: torch.empty(
                x.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
            )
            for name, x in parameters.items()
        }
    mapped._shardmap_verdict((shapes, *others), {}, "global")


def _body(
    module: nn.Module,
    plan: Plan,
    outputs: Outputs,
    known: Known,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    frames: Held,
    tensors: Sequence[Tensor],
    counts: Sequence[int],
) -> Any:
    """Runs the module on one rank: on its shards of the parameters, with the plan's forwards."""
    shared = Shared()

    def adapt(path: str, copy: nn.Module) -> None:
        if type(copy) is nn.SyncBatchNorm:
            copy.__class__ = WholeBatchNorm
        style_forward(plan, path, copy, shared)
        units.adapt(path, copy)

    units = Units(plan, parameters)
    own_buffers = copied(module, buffers)
    bound = BoundModule(module, units.values, own_buffers, adapt)
    caches = closed(frames, tensors, counts)
    own(caches)
    args, kwargs = put_back((args, kwargs), caches)
    others = [plan.axis] if known.sums_shards and plan.axis in outputs.mesh.axis_names else []
    rows = plan.data.axes
    whole = WholeBatch(rows, others, known) if (*rows, *others) else nullcontext()
    try:
        with within_body(), whole:
            out = take_out(bound.root.forward(*args, **kwargs), caches)
    except Exception as error:  # of torch too, about shapes
        vars(error)[_LEFT] = shared.left
        if isinstance(error, RuntimeError | ValueError | ShardTypeError):
            note_place(error, bound.paths(), plan.axis)
        raise
    bound.check_unwritten()
    _reject_unbound(module)
    after = Opened(caches, frames)
    written = written_into(buffers, own_buffers)
    outputs.check(out, after.tensors, known, shared.left)
    return out, after.frames, tuple(after.tensors.values()), after.counts, written


def _reject_unbound(module: nn.Module) -> None:
    """Requires that the body has read no parameter of the module itself, only of its copy.

    Raises:
        SpecError: it has, by a reference that the copy does not have.
    """
    met = closed_over()
    found = [name for name, x in module.named_parameters() if id(x) in met] if met else []
    if found:
        raise SpecError(
            f"{type(module).__name__}: the forward reads {found[0]!r} not from the module, but by "
            "an object that refers to it, so that each rank would compute with all of it.\n"
            "Fix: let forwards and hooks refer to modules by functions, methods, partials and "
            "attributes of modules, which a parallelized module follows."
        )


def resolve_axis(name: str, mesh: Mesh, axis: str | None) -> str:
    """Returns the named axis, or the only one of the mesh.

    Raises:
        SpecError: the mesh has no such axis, or several and none is named.
    """
    if axis is None and len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    if not isinstance(axis, str) or axis not in mesh.shape:
        raise SpecError(
            f"{name}: axis is one of {', '.join(map(repr, mesh.shape))}, not {show(axis)}."
        )
    return axis


def _reject_parallel(module: nn.Module) -> None:
    parallel = [path for path, below in module.named_modules() if _MAPPED in vars(below)]
    tensors = [name for name, x in module.named_parameters() if isinstance(x, DTensor)]
    if parallel or tensors:
        what = f"{(parallel[0] or 'it')!r} is" if parallel else f"{tensors[0]!r} is a DTensor:"
        raise SpecError(
            f"parallelize: {what} parallelized already. Give one plan for the outermost module, "
            "with names such as 'layers.*.w1'."
        )


def _reject_units(module: nn.Module) -> None:
    """Requires that FSDP2 gathers the parameters of no module below the one that is called.

    Raises:
        SpecError: it would, in the body, for the module and not for its copy.
    """
    for path, below in module.named_modules():
        if path and isinstance(below, FSDPModule):
            name = type(module).__name__.removeprefix("FSDP")
            raise SpecError(
                f"{name}: {path!r} is a unit of fully_shard within a parallelized module, which "
                "runs as one program on parameters that it gathers before.\n"
                f"Fix: parallelize {path!r} by itself, and not {name}; or fully_shard only {name}."
            )


def _optional(module: nn.Module, plan: object, styles: Any) -> frozenset[str]:
    """Returns the keys of plans that came with the module, which may match nothing in it."""
    if plan is None:
        return frozenset(styles)
    own = [getattr(module, name, None) or () for name in ("_tp_plan", "_ep_plan")]
    return frozenset(key for keys in own for key in keys)


def _reject_caches(mesh: Mesh, data: Data) -> None:
    """Requires that a call can fill a cache of keys and values.

    Raises:
        SpecError: there are no values, or other rows on each process, or it would be filled twice.
    """
    if mesh.kind == "abstract":
        raise SpecError(
            "parallelize: a cache of keys and values is passed, as by generate(), and on an "
            "abstract mesh there are shapes and no values to fill it with, or to choose tokens "
            "by.\n"
            "Fix: generate on a simulated mesh, or on processes."
        )
    axes = ", ".join(map(repr, data.axes))
    if data.axes and mesh.kind in PROCESS_KINDS:
        raise SpecError(
            f"parallelize: a cache of keys and values is passed, and {axes} has other rows on each "
            "rank, which generate() does not know.\n"
            "Fix: parallelize without dp= and fsdp= for generation."
        )
    if data.shards is not None and data.reshard and torch.is_grad_enabled():
        raise SpecError(
            "parallelize: a cache of keys and values is passed, and the layers are recomputed in "
            "the backward, which would fill it twice.\n"
            "Fix: torch.no_grad(), or reshard_after_forward=False."
        )


_LEFT: Final = "_shardmap_left"
"""The attribute of an error that has the name of the last module whose output is sharded."""

_GATHER: Final = (
    "gather it, by {left.how}, and where a RowwiseParallel takes it, say input_layouts=Replicate()"
)
_ROWS = """where it runs on one device, write sizes of the batch as x.shape[0] or -1, of which a \
rank has a part, and pass what has an entry a row as an argument."""
_DIVIDE = """choose heads or groups that divide over the ranks, name modules that take shards \
in the plan, and reshape by local sizes, as view(b, t, -1, head_dim), or by attributes that it \
names, as {"layers.*.attn": LocalAttributes("num_heads")}."""


def _on_meta(leaf: Any) -> Any:
    """Returns a tensor on the meta device, as parameters are, for a `ShapeDtype`."""
    if isinstance(leaf, Tensor) or not (hasattr(leaf, "shape") and hasattr(leaf, "requires_grad")):
        return leaf
    options = {"dtype": leaf.dtype, "requires_grad": leaf.requires_grad}
    return torch.empty(leaf.shape, device="meta", **options)


def _is_torchs(error: Exception) -> bool:
    """Returns whether torch refuses something, and no `raise` of the forward."""
    last = cast(TracebackType, error.__traceback__)
    while last.tb_next is not None:
        last = last.tb_next
    raises = last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]
    return type(error) is RuntimeError or (type(error) is ValueError and not raises)


def _described(module: nn.Module, src_data_rank: int | None, plan: Plan) -> Iterator[str]:
    """Describes what is placed, by lines that are equal where ranks place alike."""
    for name, x in module.named_parameters():
        own = "" if src_data_rank is not None else f", hash {hash_text(x)}"
        own += "" if x.grad is None else ", with a gradient"
        yield f"  {name}: {show_shape(x.dtype, x.shape)}, {plan.specs[name]!r}{own}"


def _put(
    mesh: Mesh, value: Tensor, split: Split | None, spec: P, src_data_rank: int | None
) -> DTensor:
    placements = placements_of_split(mesh, split, spec)
    on = mesh.device_mesh
    return distribute_tensor(value.detach(), on, placements, src_data_rank=src_data_rank)


def _place(module: nn.Module, mesh: Mesh, plan: Plan, src_data_rank: int | None) -> None:
    """Replaces all parameters by DTensors with the same hooks, gradients and attributes.

    A shared one stays shared.
    """
    put = partial(_put, mesh, src_data_rank=src_data_rank)

    def remade(name: str, old: Any) -> Any:
        split, spec = plan.splits[name], plan.specs[name]
        new: Any = nn.Parameter(put(old, split, spec), old.requires_grad)
        new.grad = None if old.grad is None else put(old.grad, split, spec)
        vars(new).update(vars(old))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            setattr(new, hooks, getattr(old, hooks))
        return new

    made: dict[Tensor, Any] = {old: remade(name, old) for name, old in module.named_parameters()}
    made |= {old: put(old, None, P()).to_local() for old in module.buffers()}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            held.update({name: made[old] for name, old in held.items() if old is not None})


class _FastPath:
    """Turns off torch's fused transformer layer, which would use weights without their styles.

    The flag is torch's, one for the process; the last call to end restores it.
    """

    def __init__(self) -> None:
        self._lock, self._depth, self._before = threading.Lock(), 0, True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._depth == 0:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    torch.backends.mha.set_fastpath_enabled(self._before)


_WITHOUT_FAST_PATH: Final = _FastPath()
