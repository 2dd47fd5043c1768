"""The inputs of a run: its tokenizer, and its data, tokenised and packed, in the order of its steps."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.config import Config
from megatrain.config.decided import with_rows
from megatrain.config.sections.data import SourceConfig
from megatrain.data.cache import FORMAT, Rows, SomeRows, remove_unused
from megatrain.data.example import texts_of
from megatrain.data.fitting import NotTextError, Packing
from megatrain.data.loader import epoch_order
from megatrain.data.pairs import JudgedRows
from megatrain.data.prepare import Prepared, find_prepared, prepare_rows
from megatrain.data.read.content import content_of
from megatrain.data.read.examples import ExampleStream, read_eval_examples, read_examples
from megatrain.data.tokenizer import (
    add_tokens,
    check_vocabulary,
    end_of_document,
    has_tokenizer,
    load_tokenizer,
    new_tokens,
    train_tokenizer,
)
from megatrain.data.tokens.encode import EncoderRecipe
from megatrain.data.tokens.ends import why_not_stopping
from megatrain.data.tokens.template import TrainOn, template_source
from megatrain.errors import ConfigError, DataError
from megatrain.model.documents.able import require_name
from megatrain.model.documents.apart import why_not_apart
from megatrain.model.sequence.range import check_row, row_range
from megatrain.model.sequence.scaling import scale_rope
from megatrain.model.weights.generation import stop_ids
from megatrain.model.weights.skeleton import read_config
from megatrain.stream.lanes.devices import compute_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_NOT_OF_ROWS = ("shuffle", "seed", "cache", "cache_limit", "workers", "packing", "day")
"""The data settings that change no row."""
_IN_USE_S = 3600.0
"""The seconds after their use in which rows stay, since a run reads several sets one after the other."""


def is_on_cpu(config: Config) -> bool:
    """Whether a CPU of this machine computes, which is so for an emulated device too."""
    return compute_device(config.train.device).type == "cpu"


def read_model_config(config: Config, source: str | None = None) -> PretrainedConfig:
    """Read the configuration of a run's model, with the scaling of its rotary embeddings.

    Args:
        config: The settings of the run.
        source: The place of the model; None: `model.path`.

    Raises:
        ModelError: `read_config` raises it.
        ConfigError: The model cannot be scaled as `model.rope_scaling` says.
    """
    model_config = read_config(config.model.path if source is None else source)
    scale_rope(model_config, config.model.rope_scaling)
    return model_config


def with_rows_for(
    config: Config, model_config: PretrainedConfig | None, *, on_cpu: bool | None = None
) -> Config:
    """Return settings in which precision and the length of rows are decided.

    Args:
        config: The settings of a run.
        model_config: The configuration of its model; None if it is unknown, as is then the limit of its rows.
        on_cpu: Whether a CPU computes; None leaves it to `train.device`.
    """
    context = None if model_config is None else row_range(model_config).longest
    return with_rows(config, context=context, on_cpu=is_on_cpu(config) if on_cpu is None else on_cpu)


def prepare_data(config: Config, *, folder: Path | None = None) -> dict[str, list[str]]:
    """Prepare all data of a run, for training and for evaluation.

    Args:
        config: The complete and checked settings.
        folder: The folder of prepared data, as in `Packer`.

    Returns:
        The lines about each set, by its name.

    Raises:
        MegatrainError: `Packer.train` raises it, or there is no such model.
    """
    model_config = read_model_config(config)
    config = with_rows_for(config, model_config)
    packer = Packer(config, choose_tokenizer(config, None, model_config), model_config, folder)
    trained = packer.train()
    sets = {"train": trained, **packer.beside(trained)}
    return {name: [*prepared.notes(), prepared.describe()] for name, prepared in sets.items()}


def holds_out(config: Config, prepared: Prepared) -> bool:
    """Return whether sequences of joined text are held out."""
    return bool(config.data.val_size) and prepared.packing == "join"


def hold_out(config: Config, prepared: Prepared) -> tuple[Rows, Rows]:
    """Return the training rows and the held-out rows of joined text, drawn by the seed.

    Raises:
        DataError: Nothing is left to train on, or nothing is held out.
    """
    size, rows = config.data.val_size, prepared.rows
    count = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < count < len(rows):
        raise DataError(
            f"data.val_size is {size:g} of {len(rows):,} sequences, which leaves {count:,} to evaluate on "
            f"and {max(0, len(rows) - count):,} to train on; use a size that leaves some of both"
        )
    is_held_out = np.zeros(len(rows), dtype=bool)
    is_held_out[epoch_order(len(rows), seed=config.data_seed, epoch=_HELD_OUT)[:count]] = True
    return SomeRows(rows, np.flatnonzero(~is_held_out)), SomeRows(rows, np.flatnonzero(is_held_out))


_HELD_OUT = 2**64 - 1
"""The epoch number that stands for the draw of held-out rows."""


class Packer:
    """Tokenises and packs the data of a run, or finds them prepared, and checks them against the model."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        model_config: PretrainedConfig,
        folder: Path | None = None,
        day: str | None = None,
    ) -> None:
        """Make a packer.

        Args:
            config: The complete and checked settings.
            tokenizer: The tokenizer of the run.
            model_config: The model's configuration.
            folder: The folder of prepared data, where `data.cache` names none; None keeps nothing.
            day: The date that the chat template was given before, in a resumed run.

        Raises:
            ConfigError: Sequences are longer than the model's context, the model would not keep documents
                apart, there is no such attention, or chats have no chat template.
        """
        is_set = config.model.rope_scaling is not None
        check_row(config.data.seq_len, row_range(model_config), is_set=is_set)
        if config.model.attn_implementation is not None:
            require_name(config.model.attn_implementation, compute_device(config.train.device).type)
            model_config._attn_implementation = config.model.attn_implementation
        self._config = config
        self._folder = folder if config.data.cache is None else Path(config.data.cache)
        self._recipe = make_recipe(config, tokenizer)
        day = config.data.day or day
        self._day = None if day is None else date.fromisoformat(day)
        self._ways = _ways(config, model_config)
        self._model_config = model_config

    def train(self) -> Prepared:
        """Pack the training data.

        Raises:
            DataError: The data cannot be read, or have nothing to train on or tokens that the model lacks.
        """
        return self._pack("train", self._config.data.sources)

    def evaluation(self, trained: Prepared | None) -> dict[str, tuple[Rows, str]]:
        """Return the sets of a run: `val`, which is held out of its data, and those of `data.eval_path`.

        Args:
            trained: The result of `train`; None for the sets of `data.eval_path` alone.

        Returns:
            The rows and their way of packing, by name.

        Raises:
            DataError: `train` raises it, nothing is left to train on, or nothing is held out.
        """
        sets: dict[str, tuple[Rows, str]] = {}
        if trained is not None and holds_out(self._config, trained):
            sets["val"] = hold_out(self._config, trained)[1], "join"
        for name, other in self.beside(trained).items():
            if name in self._config.data.eval_sources:  # `val` is described by the run's own data
                other.say_faults()
            sets[name] = rows_of(other), other.packing
        return sets

    def beside(self, trained: Prepared | None) -> dict[str, Prepared]:
        """Pack the evaluation data, except joined text, of which sequences are held out after packing.

        Args:
            trained: The result of `train`, or None, as in `evaluation`.
        """
        data, sets = self._config.data, {}
        if trained is not None and data.val_size and not holds_out(self._config, trained):
            sets["val"] = self._pack("val", data.sources, ways=[trained.packing])
        return sets | {name: self._pack(name, sources) for name, sources in data.eval_sources.items()}

    def _pack(
        self, part: str, sources: Sequence[SourceConfig], ways: Sequence[str] | None = None
    ) -> Prepared:
        content = content_of(sources) if self._folder is not None else None
        folder = self._folder if content is not None else None  # nothing is cached that may change unseen
        name = self._name(part, content)
        ways = ways or self._ways
        if self._recipe.asks_day:
            self._day = self._day or _first_day(folder, name) or date.today()
            self._recipe = replace(self._recipe, day=self._day)
            name = f"{name}-{self._day}"
        keys = {way: f"{name}-{way}" for way in ways}
        ready = (find_prepared(folder, key) for key in reversed(keys.values()) if folder is not None)
        prepared = next((found for found in ready if found is not None), None)
        for way in ways if prepared is None else ():
            packing = Packing(
                seq_len=self._config.data.seq_len,
                way=way,
                too_long=self._config.data.too_long,
                fill_id=self._fill_id(),
            )
            try:
                prepared = prepare_rows(
                    partial(self._read, part, way),
                    self._recipe,
                    packing,
                    folder=folder,
                    key=keys[way],
                    workers=self._config.data.workers,
                )
                _make_room(folder, self._config.data.cache_limit)
                break
            except NotTextError:
                if way == ways[-1]:
                    raise
        assert prepared is not None
        size = len(self._recipe.tokenizer)
        vocab_size = self._model_config.get_text_config().vocab_size
        check_vocabulary(prepared.max_id, vocab_size, tokenizer_size=size)
        if part == "train":
            stops = partial(stop_ids, self._config.model.path, self._model_config)
            if (why := why_not_stopping(prepared.ends, self._recipe.tokenizer, stops)) is not None:
                _log.warning("%s", why)
        return prepared

    def _read(self, part: str, way: str) -> ExampleStream:
        data, seed = self._config.data, self._config.data_seed
        if way == "join":  # joined text may be one document, so sequences are held out
            data = data.model_copy(update={"val_size": 0.0})
        return (
            read_examples(data, seed=seed) if part == "train" else read_eval_examples(data, seed=seed)[part]
        )

    def _fill_id(self) -> int:
        pad_id: Any = self._recipe.tokenizer.pad_token_id
        return self._recipe.end_id if pad_id is None else int(pad_id)

    def _name(self, part: str, content: str | None) -> str:
        """Return a name for all that rows are made of: files, settings, tokenizer, template and software."""
        import tokenizers
        import transformers

        settings = self._config.data.model_dump(mode="json")
        tokenizer: Any = self._recipe.tokenizer
        parts = {
            "format": FORMAT,
            "software": [transformers.__version__, tokenizers.__version__],
            "part": part,
            "content": content,
            "seed": self._config.data_seed,
            "settings": {name: value for name, value in settings.items() if name not in _NOT_OF_ROWS},
            "template": self._recipe.template,
            "end_id": self._recipe.end_id,
            "tokenizer": tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None,
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _make_room(folder: Path | None, limit: int | None) -> None:
    """Keep prepared data within its limit, and say what was removed."""
    if folder is None or limit is None:
        return
    removed = remove_unused(folder, limit, for_s=_IN_USE_S)
    if text := removed.describe():
        why = ", beyond data.cache_limit what was not used for longest" if removed.num_sets else ""
        _log.info("removed %s%s", text, why)


def _first_day(folder: Path | None, name: str) -> date | None:
    """Return the first day for which rows of a name are kept, or None."""
    kept = [] if folder is None else sorted(folder.glob(f"{name}-????-??-??-*"))
    return date.fromisoformat(kept[0].name[len(name) + 1 :][:10]) if kept else None


def make_recipe(config: Config, tokenizer: PreTrainedTokenizerBase) -> EncoderRecipe:
    """Return the recipe of a run's encoder.

    Raises:
        ConfigError: A template file cannot be read.
    """
    data = config.data
    return EncoderRecipe(
        objective=config.objective,
        tokenizer=tokenizer,
        template=template_source(data.chat_template, tokenizer),
        train_on=TrainOn.of(data.train_on, reasoning=data.train_on_reasoning),
        end_id=end_of_document(tokenizer),
        day=date.today() if data.day is None else date.fromisoformat(data.day),
    )


def _ways(config: Config, model_config: PretrainedConfig) -> list[str]:
    """Return the ways of packing to try: the first is for text only; judged answers have one of their own.

    Raises:
        ConfigError: The requested way does not suit this model.
    """
    if (way := config.objective.rows.way) is not None:
        return [way]
    reason = why_not_apart(model_config) if config.data.packing in ("auto", "best_fit") else None
    if config.data.packing == "auto":
        return ["join", "best_fit" if reason is None else "pad"]
    if reason is not None:
        raise ConfigError(
            f"data.packing=best_fit needs a model that keeps the documents of a sequence apart, but "
            f"{reason}; use data.packing=pad, or join for text"
        )
    return [config.data.packing]


def rows_of(prepared: Prepared) -> Rows:
    """Return packed rows; those of judged answers have room for the reference's log-probabilities."""
    return JudgedRows(prepared.rows, prepared.fingerprint) if prepared.kind.is_judged else prepared.rows


def _texts(config: Config) -> Iterator[str]:
    examples = read_examples(config.data, seed=config.data_seed)
    return (text for example in examples for text in texts_of(example))


def choose_tokenizer(
    config: Config, checkpoint: Path | None, model_config: PretrainedConfig
) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer, or the named one, or the model's, or train one.

    It is given `model.new_tokens`, and the model's configuration is given as many words as it then needs. Of
    a model whose positions are scaled, it takes texts as long as the model does.
    """
    tokenizer = _tokenizer(config, checkpoint, model_config)
    longest = row_range(model_config).longest
    if config.model.rope_scaling is not None and longest is not None:
        tokenizer.model_max_length = max(tokenizer.model_max_length, longest)
    if config.model.new_tokens:
        if checkpoint is None:
            add_tokens(tokenizer, new_tokens(config.model.new_tokens))
        text = model_config.get_text_config()
        text.vocab_size = max(text.vocab_size, len(tokenizer))
    return tokenizer


def _tokenizer(
    config: Config, checkpoint: Path | None, model_config: PretrainedConfig
) -> PreTrainedTokenizerBase:
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint))
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    if config.model.init == "random" and not has_tokenizer(config.model.path):
        vocab_size = config.data.vocab_size or model_config.get_text_config().vocab_size
        return train_tokenizer(_texts(config), vocab_size)
    return load_tokenizer(config.model.path)
