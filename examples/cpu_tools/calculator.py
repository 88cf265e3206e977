"""The tool the policy may call: what an engine and a model see of it is its name, its type hints and its docstring."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """The sum of two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b
