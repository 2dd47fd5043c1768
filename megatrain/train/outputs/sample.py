"""The model of a run or of a directory continues a text or answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import ModelError
from megatrain.hub import may_be_on_hub
from megatrain.model.adapters.files import is_adapter
from megatrain.train.evaluate.chat import Chat
from megatrain.train.evaluate.prompts import continue_text
from megatrain.train.outputs.export import newest_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def sample(
    path: str, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.0, chat: bool = False
) -> str:
    """Return `prompt` and its continuation by the model; in a chat, the answer alone.

    Args:
        path: The run directory (its final model, or else its newest checkpoint), model directory or hub id.
        prompt: The text to continue, which is not empty.
        max_new_tokens: The largest number of tokens to add.
        temperature: The temperature; 0 takes the likeliest token each time.
        chat: Whether to ask in the words of the tokenizer's chat template.

    Raises:
        MegatrainError: The model or its tokenizer cannot be read, the prompt has no token, or there is no
            chat template.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if chat:
        return open_chat(path, **options).ask(prompt)
    return continue_text(*_open(path), prompt, **options)


def open_chat(path: str, **options: Any) -> Chat:
    """Begin a conversation with the model of a run, a directory or a hub id; the options are those of `Chat`.

    Raises:
        MegatrainError: `sample` would raise it.
    """
    return Chat(*_open(path), **options)


def _open(path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from megatrain.stream.attach.load import load

    if not Path(path).exists() and not ("/" in path and may_be_on_hub(path)):
        raise ModelError(f"{path} is no run directory, no model directory, and no hub id such as org/name")
    source = str(_model_of(Path(path)) or path)
    return load(source), load_tokenizer(source)


def _model_of(run: Path) -> Path | None:
    """Return the place of a run's model, or None if `run` is no run directory."""
    if (run / "hf" / "config.json").is_file() or is_adapter(run / "hf"):
        return run / "hf"
    return newest_model(run) if (run / "checkpoints").is_dir() else None
