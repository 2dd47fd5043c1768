"""Names of attention: megatrain's own, which makes no mask of packed rows, and some of transformers'."""

VARLEN = "varlen"
"""torch's variable-length flash attention, on accelerators."""
BY_DOCUMENT = "sdpa_by_document"
"""Scaled dot product attention within one document after the other, on the CPU."""
FLEX = "flex_attention"
"""torch's attention from blocks of a mask, which has no backward on a CPU."""
WHERE_ABLE = "varlen_where_able"
"""`VARLEN` for models that it can compute, and what transformers chooses for others; no setting has
this value."""
