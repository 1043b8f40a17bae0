"""A body that catches what a check cannot see, or that only a check raises, is refused."""

import contextlib
import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, one_hot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardmap_torch import I, P, ShardTypeError, all_reduce, make_mesh, shard_map
from shardmap_torch.checker.interpreter.caught import MAY_FAIL
from tests.support.golden import hold

Attempt = Callable[[Tensor], object]


def rows(x: Tensor) -> Tensor:
    return (10 * x[:, 0].detach()).long()


FAILS: dict[str, Attempt] = {
    "a factorization": lambda x: torch.linalg.cholesky(x.T @ x),
    "embedding": lambda x: embedding(rows(x), x),
    "index": lambda x: x[rows(x)],
    "one_hot": lambda x: one_hot(rows(x), 4),
    "nll_loss_forward": lambda x: cross_entropy(x, rows(x)),
    "floor_divide": lambda x: rows(x) // rows(x),
}
"""Operations that fail for some values, by their names in messages."""


def caught(attempt: Attempt) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        factor = 1.0
        try:
            attempt(x)
        except Exception:
            factor = 2.0
        return all_reduce(factor * x.sum(), "tp", dst=I)

    return body


def check(body: Callable[[Tensor], Tensor]) -> Tensor:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    result: Tensor = f(torch.rand(8, 4))
    return result


@pytest.mark.parametrize("name", FAILS)
def test_an_error_for_some_values_may_not_be_caught(name: str) -> None:
    with pytest.raises(ShardTypeError) as refused:
        check(caught(FAILS[name]))
    hold("caught.txt", name, str(refused.value))


def test_an_error_may_be_caught_that_is_another_or_raised_again() -> None:
    def other(x: Tensor) -> Tensor:
        try:
            y = x[rows(x) * 0]
        except (KeyError, ImportError):
            y = 2 * x
        return all_reduce(y.sum(), "tp", dst=I)

    def again(x: Tensor) -> Tensor:
        try:
            y = x[rows(x) * 0]
        except IndexError as error:
            error.add_note("of the positions")
            raise
        return all_reduce(y.sum(), "tp", dst=I)

    def looks(x: Tensor) -> Tensor:
        total = all_reduce(x.T @ x, "tp", dst=I)
        factor, info = torch.linalg.cholesky_ex(total)
        return factor if info.item() == 0 else total

    for body in (other, again, looks):
        check(body)


def test_where_there_is_no_source_nothing_that_may_fail_is_tried() -> None:
    def tried(x: Tensor) -> Tensor:
        try:
            y = x[rows(x) * 0]
        except IndexError:
            y = 2 * x
        return all_reduce(y.sum(), "tp", dst=I)

    def plain(x: Tensor) -> Tensor:
        try:
            y = 2 * x
        finally:
            z = [x[rows(each) * 0].sum() for each in (x, y)]
        return all_reduce(torch.stack(z).sum(), "tp", dst=I)

    for body in (tried, plain):  # as at a prompt, or by exec()
        body.__code__ = body.__code__.replace(co_filename="gone.py")
    check(plain)
    with pytest.raises(ShardTypeError) as refused:
        check(tried)
    hold("caught.txt", "no source", str(refused.value))


def test_a_loop_inside_of_a_handler_does_not_leave_it() -> None:
    def again_after_a_loop(x: Tensor) -> Tensor:
        try:
            y = x[rows(x) * 0]
        except IndexError:
            for each in x.shape:
                try:
                    print(each)
                except OSError:
                    continue
            raise
        return all_reduce(y.sum(), "tp", dst=I)

    check(again_after_a_loop)


class Quiet:
    """Keeps errors from being raised, as its `__exit__` tells."""

    def __init__(self, also: type[Exception] = ValueError) -> None:
        self.also = also

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[Exception] | None, *error: object) -> bool:
        return kind is not None and issubclass(kind, (RuntimeError, self.also))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        print("no factor")


@contextlib.contextmanager
def loud() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note("no factor")
        raise
    finally:
        print("done")


def managed(manager: Any) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        with manager():
            x = torch.linalg.cholesky(torch.eye(4) + 0 * x[:4])
        return all_reduce(x.sum(), "tp", dst=I)

    return body


def made_before(manager: Any) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        made = manager()
        with made:
            x = torch.linalg.cholesky(torch.eye(4) + 0 * x[:4])
        return all_reduce(x.sum(), "tp", dst=I)

    return body


def test_managers_that_keep_an_error_from_being_raised_are_refused() -> None:
    """Made where they are entered, or before, as by torch.func.vjp where it pulls back."""
    manager: Any
    for body in (managed, made_before):
        for manager in (Quiet, quiet):
            with pytest.raises(ShardTypeError, match="fails for some values, and the body catches"):
                check(body(manager))
        for manager in (loud, torch.no_grad, contextlib.nullcontext):
            check(body(manager))


def test_an_error_that_is_raised_as_another_may_not_be_caught_either() -> None:
    class NoFactorError(Exception): ...

    def renames(x: Tensor) -> Tensor:
        try:
            factor: Tensor = torch.linalg.cholesky(torch.eye(4) + 0 * x)
        except RuntimeError as error:
            raise NoFactorError("not positive") from error
        return factor

    def catches(x: Tensor) -> Tensor:
        x = x[:4]
        try:
            x = renames(x)
        except NoFactorError:
            x = 2 * x
        return all_reduce(x.sum(), "tp", dst=I)

    check(lambda x: all_reduce(renames(x[:4]).sum(), "tp", dst=I))
    with pytest.raises(ShardTypeError, match="fails for some values, and the body catches"):
        check(catches)


def test_other_ways_to_go_on_are_refused_too() -> None:
    def suppressed(x: Tensor) -> Tensor:
        with contextlib.suppress(IndexError):
            x = x[rows(x)]
        return all_reduce(x.sum(), "tp", dst=I)

    def of_torch(x: Tensor) -> Tensor:
        try:
            x = torch.linalg.inv(x[:4])
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not in its `__all__`
            x = x[:4]
        return all_reduce(x, "tp", dst=I)

    def finally_returns(x: Tensor) -> Tensor:
        try:
            x = x[rows(x)]
        finally:
            return all_reduce(x.sum(), "tp", dst=I)  # noqa: B012  # it is what is tried

    def outside(x: Tensor) -> Tensor:
        try:
            return repeated(x)
        except IndexError:
            return all_reduce(x.sum(), "tp", dst=I)

    def repeated(x: Tensor) -> Tensor:
        return all_reduce(x[rows(x) * 0].sum(), "tp", dst=I)

    check(repeated)  # the same call out of a `try` is remembered
    for body in (suppressed, of_torch, finally_returns, outside):
        with pytest.raises(ShardTypeError, match="fails for some values, and the body catches"):
            check(body)


def test_handlers_that_leave_before_they_raise_and_those_of_groups_are_refused() -> None:
    def returns_before_it_raises(x: Tensor) -> Tensor:
        try:
            return x[rows(x)]
        except IndexError:
            if len(x) > 1:
                return x
            raise

    def grouped(x: Tensor) -> Tensor:
        try:
            x = x[rows(x)]
        except* IndexError:
            x = 2 * x
        return x

    for each in (returns_before_it_raises, grouped):
        with pytest.raises(ShardTypeError, match="fails for some values, and the body catches"):
            check(each)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda x: pickle.dumps(x.detach()),
        lambda x: torch.save(x.detach(), io.BytesIO()),
        lambda x: x.detach().share_memory_(),
        lambda x: x.detach().pin_memory(),
    ],
)
def test_what_fails_in_the_check_alone_may_not_be_caught(attempt: Attempt) -> None:
    with pytest.raises(ShardTypeError, match=r"takes the numbers|memory of another kind"):
        check(caught(attempt))


def test_copies_and_texts_are_made_in_checks_and_runs() -> None:
    def body(x: Tensor) -> Tensor:
        assert f"{x.sum():.3f}"
        return all_reduce((x + copy.deepcopy(x.detach())).sum(), "tp", dst=I)

    torch.manual_seed(0)
    found = check(body)
    torch.manual_seed(0)
    torch.testing.assert_close(found, 2 * torch.rand(8, 4).sum())


# ---------------------------------------------------------------------- which operations may fail


class Last(TorchDispatchMode):
    """Notes the operation that has been called last."""

    op: object = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = func
        return func(*args, **(kwargs or {}))


FILLS = (math.nan, math.inf, -1e30, 0.0, 2.0)
ASKED_OR_OF_MEMORY = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.as_strided.default,
}
"""Operations refused for another reason, or that fail for the fills' memory."""


def filled(x: object, value: float) -> object:
    """Fills a tensor with a value, or, for integers and bools, with one that stands for it."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return x
    if not (x.is_floating_point() or x.is_complex()):
        value = max(min(value, 100), -100) if value == value else 0
    if x.dtype in (torch.bool, torch.uint8):
        value = abs(value)
    return torch.full_like(x.detach(), value)


def failing(info: Any, dtype: torch.dtype) -> Iterator[object]:
    """Yields the operations that fail for a fill and not for torch's own samples of it."""
    for sample in itertools.islice(info.sample_inputs("cpu", dtype), 8):
        given = sample.input, sample.args, sample.kwargs
        if sum(x.numel() for x in tree_leaves(given) if isinstance(x, Tensor)) > 500:
            continue
        if last_of(info.op, *given) is not None:
            continue
        for value in FILLS:
            yield last_of(info.op, *tree_map(partial(filled, value=value), given))


def last_of(op: Any, first: object, args: Any, kwargs: Any) -> object:
    """Returns the operation in which a call fails; None if it does not."""
    last = Last()  # type: ignore[no-untyped-call]
    try:
        with last:
            op(first, *args, **kwargs)
    except Exception:
        return last.op
    return None


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
def test_every_operation_of_torch_that_fails_for_some_values_is_known() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    found = {
        op
        for info in op_db
        for dtype in (torch.float64, torch.int64)
        if dtype in info.dtypes
        for op in failing(info, dtype)
    }
    named = {str(op) for op in found - MAY_FAIL - ASKED_OR_OF_MEMORY - {None}}
    assert {each for each in named if not each.startswith("torch_nn.")} == set()
