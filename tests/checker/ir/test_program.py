"""The typed program, its printed form, bytes, fingerprint, and types asked for in the body."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    P,
    Partial,
    R,
    S,
    ShapeDtype,
    ShardTypeError,
    SpecError,
    TransformError,
    V,
    all_gather,
    all_reduce,
    assert_type,
    assume_constant,
    axis_index,
    check_program,
    convert,
    explain,
    make_mesh,
    reduce_scatter,
    shard_map,
    trace,
    typeof,
)
from tests.support.golden import hold_own, told

MESH = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
X = ShapeDtype((8, 16))
W = ShapeDtype((16, 8), requires_grad=True)


def column(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)


MAPPED = shard_map(column, mesh=MESH, in_specs=(P("dp"), P(None, "tp")), out_specs=P())


def test_a_program_prints_one_typed_equation_a_line() -> None:
    line = column.__code__.co_firstlineno + 1
    site = f'# test_program.py:{line}: return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)'
    assert str(trace(MAPPED, X, W)) == "\n".join(
        [
            "column on the abstract mesh (dp=2, tp=4)",
            "  x: P('dp', invariant={'tp'})",
            "  w: P(None, 'tp', replicate={'dp'})",
            "forward:",
            "  %1: float32[4, 2] {dp: V, tp: V} = mm(input x (P('dp')); input w (P(None, 'tp')))"
            f"  {site}",
            f"  %2: float32[] {{dp: V, tp: V}} = sum(%1)  {site}",
            "  %3: float32[] {dp: I, tp: I} = all_reduce(('dp', 'tp'), Partial -> I)(%2)  "
            "sends 7 B  "
            f"{site}",
            "backward:",
            "  %4: float32[] {dp: V, tp: V} = convert(('dp', 'tp'), I -> R)(the cotangent of a "
            f"result)  {site}",
            f"  %5: float32[4, 2] {{dp: V, tp: V}} = expand(%4; size=[4, 2])  {site}",
            f"  %6: float32[16, 4] {{dp: V, tp: K}} = t(input x (P('dp')))  {site}",
            f"  %7: float32[16, 2] {{dp: V, tp: V}} = mm(%6; %5)  {site}",
            "  %8: float32[16, 2] {dp: I, tp: V} = all_reduce('dp', Partial -> I)(%7)  sends 128 B",
        ]
    )


def test_a_program_and_a_verdict_show_themselves_in_short() -> None:
    assert repr(trace(MAPPED, X, W)) == str(trace(MAPPED, X, W))
    shown = "<Verdict: column on the abstract mesh (dp=2, tp=4) is accepted>"
    assert repr(check_program(MAPPED, X, W)) == shown


def test_explain_pairs_each_collective_with_the_one_that_autograd_derived() -> None:
    line = column.__code__.co_firstlineno + 1
    assert str(explain(MAPPED, X, W)) == "\n".join(
        [
            "column on the abstract mesh (dp=2, tp=4)",
            "arguments:",
            "  x: P('dp', invariant={'tp'})",
            "  w: P(None, 'tp', replicate={'dp'})",
            "collectives:",
            "  all_reduce(('dp', 'tp'), Partial -> I) of float32[], sends 7 B  "
            f'# test_program.py:{line}: return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)',
            "    backward: convert(('dp', 'tp'), I -> R) of float32[], sends 0 B, as specified",
            "gradients of arguments:",
            "  w: {dp: V, tp: V}",
            "  all_reduce('dp', Partial -> I) of float32[16, 2], sends 128 B",
            "bytes sent by each rank, forward and backward:",
            "  dp: 128",
            "  dp,tp: 7",
            "global: the same program on one device",
        ]
    )


def test_the_fingerprint_is_that_of_the_program_and_not_of_its_source() -> None:
    def scaled(factor: float) -> Any:
        return shard_map(lambda x: x * factor, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))

    def again(x: Tensor) -> Tensor:
        return x * 2.0

    same = shard_map(again, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    assert trace(scaled(2.0), X).fingerprint == trace(same, X).fingerprint
    assert trace(scaled(2.0), X).fingerprint != trace(scaled(3.0), X).fingerprint


def test_an_abstract_mesh_gives_shapes_and_dtypes_for_8192_ranks() -> None:
    mesh = make_mesh((1024, 8), ("dp", "tp"), kind="abstract")

    @shard_map(mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs={"y": P("dp"), "n": None})
    def f(x: Tensor, w: Tensor) -> dict[str, Any]:
        y = reduce_scatter(x @ w, "tp", dim=1)
        return {"y": all_gather(y, "tp", dim=1, dst=I), "n": 3}

    x: Any = ShapeDtype((2048, 64), torch.bfloat16)
    w = torch.empty(64, 32, dtype=torch.bfloat16)
    assert f(x, w) == {"y": ShapeDtype((2048, 32), torch.bfloat16), "n": 3}


def test_the_number_of_ranks_does_not_change_the_program() -> None:
    def f(x: Tensor) -> Tensor:
        return all_reduce(x.sum(), "i", dst=I)

    def count(n: int) -> int:
        mesh = make_mesh((n,), ("i",), kind="abstract")
        mapped = shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P())
        return len(check_program(mapped, ShapeDtype((n,))).equations)

    assert count(8) == count(8192)


# ----------------------------------------------------------------------------- in the body


def test_typeof_and_assert_type_see_every_type() -> None:
    seen: list[Any] = assume_constant([])

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        seen.append(dict(typeof(y)))
        total = all_reduce(y, "dp", dst=I)
        seen.append(dict(typeof(total)))
        seen.append(dict(typeof(torch.ones(2))))
        seen.append(dict(typeof(torch.zeros(2))))
        partial = assert_type(convert(w, "tp", src="V", dst="P", dim=0), {"tp": Partial})
        assert_type(axis_index("tp"), {"tp": V, "dp": R})
        return assert_type(total * 2, {"dp": I}) + 0 * all_reduce(partial, "tp", dst=I).sum()

    f = shard_map(body, mesh=MESH, in_specs=(P("dp"), P("tp", invariant={"dp"})), out_specs=P())
    check_program(f, ShapeDtype((8, 16), requires_grad=True), W)
    assert seen == [
        {"dp": V, "tp": "K"} | {"tp": seen[0]["tp"]},
        {"dp": I, "tp": seen[1]["tp"]},
        {"dp": seen[2]["dp"], "tp": seen[2]["tp"]},
        {"dp": seen[3]["dp"], "tp": seen[3]["tp"]},
    ]
    assert [str(seen[i]["tp"]) for i in range(4)] == ["K", "K", "K", "Z"]


def asserting(types: dict[str, Any]) -> str:
    f = shard_map(lambda x: assert_type(x, types), mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    with pytest.raises((ShardTypeError, CollectiveError)) as caught:
        check_program(f, X)
    return str(caught.value)


def test_a_wrong_assertion_tells_both_types_and_where_the_value_is_from() -> None:
    hold_own(asserting({"dp": I}))


def test_an_assertion_on_an_unknown_axis_or_on_a_shard_is_refused() -> None:
    line = "\n  at test_program.py:"
    assert asserting({"pp": I}).startswith(
        f"assert_type: no axis 'pp' in the abstract mesh (dp=2, tp=4).{line}"
    )
    assert asserting({"dp": S(0)}).startswith(
        "assert_type: S(0) over 'dp' cannot be distinguished from V: shards are tracked only with "
        f"check='global'. Use V.{line}"
    )


def test_an_assertion_does_nothing_outside_of_a_check() -> None:
    x = torch.ones(2)
    assert assert_type(x, {"tp": V}) is x


def test_only_a_shard_mapped_function_can_be_checked() -> None:
    with told(TransformError):
        check_program(len, X)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, -1), torch.float32), ("4", torch.float32), ((4,), "float32")]
)
def test_what_is_no_shape_or_dtype_is_told_where_it_is_made(shape: Any, dtype: Any) -> None:
    with told(SpecError):
        ShapeDtype(shape, dtype)


def test_a_product_of_several_dtypes_is_refused_as_with_data() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    mesh = make_mesh((2,), ("i",), kind="abstract")
    f: Any = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    line = body.__code__.co_firstlineno + 1
    for shape in ((4, 4), (2, 4, 4)):
        with pytest.raises(ShardTypeError) as caught:
            f(ShapeDtype(shape), ShapeDtype((4, 4), torch.bfloat16))
        assert str(caught.value) == (
            "body: mm of bfloat16 and float32: torch multiplies tensors of one dtype only.\n"
            f"  at test_program.py:{line}: return x @ w\nFix: cast one of them."
        )
    with torch.autocast("cpu"):
        f(ShapeDtype((4, 4)), ShapeDtype((4, 4), torch.bfloat16))
