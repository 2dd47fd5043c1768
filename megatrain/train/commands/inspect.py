"""`inspect_data` reads the data of a run as the run would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.data.inspect import Inspection, inspect_examples
from megatrain.data.read.examples import read_eval_examples, read_examples
from megatrain.data.tokenizer import load_tokenizer
from megatrain.data.tokens.encode import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def inspect_data(config: Config, *, has_model: bool = True, num_samples: int = 1) -> Mapping[str, Inspection]:
    """Inspect the training data and the evaluation sets; return the findings by name, `train` first.

    Args:
        config: The complete and checked settings.
        has_model: Whether the settings name a model. Without a model and a tokenizer, characters are counted.
        num_samples: The number of examples of `train` to show.

    Raises:
        DataError: The data cannot be read.
        ModelError: The model has no tokenizer.
        ConfigError: The examples need a chat template, and there is none.
    """
    tokenizer, encoder, seq_len = _tokens(config, has_model=has_model)
    seed = config.data_seed
    streams = {"train": read_examples(config.data, seed=seed), **read_eval_examples(config.data, seed=seed)}
    return {
        name: inspect_examples(
            stream,
            encoder=encoder,
            tokenizer=tokenizer,
            seq_len=seq_len,
            num_samples=num_samples if name == "train" else 0,
        )
        for name, stream in streams.items()
    }


def _tokens(
    config: Config, *, has_model: bool
) -> tuple[PreTrainedTokenizerBase | None, Encoder | None, int | None]:
    """Return the tokenizer of a run, its encoder and its row length; None where it names no tokenizer."""
    named = config.data.tokenizer
    if not (has_model or named):
        return None, None, None
    # torch and models are loaded for these alone
    from megatrain.train.inputs import choose_tokenizer, make_recipe, read_model_config, with_rows_for

    model = read_model_config(config) if has_model else None
    if named is not None:
        tokenizer = load_tokenizer(named)
    else:
        assert model is not None
        tokenizer = choose_tokenizer(config, None, model)
    return tokenizer, make_recipe(config, tokenizer).make(), with_rows_for(config, model).data.seq_len
