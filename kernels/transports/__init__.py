"""Transports of the overlapped kernels: point-to-point messages over gloo, NCCL or host memory."""
