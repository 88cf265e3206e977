"""Texts of others made fit for a terminal, and numbers made fit for people. Pure.

What always holds: what `plain` returns is one line of printable characters, so that no error, completion or name can
move the cursor, set a title, change colours or turn the direction of writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.text import Text

MOST = 400
"""Characters of one text: more would push everything else off the screen."""
LEVELS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
NONE = "-"
"""Where there is no value."""


def plain(text: object, most: int = MOST) -> str:
    """`text` on one line, what is not printable written as an escape (`\\x1b`), cut to `most` characters."""
    shown = str(text)
    cut = len(shown) > most
    shown = shown[:most]
    if not (shown.isascii() and shown.isprintable()):
        shown = "".join(_visible(character) for character in shown)
    return shown + "…" if cut else shown


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return character.encode("unicode_escape").decode("ascii")


def words(text: object, style: str = "", *, most: int = MOST) -> Text:
    """`plain` text as rich shows it: never read as markup."""
    return Text(plain(text, most), style=style)


def one_line(text: object, style: str = "", *, most: int = MOST) -> Text:
    """The same, cut at the edge of its column instead of wrapped."""
    shown = words(text, style, most=most)
    shown.no_wrap, shown.overflow = True, "ellipsis"
    return shown


def count(value: float) -> str:
    """1234567 → `1,234,567`."""
    return f"{value:,.0f}"


def many(value: int, noun: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def rate(value: float | None) -> str:
    """Per second: few digits, but never 0 for something."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


def span(seconds: float) -> str:
    """A time span in its two largest units: `45 s`, `4 min 10 s`, `3 h 2 min`, `2 d 5 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def short(seconds: float) -> str:
    """The same in its largest unit, for tables: `45s`, `4m`, `3h`, `2d`."""
    whole = max(0, round(seconds))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def flow(pieces: Sequence[Text], width: int, gap: str = "   ") -> Text:
    """`pieces` one after the other, a new line where the next one would not fit whole."""
    lines = [Text()]
    for piece in pieces:
        line = lines[-1]
        if line.cell_len and line.cell_len + len(gap) + piece.cell_len > width:
            lines.append(piece.copy())
        else:
            line.append_text(Text(gap if line.cell_len else "")).append_text(piece)
    return Text("\n").join(lines)


def moment(timestamp: str) -> datetime | None:
    """An RFC 3339 time; None where it is none."""
    try:
        found = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def since(then: str, now: str) -> str | None:
    """The span between two of the service's own times, so that the clock of this machine does not matter."""
    start, end = moment(then), moment(now)
    return None if start is None or end is None else span((end - start).total_seconds())


def clock(timestamp: str) -> str:
    """Hours, minutes and seconds (UTC) of a time."""
    found = moment(timestamp)
    return plain(timestamp, 20) if found is None else found.strftime("%H:%M:%S")


def bar(value: float, whole: float, width: int) -> str:
    """A horizontal bar of `value` in `whole`, at most `width` cells; something is never drawn as nothing."""
    if value <= 0 or whole <= 0 or width <= 0:
        return ""
    eighths = max(1, round(min(1.0, value / whole) * width * 8))
    full, rest = divmod(eighths, 8)
    return LEVELS[-1] * full + (EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, from the least to the greatest; a gap where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, reach = min(known), max(known) - min(known)
    if reach <= 0:
        return "".join(" " if value is None else LEVELS[3] for value in values)
    steps = len(LEVELS) - 1
    return "".join(" " if value is None else LEVELS[round((value - low) / reach * steps)] for value in values)
