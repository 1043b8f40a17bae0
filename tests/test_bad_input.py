"""Junk arguments raise errors of this package, and leave nothing behind."""

import os
import re
import threading
import weakref
from collections import UserList
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardmap_torch import (
    CollectiveError,
    Function,
    I,
    LayerError,
    P,
    ShardMapError,
    ShardTypeError,
    SpecError,
    all_gather,
    all_reduce,
    current_mesh,
    debug_print,
    explain,
    full,
    lax,
    make_mesh,
    mark_sharding,
    match_specs,
    nn,
    ops,
    optim,
    parallel,
    planning,
    random,
    saving,
    shard_map,
    testing,
)
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.errors import listing
from shardmap_torch.lax import slicing
from tests.support.bad_calls import library_call, method_call
from tests.support.bad_input import Draw, any_call, internal_errors, limited
from tests.support.fuzzing import sized
from tests.support.golden import told, unplaced

NUM_SEEDS = sized(150, 5_000)
FIRST = int(os.environ.get("SHARDMAP_FUZZ_SEED", "0"))


@pytest.mark.parametrize("choose", [any_call, library_call, method_call])
def test_junk_is_refused_by_name_and_leaves_nothing_behind(
    choose: Callable[[Draw], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some junk is a folder's name
    found = list(internal_errors(range(FIRST, FIRST + NUM_SEEDS), choose))
    assert not found, "\n".join(found)
    assert_nothing_is_left()


def test_results_are_not_made_by_hand_and_other_fields_are_compared_with_annotations() -> None:
    wrong: Any = "a"
    place = {"a": wrong, "b": 0}
    for call, text in (
        (lambda: planning.Estimate(wrong, wrong), "Estimate is what functions of shardmap_torch"),
        (lambda: replace(planning.H100, memory=wrong), "Hardware: memory='a' is no float."),
        (lambda: GRID.resized((1, wrong)), "Mesh.resized: sizes=(1, 'a') is no tuple[int, ...]."),
        (lambda: GRID.rank_at(place), "Mesh.rank_at: place={'a': 'a', 'b': 0} is no Mapping"),
        (lambda: Function.apply(3), "Function has no forward: write one in a class of its own."),
    ):
        with pytest.raises(ShardMapError, match="^" + re.escape(text)):
            call()
    assert replace(planning.H100, memory=1.0).memory == 1.0
    exec("import shardmap_torch; shardmap_torch.ShapeDtype((2,))", {})  # by code of no module


def test_a_call_that_takes_too_long_or_too_much_memory_is_told() -> None:
    def endless() -> None:
        while True:
            pass

    with pytest.raises(TimeoutError), limited(0.1):
        endless()
    with pytest.raises(MemoryError), limited(1.0):
        bytearray(8 << 30)
    wrong: Any = 3
    (told,) = internal_errors(range(1), lambda draw: lambda: listing("", wrong))
    assert told.startswith("seed 0: TypeError at ")


def assert_nothing_is_left() -> None:
    assert current_scope() is None
    assert current_mesh() is None
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()


GRID = make_mesh((2, 2), ("a", "b"), kind="simulated", simulate="ranks")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_tensor_that_cannot_be_sharded_is_refused_under_transforms_too() -> None:
    mapped = shard_map(double, mesh=GRID, in_specs=P(), out_specs=P())
    quantized = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
    with pytest.raises(SpecError, match=r"x: is a quantized tensor; pass x\.dequantize\(\)"):
        torch.func.vmap(mapped)(quantized)
    with FakeTensorMode():
        fake = torch.ones(4)
    with pytest.raises(SpecError, match=r"x: is a fake tensor whose FakeTensorMode has ended"):
        mapped(fake)


def test_a_tree_too_deep_to_place_and_a_nested_tensor_given_twice_are_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(SpecError, match=r"A list contains itself, or is nested too deep"):
        full(endless)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    mapped = shard_map(lambda *xs: xs, mesh=GRID, in_specs=None, out_specs=P())
    for _ in range(3):
        with pytest.raises(ShardMapError):
            mapped(nested, 3)


def test_half_precision_crosses_the_boundary_under_autocast_of_bfloat16() -> None:
    mapped = shard_map(double, mesh=GRID, in_specs=P("a"), out_specs=P("a"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mapped(torch.ones(4, dtype=torch.float16)), torch.full((4,), 2.0).half())


def test_a_tensor_of_inference_mode_has_gradients_on_ranks() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
    mapped = shard_map(double, mesh=GRID, in_specs=P("a", invariant="b"), out_specs=P("a"))
    assert torch.equal(torch.func.grad(lambda x: mapped(x).sum())(x), torch.full((4,), 2.0))


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e5m2])
def test_ranks_compare_results_of_dtypes_that_torch_cannot_compare(dtype: torch.dtype) -> None:
    mapped = shard_map(torch.clone, mesh=GRID, in_specs=P(), out_specs=P(), check=False)
    assert mapped(torch.ones(4).to(dtype)).dtype == dtype


def test_tiled_is_true_or_false() -> None:
    mapped = shard_map(
        lambda x: all_gather(x, "a", dst=I, tiled=[1]),  # type: ignore[arg-type]
        mesh=GRID,
        in_specs=P("a"),
        out_specs=P(),
    )
    with pytest.raises(CollectiveError) as caught:
        mapped(torch.ones(4))
    assert unplaced(caught.value) == "all_gather: tiled=[1] is neither True nor False."


@pytest.mark.parametrize("dtype", [torch.uint64, torch.float8_e5m2])
def test_a_dtype_that_torch_cannot_add_is_an_error_and_no_hang(dtype: torch.dtype) -> None:
    mapped = shard_map(
        lambda x: all_reduce(x, "a", dst=I), mesh=GRID, in_specs=P("a"), out_specs=P()
    )
    with told(CollectiveError):
        mapped(torch.ones(4).to(dtype))


X = torch.ones(2, 2)
SGD = optim.sgd(0.1, momentum=0.9)
one_device, schedule = testing.assert_equals_one_device, nn.one_forward_one_backward_schedule
GROUP: Any = ops.axis_group(GRID, "a")
EXPLAINED_PROGRAM = explain(shard_map(double, mesh=GRID, in_specs=P(), out_specs=P()), X)
WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (ops.axis_group, (GRID, None), {}, "axis_group: axis=None is no str | Sequence[str]."),
    (parallel.parallel_summary, (3,), {}, "parallel_summary: module=3 is no Module."),
    (parallel.save_pretrained, ({}, "x"), {}, "save_pretrained: model={} is no Module."),
    (parallel.load_safetensors, (torch.nn.Linear(1, 1), "a\0b"), {}, "is no file 'a\\x00b'."),
    (testing.assert_bytes, (double, 3, {}), {}, "takes a sequence of arguments, not 3."),
    (parallel.PackedColwiseParallel, (), {"x": 1}, "got an unexpected keyword argument 'x'."),
    (one_device, (double, double, X), {"gradients": "x"}, "is no bool."),
    (one_device, (double, double, X), {"seed": 1 << 200}, "unpacking long long"),
    (GRID.make_group, (("a",), "x", None, 0), {}, "A simulated mesh has no process groups."),
    (GRID.resized, ((1024, 2048),), {}, "A mesh has up to 1,048,576 ranks, not (1024, 2048)."),
    (nn.gpipe_schedule, (10**9, 2), {}, "not 1000000000 ranks * 2000000002 ticks."),
    (schedule, (2, 10**18), {}, "1,048,576 places, not 2 ranks * 1000000000000000002 ticks."),
    (GRID.num_ranks, (b"a",), {}, "Mesh.num_ranks: axes=b'a' is no Sequence[str]."),
    (GRID.num_ranks, (range(10**12),), {}, "is no Sequence[str]."),
    (one_device, (double, 3, X), {}, "'int' object is not callable."),
    (nn.moe, (X, X.sum(), X, "a"), {"expert": double}, "a scalar, which contracts no features."),
    (lax.dynamic_slice_in_dim, ("x", 0, 1), {}, "not str ('x')."),
    (lax.dynamic_slice_in_dim, (X, 0.5, 1), {}, "a slice starts at one integer, not at 0.5."),
    (lax.dynamic_slice_in_dim, (X, X, 1), {}, "one integer, not at float32[2, 2]."),
    (lax.dynamic_update_slice_in_dim, (X, 3, 0, 0), {}, "not int (3)."),
    (lax.dynamic_update_index_in_dim, (X, [], 0, 0), {}, "not list ([])."),
    (lax.fori_loop, (0, 1, 3, X), {}, "fori_loop: body_fun=3 is no function."),
    (lax.scan, (3, X, X), {}, "scan: f=3 is no function."),
    (lax.scan, (lambda c, x: 3, X, X), {}, "scan: f returns a carry and a result, not 3."),
    (lax.scan, (print, X), {"length": "n"}, "scan: length='n' is no number of iterations."),
    (lax.cond, ({}, print, print), {}, "cond: pred={} is neither a bool nor a tensor of one."),
    (lax.cond, (True, 3, print), {}, "cond: true_fun=3 is no function."),
    (optim.adamw, ("x",), {}, "lr='x' is no number"),
    (optim.adamw, (0.1,), {"betas": 0.9}, "adamw: betas=0.9 is no pair of numbers."),
    (optim.sgd, (X,), {}, "is no number"),
    (optim.warmup_cosine, (1.0,), {"steps": "n"}, "steps='n' is no number"),
    (optim.global_norm, ({"w": 3},), {}, "global_norm: a leaf of the tree is no tensor."),
    (optim.global_norm, (X,), {"ord": "x"}, "ord='x' is no norm; it must be at least 1."),
    (optim.clip_by_global_norm, (X,), {"max_norm": []}, "max_norm=[] is no bound."),
    (optim.clip_by_global_norm, (X,), {"max_norm": -1.0}, "max_norm=-1.0 is no bound."),
    (optim.warmup_cosine, (1.0,), {"steps": 0}, "steps=0 is not in [1, inf)"),
    (optim.clip_grad_norm_, (3, 1.0), {}, "the parameters are tensors, or one tensor."),
    (optim.shard_over, (X, P(), 3, GRID), {}, "3 is neither an axis name nor a tuple of them."),
    (optim.shard_over, ({"w": 3}, P(), "a", GRID), {}, "3 has no shape"),
    (optim.sync_gradients, (X, P(), 3), {}, "3 is neither an axis name nor a tuple of them."),
    (mark_sharding, (X, GRID, 2.5), {}, "2.5 is neither a P nor a sequence of entries."),
    (match_specs, (X, 3), {}, "the patterns are a mapping from paths to P(...)."),
    (match_specs, (X, {"**": 3}), {}, "match_specs: 3 is no P(...)."),
    (GRID.coordinates, ("x",), {}, "Mesh.coordinates: rank='x' is no int."),
    (GRID.num_ranks, (["zz"],), {}, "axes=['zz'] names 'zz', which is unknown."),
    (GRID.rank_at, ({"a": 0},), {}, "place={'a': 0} lacks 'b'."),
    (GRID.rank_at, (), {}, "argument: 'place'; it is Mesh.rank_at(self, place)."),
    (EXPLAINED_PROGRAM.html, ("no/where",), {}, "cannot be used: No such file or directory."),
    (EXPLAINED_PROGRAM.html, ("a\0b",), {}, "path='a\\x00b' cannot be used: embedded null byte."),
    (SGD.init, (torch.Tensor,), {}, "out of the tree:\n  : <class 'torch.Tensor'>"),
    (lax.switch, (0, [double], X, X), {}, "takes 1 positional argument but 2 were given."),
    (optim.adamw().init, ({"w": torch.bits8},), {}, "out of the tree:\n  w: torch.bits8"),
    (GRID.num_ranks, (UserList([1]),), {}, "axes=[1] names 1, which is unknown."),
    (EXPLAINED_PROGRAM.html, (MagicMock(spec=str),), {}, "is no str | pathlib.Path."),
    (EXPLAINED_PROGRAM.with_rows, (list[int],), {}, "'Row' object is not iterable."),
    (SGD.update, (X, X, 3), {}, "Optimizer.update: state=3 is no dict[str, Any]."),
    (GROUP.allreduce, ([X, X], None), {}, "A group takes lists of one tensor, not of 2."),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "text"), WRONG)
def test_junk_for_a_library_function_is_named(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(ShardMapError) as caught:
        function(*args, **kwargs)
    assert str(caught.value).endswith(text)


EXPLAINED: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.rms_norm(X.to_sparse(), X[0]), "rms_norm: x=float32[2, 2] is a sparse_coo tensor"),
    (lambda: debug_print("x", X.to_sparse()), "debug_print: x=float32[2, 2] is a sparse_coo"),
    (lambda: random.fold_in(random.key(0), 1 << 99), "fold_in: torch refuses key=int64[], data="),
    (lambda: nn.kv_update("x", X, 0), "kv_update: cache='x' is no Tensor."),  # type: ignore[arg-type]
    (lambda: saving.latest(3), "latest: folder=3 is no str | os.PathLike[str]."),  # type: ignore[arg-type]
    (lambda: lax.pcast(X, "a", "b"), "pcast: too many positional arguments; it is pcast(x, "),  # type: ignore[call-arg]
    (lambda: lax.cond(True, torch.mv, print, X, X), "torch refuses pred=True, true_fun="),
    (lambda: saving.latest("a" * 300), "File name too long"),
    (lambda: random.iota("ab"), "iota: shape='ab' is no Sequence[int]."),  # type: ignore[arg-type]
    (lambda: nn.head_tail_order(2**70, 2), "torch refuses length=1180591620717411303424"),
    (lambda: nn.grouped_linear({"w": X}, X, X), "grouped_linear: rows={'w': tensor"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "text"), EXPLAINED)
def test_an_error_from_within_a_library_function_names_its_arguments(
    call: Callable[[], Any], text: str
) -> None:
    with pytest.raises(ShardMapError) as caught:
        call()
    assert text in str(caught.value)
    assert caught.value.__cause__ is not None


def test_errors_of_the_users_and_of_ours_go_through_library_functions_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        lax.fori_loop(0, 1, fails, X)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        lax.map(lambda row: row @ torch.ones(5), X)
    monkeypatch.setattr(slicing, "_positions", {}.__getitem__)  # a mistake of ours
    with pytest.raises(TypeError, match="takes exactly one argument"):
        lax.dynamic_slice_in_dim(X, 0, 1)


ODD: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.Tensor.to_sparse,
    torch.Tensor.to_mkldnn,
    lambda x: torch.nested.nested_tensor([x[0], x[1, :1]]),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", ODD, ids=["coo", "mkldnn", "nested"])
def test_a_body_may_refer_to_a_tensor_that_is_not_dense_and_not_use_it(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    odd = make(X)

    def referring(x: torch.Tensor, uses: bool) -> torch.Tensor:
        return x + odd if uses else x

    mapped = shard_map(referring, mesh=GRID, in_specs=(P(), None), out_specs=P())
    assert torch.equal(mapped(X, False), X)
    with pytest.raises(ShardTypeError, match="closes over a nested, quantized or sparse tensor"):
        mapped(X, True)


def test_an_argument_that_cannot_be_asked_for_its_class_or_lies_about_it_is_named() -> None:
    class Lies:
        __class__: Any = Tensor

    for value in (Lies(), _gone()):
        with pytest.raises(LayerError, match=r"^row_linear: x=.* is no Tensor\. weight="):
            nn.row_linear(threading.local(), value, "a")  # type: ignore[arg-type]


def _gone() -> Any:
    class Gone:
        pass

    return weakref.proxy(Gone())
