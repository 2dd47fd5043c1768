"""Continues a text with the model of a run or of a directory."""

from __future__ import annotations

from pathlib import Path

from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import ModelError
from megatrain.model.adapters.files import is_adapter
from megatrain.train.evaluate.prompts import continue_text
from megatrain.train.outputs.export import newest_model


def sample(path: str, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.0) -> str:
    """Return `prompt` and what the model makes of it.

    Args:
        path: A run directory (its final model, or else its newest checkpoint), a model directory or a hub id.
        prompt: Text to continue; not empty.
        max_new_tokens: Tokens to add at most.
        temperature: 0 takes the likeliest token each time.

    Raises:
        MegatrainError: The model or its tokenizer cannot be read, or the prompt has no token.
    """
    from megatrain.stream.load import load

    if not Path(path).exists() and "/" not in path:
        raise ModelError(f"{path} is no run directory, no model directory, and no hub id such as org/name")
    source = str(_model_of(Path(path)) or path)
    model, tokenizer = load(source), load_tokenizer(source)
    return continue_text(model, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature)


def _model_of(run: Path) -> Path | None:
    """Return where a run's model is; None if `run` is no run directory."""
    if (run / "hf" / "config.json").is_file() or is_adapter(run / "hf"):
        return run / "hf"
    return newest_model(run) if (run / "checkpoints").is_dir() else None
