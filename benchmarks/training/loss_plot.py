"""Two loss curves and their difference as an SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, LEFT, RIGHT = 860, 76, 20
CURVES, DIFFERENCE = (64, 380), (440, 540)
"""Top and bottom of the two panels."""
HEIGHT = 590
STREAMED, RESIDENT, GREY = "#f0a030", "#103a70", "#888888"


def draw(streamed: Sequence[float], resident: Sequence[float], title: str, subtitle: str) -> str:
    """Return the SVG: both curves in one panel, streamed minus resident in another below it.

    Args:
        streamed: Loss of each step, from step 1.
        resident: The same of the other run.
        title: First line.
        subtitle: Second line.
    """
    assert len(streamed) == len(resident) > 1
    differences = [a - b for a, b in zip(streamed, resident, strict=True)]
    num_equal = sum(difference == 0 for difference in differences)
    largest = max(map(abs, differences))
    both = [*streamed, *resident]
    low, high = nice_range(min(both), max(both))
    bound = nice_range(-largest, largest)[1] if largest > 0 else 1e-7
    count = f"{num_equal:,} of {len(differences):,} steps equal bit for bit"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, size=16),
        text(LEFT, 44, subtitle, colour=GREY),
        *axes(CURVES, low, high, len(streamed)),
        *axes(DIFFERENCE, -bound, bound, len(streamed)),
        line(streamed, CURVES, low, high, STREAMED, 5.0),
        line(resident, CURVES, low, high, RESIDENT, 1.2),
        line(differences, DIFFERENCE, -bound, bound, RESIDENT, 1.2),
        *legend("streamed", STREAMED, 5.0, CURVES[0] + 22),
        *legend("resident", RESIDENT, 1.2, CURVES[0] + 42),
        text(LEFT, DIFFERENCE[0] - 10, f"streamed minus resident: largest {largest:.3g}; {count}"),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "step", anchor="middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def axes(panel: tuple[int, int], low: float, high: float, num_steps: int) -> list[str]:
    """Return the frame, the ticks and their numbers."""
    top, bottom = panel
    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - top}" fill="none" '
        f'stroke="{GREY}"/>'
    ]
    for value in ticks(low, high, 6 if bottom - top > 200 else 4):
        y = bottom - (value - low) / (high - low) * (bottom - top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for value in ticks(0, num_steps, 10):
        x = x_of(value, num_steps)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{GREY}"/>')
        parts.append(text(x, bottom + 19, f"{value:g}", anchor="middle"))
    return parts


def line(
    values: Sequence[float], panel: tuple[int, int], low: float, high: float, colour: str, width: float
) -> str:
    """Return a curve over the steps."""
    top, bottom = panel
    points = (
        f"{x_of(step, len(values)):.1f},{bottom - (value - low) / (high - low) * (bottom - top):.1f}"
        for step, value in enumerate(values, start=1)
    )
    return (
        f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round" '
        f'points="{" ".join(points)}"/>'
    )


def legend(name: str, colour: str, width: float, y: float) -> list[str]:
    """Return a curve's name and a piece of it."""
    x = WIDTH - RIGHT - 130
    stroke = f'<path d="M{x} {y - 4}h32" stroke="{colour}" stroke-width="{width}"/>'
    return [stroke, text(x + 42, y, name)]


def text(
    x: float, y: float, words: str, *, size: int = 13, colour: str = "black", anchor: str = "start"
) -> str:
    """Return one line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def x_of(step: float, num_steps: int) -> float:
    """Return where a step is; 0 is at the left edge."""
    return LEFT + step / num_steps * (WIDTH - LEFT - RIGHT)


def nice_range(low: float, high: float) -> tuple[float, float]:
    """Return round numbers around a range."""
    step = nice_step(high - low or 1.0, 6)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about so many round numbers within a range."""
    step = nice_step(high - low, about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 15) for number in range(first, last + 1)]


def nice_step(extent: float, about: int) -> float:
    """Return 1, 2 or 5 times a power of ten, of which about so many make the extent."""
    power: float = 10.0 ** math.floor(math.log10(extent / about))
    return next(factor * power for factor in (1, 2, 5, 10) if extent / (factor * power) <= about)
