"""Settings of the data: where rows come from, what they hold, and how they become batches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation, ValidationError
from pydantic_core import PydanticCustomError

from megatrain.config.choice import AUTO
from megatrain.config.sections.section import Section
from megatrain.config.types import (
    Bytes,
    Count,
    Day,
    LocalPath,
    Name,
    OpenLength,
    Rate,
    Seed,
    TrainedPart,
    one_of,
    reads_as,
)

FORMATS = (
    "text",
    "alpaca",
    "sharegpt",
    "messages",
    "prompt_completion",
    "preference",
    "kto",
    "tokens",
)
"""The kinds of rows, by their names in settings and logs."""

COLUMNS = (
    *("text", "instruction", "input", "output", "history", "system", "tools", "messages"),
    *("prompt", "completion", "chosen", "rejected", "label", "input_ids", "labels"),
    *("query", "response", "kto_tag"),  # LLaMA-Factory's names of input, output and label
    *("images", "videos", "audios"),
)
"""Fields of a row, for which a data set may have columns of other names."""

TAGS = (
    *("role_tag", "content_tag", "user_tag", "assistant_tag"),
    *("observation_tag", "function_tag", "system_tag"),
)
"""The names for the parts of a turn, in LLaMA-Factory's words."""

Format = Annotated[str, one_of("auto", *FORMATS)]


def _names(value: object) -> object:
    """Read one name, several with commas between them as LLaMA-Factory has them, or a list."""
    if isinstance(value, str):
        return tuple(name for part in value.split(",") if (name := part.strip()))
    return tuple(value) if isinstance(value, list) else value


def _known(known: tuple[str, ...]) -> BeforeValidator:
    def check(value: object) -> object:
        for name in value if isinstance(value, Mapping) else ():
            if name not in known:
                raise PydanticCustomError(
                    "said", "{name} is not one of {known}", {"name": name, "known": ", ".join(known)}
                )
        return value

    return BeforeValidator(check)


Columns = Annotated[
    dict[str, Name], _known(COLUMNS), reads_as("a mapping such as {instruction: question, output: answer}")
]
Tags = Annotated[
    dict[str, Name], _known(TAGS), reads_as("a mapping such as {role_tag: from, user_tag: human}")
]
Names = Annotated[tuple[Name, ...], BeforeValidator(_names), reads_as("a name or a list of names")]


class SourceConfig(Section):
    """One source of rows, where `data.path` gives a mapping; what it does not say is as `data` says."""

    path: LocalPath
    """File, directory, pattern or hub id."""
    name: Name | None = None
    """What reports call it. null = the path, or the entry of `dataset_info.json`."""
    dataset: Name | None = None
    """Entry of the `dataset_info.json` that `path` is, or that lies in it."""
    weight: Rate | None = None
    """How often rows of it are drawn, relative to the other sources."""
    format: Format | None = None
    columns: Columns | None = None
    tags: Tags | None = None
    split: Name | None = None
    subset: Name | None = None
    folder: Name | None = None
    """Folder inside a hub dataset."""
    revision: Name | None = None
    max_samples: Count | None = None


_SOURCES = "a path, a mapping such as {path: a.jsonl, weight: 2}, or a list of these"


def _sources(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _source(value: object) -> object:
    """Read a path, or a mapping as a source; its first problem is said with its key."""
    if isinstance(value, str) and value:
        return os.path.expanduser(value)
    if isinstance(value, SourceConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(_SOURCES)
    try:
        return SourceConfig.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        known = ", ".join(SourceConfig.model_fields)
        text = f"there is no key {key}; a source has {known}" if problem["type"] == "extra_forbidden" else ""
        text = text or f"{key}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
        raise PydanticCustomError("said", "{text}", {"text": text}) from error


Sources = Annotated[
    tuple[Annotated[SkipValidation[str | SourceConfig], BeforeValidator(_source)], ...],
    BeforeValidator(_sources),
    Field(min_length=1),
    reads_as(_SOURCES),
]
_EVAL_SOURCES = "a path, a list of paths, or a mapping of names to these"


def _eval_sources(value: object) -> object:
    if value is None or isinstance(value, Mapping):
        return value
    return {"eval": value}


class DataConfig(Section):
    """These settings say where rows come from, what they hold, and how they become batches."""

    path: Sources
    """Files (`.txt .jsonl .json .csv .tsv .parquet .arrow`), directories of them or of a saved dataset,
    patterns such as `data/*.jsonl`, hub ids, or a LLaMA-Factory `dataset_info.json`: one or a list. A mapping
    `{path, weight, name, dataset, format, columns, tags, split, subset, folder, revision,
    max_samples}` says more."""
    dataset: Names = ()
    """Entries of the `dataset_info.json` that `data.path` is, or that lies in it, such as
    `identity, alpaca_en_demo`."""
    format: Format = "auto"
    """The kind of rows. `auto` = as their columns say; the log names what was found."""
    columns: Columns = Field(default={})
    """Columns that have other names than the format's own: `{instruction: question, output: answer}`."""
    tags: Tags = Field(default={})
    """Words of `sharegpt` and `messages` rows that are others than usual, by LLaMA-Factory's names."""
    text_column: Name = "text"
    """Column of raw text; naming another one than `text` means that rows are raw text."""
    split: Name | None = None
    """Split of a hub or saved dataset. null = `train`, or the only one."""
    subset: Name | None = None
    """Subset (configuration) of a hub dataset."""
    revision: Name | None = None
    """Commit, branch or tag at which a hub dataset is read. null = its newest commit, which may be another
    when the run goes on."""
    streaming: bool = False
    """Read hub datasets over the network, row by row; false = download them first. Files are always read row
    by row."""
    max_samples: Count | None = None
    """Most examples to take of each source: the first usable ones. null = all."""
    on_bad_row: Annotated[str, one_of("drop", "stop")] = "drop"
    """The consequence of a row that cannot be used: `drop` leaves it out, counted by reason, with file and
    row of the first ones in the log; `stop` ends the run with its file, row and reason."""
    mixture_ends: Annotated[str, one_of("all_exhausted", "first_exhausted")] = "all_exhausted"
    """When a pass over weighted sources ends: when each has been read to its end (smaller ones start over
    before), or when the first has."""
    val_size: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Part of the examples that is held out for evaluation: a share below 1, or a number of examples."""
    eval_path: Annotated[
        dict[str, Sources] | None, BeforeValidator(_eval_sources), reads_as(_EVAL_SOURCES)
    ] = None
    """Evaluation data, as `data.path`; a mapping names several sets: `{math: a.jsonl, chat: b.jsonl}`."""
    seq_len: OpenLength = AUTO
    """Tokens per sequence. Documents are joined and cut to this length; not beyond the model's context.
    `auto` = that context, at most 4,096 (1,024 on a CPU)."""
    tokenizer: LocalPath | None = None
    """Tokenizer directory or hub id. null = the model's own, or one trained on the data if `model.init` is
    `random` and the model has none."""
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    """Entries of a tokenizer trained on the data. null = the model's vocabulary size."""
    shuffle: bool = True
    """Visit the sequences in a new random order in each pass over the data; false = in file order."""
    seed: Seed | None = None
    """Seed of the order of the data. null = `train.seed`."""
    chat_template: LocalPath | None = None
    """Jinja file of the chat template, or a name: `alpaca`, `chatml`, `gemma`, `llama2`, `llama3`, `mistral`,
    `phi3`, `qwen2.5`, `qwen3`, `vicuna`, or `plain`, which needs no special tokens. null = the tokenizer's
    own."""
    day: Day | None = None
    """Day that a chat template is told which asks for the time (`strftime_now`), such as `2026-11-23`. null =
    the one on which this data was first prepared; a run that is resumed keeps it."""
    train_on: TrainedPart = "assistant"
    """Which part of a chat is trained on: each turn of the `assistant`, its `last` turn, `all` with the
    prompts, or a list of roles. A message's `loss_weight` of 0 or 1 goes first. A prompt without a chat
    template is trained on with `all` only."""
    train_on_reasoning: bool = True
    """Train on what the assistant thinks before it answers, where the chat template shows it."""
    too_long: Annotated[str, one_of("auto", "split", "truncate", "drop")] = "auto"
    """The treatment of an example longer than `data.seq_len`: `split` into pieces that do not see each other,
    `truncate` at its end, or `drop`. `auto` = text is split, all else truncated."""
    packing: Annotated[str, one_of("auto", "join", "best_fit", "pad")] = "auto"
    """The way in which examples share a sequence. `join` = one after the other without a gap, cut anywhere,
    seeing each other; for text only. `best_fit` = whole, as many as fit, none seeing another. `pad` = one
    each. `auto` = `join` for text, else `best_fit`, or `pad` if the model cannot keep examples apart."""
    workers: Count = 1
    """Processes that tokenise the data."""
    cache: LocalPath | None = None
    """Folder where prepared data is kept. null = `megatrain/data` in the user's cache folder."""
    cache_limit: Bytes | None = 200 * 2**30
    """Bytes that prepared data may take up there: beyond, what was not used for longest is removed, with a
    line in the log. null = no limit."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """All sources of `data.path`."""
        return self._complete(self.path, self.dataset)

    @property
    def eval_sources(self) -> Mapping[str, tuple[SourceConfig, ...]]:
        """All sources of `data.eval_path` by the name of their set."""
        return {name: self._complete(sources) for name, sources in (self.eval_path or {}).items()}

    def _complete(
        self, sources: tuple[str | SourceConfig, ...], entries: tuple[str, ...] = ()
    ) -> tuple[SourceConfig, ...]:
        """Give each source what `data` says for all; a plain path is one source for each of the entries."""
        said: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("format", "columns", "tags", "split", "subset", "revision", "max_samples")
        }
        complete = []
        for source in sources:
            given = SourceConfig(path=source) if isinstance(source, str) else source
            own = {key: value for key, value in given if value is not None}
            datasets = (entries if isinstance(source, str) else ()) or (given.dataset,)
            complete += [SourceConfig(**(said | own | {"dataset": dataset})) for dataset in datasets]
        return tuple(complete)
