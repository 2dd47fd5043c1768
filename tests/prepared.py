"""Imported last, before a process forks: what each of its forks would do again is done, and kept as it is.

numba fills its registries for the first kernel, which takes a second. Python's collections, those at the end
of a process above all, would go through everything that torch and transformers are, and a fork would copy it.
"""

from __future__ import annotations

import gc

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.collect()
gc.freeze()
