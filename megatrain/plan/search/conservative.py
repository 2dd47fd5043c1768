"""A choice for a model whose cost is not known: from the sizes of its blocks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatrain.config.choice import AUTO, Choice


def conservative(choice: Choice, num_layers: int, num_parts: int, fits: Callable[[Choice], bool]) -> Choice:
    """Decide what is open in a way that takes little memory.

    Every layer is recomputed and nothing is resident; one micro-batch passes at a time. Two slots overlap
    copies and compute; where blocks are too large for that, there is one, and then layers come in fragments.

    Args:
        choice: The choice as far as it is decided; what is decided is kept.
        num_layers: The number of layers of the model.
        num_parts: The largest number of fragments of a layer.
        fits: A function that returns whether the device holds the blocks of a resolved choice.

    Returns:
        The first such choice that fits; the smallest if none does.
    """
    frames = list(_smaller_and_smaller(choice, num_layers, num_parts))
    return next((frame for frame in frames if fits(frame)), frames[-1])


def _smaller_and_smaller(choice: Choice, num_layers: int, num_parts: int) -> Iterator[Choice]:
    for fragments in [False, True] if choice.fragments == AUTO and num_parts > 1 else [choice.fragments]:
        frame = replace(choice, fragments=fragments).with_defaults(num_layers, num_parts)
        yield frame
        if choice.num_slots == AUTO:
            yield replace(frame, num_slots=num_parts if frame.fragments else 1)
