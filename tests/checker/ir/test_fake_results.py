"""Tests that results made again are what torch makes, up to the memory's address."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils._python_dispatch import TorchDispatchMode

from shardmap_torch.checker.ir.fake_results import SEEN, empty, look_up, run_fake
from shardmap_torch.core.torch_private.fake_modes import UNTRIED, CheckMode

Body = Callable[[Tensor, Tensor], object]

BODIES: dict[str, Body] = {
    "products and sums": lambda x, w: (x @ w + 1).sum(0, keepdim=True),
    "numbers of other types": lambda x, w: (x.int() * 2, x.int() * 2.0, x.int() * True),
    "views at offsets": lambda x, w: (x[1:].t()[2:], w[:, 1].unsqueeze(0), x[2:, 1:].flatten()),
    "views of one size at two offsets": lambda x, w: (x[:2] * 1, x[2:] * 1, x[:2].t(), x[2:].t()),
    "several views": lambda x, w: (*x.split(1), *w.unbind(1), *x.chunk(2, 1)),
    "several new tensors": lambda x, w: (x.max(1), torch.var_mean(x, 0), torch.frexp(x)),
    "other strides": lambda x, w: (x.t().clone(), x.t() + 1, torch.empty_like(x.t())),
    "copies of other dtypes": lambda x, w: (x.double(), x.to(torch.int8), x.bool()),
    "bits as another dtype": lambda x, w: (x.view(torch.int32)[1:], x[1:].view(torch.int32)),
    "complex numbers": lambda x, w: (
        torch.view_as_real(torch.complex(x, x)),
        x.to(torch.cfloat).imag,
    ),
    "explicit strides": lambda x, w: (x.as_strided((2,), (1,)), x[1:].as_strided((2,), (1,), 3)),
    "an entry many times": lambda x, w: x[:1].expand(5, 3) + w.new_zeros(()).expand(3),
    "factories": lambda x, w: (torch.arange(3), torch.full((2,), 3), torch.ones(2, 3).t()),
    "no entries": lambda x, w: (x[:0] @ w, x[:, :0].sum(1), torch.empty(0, 3).t()),
    "writes": lambda x, w: (
        x.clone().add_(1),
        x.clone().t_(),
        torch.add(x, 1, out=x.new_empty(4, 3)),
    ),
    "picked rows": lambda x, w: (x[torch.tensor([0, 1])], torch.embedding(x, torch.tensor([2]))),
    "zeros without memory": lambda x, w: torch._efficientzerotensor((4, 3)) * x + x,
    "lists": lambda x, w: (
        torch._foreach_mul([x, w, x, x.t()], [x, w, x[:1], x.t()]),
        torch._foreach_mul([x, x.double(), x], 2.0),
        torch._foreach_lerp([x, x, w], [x, x, w], 0.5),
        torch._foreach_norm([x, w, x]),
    ),
    "attention": lambda x, w: attention(x[None, None], x[None, None], x[None, None]),
}


class _Remembering(TorchDispatchMode):
    """Makes each result twice from what is known, and compares that with what torch makes."""

    def __init__(self, mode: CheckMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._mode, self.made_again = mode, 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with patch.object(CheckMode, "run_kernel", return_value=UNTRIED):
            expected = func(*args, **kwargs)
        call = look_up(self._mode, func, args, kwargs)
        if call is None or func._schema.is_mutable:
            return expected
        for _ in range(2):
            actual = run_fake(self._mode, call, func, args, kwargs)
            assert facts(actual, args) == facts(expected, args), func
        self.made_again += 1
        return actual


def facts(out: Any, args: Sequence[Any]) -> list[object]:
    """Returns all that later operations can see of a result."""
    given = [x for value in args for x in (value if isinstance(value, list) else [value])]
    memory = [x.untyped_storage()._cdata if isinstance(x, Tensor) else None for x in given]
    found: list[object] = [type(out)]
    for x in out if isinstance(out, list | tuple) else [out]:
        if not isinstance(x, FakeTensor):
            found.append(x)
            continue
        storage = x.untyped_storage()
        shares = [i for i, each in enumerate(memory) if each == storage._cdata]
        where = x.shape, x.stride(), x.storage_offset(), storage.nbytes(), shares
        bits = x.is_conj(), x.is_neg(), x.is_inference(), x._is_zerotensor(), x.layout, x.constant
        found.append((where, x.dtype, x.device, x.fake_mode, bits, torch._C._dispatch_keys(x)))
        found.append(sorted(name for name in x.__dict__ if name != SEEN))
    return found


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_result_made_again_is_the_one_that_torch_makes(body: Body) -> None:
    with CheckMode() as mode:
        x, w = torch.empty(4, 3), torch.empty(3, 5)
        with _Remembering(mode) as remembering:
            body(x, w)
            body(torch.empty(9, 3)[5:], torch.empty(3, 5))  # at another offset
    assert remembering.made_again


def test_a_view_made_again_is_of_the_operand_of_this_call() -> None:
    with CheckMode() as mode:
        storage = torch.empty(8, 3)
        views = []
        for x in (storage[:4], storage[4:], torch.empty(4, 3)):
            call = look_up(mode, torch.ops.aten.t.default, [x], {})
            views.append(run_fake(mode, call, torch.ops.aten.t.default, [x], {}))
    assert [view.storage_offset() for view in views] == [0, 12, 0]
    same = [view.untyped_storage()._cdata == storage.untyped_storage()._cdata for view in views]
    assert same == [True, True, False]


def test_an_operation_with_a_kernel_takes_no_more_of_torch() -> None:
    aten = torch.ops.aten
    with CheckMode() as mode:
        x, y = torch.empty(41, 43), torch.empty(43, 41)
        calls = (
            (aten.mm.default, [x, y]),
            (aten.copy_.default, [x, x]),
            (aten.slice.Tensor, [x, 0, 1]),
        )
        with patch.object(CheckMode, "dispatch", side_effect=AssertionError):
            made = [run_fake(mode, look_up(mode, op, args, {}), op, args, {}) for op, args in calls]
        assert [each.shape for each in made] == [(41, 41), (41, 43), (40, 43)]


def test_an_operation_on_lists_runs_once_for_each_kind_of_item() -> None:
    op = torch.ops.aten._foreach_add.List
    with CheckMode() as mode:
        x, y, z = torch.empty(47, 3), torch.empty(47, 1), torch.empty(47, 3, dtype=torch.int64)
        lists = [[x, x, x, y, x, z, z], [x, x, y, x, z, x, x]]
        expected = [facts(each, ()) for each in op(*lists)]
        with patch.object(CheckMode, "run_kernel", side_effect=mode.run_kernel) as run:
            made = run_fake(mode, look_up(mode, op, lists, {}), op, lists, {})
    assert [len(each) for each in run.call_args.args[1]] == [5, 5]
    assert [facts(each, ()) for each in made] == expected


def test_calls_of_which_more_counts_than_metadata_have_no_key() -> None:
    aten = torch.ops.aten
    with CheckMode() as mode:
        x = torch.empty(3)
        assert look_up(mode, aten.add.out, [x, x], {"out": x}) is None
        assert look_up(mode, aten.conj.default, [x.to(torch.cfloat)], {}) is None
        literal = torch.tensor(1.0)
        assert look_up(mode, aten.add.Tensor, [x, literal], {}) is None  # the number counts
    assert look_up(mode, aten.add.Tensor, [torch.ones(3), x], {}) is None
    with CheckMode() as other:
        assert look_up(other, aten.neg.default, [x], {}) is None


@pytest.mark.parametrize("numbers", [(1, 1.0, True), (0.0, -0.0)])
def test_equal_numbers_that_differ_have_other_keys(numbers: Sequence[float]) -> None:
    with CheckMode() as mode:
        x = torch.empty(3)
        calls = [look_up(mode, torch.ops.aten.mul.Tensor, [x, n], {}) for n in numbers]
    assert len({call.key for call in calls if call is not None}) == len(numbers)


def test_empty_is_what_torch_makes_of_an_empty_tensor() -> None:
    with CheckMode() as mode:
        expected = torch.empty(2, 3, dtype=torch.bfloat16)
        for _ in range(2):
            actual = empty(mode, (2, 3), torch.bfloat16, torch.device("cpu"))
            assert facts(actual, []) == facts(expected, [])
