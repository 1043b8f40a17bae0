"""Calls of overloads that op_db does not reach, or not with the arguments that matter."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.checker.support.calls import Call


def t(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def z(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.complex128)


def i(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def b(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def c(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def positive(*shape: int) -> Tensor:
    return t(*shape).abs() + 0.5


CALLS: Final[dict[str, Callable[[], Sequence[Call]]]] = {
    "div.Tensor_mode": lambda: [c(t(3), t(3), rounding_mode=mode) for mode in (None, "floor")],
    "div.Scalar_mode": lambda: [c(t(3), 2.5, rounding_mode=mode) for mode in (None, "trunc")],
    "where.ScalarOther": lambda: [c(b(1, 0, 1), t(3), 1.5)],
    "where.ScalarSelf": lambda: [c(b(1, 0, 1), 1.5, t(3))],
    "where.Scalar": lambda: [c(b(1, 0, 1), 1.5, 2.5)],
    "positive.default": lambda: [c(t(3))],
    "contiguous.default": lambda: [c(t(3, 2).mT)],
    "lift.default": lambda: [c(t(3))],
    "gather.default": lambda: [c(t(3, 2), 0, torch.tensor([[0, 1], [2, 0]]))],
    "take.default": lambda: [c(t(3, 2), i(0, 4, 2))],
    "index_add.default": lambda: [c(t(4, 2), 0, i(0, 3, 2), t(3, 2))],
    "index_reduce.default": lambda: [
        c(t(4, 2), 0, i(0, 3, 2), t(3, 2), how) for how in ("mean", "prod")
    ],
    "masked_scatter_backward.default": lambda: [c(t(4), b(1, 0, 1, 0), [3])],
    "nll_loss_forward.default": lambda: [c(t(3, 4), i(0, 2, 3), positive(4), 1, -100)],
    "nll_loss_backward.default": lambda: [
        c(t(), t(3, 4), i(0, 2, 3), positive(4), 1, -100, positive())
    ],
    "nll_loss2d_forward.default": lambda: [
        c(t(1, 4, 2, 2), i(0, 2, 3, 1).reshape(1, 2, 2), positive(4), 1, -100)
    ],
    "nll_loss2d_backward.default": lambda: [
        c(t(), t(1, 4, 2, 2), i(0, 2, 3, 1).reshape(1, 2, 2), positive(4), 1, -100, positive())
    ],
    "binary_cross_entropy_backward.default": lambda: [
        c(t(3), t(3).sigmoid(), t(3).sigmoid(), positive(3), 0)
    ],
    "multi_margin_loss_backward.default": lambda: [
        c(t(), t(3, 4), i(0, 2, 3), 1, 1.0, positive(4), 1)
    ],
    "native_layer_norm_backward.default": lambda: [
        c(t(2, 3), t(2, 3), [3], t(2, 1), positive(2, 1), t(3), t(3), [True] * 3)
    ],
    "native_group_norm_backward.default": lambda: [
        c(t(2, 4, 3), t(2, 4, 3), t(2, 2), positive(2, 2), t(4), 2, 4, 3, 2, [True] * 3)
    ],
    "native_batch_norm_backward.default": lambda: [
        c(
            *(t(2, 3), t(2, 3), t(3), t(3), positive(3), t(3), positive(3)),
            *(train, 1e-5, [True] * 3),
        )
        for train in (True, False)
    ],
    "batch_norm_backward.default": lambda: [
        c(
            *(t(2, 3), t(2, 3), t(3), t(3), positive(3), t(3), positive(3)),
            *(train, 1e-5, [True] * 3, torch.empty(0, dtype=torch.uint8)),
        )
        for train in (True, False)
    ],
    "_embedding_bag_dense_backward.default": lambda: (
        [
            c(t(2, 3), i(0, 1, 2), i(0, 0, 1), i(2, 1), i(0, 0), 4, False, mode, weights)
            for mode, weights in ((0, positive(3)), (1, None))
        ]
        + [
            c(
                *(t(2, 3), i(0, 1, 2), i(0, 0, 1), i(2, 1), torch.tensor([[0, 1, 0], [2, 2, 2]])),
                *(4, False, 2, None),
            )
        ]
    ),
    "multilabel_margin_loss_backward.default": lambda: [
        c(t(), t(1, 4), i(1, 3, -1, 0)[None], 1, torch.tensor([[0, 1, 0, 1]]).double())
    ],
    "_embedding_bag_backward.default": lambda: (
        [
            c(
                *(t(2, 3), i(0, 1, 2), i(0, 2), i(0, 0, 1), i(2, 1)),
                *(torch.tensor([[0, 1, 0], [2, 2, 2]]), 4, False, mode, False, None),
            )
            for mode in (0, 1, 2)
        ]
        + [  # the bags are told by their offsets alone
            c(
                *(t(2, 3), i(0, 1, 2), i(0, 2), i(), i(2, 1), i()),
                *(4, False, 0, False, positive(3)),
            )
        ]
    ),
    "_embedding_bag_per_sample_weights_backward.default": lambda: [
        c(t(2, 3), t(4, 3), i(0, 1, 2), i(0, 2), i(), 0)
    ],
    "xlogy.Scalar_Other": lambda: [c(t(3), 2.5)],
    "squeeze_.default": lambda: [c(t(1, 3))],
    "squeeze_.dims": lambda: [c(t(1, 3, 1), [0, 2])],
    "t_.default": lambda: [c(t(2, 3))],
    "as_strided_.default": lambda: [c(t(2, 3), [3], [2])],
    "detach_.default": lambda: [c(t(3))],
    "_lazy_clone.default": lambda: [c(t(3))],
    "_to_copy.default": lambda: [c(t(3), dtype=torch.float32), c(z(3)), c(i(1, 2))],
    "matmul.default": lambda: [c(t(2, 3), t(3, 4)), c(t(2, 2, 3), t(3))],
    "linear.default": lambda: [c(t(2, 3), t(4, 3)), c(t(2, 3), t(4, 3), t(4))],
    "convolution.default": lambda: [
        c(t(2, 4, 5), t(4, 2, 3), t(4), [1], [1], [1], False, [0], 2),
        c(t(2, 4, 5), t(4, 3, 3), t(3), [2], [1], [1], True, [1], 1),
    ],
    "im2col.default": lambda: [c(t(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])],
    "col2im.default": lambda: [c(t(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
    "cholesky_solve.default": lambda: [c(t(3, 2), t(3, 3) + 4 * torch.eye(3).double())],
    "_grouped_mm.default": lambda: [
        c(
            t(8, 16, dtype=torch.bfloat16),
            t(2, 16, 8, dtype=torch.bfloat16),
            torch.tensor([3, 8], dtype=torch.int32),
        )
    ],  # a bias is not implemented
    "grouped_matmul.default": lambda: [c(t(5, 3), t(2, 3, 4), i(2, 3))],
    "grouped_outer.default": lambda: [c(t(5, 3), t(5, 4), i(2, 3))],
    "_reshape_copy.default": lambda: [c(t(2, 3), [6])],
    "_reshape_alias_copy.default": lambda: [c(t(2, 3), [6], [1])],
    "detach_copy.default": lambda: [c(t(3))],
    "lift_fresh_copy.default": lambda: [c(t(3))],
    "select_copy.int": lambda: [c(t(2, 3), 0, 1)],
    "slice_copy.Tensor": lambda: [c(t(4, 3), 0, 1, 3)],
    "split_copy.Tensor": lambda: [c(t(4, 3), 2)],
    "unsafe_split_with_sizes.default": lambda: [c(t(4, 3), [1, 3])],
    "squeeze_copy.dims": lambda: [c(t(1, 3, 1), [0, 2])],
    "view_as_real_copy.default": lambda: [c(z(3))],
    "view_as_complex_copy.default": lambda: [c(t(3, 2))],
    "_conj_copy.default": lambda: [c(z(3))],
    "_neg_view_copy.default": lambda: [c(t(3))],
    "index.Tensor": lambda: [c(t(4, 3), [i(0, 2, 2)]), c(t(4, 3), [None, i(1, 1)])],
    "_unsafe_index.Tensor": lambda: [c(t(4, 3), [i(0, 2, 2)])],
    "_unsafe_masked_index.default": lambda: [c(t(4), b(1, 0, 1), [i(0, 1, 3)], 1.5)],
    "_unsafe_masked_index_put_accumulate.default": lambda: [
        c(t(4), b(1, 0, 1), [i(0, 1, 3)], t(3))
    ],
    "slice_scatter.default": lambda: [c(t(4, 3), t(2, 3), 0, 1, 3)],
    "scatter.reduce": lambda: [
        c(t(4), 0, i(0, 0, 2), t(3), reduce=how) for how in ("add", "multiply")
    ],
    "scatter.value_reduce": lambda: [
        c(t(4), 0, i(0, 1, 2), 1.5, reduce=how) for how in ("add", "multiply")
    ],
    "scatter.value": lambda: [c(t(4), 0, i(0, 1), 1.5)],
    "scatter_add.default": lambda: [c(t(4), 0, i(0, 0, 2), t(3))],
    "index_put.default": lambda: [c(t(4), [i(0, 2)], t(2)), c(t(4), [i(0, 0)], t(2), True)],
    "_unsafe_index_put.default": lambda: [c(t(4), [i(0, 2)], t(2))],
    "_index_put_impl.default": lambda: [c(t(4), [i(0, 2)], t(2))],
    "masked_scatter.default": lambda: [c(t(4), b(1, 0, 1, 0), t(4))],
    "put.default": lambda: [c(t(4), i(0, 2), t(2)), c(t(4), i(0, 0), t(2), True)],
    "index_copy.default": lambda: [c(t(4), 0, i(0, 2), t(2))],
    "masked_fill.Scalar": lambda: [c(t(4), b(1, 0, 1, 0), 1.5)],
    "constant_pad_nd.default": lambda: [c(t(4), [1, 2], 1.5)],
    "_masked_softmax_backward.default": lambda: [c(t(2, 3), t(2, 3), b(1, 0, 1).expand(2, 3), 1)],
    "native_dropout_backward.default": lambda: [c(t(4), b(1, 0, 1, 1), 2.0)],
    "native_dropout.default": lambda: [c(t(4), 0.5, train) for train in (True, False, None)],
    "rrelu_with_noise_functional.default": lambda: [
        c(t(4), t(4), 0.1, 0.4, train) for train in (True, False)
    ],
    "_weight_norm_interface_backward.default": lambda: [
        c(t(3, 4), t(3, 4), t(3, 1), positive(3, 1), 0)
    ],
    "_ctc_loss_backward.default": lambda: [
        c(t(1), t(4, 1, 3).log_softmax(-1), i(1, 2)[None], [4], [2], positive(1), t(1, 4, 5), 0)
    ],
    "_ctc_loss_backward.Tensor": lambda: [
        c(t(1), t(4, 1, 3).log_softmax(-1), i(1, 2)[None], i(4), i(2), positive(1), t(1, 4, 5), 0)
    ],
    "_segment_reduce_backward.default": lambda: [
        c(t(4), t(4), t(5), how, offsets=i(0, 0, 1, 3, 5), initial=1) for how in ("sum", "prod")
    ],
    "_cdist_backward.default": lambda: [c(t(3, 4), t(3, 2), t(4, 2), 2.0, positive(3, 4))],
    "_pdist_backward.default": lambda: [c(t(3), t(3, 2), p, positive(3)) for p in (2.0, 3.0)],
    "_scaled_dot_product_flash_attention_for_cpu.default": lambda: [
        c(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8), 0.0, True),
        c(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8), attn_mask=t(4, 4)),
    ],
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": lambda: [
        c(*(t(1, 2, 4, 8) for _ in range(5)), t(1, 2, 4), 0.0, False, attn_mask=t(4, 4))
    ],
    "_fused_sdp_choice.default": lambda: [
        c(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8), mask) for mask in (None, t(4, 4))
    ],
    "_upsample_nearest_exact3d.default": lambda: [c(t(1, 1, 2, 2, 2), [3, 3, 3])],
    "_upsample_nearest_exact3d_backward.default": lambda: [
        c(t(1, 1, 3, 3, 3), [3, 3, 3], [1, 1, 2, 2, 2])
    ],
    **{
        f"_upsample_{kind}2d_aa.default": lambda: [c(t(1, 1, 3, 3), [4, 4], True)]
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    **{
        f"_upsample_{kind}2d_aa_backward.default": lambda: [
            c(t(1, 1, 4, 4), [4, 4], [1, 1, 3, 3], True)
        ]
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    "affine_grid_generator.default": lambda: [c(t(1, 2, 3), [1, 1, 2, 2], True)],
    "zero.default": lambda: [c(t(3))],
    "fill.Scalar": lambda: [c(t(3), 1.5)],
    "fill.Tensor": lambda: [c(t(3), t())],
    "copy.default": lambda: [c(t(3), t(3))],
    "rand_like.default": lambda: [c(t(3))],
    "randint_like.Tensor": lambda: [c(t(3), i(7)[0])],
    "bernoulli_.Tensor": lambda: [c(t(3), torch.full((3,), 0.5))],
    "random_.default": lambda: [c(t(3))],
    "random_.from": lambda: [c(t(3), 2, 90)],
    "random_.to": lambda: [c(t(3), 90)],
}
"""Calls by `packet.overload`."""


def _lists() -> list[Tensor]:
    return [positive(3), positive(2, 3), positive(3)]


def _of_schema(op: OpOverload) -> Call:
    """Arguments for an operation on lists, made from the types in its schema."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = _of_type(str(argument.type), argument.name)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _of_type(kind: str, name: str) -> Any:
    if name == "state_steps":
        return [torch.full((), 3.0, dtype=torch.float64) for _ in range(3)]
    by_type: dict[str, Callable[[], Any]] = {
        "List[Tensor]": _lists,
        "Tensor": lambda: positive(3) if name == "scalars" else positive(),
        "List[number]": lambda: [1.5, 0.5, 2.5],
        "number": lambda: 1.5,
        "float": lambda: 0.3,
        "bool": lambda: False,
    }
    return by_type[kind]() if kind in by_type else None


def _fused(op: OpOverload) -> Sequence[Call]:
    """Optimiser steps, plain and under a gradient scaler."""
    args, kwargs = _of_schema(op)
    if "amsgrad" in kwargs:
        kwargs["amsgrad"] = True
    lists = [
        [item.float() for item in value] if isinstance(value, list) else value for value in args
    ]
    scaler = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    return [(tuple(lists), kwargs), (tuple(lists), {**kwargs, **scaler})]


def extra_calls(op: OpOverload) -> Sequence[Call]:
    """The calls written here, or made from the schema of an operation on lists."""
    name = f"{op._schema.name.split('::')[1]}.{op._overloadname}"
    if name in CALLS:
        return CALLS[name]()
    if name == "_foreach_mm.default":
        return [c([t(2, 3), t(3, 3)], [t(3, 2), t(3, 3)])]
    if name.startswith(("_fused_a", "_fused_sgd")):
        return _fused(op)
    if name.startswith("_foreach_"):
        return [_of_schema(op)]
    return []
