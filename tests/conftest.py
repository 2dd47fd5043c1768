"""Settings of the whole suite."""

from __future__ import annotations

import os

# One thread per test process: the suite runs in parallel processes, and threads that wait for each other's
# turn on a busy core slow everything down many times over.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
