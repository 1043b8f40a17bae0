"""Every argument of a collective that cannot work, with the whole text of its error."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    S,
    ShardMapError,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    convert,
    current_mesh,
    ppermute,
    redistribute,
    reduce_scatter,
    reinterpret,
    shift,
)
from shardmap_torch.collectives.scope import current_scope
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on, same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.support.golden import told, unplaced
from tests.support.pool import Gloo

HALF = torch.float16
DIVIDE = "which does not divide over the 2 ranks of 'tp' (3 = 1*2 + 1). Pass sizes=, or pad it."
GOES = "I -> R, I -> V, I -> Partial, R -> I, R -> V, V -> Partial, R -> Partial"
WITHOUT_DST = """\
{name} needs dst=: all ranks get the same, and its gradient depends on what they do with it next.
  dst=I: all do the same, as with a loss or a residual stream: each has the whole gradient, and \
the backward sends nothing.
  dst=R: each does something else, as to multiply it by its own columns of weights: each has an \
addend of the gradient, and the backward sums them.
Fix: {fix}, or with dst=R; in a checked body the one that does not fit is refused."""
HINT = "redistribute(x, axis, src=, dst=) finds the collective for any two types."

# Each gets a float32 tensor of shape [2, 3] on each of two ranks of 'tp'.
CASES: list[tuple[Callable[[Tensor], Any], str]] = [
    # without dst, as whoever comes from JAX or torch.distributed begins
    *(
        (call, WITHOUT_DST.format(name=name, fix=fix))
        for call, name, fix in (
            (
                lambda x: all_reduce(x.sum(), "tp"),  # type: ignore[call-arg]
                "all_reduce",
                'all_reduce(x.sum(), "tp", dst=I)',
            ),
            (
                lambda x: all_gather(x, "tp", dim=1),  # type: ignore[call-arg]
                "all_gather",
                'all_gather(x, "tp", dim=1, dst=I)',
            ),
            (
                lambda x: broadcast(x, "tp", 0),  # type: ignore[call-arg]
                "broadcast",
                'broadcast(x, "tp", 0, dst=I)',
            ),
            (
                lambda x: all_reduce(x, "tp", dst=cast(Any, None)),
                "all_reduce",
                "say dst=I",
            ),
        )
    ),
    # axes
    (
        lambda x: all_reduce(x, cast(Any, 3), dst=I),
        "all_reduce: axis=3 is no axis name and no sequence of them.",
    ),
    (
        lambda x: all_reduce(x, cast(Any, ("tp", 3)), dst=I),
        "all_reduce: axis=('tp', 3) is no axis name and no sequence of them.",
    ),
    (
        lambda x: all_reduce(x, (), dst=I),
        "all_reduce: axes () must be at least one name, each once.",
    ),
    (
        lambda x: all_reduce(x, ("tp", "tp"), dst=I),
        "all_reduce: axes ('tp', 'tp') must be at least one name, each once.",
    ),
    # operands
    (
        lambda x: all_reduce(cast(Any, {"a": x, "b": 3}), "tp", dst=I),
        "all_reduce takes tensors, or pytrees of them, not int (3).",
    ),
    # types
    (lambda x: all_reduce(x, "tp", dst=V), "all_reduce: dst=V is none of R, I."),
    (
        lambda x: all_reduce(x, "tp", dst="Q"),
        "'Q' is no type; use I, R, V, Partial, or one of ['I', 'P', 'R', 'V'].",
    ),
    (
        lambda x: all_reduce(x, "tp", dst=I, src=R),
        "all_reduce with op='sum': src=R is none of Partial, V.",
    ),
    (
        lambda x: all_reduce(x, "tp", dst=I, src="P", op="max"),
        "all_reduce with op='max': src=Partial is none of V.",
    ),
    (lambda x: all_gather(x, "tp", dst="P"), "all_gather: dst=Partial is none of R, I."),
    (lambda x: broadcast(x, "tp", 0, dst="V"), "broadcast: dst=V is none of R, I."),
    (
        lambda x: convert(x, "tp", src=V, dst=R),
        f"convert does not go from V to R; it goes {GOES}. {HINT}",
    ),
    (
        lambda x: reinterpret(x, "tp", src=I, dst=V),
        "reinterpret does not go from I to V; it goes R -> V, V -> Partial, R -> Partial, "
        f"Partial -> V, V -> V. {HINT}",
    ),
    (
        lambda x: redistribute(x, "tp", src=V, dst=R),
        "redistribute from V to R: V does not say how the ranks' values are put together; name the "
        "dim with S(dim).",
    ),
    # operations
    (
        lambda x: all_reduce(x, "tp", dst=I, op=cast(Any, "prod")),
        "all_reduce: op='prod' is none of sum, mean, max, min.",
    ),
    (
        lambda x: reduce_scatter(x, "tp", op=cast(Any, "max")),
        "reduce_scatter: op='max' is none of sum, mean.",
    ),
    (
        lambda x: all_reduce(x.to(torch.int32), "tp", dst=I, op="mean"),
        "all_reduce: op='mean' needs a floating dtype, not torch.int32.",
    ),
    (
        lambda x: reduce_scatter(x > 0, "tp", op="mean"),
        "reduce_scatter: op='mean' needs a floating dtype, not torch.int64.",
    ),
    (
        lambda x: all_reduce(x.to(torch.complex64), "tp", dst=I, op="max"),
        "all_reduce: op='max' needs an order, which torch.complex64 lacks.",
    ),
    # dims
    (
        lambda x: all_gather(x, "tp", dim=2, dst=I),
        "all_gather: dim=2 is no dim of the operand; it has 2 dims.",
    ),
    (
        lambda x: all_gather(x, "tp", dim=cast(Any, "0"), dst=I),
        "all_gather: dim='0' is no dim of the operand; it has 2 dims.",
    ),
    (
        lambda x: all_gather(x.sum(), "tp", dst=I),
        "all_gather: dim=0 is no dim of the operand; it is a scalar; x[None] has a dim.",
    ),
    (
        lambda x: all_gather(x, "tp", dim=3, dst=I, tiled=False),
        "all_gather: dim=3 is no dim of the operand; it has 3 dims.",
    ),
    (
        lambda x: reduce_scatter(x, "tp", dim=-3),
        "reduce_scatter: dim=-3 is no dim of the operand; it has 2 dims.",
    ),
    (
        lambda x: all_to_all(x, "tp", split_dim=0, concat_dim=2),
        "all_to_all: concat_dim=2 is no dim of the operand; it has 2 dims.",
    ),
    (
        lambda x: all_to_all(x, "tp", split_dim=-2, concat_dim=0, split_sizes=(1, 3)),
        "all_to_all: split_dim and concat_dim are both 0, where sizes say nothing of what goes "
        "from one rank to another. Use ragged_all_to_all.",
    ),
    (lambda x: convert(x, "tp", src=R, dst=V), "convert from R to V needs dim=."),
    (
        lambda x: redistribute(x, "tp", src=S(2), dst=S(0)),
        "redistribute: src dim=2 is no dim of the operand; it has 2 dims.",
    ),
    # lengths
    (lambda x: reduce_scatter(x, "tp", dim=1), f"reduce_scatter: dim has size 3, {DIVIDE}"),
    (
        lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=0),
        f"all_to_all: split_dim has size 3, {DIVIDE}",
    ),
    (lambda x: convert(x, "tp", src=I, dst=V, dim=1), f"convert: dim has size 3, {DIVIDE}"),
    (
        lambda x: reduce_scatter(x, "tp", dim=1, tiled=False),
        "reduce_scatter: dim has size 3, not 2, the number of ranks of 'tp', as tiled=False needs.",
    ),
    (
        lambda x: reduce_scatter(x, "tp", dim=1, sizes=(1, 1)),
        "reduce_scatter: dim has size 3, not 2, the sum of sizes=(1, 1).",
    ),
    (
        lambda x: all_gather(x, "tp", sizes=(1, 3), dst=I),
        "all_gather: dim has size 2, not 3, the largest of sizes=(1, 3); uneven shards are padded "
        "to it.",
    ),
    (
        lambda x: all_gather(x, "tp", sizes=(1, 2, 3), dst=I),
        "all_gather: sizes=(1, 2, 3) must be 2 non-negative integers, one per rank.",
    ),
    (
        lambda x: reduce_scatter(x, "tp", sizes=(3, -1)),
        "reduce_scatter: sizes=(3, -1) must be 2 non-negative integers, one per rank.",
    ),
    (
        lambda x: all_to_all(x, "tp", split_dim=0, concat_dim=1, concat_sizes=(1,)),
        "all_to_all: concat_sizes=(1,) must be 2 non-negative integers, one per rank.",
    ),
    (
        lambda x: all_gather(x, "tp", sizes=(1, 2), tiled=False, dst=I),
        "all_gather: sizes need tiled=True.",
    ),
    (
        lambda x: reduce_scatter(x, "tp", sizes=(1, 1), tiled=False),
        "reduce_scatter: sizes= needs tiled=True.",
    ),
    # ranks
    (lambda x: broadcast(x, "tp", 2, dst=I), "broadcast: source=2 is none of the 2 ranks of 'tp'."),
    (
        lambda x: broadcast(x, "tp", True, dst=I),
        "broadcast: source=True is none of the 2 ranks of 'tp'.",
    ),
    (lambda x: ppermute(x, "tp", [(0, 2)]), "ppermute: [2] are none of the 2 ranks of 'tp'."),
    (
        lambda x: ppermute(x, "tp", [(0, 1), (0, 0)]),
        "ppermute: [0] are the source of more than one pair.",
    ),
    (
        lambda x: ppermute(x, "tp", [(0, 1), (1, 1)]),
        "ppermute: [1] are the target of more than one pair.",
    ),
    (
        lambda x: ppermute(x, "tp", cast(Any, [(0, 1, 1)])),
        "ppermute: perm takes pairs (source, target) of integers, not (0, 1, 1).",
    ),
    (
        lambda x: ppermute(x, "tp", cast(Any, [(0, 1.0)])),
        "ppermute: perm takes pairs (source, target) of integers, not (0, 1.0).",
    ),
    (lambda x: shift(x, "tp", cast(Any, 0.5)), "shift: offset=0.5 is no integer."),
    # dtypes
    (
        lambda x: ppermute(x, "tp", [], comm_dtype=torch.int8),
        "ppermute: comm_dtype=torch.int8 is no floating dtype.",
    ),
    (
        lambda x: all_reduce(x, "tp", dst=I, grad_comm_dtype=cast(Any, "half")),
        "all_reduce: grad_comm_dtype='half' is no floating dtype.",
    ),
    (
        lambda x: all_reduce(x, "tp", dst=I, op="min", comm_dtype=HALF),
        "all_reduce with op='min' rounds nothing; it takes no comm_dtype and no out_dtype.",
    ),
]


def wrong_arguments(mesh: Mesh) -> None:
    """All cases in turn, and after each the mesh, its groups and the modes work as before."""
    x = torch.arange(12.0).reshape(4, 3)
    working = shard_map(
        lambda x: all_gather(x, "tp", dst=I), mesh=mesh, in_specs=P("tp"), out_specs=P()
    )
    for call, text in CASES:
        with pytest.raises(ShardMapError) as caught:
            shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x)
        assert unplaced(caught.value) == text
        assert current_scope() is None
        assert current_mesh() is None
        assert torch.is_grad_enabled()
        same(working(x), x)


@ON_EVERY_MESH
def test_each_wrong_argument_is_explained_and_leaves_nothing_behind(kind: str, gloo: Gloo) -> None:
    run_on(kind, wrong_arguments, gloo)


def wrong_axes(mesh: Mesh) -> None:
    x = torch.zeros(4)
    fix = "Fix: name one of the axes that the body has, 'tp'."
    over = f"in the {mesh.kind} mesh (dp=1, tp=2).\n{fix}"
    for call, text in [
        (lambda x: all_reduce(x, "pp", dst=I), f"all_reduce: no axis 'pp' {over}"),
        (lambda x: axis_index(("pp", "qq")), f"axis_index: no axis 'pp', 'qq' {over}"),
        (
            lambda x: axis_size("dp"),
            "axis_size: axis 'dp' is not bound here; the body is mapped over 'tp'. Values are "
            "global over the other axes; bind more with axis_names=.",
        ),
    ]:
        f = shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"tp"})
        with pytest.raises(ShardMapError) as caught:
            f(x)
        assert unplaced(caught.value) == text


@ON_EVERY_MESH
def test_an_axis_that_is_not_there_or_not_bound_is_named(kind: str, gloo: Gloo) -> None:
    run_on(kind, wrong_axes, gloo, (1, 2), ("dp", "tp"))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: all_reduce(x, "tp", dst=I), "all_reduce"),
        (lambda x: all_gather(x, "tp", dst=I), "all_gather"),
        (lambda x: reduce_scatter(x, "tp"), "reduce_scatter"),
        (lambda x: all_to_all(x, "tp", split_dim=0, concat_dim=1), "all_to_all"),
        (lambda x: ppermute(x, "tp", []), "ppermute"),
        (lambda x: shift(x, "tp", 1), "shift"),
        (lambda x: broadcast(x, "tp", 0, dst=I), "broadcast"),
        (lambda x: convert(x, "tp", src=I, dst=R), "convert"),
        (lambda x: reinterpret(x, "tp", src=R, dst=V), "reinterpret"),
        (lambda x: redistribute(x, "tp", src=S(0), dst=R), "redistribute"),
        (lambda x: axis_index("tp"), "axis_index"),
        (lambda x: axis_size("tp"), "axis_size"),
    ],
)
def test_outside_a_body_each_function_says_where_it_belongs(
    call: Callable[[Tensor], Any], name: str
) -> None:
    with told(ShardMapError):
        call(torch.zeros(2, 2))
