"""The section `eval`: the times of a run's evaluations on held-out data, and their consequences."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from megatrain.config.sections.section import Section
from megatrain.config.types import Count, Every, Name, as_tuple, reads_as


class EvalConfig(Section):
    """Evaluation on the data of `data.val_size` and `data.eval_path`; it changes no bit of training."""

    every: Every | None = "epoch"
    """Steps between evaluations; `epoch` = after each pass over the data, `epoch/4` = four times in each.
    null = only as `eval.at_start` and `eval.at_end` say."""
    batches: Count | None = None
    """Micro-batches of each set that are evaluated. null = all."""
    at_start: bool = False
    """Evaluate before the first step too."""
    at_end: bool = True
    """Evaluate after the last step too."""
    by_position: bool = True
    """Also tell the loss by the position of tokens in their documents, or in joined rows: below 1k (1,024),
    from there to 2k, to 4k, and so on. Only of rows of more than 2,048 tokens, and not of judged answers."""
    metric: Name | None = None
    """Name of the set whose loss says which checkpoint is the best. null = the first one."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest loss beside the newest ones. It is saved as soon as it is known."""
    load_best: bool = False
    """Leave the best model in `hf/` at the end, in place of the last one."""
    patience: Count | None = None
    """Stop after this many evaluations in a row that were no better than the best one. null = never."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The amount by which the loss must be below the best one to be better."""
    prompts: Annotated[tuple[Name, ...], BeforeValidator(as_tuple), reads_as("a list of texts")] = ()
    """Texts that the model continues at each evaluation, with the likeliest token each time."""
    chat: bool = False
    """Ask the prompts in the words of the chat template, as `megatrain chat` does, in place of continuing
    them."""
    max_new_tokens: Count = 50
    """Tokens to add to a prompt at most, or of an answer."""


def eval_conflicts(settings: EvalConfig, *, has_data: bool) -> list[str]:
    """List what excludes each other, each with a way out; `has_data`: there is something to evaluate on."""
    problems = []
    wishes = {
        "eval.load_best": settings.load_best,
        "eval.patience": settings.patience is not None,
        "eval.metric": settings.metric is not None,
        "eval.batches": settings.batches is not None,
    }
    if not has_data:
        problems += [
            f"{name} is set, but nothing is held out; add data.val_size=0.05, or data.eval_path"
            for name, is_wished in wishes.items()
            if is_wished
        ]
        if isinstance(settings.every, int) and not settings.prompts:
            problems.append(
                "eval.every is set, but there is nothing to evaluate; add data.val_size=0.05, "
                "data.eval_path, or eval.prompts"
            )
    if settings.load_best and not settings.keep_best:
        problems.append("eval.load_best is true, but eval.keep_best is false; keep the best checkpoint")
    return problems
