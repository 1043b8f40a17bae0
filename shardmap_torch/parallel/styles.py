"""Styles of torch.distributed.tensor.parallel and ours, as changes of layout, and their modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from shardmap_torch.contracts import call_given
from shardmap_torch.core.caching import lazy
from shardmap_torch.errors import SpecError, show
from shardmap_torch.spec import P

Change: TypeAlias = tuple[Any, Any]
"""The placements of a value before and after."""


class _Ours(ParallelStyle):
    """A style that torch does not have."""

    use_local_output = True
    outputs: Sequence[Change] | None = None

    def __repr__(self) -> str:
        """Formats it as the call that makes it."""
        return f"{type(self).__name__}()"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise SpecError(f"{type(self).__name__} is a style of shardmap_torch.parallelize.")


class ReplicatedParallel(_Ours):
    """Keeps a module as it is, on every rank; its gradients are summed where that is needed."""


class SharedResult(_Ours):
    """Keeps a module as it is; ranks use its result differently, whose gradient they sum."""

    outputs = ((Replicate(), Replicate()),)


class ExpertsParallel(_Ours):
    """Splits the hidden features of every expert: a module of 3-d weights, which ranks add up.

    Its inputs are replicated and its output is summed over the ranks. The plan names its weights.
    """

    outputs = ((Partial(), Replicate()),)


class ExpertsDispatch(ExpertsParallel):
    """Gives each rank some of the experts whole: a module of 3-d weights, which ranks add up.

    Its inputs are rows, the numbers of their experts and the weights of these, equal on all ranks;
    a rank gives its experts those of their rows, and the sum over the ranks is the output.
    """


class LocalAttributes(_Ours):
    """Divides integers of a module by the number of ranks: numbers of heads, sizes of a split."""

    def __init__(self, *names: str, heads: Mapping[str, int] | None = None) -> None:
        """Takes the names of the attributes.

        `heads` names keyword inputs that have a row for each head, or for each head of each
        sequence, as biases of positions (ALiBi), and the dim of these: a rank gets its heads' own.
        The number of heads is the first attribute.
        """
        self.names, self.heads = names, {} if heads is None else heads

    def __repr__(self) -> str:
        """Formats it as the call that makes it."""
        heads = [f"heads={dict(self.heads)!r}"] if self.heads else []
        return f"LocalAttributes({', '.join([*map(repr, self.names), *heads])})"


class PackedColwiseParallel(ColwiseParallel):
    """Shards each of the equal parts of the output by itself: one matrix for q, k and v."""

    def __init__(self, *, parts: int = 2, **layouts: Any) -> None:
        """Takes the number of parts, and the arguments of `ColwiseParallel`."""
        call_given(super().__init__, (), layouts, SpecError, "PackedColwiseParallel")
        self.parts = parts

    def __repr__(self) -> str:
        """Formats it as the call that makes it, with the layouts that torch formats if given."""
        text, usual = super().__repr__(), ColwiseParallel().__repr__()
        own = "" if text == usual.replace("Col", "PackedCol", 1) else f", {text.partition('(')[2]}"
        return f"PackedColwiseParallel(parts={self.parts}{own or ')'}"


ONE_TENSOR: Final = (ColwiseParallel, RowwiseParallel, SequenceParallel)
"""Styles of the first positional input and of the only output."""


KNOWN: Final = (
    *(*ONE_TENSOR, PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput),
    *(PackedColwiseParallel, ReplicatedParallel, ExpertsParallel, ExpertsDispatch, LocalAttributes),
)


@dataclass(frozen=True)
class Layouts:
    """The layouts between which a style changes the inputs and outputs of a module.

    Attributes:
        style: the style, which is torch's.
        inputs: for each positional input its placements outside and inside of the module, None for
            one that stays; None where the style says nothing.
        named: those of keyword inputs.
        outputs: for each output its placements inside and outside.
    """

    style: ParallelStyle
    inputs: Sequence[Change | None] | None = None
    named: Mapping[str, Change] = field(default_factory=dict)
    outputs: Sequence[Change | None] | None = None

    @lazy
    def is_for_one(self) -> bool:
        """Returns whether the style is for one tensor, and what else is passed stays."""
        return isinstance(self.style, ONE_TENSOR)

    @property
    def is_local(self) -> bool:
        """Returns whether the root of a plan returns this rank's tensors, not DTensors."""
        style: Any = self.style
        if isinstance(style, PrepareModuleInputOutput):
            style = style.prepare_module_output
        return isinstance(style, PrepareModuleInput) or bool(style.use_local_output)


class Left(str):
    """The name of a module that left its output sharded, and how a plan has that gathered."""

    how = "output_layouts=Replicate() in the style of {} (in words, colwise_gather_output)"

    @classmethod
    def by(cls, style: ParallelStyle, name: str) -> "Left":
        """Makes that of a module with a style."""
        left = cls(name)
        if isinstance(style, SequenceParallel):  # has no such argument
            left.how = "input_layouts=Shard(1) in the style of what takes it"
        elif not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            left.how = "desired_output_layouts=Replicate() in the style of {}"
        left.how = left.how.format(name)
        return left


def layouts_of(style: Any, module: nn.Module) -> Layouts:
    """Reads a style for a module that is to have it."""
    if isinstance(style, ColwiseParallel):
        inputs = [(style.input_layouts[0], Replicate())]
        return Layouts(style, inputs, {}, [(Shard(-1), style.output_layouts[0])])
    if isinstance(style, RowwiseParallel):
        inside = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        outputs: list[Change | None] = [(Partial(), style.output_layouts[0])]
        return Layouts(style, [(style.input_layouts[0], inside)], {}, outputs)
    if isinstance(style, SequenceParallel):
        shard = style.sequence_sharding[0]
        return Layouts(style, [(shard, shard)], {}, [(shard, shard)])
    if isinstance(style, _Ours):
        return Layouts(style, outputs=style.outputs)
    if isinstance(style, PrepareModuleInput):
        have, desired = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
        named = {name: (have.get(name), desired.get(name)) for name in {**have, **desired}}
        return Layouts(style, _pairs(style.input_layouts, style.desired_input_layouts), named)
    if isinstance(style, PrepareModuleOutput):
        pairs = _pairs(style.output_layouts, style.desired_output_layouts)
        return Layouts(style, None, {}, pairs)
    both: PrepareModuleInputOutput = style
    on_entry = layouts_of(both.prepare_module_input, module)
    on_exit = layouts_of(both.prepare_module_output, module)
    return Layouts(style, on_entry.inputs, on_entry.named, on_exit.outputs)


def _pairs(before: Any, after: Any) -> list[Change | None] | None:
    if before is None or after is None:
        return None
    pairs = zip(before, after, strict=True)
    return [None if src is None and dst is None else (src, dst) for src, dst in pairs]


def mistakes(layouts: Layouts) -> Iterator[str]:
    """Yields what cannot be meant by the arguments of a style."""
    for name, (src, dst) in layouts.named.items():
        if src is None or dst is None:
            yield f"input_kwarg_layouts and desired_input_kwarg_layouts must both name {name!r}"
    positional = [*(layouts.inputs or ()), *(layouts.outputs or ())]
    for src, dst in filter(None, [*positional, *layouts.named.values()]):
        if src is None:
            yield f"{dst!r} is desired, and nothing says from what; give both layouts, or None"
        for placement in (src, dst):
            if placement is not None and not _is_placement(placement):
                yield f"a layout is Shard(dim), Replicate() or Partial(), not {show(placement)}"


def _is_placement(placement: object) -> bool:
    """Returns whether a placement corresponds to a type."""
    if type(placement) is Shard:
        return type(placement.dim) is int
    if type(placement) is Partial:
        return placement.reduce_op == "sum"
    return type(placement) is Replicate


def normalized(placement: Placement, ndim: int, name: str) -> Placement:
    """Returns the placement with its dim counted from the front.

    Raises:
        SpecError: the tensor has no such dim.
    """
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise SpecError(f"{name}: {placement!r}, but the tensor has {ndim} dims.")
    return Shard(placement.dim % ndim)


def spec_of(placement: Placement, axis: str) -> P:
    """Converts a placement, with its dim counted from the front, to a partition spec."""
    if isinstance(placement, Shard):
        return P(*[None] * placement.dim, axis)
    return P(partial=(axis,) if isinstance(placement, Partial) else ())


@dataclass(frozen=True)
class Kind:
    """The way a module multiplies by its weight.

    Attributes:
        outputs: the dim of the weight that the output has.
        inputs: the dim of the weight that is summed over.
        function: what a forward calls on its input and the weight; None if we call it ourselves.
    """

    outputs: int
    inputs: int
    function: Callable[..., Tensor] | None = None


LINEAR: Final = Kind(0, 1, functional.linear)
EMBEDDING: Final = Kind(1, 0, functional.embedding)
CONV1D: Final = Kind(1, 0)
"""The `Conv1D` of transformers: a Linear with a transposed weight."""


def kind_of(module: nn.Module) -> Kind | None:
    """Returns the kind of a module; of a `Conv1D` by the name of its class."""
    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    return CONV1D if any(each.__name__ == "Conv1D" for each in type(module).__mro__) else None
