"""The matmul family, convolution and their backwards; linear algebra and Fourier transforms."""

from typing import Final

from shardmap_torch.checker.rules.builders import SELF, each, merged, product, sums
from shardmap_torch.checker.rules.rule import Row

MATMUL: Final = merged(
    each(product("self", "mat2"), "mm bmm"),
    each(product("self", "other"), "matmul linalg_cross vdot"),
    each(product("self", "tensor"), "dot"),
    each(product("self", "vec"), "mv"),
    each(Row(linear=(("self",), ("mat1", "mat2"))), "addmm"),
    each(Row(linear=(("self",), ("mat", "vec"))), "addmv"),
    each(Row(linear=(("self",), ("vec1", "vec2"))), "addr"),
    each(Row(linear=(("self",), ("batch1", "batch2"))), "baddbmm addbmm"),
    each(Row(linear=(("input", "weight"), ("bias",))), "linear"),
    each(product("i1", "i2", "i3"), "_trilinear"),
    # Ragged groups: every row of the result is one group's product.
    each(product("self", "mat2"), "_grouped_mm"),
)

# d input, d weight and d bias: a product that leaves one operand out each.
_CONVOLUTION_BACKWARD: Final = Row(
    results=(
        product("grad_output", "weight", unread=("input",)),
        product("grad_output", "input", unread=("weight",)),
        sums("grad_output", unread=("input", "weight")),
    )
)

CONVOLUTION: Final = merged(
    each(Row(linear=(("input", "weight"), ("bias",))), "convolution"),
    each(_CONVOLUTION_BACKWARD, "convolution_backward"),
    each(SELF, "im2col col2im"),
)

_SOLVE: Final = Row(
    results=(
        sums("B"),
        # The factors, pivots and status of the matrix.
        *(Row(unread=("B",)) for _ in range(3)),
    )
)

LINALG: Final = merged(
    each(_SOLVE, "_linalg_solve_ex"),
    each(sums("B"), "linalg_solve_triangular linalg_lu_solve linalg_ldl_solve"),
    each(Row(results=(sums("self"), sums("A", unread=("self",)))), "triangular_solve"),
    each(sums("self"), "cholesky_solve"),
    each(sums("input3"), "ormqr"),
    each(SELF, "_fft_c2c _fft_c2r _fft_r2c"),
)

# In each group a product; the sizes of the groups select rows.
GROUPED: Final = {
    "shardmap_torch.grouped_matmul.default": product("rows", "weights"),
    "shardmap_torch.grouped_outer.default": product("left", "right"),
}

ROWS: Final = merged(MATMUL, CONVOLUTION, LINALG)
