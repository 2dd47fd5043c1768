"""A check whether the data teach a model to stop: which of the end tokens are trained on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.flagged_tokens import IDS, TRAINED, Words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedEnds:
    """Collects the special tokens that are trained on, among them the one that ends an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Begin with an empty set."""
        special = [*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids]
        self._is_special = np.zeros(max(special, default=-1) + 1, dtype=np.bool_)
        self._is_special[special] = True
        self.found: set[int] = set()
        """The token ids."""

    def add(self, words: Words) -> None:
        """Look at the part of an example that goes into rows."""
        ids = words[words & TRAINED != 0] & IDS
        ids = ids[ids < len(self._is_special)]
        self.found.update(ids[self._is_special[ids]].tolist())


def why_not_stopping(
    trained: Collection[int] | None,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Callable[[], Collection[int]],
) -> str | None:
    """Return why a model would not learn to stop, or would not if trained elsewhere; None if it would.

    Args:
        trained: The special tokens that are trained on; None skips the check.
        tokenizer: The tokenizer of the model.
        stop_ids: The function that returns the tokens at which `generate` stops. It is called where the
            tokenizer's own end token is not trained on, or is the padding.
    """

    def names(ids: Collection[int]) -> str:
        tokens = {number: tokenizer.convert_ids_to_tokens(number) for number in sorted(ids)}
        return " and ".join(
            f"id {number}" if token is None else str(token) for number, token in tokens.items()
        )

    if trained is None:
        return None
    padding = {tokenizer.pad_token_id} - {None}
    ends = {tokenizer.eos_token_id} - {None}
    if (ends - padding).intersection(trained):
        return None
    ends |= set(stop_ids())
    if (ends - padding).intersection(trained):
        return None
    if taught := ends.intersection(trained):
        return (
            f"{names(taught)} ends what is trained on, and is the padding token too: here it is trained on "
            "where it ends an answer, and other trainers leave it out with the padding, so that a model does "
            "not learn to stop; name another pad_token in tokenizer_config.json"
        )
    others = f", such as {names(trained)}," if trained else ""
    padded = ", the padding token too, which labels may leave out" if ends & padding else ""
    return (
        f"generation stops at {names(ends)}{padded}; no example trains on that, so the model does not learn "
        f"to stop: let answers end with it (data.chat_template), or name what they end with{others} as "
        "eos_token in tokenizer_config.json and as eos_token_id in generation_config.json"
    )
