"""Figures and names in words, as pages and plots show them."""

import math
import re
import textwrap

NOTHING = "–"
"""Stands where there is no figure."""

_THIN_SPACE = "\u202f"


def seconds(value: float | None) -> str:
    """Three digits that count, in ms below one second."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if abs(value) < 0.9995:
        return f"{_digits(value * 1000)} ms"
    return f"{_digits(value)} s"


def objective_s(value: float) -> str:
    """A chosen time, with no more digits than were chosen."""
    return f"{1000 * value:g} ms" if value < 1 else f"{value:g} s"


def ratio(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{_digits(value)}×"


def count(value: int) -> str:
    """Thousands apart by thin spaces that do not break."""
    return f"{value:,}".replace(",", _THIN_SPACE)


def share(value: float | None) -> str:
    """Of 1, in percent. What is not quite all, or not quite nothing, does not read as if it were."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if 0.0 < value < 0.001:
        return "< 0.1 %"
    if 0.999 < value < 1.0:
        return "> 99.9 %"
    return f"{100 * value:.1f} %"


def per_second(value: float, unit: str) -> str:
    return f"{_digits(value)} {unit}/s"


def _digits(value: float) -> str:
    """Three digits that count; more before the point where there are more."""
    if value == 0:
        return "0"
    before = math.floor(math.log10(abs(value))) + 1
    rounded = round(value, 3 - before)
    decimals = max(3 - math.floor(math.log10(abs(rounded))) - 1, 0) if rounded else 0
    text = f"{rounded:,.{decimals}f}" if before <= 3 else f"{value:,.0f}"
    return text.replace(",", _THIN_SPACE)


def plain(text: str) -> str:
    """On one line, without characters that no one sees or that no file can hold (controls, lone surrogates)."""
    one_line = re.sub(rf"[^\S{_THIN_SPACE}]+", " ", text).strip()
    return "".join(char if char.isprintable() or char == _THIN_SPACE else "\ufffd" for char in one_line)


def wrapped(text: str, width: int, max_lines: int = 3) -> str:
    """As plain lines of at most `width` characters, cut off after the last."""
    return "\n".join(textwrap.wrap(plain(text), width, max_lines=max_lines, placeholder=" …")) or NOTHING
