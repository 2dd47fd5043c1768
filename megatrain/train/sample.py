"""Continues a text with the model of a run or of a directory."""

from __future__ import annotations

from pathlib import Path

from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import ConfigError, ModelError
from megatrain.train.export import newest_model


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
    import torch

    from megatrain.stream.load import load

    if not Path(path).exists() and "/" not in path:
        raise ModelError(f"{path} is no run directory, no model directory, and no hub id such as org/name")
    source = str(_model_of(Path(path)) or path)
    model = load(source)
    tokenizer = load_tokenizer(source)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise ConfigError("the prompt is empty; give --prompt some text")
    options = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        ids = model.generate(
            **inputs, max_new_tokens=max_new_tokens, max_length=None, pad_token_id=pad, **options
        )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _model_of(run: Path) -> Path | None:
    """Return where a run's model is; None if `run` is no run directory."""
    if (run / "hf" / "config.json").is_file():
        return run / "hf"
    return newest_model(run) if (run / "checkpoints").is_dir() else None
