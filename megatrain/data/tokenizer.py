"""The tokenizer of a run: the model's own, or a byte-level BPE trained on the run's text.

No tokenizer code from a model directory is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import (
    ConfigError,
    DataError,
    MegatrainError,
    ModelError,
    os_error_behind,
    os_errors,
    os_sentence,
)
from megatrain.hub import asking_hub, may_be_on_hub, refuse_link_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_NUM_BYTES = 256
# A tokenizer needs one of these files; without them transformers may silently build an empty one.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


_OF_TOKENIZERS = (".json", ".jinja", ".txt", ".model")
_OF_THIS_LOAD = ("is_local", "local_files_only")
"""Notes of transformers about how a tokenizer was loaded, which it would save as its configuration."""


_TRIED = "Once upon a time"
_PANIC = "PanicException"
"""The name of Rust's panic, whose class is in no module and derives from `BaseException`."""


def has_tokenizer(path: str) -> bool:
    """Return whether a local model directory holds a tokenizer's vocabulary; a hub id counts as one."""
    return not Path(path).is_dir() or any(Path(path, name).is_file() for name in _VOCABULARY_FILES)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or hub id.

    Raises:
        ModelError: There is no tokenizer, it is not readable, it is a link out of the directory, or it needs
            code from there.
    """
    from transformers import AutoTokenizer

    is_here = Path(path).exists()
    if not is_here and not may_be_on_hub(path):
        raise ModelError(f"{path} does not exist; check data.tokenizer and model.path")
    if not has_tokenizer(path):
        raise ModelError(
            f"{path} has no tokenizer (none of {', '.join(_VOCABULARY_FILES)}); "
            "set data.tokenizer to a directory with one"
        )
    _refuse_links_out(Path(path))
    _refuse_remote_code(path)
    asking = nullcontext() if is_here else asking_hub(path, "its tokenizer")
    try:
        with asking:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer.decode(tokenizer(_TRIED)["input_ids"])  # some settings fail only in use
    except MegatrainError:
        raise
    except (
        BaseException
    ) as error:  # the errors of transformers, tokenizers and sentencepiece for damaged files
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        refused = os_error_behind(error, path)
        if refused is not None:
            raise ModelError(os_sentence("read the tokenizer in", path, refused)) from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(
            f"{path}: the tokenizer cannot be loaded ({reason}); repair it or set data.tokenizer"
        ) from error
    for name in _OF_THIS_LOAD:
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def new_tokens(given: tuple[str, ...] | str) -> list[str]:
    """Return the tokens of `model.new_tokens`: as listed, or one for each line of a file.

    Raises:
        ConfigError: The file cannot be read, or has none.
    """
    if not isinstance(given, str):
        return list(given)
    with os_errors("read model.new_tokens from", given, ConfigError):
        try:
            lines = Path(given).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"model.new_tokens: {given} is not UTF-8 text; give one token per line"
            ) from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"model.new_tokens: {given} has no line with a token; give one token per line")
    return found


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str]) -> None:
    """Add words to a tokenizer, to which no text is normalised; words that it already has stay."""
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])


def _refuse_links_out(directory: Path) -> None:
    """Refuse files that a tokenizer may be made of, or a template, that are links out of a directory."""
    if directory.is_dir():
        with os_errors("read", directory, ModelError):
            for file in sorted(directory.iterdir()):
                if file.suffix in _OF_TOKENIZERS:
                    refuse_link_out(file)


def _refuse_remote_code(path: str) -> None:
    for name in ("tokenizer_config.json", "config.json"):
        file = Path(path, name)
        if not file.is_file():
            continue
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{file} is not readable as JSON ({error})") from error
        auto_map = settings.get("auto_map") if isinstance(settings, dict) else None
        needs_code = "AutoTokenizer" in auto_map if isinstance(auto_map, dict) else auto_map is not None
        if needs_code:
            raise ModelError(
                f"{file} names a tokenizer class in its own code (auto_map), which megatrain does not run; "
                "set data.tokenizer to a directory with a standard tokenizer"
            )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; equal texts give an equal tokenizer.

    Args:
        texts: The documents to learn from.
        vocab_size: The number of entries: `<|endoftext|>`, 256 bytes, and as many merges as texts give.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= _NUM_BYTES:
        raise ConfigError(
            f"a tokenizer of {vocab_size} entries cannot hold {END_OF_TEXT} and the 256 bytes; "
            "use data.vocab_size of 257 or more, and a model whose vocab_size holds it"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=None, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def end_of_document(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that ends a document.

    Raises:
        ConfigError: The tokenizer has none.
    """
    eos_token_id: Any = tokenizer.eos_token_id
    if eos_token_id is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path or 'of this run'} has no eos_token, and documents must "
            "end with one; name it in its tokenizer_config.json"
        )
    return int(eos_token_id)


def check_vocabulary(max_id: int, vocab_size: int, *, tokenizer_size: int | None = None) -> None:
    """Check that the model has an embedding for every token of the data.

    Raises:
        DataError: The data have a token id beyond the model's vocabulary.
    """
    if max_id >= vocab_size:
        entries = "" if tokenizer_size is None else f" of {tokenizer_size} entries"
        raise DataError(
            f"the data has token id {max_id}, but the model's vocab_size is {vocab_size}: the "
            f"tokenizer{entries} belongs to another model; set data.tokenizer to this model's own"
        )
