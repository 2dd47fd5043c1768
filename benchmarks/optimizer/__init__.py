"""AdamW's kernels, and moments in fewer bits."""
