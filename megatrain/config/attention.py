"""Names of megatrain's own attention, which makes no mask of packed rows."""

VARLEN = "varlen"
"""torch's variable-length flash attention, on accelerators."""
BY_DOCUMENT = "sdpa_by_document"
"""Scaled dot product attention within one document after the other, on the CPU."""
WHERE_ABLE = "varlen_where_able"
"""`VARLEN` for models that it can compute, and what transformers chooses for others; no setting has
this value."""
