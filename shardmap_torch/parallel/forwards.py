"""Forwards of a plan's modules in the body: each style's collectives around the own forward."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.nn import functional

from shardmap_torch.errors import SpecError
from shardmap_torch.nn.embedding import own_embeddings
from shardmap_torch.parallel.layouts import is_replicated, normalized, relayout
from shardmap_torch.parallel.plan import Plan
from shardmap_torch.parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shardmap_torch.types import AxisType, I, R


def style_forward(plan: Plan, path: str, module: nn.Module) -> None:
    """Replaces the forward of the bound copy of the module at `path` by that of its style."""
    style = plan.styles.get(path)
    if style is not None:
        run = next(run for types, run in _FORWARDS if isinstance(style, types))
        vars(module)["forward"] = partial(run, style, _Styled(plan, path, module))


class _Styled:
    """A module of the plan in the body.

    Attributes:
        axis: the mesh axis of the plan.
        name: its name in errors.
        module: its bound copy.
        forward: its own forward.
        replicate: type of its replicated inputs, R or I.
    """

    def __init__(self, plan: Plan, path: str, module: nn.Module) -> None:
        self.axis, self.module = plan.axis, module
        self.name = repr(path) if path else type(module).__name__
        own = vars(module).get("forward") or MethodType(type(module).forward, module)
        self.forward: Callable[..., Any] = own
        self.replicate = R if plan.splits_below(path) else I

    def first(self, args: tuple[Any, ...]) -> Any:
        """Returns the first positional input, which the style is for."""
        if not args:
            raise SpecError(f"{self.name}: pass the input by position, as its style needs it.")
        return args[0]

    def relayout(
        self, x: object, src: Placement, dst: Placement, replicate: AxisType, what: str
    ) -> Tensor:
        """Redistributes an input or output of the module between placements."""
        name = f"{what} of {self.name}"
        if not isinstance(x, Tensor):
            raise SpecError(f"{name}: the plan says {src!r}, but it is a {type(x).__name__}.")
        return relayout(x, self.axis, src, dst, replicate, name)


def _colwise(style: ColwiseParallel, own: _Styled, *args: Any, **kwargs: Any) -> Tensor:
    x = own.relayout(own.first(args), style.input_layouts, Replicate(), R, "the input")
    y = own.forward(x, *args[1:], **kwargs)
    return own.relayout(y, Shard(-1), style.output_layouts, I, "the output")


def _rowwise(style: RowwiseParallel, own: _Styled, *args: Any) -> Tensor:
    module = own.module
    desired = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
    x = own.relayout(own.first(args), style.input_layouts, desired, I, "the input")
    if isinstance(module, nn.Embedding):
        y = _embed(x, module.weight, own.axis, module.padding_idx)
        return own.relayout(y, Partial(), style.output_layouts, I, "the output")
    assert isinstance(module, nn.Linear)
    y = functional.linear(x, module.weight)
    y = own.relayout(y, Partial(), style.output_layouts, I, "the output")
    return y if module.bias is None else _add_bias(y, module.bias, own, style.output_layouts)


def _add_bias(y: Tensor, bias: Tensor, own: _Styled, layout: Placement) -> Tensor:
    """Adds the bias once, to the finished sum, or to the addend of one rank."""
    bias = bias.to(y.dtype)  # autocast may have changed the dtype of y
    layout = normalized(layout, y.ndim, own.name)
    if layout == Shard(y.ndim - 1):
        layout = Shard(0)
    elif isinstance(layout, Shard):
        return y + bias
    return y + own.relayout(bias, Replicate(), layout, I, "the bias")


def _embed(ids: Tensor, table: Tensor, axis: str, padding: int | None) -> Tensor:
    """Looks up ids [...] in table [v/n, d] -> [..., d], an addend; no gradient for the padding."""
    rows: Tensor = own_embeddings(axis)(ids, table)
    return rows if padding is None else rows.where((ids != padding).unsqueeze(-1), rows.detach())


def _sequence(style: SequenceParallel, own: _Styled, *args: Any, **kwargs: Any) -> Tensor:
    x, sharded = own.first(args), Shard(style.sequence_dim)
    # torch assumes that a plain tensor is a shard; here the type of the value is known.
    source = Replicate() if isinstance(x, Tensor) and is_replicated(own.axis, x) else sharded
    x = own.relayout(x, source, sharded, I, "the input")
    y = own.forward(x, *args[1:], **kwargs)
    return own.relayout(y, sharded, sharded, I, "the output")


def _prepare_input(style: PrepareModuleInput, own: _Styled, *args: Any, **kwargs: Any) -> Any:
    have, desired = style.input_layouts, style.desired_input_layouts
    if have is not None and desired is not None:
        if len(have) != len(args):
            raise SpecError(
                f"{own.name}: input_layouts has {len(have)} layouts, and {len(args)} positional "
                "inputs are passed; give one for each, or None."
            )
        args = tuple(
            x if src is None or dst is None else own.relayout(x, src, dst, own.replicate, _nth(i))
            for i, (x, src, dst) in enumerate(zip(args, have, desired, strict=True))
        )
    unknown = sorted(style.input_kwarg_layouts.keys() - kwargs.keys())
    if unknown:
        raise SpecError(f"{own.name}: input_kwarg_layouts names {unknown}, which are not passed.")
    for name, src in style.input_kwarg_layouts.items():
        dst = style.desired_input_kwarg_layouts[name]
        kwargs[name] = own.relayout(kwargs[name], src, dst, own.replicate, f"the input {name!r}")
    return own.forward(*args, **kwargs)


def _prepare_output(style: PrepareModuleOutput, own: _Styled, *args: Any, **kwargs: Any) -> Any:
    return _change_outputs(style, own, own.forward(*args, **kwargs))


def _prepare_both(style: PrepareModuleInputOutput, own: _Styled, *args: Any, **kwargs: Any) -> Any:
    out = _prepare_input(style.prepare_module_input, own, *args, **kwargs)
    return _change_outputs(style.prepare_module_output, own, out)


def _change_outputs(style: PrepareModuleOutput, own: _Styled, out: Any) -> Any:
    outputs = out if isinstance(out, tuple) else (out,)
    if len(outputs) != len(style.output_layouts):
        raise SpecError(
            f"{own.name}: output_layouts has {len(style.output_layouts)} layouts, and the module "
            f"returns {len(outputs)} values; give one for each, or None."
        )
    layouts = zip(outputs, style.output_layouts, style.desired_output_layouts, strict=True)
    changed = tuple(
        y if src is None or dst is None else own.relayout(y, src, dst, I, f"output {i}")
        for i, (y, src, dst) in enumerate(layouts)
    )
    return changed if isinstance(out, tuple) else changed[0]


def _nth(position: int) -> str:
    return f"input {position}"


_FORWARDS: Final[tuple[tuple[type[ParallelStyle], Callable[..., Any]], ...]] = (
    (ColwiseParallel, _colwise),
    (RowwiseParallel, _rowwise),
    (SequenceParallel, _sequence),
    (PrepareModuleInput, _prepare_input),
    (PrepareModuleOutput, _prepare_output),
    (PrepareModuleInputOutput, _prepare_both),
)
"""Forwards by style."""
