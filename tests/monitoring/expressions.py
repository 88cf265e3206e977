"""Which metrics, labels and label values PromQL and its legends speak of, and which of them a page of metrics lacks.

What always holds: a name that begins with `rollout` is taken for a metric, whatever stands around it; a label is looked
for where it is matched, grouped by or shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"(?<![\w:/.{-])((?:rollout[_:]\w[\w:]*)|up(?=\{)|ALERTS(?=\{))(\{[^{}]*\})?(?![\w(-])")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*(?:"([^"]*)"|\'([^\']*)\')')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?([a-z]\w*)\s*\}\}|label \"(\w+)\"|\$labels\.(\w+)")
OF_THE_TARGET = frozenset({"job", "instance"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """One mention of a metric, with its label matchers."""

    name: str
    matchers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposed:
    """What a page of metrics has: of each name its labels, and of each label its values."""

    series: Mapping[str, Mapping[str, frozenset[str]]]

    def problems(self, text: str, *, also: Mapping[str, frozenset[str]] | None = None) -> Iterator[str]:
        """What `text` speaks of and the page has not. `also`: names from elsewhere, with their labels."""
        known = {name: frozenset(labels) | OF_THE_TARGET for name, labels in self.series.items()} | dict(also or {})
        labels_here: set[str] = set(OF_THE_TARGET)
        for used in uses(text):
            if used.name not in known:
                yield f"no metric {used.name}"
                continue
            labels_here |= known[used.name]
            for label, pattern in used.matchers.items():
                if label not in known[used.name]:
                    yield f"{used.name} has no label {label}"
                elif label not in OF_THE_TARGET and used.name in self.series:
                    values = self.series[used.name][label]
                    for value in pattern.split("|"):
                        if not any(re.fullmatch(value, found) for found in values):
                            yield f'{used.name} has no {label}="{value}", only {sorted(values)}'
        for label in labels_named(text):
            if label not in labels_here:
                yield f"nothing in it has a label {label}"


def exposed(page: str) -> Exposed:
    """`page`: an answer of /metrics."""
    series: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = series.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return Exposed(
        series={name: {k: frozenset(v) for k, v in labels.items()} for name, labels in series.items()},
    )


def uses(text: str) -> Iterator[Used]:
    for match in NAME.finditer(text):
        name, selector = match.group(1), match.group(2) or ""
        yield Used(name=name, matchers={m[0]: m[2] or m[3] for m in MATCHER.findall(selector)})


def labels_named(text: str) -> set[str]:
    """Labels that a text groups by or shows."""
    grouped = {label.strip() for inside in GROUPING.findall(text) for label in inside.split(",")}
    shown = {label for found in SHOWN.findall(text) for label in found}
    return (grouped | shown) - {"", "end", "else"}
