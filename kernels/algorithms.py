"""Algorithms of the overlapped matmuls, forward and backward, as generators over any transport.

Every function here is per-rank code on plain tensors. A tensor whose last dim is contracted is
seen as a matrix of *tokens*, one row for each index of the other dims. The dim that is gathered or
scattered shards that matrix either by rows or by features (`ChunkedDim`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmap_torch.kernels.executor import (
    LOW_PRECISION,
    Choice,
    Consume,
    Gather,
    Produce,
    Scatter,
    Sum,
    complete,
)
from shardmap_torch.kernels.transport import Steps, Transport


def multiply(transport: Transport, a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b`, and charges it to the transport's clock."""
    _charge(transport, a, b)
    return a @ b


def multiply_into(
    transport: Transport, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None
) -> None:
    """Computes `out = a @ b + bias` in place."""
    _charge(transport, a, b)
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def accumulate(transport: Transport, total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes `total += a @ b`; the product is rounded to its own dtype before a wider sum."""
    _charge(transport, a, b)
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _charge(transport: Transport, a: Tensor, b: Tensor) -> None:
    outputs = a.shape[0] * b.shape[1]
    traffic = (a.numel() + b.numel() + outputs) * a.element_size()
    transport.charge(2.0 * outputs * a.shape[1], float(traffic))


def zeros_for_sum(like: Tensor, *shape: int) -> Tensor:
    """Makes an accumulator over chunks: float32 where `like` is of lower precision."""
    dtype = torch.float32 if like.dtype in LOW_PRECISION else like.dtype
    return like.new_zeros(shape, dtype=dtype)


def as_matrix(x: Tensor) -> Tensor:
    """Flattens all dims but the last; reshape(-1, ...) refuses a last dim of size 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@dataclass(frozen=True, slots=True)
class ChunkedDim:
    """The sharding of a matrix of tokens that follows from sharding one dim of its tensor.

    The *chunked matrix* has the sharded dim as its rows, so that a chunk is contiguous: the matrix
    of tokens itself, `dim` outermost, or its transpose when the last dim is sharded.
    """

    dim: int
    by_features: bool

    @classmethod
    def of(cls, dim: int, ndim: int) -> "ChunkedDim":
        """Describes sharding `dim`, which may be negative, of a tensor of `ndim` dims."""
        dim %= ndim
        return cls(0 if dim == ndim - 1 else dim, dim == ndim - 1)

    def tokens(self, x: Tensor) -> Tensor:
        """Returns the matrix of tokens; a copy of `x` unless the sharded dim is outermost."""
        return as_matrix(x.movedim(self.dim, 0))

    def restore(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverts `tokens`: the contiguous tensor of `shape` with this matrix of tokens."""
        outermost = [shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :]]
        return tokens.reshape(outermost).movedim(0, self.dim).contiguous()

    def matrix(self, x: Tensor) -> Tensor:
        """Returns the chunked matrix, contiguous."""
        return self.flip(self.tokens(x)).contiguous()

    def flip(self, matrix: Tensor) -> Tensor:
        """Converts tokens to the chunked matrix and back."""
        return matrix.t() if self.by_features else matrix

    def times(self, transport: Transport, w: Tensor, bias: Tensor | None, out: Tensor) -> Consume:
        """Consumes rows of the chunked x into the tokens of `out`, which become x @ w + bias."""

        def rows_times(rows: slice, tile: Tensor) -> None:
            multiply_into(transport, out[rows], tile, w, bias)

        def features_times(rows: slice, tile: Tensor) -> None:
            accumulate(transport, out, tile.t(), w[rows])

        return features_times if self.by_features else rows_times

    def left_gradient(self, transport: Transport, dy: Tensor, out: Tensor) -> Consume:
        """Consumes rows of the chunked x into xᵀ @ dy; `out` starts at zero."""

        def rows_gradient(rows: slice, tile: Tensor) -> None:
            accumulate(transport, out, tile.t(), dy[rows])

        def features_gradient(rows: slice, tile: Tensor) -> None:
            out[rows] = multiply(transport, tile, dy)

        return features_gradient if self.by_features else rows_gradient

    def right_gradient(self, transport: Transport, x: Tensor, out: Tensor) -> Consume:
        """Consumes rows of the chunked dy into xᵀ @ dy; `out` starts at zero."""

        def rows_gradient(rows: slice, tile: Tensor) -> None:
            accumulate(transport, out, x[rows].t(), tile)

        def features_gradient(rows: slice, tile: Tensor) -> None:
            out[:, rows] = multiply(transport, x.t(), tile.t())

        return features_gradient if self.by_features else rows_gradient

    def sum_of_products(
        self, transport: Transport, xs: Sequence[Tensor], ws: Sequence[Tensor]
    ) -> Produce:
        """Produces rows of the chunked sum of x @ w over pairs, from the tokens of each x."""

        def operands(x: Tensor, w: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            return (w[:, rows].t(), x.t()) if self.by_features else (x[rows], w)

        def produce(rows: slice) -> Tensor:
            tile = multiply(transport, *operands(xs[0], ws[0], rows))
            for x, w in zip(xs[1:], ws[1:], strict=True):
                accumulate(transport, tile, *operands(x, w, rows))
            return tile

        return produce


def with_dim(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Returns the shape with another size at `dim`."""
    dim %= len(shape)
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _both(consumers: Sequence[Consume]) -> Consume:
    def consume(rows: slice, tile: Tensor) -> None:
        for consumer in consumers:
            consumer(rows, tile)

    return consume


def gather_forward(
    transport: Transport,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    choice: Choice,
) -> Steps[tuple[list[Tensor], Tensor]]:
    """Computes `all_gather(x) @ w + bias` for each pair of w and bias, with one gather.

    Returns the products, and the chunked matrix of the gathered x for the backward.
    """
    chunked = ChunkedDim.of(dim, x.ndim)
    full_shape = with_dim(x.shape, dim, x.shape[dim] * transport.num_ranks)
    num_tokens = torch.Size(full_shape[:-1]).numel()
    products = list(zip(ws, biases, strict=True))
    sums = [_tokens_out(chunked, x, num_tokens, w.shape[1], bias) for w, bias in products]
    consume = _both(
        [chunked.times(transport, *pair, out) for pair, out in zip(products, sums, strict=True)]
    )
    gather = Gather(transport, "all_gather_matmul", chunked.matrix(x), consume, choice)
    gathered = yield from complete(gather)
    outs = [chunked.restore(out.to(x.dtype), [*full_shape[:-1], out.shape[1]]) for out in sums]
    return outs, gathered


def _tokens_out(
    chunked: ChunkedDim, like: Tensor, num_tokens: int, columns: int, bias: Tensor | None = None
) -> Tensor:
    """Allocates the output: empty if chunked by rows, else an accumulator that has the bias."""
    if not chunked.by_features:
        return like.new_empty(num_tokens, columns)
    total = zeros_for_sum(like, num_tokens, columns)
    return total if bias is None else total + bias


def scatter_forward(
    transport: Transport, x: Tensor, w: Tensor, dim: int, choice: Choice
) -> Steps[Tensor]:
    """Computes `reduce_scatter(x @ w)`."""
    chunked = ChunkedDim.of(dim, x.ndim)
    produce = chunked.sum_of_products(transport, [chunked.tokens(x)], [w])
    shape = [*x.shape[:-1], w.shape[1]]
    scatter = _scatter(transport, "matmul_reduce_scatter", produce, shape, x, dim, choice)
    total = yield from complete(scatter)
    return _own_block(chunked, total, shape, dim, transport.num_ranks)


def _scatter(
    transport: Transport,
    op: str,
    produce: Produce,
    shape: Sequence[int],
    like: Tensor,
    dim: int,
    choice: Choice,
) -> Scatter:
    """Makes the reduce-scatter along `dim` of a tensor of `shape`."""
    chunked = ChunkedDim.of(dim, len(shape))
    num_tokens = torch.Size(shape[:-1]).numel()
    num_rows, columns = (shape[-1], num_tokens) if chunked.by_features else (num_tokens, shape[-1])
    out = like.new_empty(num_rows // transport.num_ranks, columns)
    return Scatter(transport, op, produce, out, num_rows, choice)


def _own_block(
    chunked: ChunkedDim, matrix: Tensor, shape: Sequence[int], dim: int, num_ranks: int
) -> Tensor:
    return chunked.restore(chunked.flip(matrix), with_dim(shape, dim, shape[dim] // num_ranks))


def reduce_forward(transport: Transport, x: Tensor, w: Tensor, choice: Choice) -> Steps[Tensor]:
    """Computes `all_reduce(x @ w)`, chunked by rows of the flattened x."""
    tokens = as_matrix(x)
    out = x.new_empty(tokens.shape[0], w.shape[1])
    produce = ChunkedDim(0, by_features=False).sum_of_products(transport, [tokens], [w])
    total = yield from complete(
        Scatter(transport, "matmul_all_reduce", produce, out, out.shape[0], choice)
    )
    return total.view(*x.shape[:-1], w.shape[1])


def gather_backward(
    transport: Transport,
    x: Tensor,
    gathered: Tensor | None,
    ws: Sequence[Tensor],
    dys: Sequence[Tensor],
    needs_grad: Sequence[bool],
    dim: int,
    choice: Choice,
    again: Choice,
) -> Steps[tuple[Tensor, list[Tensor | None]]]:
    """Computes the gradients of `gather_forward`: dx, and for each weight dw, None if not needed.

    The sum of dy @ wᵀ is reduce-scattered while it is produced, and what is still on its way then
    moves while the weight gradients are computed. Where the chunked matrix of the gathered x was
    not kept, these consume another gather, by the choice `again`; its own block is on its way while
    dy @ wᵀ is produced.
    """
    chunked, op = ChunkedDim.of(dim, x.ndim), "all_gather_matmul backward"
    tokens = [chunked.tokens(dy) for dy in dys]
    produce = chunked.sum_of_products(transport, tokens, [w.t() for w in ws])
    shape = [*dys[0].shape[:-1], ws[0].shape[0]]
    scatter = _scatter(transport, op, produce, shape, dys[0], dim, choice)
    wanted = [at for at, want in enumerate(needs_grad) if want]
    sums: dict[int, Tensor] = {}
    if gathered is None:
        sums = {at: zeros_for_sum(ws[at], *ws[at].shape) for at in wanted}
    consumers = [chunked.left_gradient(transport, tokens[at], dw) for at, dw in sums.items()]
    gather = Gather(transport, op, chunked.matrix(x), _both(consumers), again) if sums else None
    if gather is not None:
        yield from gather.start()
    yield from scatter.start()
    if gather is not None:
        yield from gather.finish()
    if gathered is not None:
        left = chunked.flip(gathered).t()
        sums = {at: multiply(transport, left, tokens[at]) for at in wanted}
    total = yield from scatter.finish()
    dws = [sums[at].to(x.dtype) if want else None for at, want in enumerate(needs_grad)]
    return _own_block(chunked, total, shape, dim, transport.num_ranks), dws


def product_backward(
    transport: Transport,
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    needs_grad: tuple[bool, bool],
    dim: int | None,
    choice: Choice,
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """Computes the gradients (dx, dw) of `scatter_forward`, None in place of those not needed.

    One gather of dy feeds both, chunk by chunk. With `dim` None they are those of `reduce_forward`
    whose cotangents have to be summed: each chunk of the sum feeds both as soon as it is finished.
    """
    chunked = ChunkedDim(0, by_features=False) if dim is None else ChunkedDim.of(dim, x.ndim)
    tokens = chunked.tokens(x)
    dx = _tokens_out(chunked, x, tokens.shape[0], x.shape[-1])
    dw = zeros_for_sum(w, *w.shape)
    left = chunked.times(transport, w.t(), None, dx)
    right = chunked.right_gradient(transport, tokens, dw)
    consume = _both([each for each, want in zip((left, right), needs_grad, strict=True) if want])
    rows = chunked.matrix(dy)
    if dim is None:
        yield from complete(Sum(transport, "matmul_all_reduce backward", rows, consume, choice))
    else:
        op = "matmul_reduce_scatter backward"
        yield from complete(Gather(transport, op, rows, consume, choice))
    return (
        chunked.restore(dx.to(x.dtype), x.shape) if needs_grad[0] else None,
        dw.to(x.dtype) if needs_grad[1] else None,
    )
