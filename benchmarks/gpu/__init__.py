"""Correctness, rates and speed on one CUDA device: `python -m benchmarks.gpu.suite`."""
