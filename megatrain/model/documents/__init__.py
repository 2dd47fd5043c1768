"""Documents that share a row: which models keep them apart, and where each begins."""
