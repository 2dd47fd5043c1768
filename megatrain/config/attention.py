"""Names of attention: megatrain's own, which makes no mask of packed rows, and some of transformers'."""

TILED = "tiled"
"""Attention of torch's own operations by tiles of queries and keys, where no kernel does it."""
VARLEN = "varlen"
"""torch's variable-length flash attention, on accelerators."""
BY_DOCUMENT = "sdpa_by_document"
"""Scaled dot product attention within one document after the other, on the CPU."""
FLEX = "flex_attention"
"""torch's attention from blocks of a mask, which has no backward on a CPU."""
WHERE_ABLE = "varlen_where_able"
"""`VARLEN` for models that it can compute, and what transformers chooses for others; no setting has
this value."""
TILED_WHERE_ABLE = "tiled_where_able"
"""`TILED` in the place of `VARLEN` there."""
EITHER_WHERE_ABLE = "varlen_or_tiled_where_able"
"""`VARLEN` for models that it can compute, `TILED` for others that this can; no setting has this value."""

MOST_TOKENS = 16_384
"""A mask has at most as many entries as one of so many queries and keys."""
