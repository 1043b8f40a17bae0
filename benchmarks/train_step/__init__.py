"""The training step of a small Llama: ours, written by hand, and by torch's `parallelize_module`.

Run `python -m benchmarks.train_step`; it writes docs/train_step.md. All three start from the same
global parameters and must give the same losses before anything is timed.
"""
