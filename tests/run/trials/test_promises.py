"""check="global" with per-rank code: what a `local_region` promises is tried."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_reduce,
    axis_size,
    check_program,
    explain,
    local_region,
    make_mesh,
    shard_map,
)
from tests.run.trials.support.regions import TABLE, TOKENS, Region, lookup, random, ring, weigh

TP: Final = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
CP: Final = make_mesh((3,), ("cp",), kind="simulated")


def embedded(rows: Region) -> Callable[..., Any]:
    def embed(table: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = rows(table, ids)
        return all_reduce(y, "tp", dst=I)

    return shard_map(embed, mesh=TP, in_specs=(P("tp"), P()), out_specs=P(), check="global")


def weighed(region: Region) -> Callable[..., Any]:
    return shard_map(region, mesh=CP, in_specs=P("cp"), out_specs=P("cp"), check="global")


def multiplied(direction: int) -> Callable[..., Any]:
    specs = (P("tp"), P(None, "tp"))
    region = ring(direction)
    mesh = make_mesh((3,), ("tp",), kind="simulated")
    return shard_map(region, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"), check="global")


RIGHT: Final[list[tuple[Callable[..., Any], tuple[Tensor, ...]]]] = [
    (embedded(lookup()), (TABLE, TOKENS)),
    (multiplied(-1), (random(6, 4), random(4, 6))),
]
WRONG: Final[list[tuple[Callable[..., Any], tuple[Tensor, ...]]]] = [
    (embedded(lookup(mask=False)), (TABLE, TOKENS)),
    (embedded(lookup(offset=False)), (TABLE, TOKENS)),
    (multiplied(1), (random(6, 4), random(4, 6))),
    (weighed(weigh), (random(6).requires_grad_(),)),
]


@pytest.mark.parametrize(("f", "args"), RIGHT)
def test_a_promise_that_is_kept_is_tried_and_no_longer_assumed(f: Any, args: Any) -> None:
    found = explain(f, *args)
    assert (found.one_device, found.assumed) == ("tried", ())


@pytest.mark.parametrize(("f", "args"), WRONG)
def test_a_promise_that_is_not_kept_is_refused(f: Any, args: Any) -> None:
    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        check_program(f, *args)


def test_the_refusal_names_the_region_and_its_line() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def centred(x: Tensor) -> Tensor:
        return x - x.mean()

    with pytest.raises(ShardTypeError) as caught:
        weighed(lambda x: centred(x))(random(6))
    head, reason, line, fix = str(caught.value).splitlines()
    start = "<lambda>: check='global': tried with numbers over 'cp', a region is not what it "
    assert head.startswith(start + "promises: out is ")
    assert reason == "The program rests on:"
    assert line.startswith("  local_region centred  # test_promises.py:")
    assert fix == (
        "Fix: where its axes have one rank it must compute what all ranks compute together; "
        "validate_rule tries it by itself. If its arguments are no free choice, as a sequence that "
        "is permuted before it is sharded, say trusted=True, which explain lists."
    )


def test_an_unknown_operator_does_not_hide_what_differs() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def flipped(x: Tensor) -> Tensor:
        y: Tensor = torch.special.bessel_j0(x)
        return y.flip(0)

    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        weighed(lambda x: flipped(x))(random(6))


def halved(x: Tensor) -> Tensor:
    """Halves where there are several ranks, so that no promise of it is kept."""
    return x / 2 if axis_size("cp") > 1 else x


def test_a_trusted_promise_is_believed_and_listed() -> None:
    region = local_region(halved, in_types=(P("cp"),), out_types=P("cp"), trusted=True)
    found = explain(weighed(lambda x: region(x)), random(6))
    (line,) = found.assumed
    assert found.one_device == "proven"
    assert line.startswith("  local_region halved  # test_promises.py:")


@pytest.mark.parametrize("draw", [functional.dropout, torch.rand_like, lambda w: w + w.normal_()])
def test_random_numbers_beside_a_region_do_not_keep_it_from_being_tried(draw: Any) -> None:
    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return region(x), draw(w * 1)

    specs = P("cp"), P()
    mapped = shard_map(body, mesh=CP, in_specs=specs, out_specs=specs, check="global")
    declared: Any = local_region(in_types=(P("cp"),), out_types=P("cp"))
    region = declared(Tensor.sin)
    assert explain(mapped, random(6), random(4)).one_device == "tried"
    region = declared(halved)
    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        check_program(mapped, random(6), random(4))


def test_a_promise_that_numbers_cannot_decide_is_believed_and_listed() -> None:
    region: Region = local_region(Tensor.round, in_types=(P("cp"),), out_types=P("cp"))
    found = explain(weighed(lambda x: region(x)), random(6))
    _, why = found.assumed
    assert found.one_device == "proven"
    assert why.startswith("    could not be tried: round may have pieces that random inputs do not")


def test_each_size_is_tried() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def short(x: Tensor) -> Tensor:
        return x * min(x.shape[0] * axis_size("cp"), 8) / min(x.shape[0], 8) / axis_size("cp")

    f = weighed(lambda x: short(x))
    for size in (3, 6):
        f(random(size))
    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        f(random(27))


def test_local_strictness_believes_what_a_region_promises() -> None:
    region = local_region(halved, in_types=(P("cp"),), out_types=P("cp"))
    mapped = shard_map(lambda x: region(x), mesh=CP, in_specs=P("cp"), out_specs=P("cp"))
    check_program(mapped, random(6))


@pytest.mark.sample(1)
@pytest.mark.parametrize("out", [P("dp"), P(None, "dp")])
def test_a_lookup_serves_programs_in_which_another_axis_shards_ids(out: P) -> None:
    mapped = shard_map(
        lambda table, ids: all_reduce(lookup()(table, ids), "tp", dst=I),
        mesh=TP,
        in_specs=(P("tp"), out),
        out_specs=out,
        check="global",
    )
    torch.testing.assert_close(mapped(TABLE, TOKENS), TABLE[TOKENS])
