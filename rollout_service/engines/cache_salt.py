"""What keeps prefixes apart that an engine cached with other weights (vLLM's `cache_salt`).

vLLM goes on using cached prefixes after new weights were loaded, unless somebody empties its cache: the tokens that
follow are then sampled from a mixture of two policies that nobody can name. What always holds: two requests share a
salt only where the policy version did not change between them, by number or by a way back to a lower one, nor this
service start again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable


class CacheSalt:
    """Gives the salt of this moment."""

    def __init__(self, version: Callable[[], int], returns: Callable[[], int]) -> None:
        """`version`: the policy version; `returns`: how often it was lowered."""
        self._version = version
        self._returns = returns
        self._boot = secrets.token_hex(4)

    def __call__(self) -> str:
        return f"v{self._version()}-{self._returns()}-{self._boot}"
