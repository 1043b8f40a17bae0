"""Loosened rows that hold on every call, and why the table's row says less."""

from collections.abc import Mapping
from typing import Final

TRUE: Final[Mapping[str, Mapping[str, str]]] = {
    "where.Scalar": {"all one product": "its numbers are no tensors, and no P comes here"},
    "scatter.value_reduce": {
        "whenever": "a number that is not 0 is refused beside a P, and 0 times a P is a P"
    },
    "rrelu_with_noise.default": {
        "unread noise": "no result reads it, but where it is not written it keeps its own type"
    },
    "_fused_sdp_choice.default": {"zero": "its result is a Python number, which has no type"},
    "_scaled_dot_product_flash_attention_for_cpu.default": {
        "never draws": "the kernel takes no dropout yet"
    },
}
