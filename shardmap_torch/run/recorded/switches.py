"""Switches of torch that decide what its functions do."""

import sys
from typing import Any, Final

import torch

from shardmap_torch.core.torch_private.engine import function_mode_stack

_DEVICES: Final = ("cpu", "cuda", "xpu", "mps")


def switches() -> tuple[Any, ...]:
    """Returns the values of the switches that can change while a process runs."""
    backends: Any = torch.backends  # stubs lack some
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    return (
        torch.get_default_dtype(),
        torch.get_default_device() if function_mode_stack() else None,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_cache_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.fp32_precision,  # the precision of matmuls decides; asking for that may raise
        torch.backends.mha.get_fastpath_enabled(),
        mkldnn.enabled,
        mkldnn.matmul.fp32_precision,
        mkldnn.conv.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        (backends.opt_einsum.enabled, backends.opt_einsum.strategy),  # the order of contractions
        sys.float_info.min / 2 == 0.0,  # torch.set_flush_denormal
        tuple([(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]),
    )
