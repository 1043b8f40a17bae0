"""Planning of overlapped kernels: schedules as data, and the cost model."""
