"""What is said of the tokens at which a model stops."""

from __future__ import annotations

from megatrain.data.tokenizer import END_OF_TEXT, train_tokenizer
from megatrain.data.tokens.ends import why_not_stopping


def test_a_stop_that_the_tokenizer_does_not_know_is_named_by_its_number() -> None:
    """As of a configuration that has kept the ids of another vocabulary."""
    said = why_not_stopping([], train_tokenizer(["a b"], 260), lambda: [999])
    assert said is not None
    assert said.startswith(f"generation stops at {END_OF_TEXT} and id 999; no example trains on that")
