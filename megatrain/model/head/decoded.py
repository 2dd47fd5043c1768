"""A forward of a CausalLM between what its decoder has returned and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatrain.errors import ModelError
from megatrain.model.tiles.last_norm import LastNorm, NormOfChunks


def handed_on(norm: LastNorm | None, output: Any) -> LastNorm | None:
    """Return the norm if a decoder has returned what the norm was given and handed on; else None.

    Raises:
        ModelError: The decoder has made something else of it.
    """
    handed = None if norm is None else norm.take()
    if handed is not None and output.last_hidden_state is not handed:
        raise ModelError(
            "the decoder of this model computes with what its last norm returns, as that of a small model of "
            "its configuration does not; pass rows whole (train.tile_tokens of at least data.seq_len)"
        )
    return None if handed is None else norm


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a CausalLM goes on with when its decoder has run."""

    inner: Callable[..., Any]
    named: dict[str, Any]
    """The arguments."""
    output: Any
    """What the decoder has returned."""
    norm: LastNorm | None = None
    """The norm that the last hidden states have yet to pass."""

    def norm_of_chunks(self) -> NormOfChunks | None:
        """Return the norm's call on the last hidden states in chunks; None: they have passed it."""
        return None if self.norm is None else NormOfChunks(self.norm, self.output.last_hidden_state)

    def normed_output(self) -> Any:
        """Return the decoder's output with hidden states that have passed the norm as whole rows."""
        if self.norm is None:
            return self.output
        return replace(self.output, last_hidden_state=self.norm(self.output.last_hidden_state))

    def without_hidden(self) -> Decoded:
        """Return the same without the last hidden states, for who is given a part of them each time."""
        return replace(self, output=replace(self.output, last_hidden_state=None))
