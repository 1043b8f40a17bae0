"""Styles, the entries of a plan: ColwiseParallel and others, with torch's names and arguments."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from torch.distributed.tensor import Placement, Replicate, Shard

from shardmap_torch.errors import SpecError, show
from shardmap_torch.parallel.layouts import check_placement

Layouts: TypeAlias = Placement | tuple[Placement | None, ...]
"""One placement for each tensor, in a tuple; one alone stands for a tuple of one."""

ROOT: Final = ""
"""The key of a plan that stands for the module itself."""


class ParallelStyle:
    """Base of the styles of a plan; each class below takes torch's arguments."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"


class _Linear(ParallelStyle):
    """Base of the two styles of `nn.Linear` and `nn.Embedding`."""

    def __init__(
        self,
        input_layouts: Placement | None,
        output_layouts: Placement | None,
        use_local_output: bool,
        defaults: tuple[Placement, Placement],
    ) -> None:
        self.input_layouts = _one(self, "input_layouts", input_layouts, defaults[0])
        self.output_layouts = _one(self, "output_layouts", output_layouts, defaults[1])
        self.use_local_output = use_local_output


class ColwiseParallel(_Linear):
    """Shards the output features of an `nn.Linear` or the features of an `nn.Embedding`.

    The weight of a Linear is sharded on dim 0 (so is its bias), that of an Embedding on dim 1. A
    sharded input is gathered; each rank computes its own features.

    Moves: for `input_layouts=Shard(dim)` an all_gather of the input, backward a reduce_scatter; for
    Replicate() nothing, backward an all_reduce; for `output_layouts` other than Shard(-1) what
    `redistribute` moves.

    Args:
        input_layouts: placement of the input; Replicate() by default.
        output_layouts: placement of the output; Shard(-1) by default.
        use_local_output: for the root of the plan, return this rank's tensor (True, the default)
            or a DTensor. Below the root values are always local.

    Raises:
        SpecError: a layout is no placement.

    Source: `torch.distributed.tensor.parallel.ColwiseParallel`.

    Example:
        >>> from shardmap_torch import ColwiseParallel
        >>> ColwiseParallel().output_layouts
        Shard(dim=-1)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output, (Replicate(), Shard(-1)))


class RowwiseParallel(_Linear):
    """Shards the input features of an `nn.Linear` or the rows of an `nn.Embedding`.

    The weight of a Linear is sharded on dim 1 and its bias replicated, which is added once, to the
    finished sum; the weight of an Embedding is sharded on dim 0, and each rank looks up the rows
    that it has. The output is the sum over the ranks.

    Moves: for `output_layouts=Replicate()` an all_reduce, backward nothing; for Shard(dim) a
    reduce_scatter, backward an all_gather; for Partial() nothing.

    Args:
        input_layouts: placement of the input; Shard(-1) by default. For an Embedding, whose ids
            are gathered if they are sharded, use Replicate().
        output_layouts: placement of the output; Replicate() by default.
        use_local_output: as in `ColwiseParallel`.

    Raises:
        SpecError: a layout is no placement.

    Source: `torch.distributed.tensor.parallel.RowwiseParallel`.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> from shardmap_torch import RowwiseParallel
        >>> RowwiseParallel(output_layouts=Shard(1)).output_layouts
        Shard(dim=1)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output, (Shard(-1), Replicate()))


class SequenceParallel(ParallelStyle):
    """Runs a module, such as a norm or dropout, on a shard of the sequence.

    Input and output are sharded on `sequence_dim`; parameters are replicated. They are those of
    rank 0 and keep their `requires_grad` (torch lets each rank keep its own, and makes frozen ones
    trainable).

    Moves: nothing; backward the gradients of the parameters are summed by an all_reduce.

    Args:
        sequence_dim: the dim of the sequence; 1 by default.
        use_local_output: as in `ColwiseParallel`; False by default.

    Raises:
        SpecError: the dim is no int.

    Source: `torch.distributed.tensor.parallel.SequenceParallel`; Korthikanti et al. 2022.

    Example:
        >>> from shardmap_torch import SequenceParallel
        >>> SequenceParallel()
        SequenceParallel(sequence_dim=1, use_local_output=False)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        if type(sequence_dim) is not int:
            raise SpecError(f"SequenceParallel: sequence_dim is an int, not {show(sequence_dim)}.")
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output


class PrepareModuleInput(ParallelStyle):
    """Redistributes the inputs of a module, before its forward.

    Moves: what `redistribute` moves between the two layouts of each input.

    Args:
        input_layouts: placement of each positional input; None for one that is not changed.
        desired_input_layouts: placement of each after it.
        input_kwarg_layouts: the same for keyword inputs, by name; those not named are not changed.
        desired_input_kwarg_layouts: placement of each of these after it.
        use_local_output: accepted as torch's; inside the module values are local in any case.

    Raises:
        SpecError: a layout is no placement, or the lengths or names differ.

    Source: `torch.distributed.tensor.parallel.PrepareModuleInput`.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from shardmap_torch import PrepareModuleInput
        >>> style = PrepareModuleInput(input_layouts=(Shard(1), None),
        ...                            desired_input_layouts=(Replicate(), None))
        >>> style.input_layouts
        (Shard(dim=1), None)
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _several(self, "input_layouts", input_layouts)
        self.desired_input_layouts = _several(self, "desired_input_layouts", desired_input_layouts)
        self.input_kwarg_layouts = _named(self, "input_kwarg_layouts", input_kwarg_layouts)
        self.desired_input_kwarg_layouts = _named(
            self, "desired_input_kwarg_layouts", desired_input_kwarg_layouts
        )
        self.use_local_output = use_local_output
        _same_length(self, "input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise SpecError(
                f"{type(self).__name__}: input_kwarg_layouts names "
                f"{sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}."
            )


class PrepareModuleOutput(ParallelStyle):
    """Redistributes the outputs of a module, after its forward.

    Moves: what `redistribute` moves between the two layouts of each output.

    Args:
        output_layouts: placement of each output; None for one that is not changed.
        desired_output_layouts: placement of each after it.
        use_local_output: as in `ColwiseParallel`.

    Raises:
        SpecError: a layout is no placement, or the lengths differ.

    Source: `torch.distributed.tensor.parallel.PrepareModuleOutput`.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from shardmap_torch import PrepareModuleOutput
        >>> style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        >>> style.desired_output_layouts
        (Shard(dim=0),)
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _several(self, "output_layouts", output_layouts) or ()
        self.desired_output_layouts = (
            _several(self, "desired_output_layouts", desired_output_layouts) or ()
        )
        self.use_local_output = use_local_output
        _same_length(self, "output_layouts", self.output_layouts, self.desired_output_layouts)


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` of one module.

    Moves: what the two move.

    Args:
        input_layouts: as in `PrepareModuleInput`.
        desired_input_layouts: as there.
        input_kwarg_layouts: as there.
        desired_input_kwarg_layouts: as there.
        use_local_input: its `use_local_output`.
        output_layouts: as in `PrepareModuleOutput`.
        desired_output_layouts: as there.
        use_local_output: as there.

    Raises:
        SpecError: as both.

    Source: `torch.distributed.tensor.parallel.PrepareModuleInputOutput`.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from shardmap_torch import PrepareModuleInputOutput
        >>> style = PrepareModuleInputOutput(
        ...     input_layouts=Shard(1), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(1))
        >>> style.prepare_module_output.output_layouts
        (Replicate(),)
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )


def _one(
    style: ParallelStyle, name: str, layout: Placement | None, default: Placement
) -> Placement:
    if layout is None:
        return default
    check_placement(layout, f"{type(style).__name__}: {name}")
    return layout


def _several(
    style: ParallelStyle, name: str, layouts: Layouts | None
) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    placements = tuple(layouts) if isinstance(layouts, tuple | list) else (layouts,)
    for layout in placements:
        if layout is not None:
            check_placement(layout, f"{type(style).__name__}: {name}")
    return placements


def _named(
    style: ParallelStyle, name: str, layouts: Mapping[str, Placement] | None
) -> dict[str, Placement]:
    if layouts is None:
        return {}
    if not isinstance(layouts, Mapping):
        raise SpecError(
            f"{type(style).__name__}: {name} takes placements by name, not {show(layouts)}."
        )
    for layout in layouts.values():
        check_placement(layout, f"{type(style).__name__}: {name}")
    return dict(layouts)


def _same_length(
    style: ParallelStyle,
    name: str,
    have: tuple[Placement | None, ...] | None,
    desired: tuple[Placement | None, ...] | None,
) -> None:
    for place, (ours, theirs) in enumerate(zip(have or (), desired or (), strict=False)):
        if ours is None and theirs is not None:
            raise SpecError(
                f"{type(style).__name__}: desired_{name}[{place}] is {theirs!r}, and "
                f"{name}[{place}] does not say from what; give both, or None for both."
            )
    if len(have or ()) != len(desired or ()):
        raise SpecError(
            f"{type(style).__name__}: {name} has {len(have or ())} layouts, desired_{name} "
            f"{len(desired or ())}; both need one per tensor."
        )
