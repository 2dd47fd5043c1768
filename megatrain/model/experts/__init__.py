"""Mixtures of experts: what routers choose, and experts that come apart into chunks."""
