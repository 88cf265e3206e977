"""The identity of a prompt's content: equal content, equal digest, in every process and in every version.

The encoding is part of the store's format. Changing it would make every known prompt look like another one (409), so
it only ever changes under a new `_FORMAT`, with a migration.
"""

from __future__ import annotations

import json
from hashlib import sha256

from rollout_service.core.model import Prompt

_FORMAT = 1


def content_digest(prompt: Prompt) -> bytes:
    """SHA-256 (32 bytes) over the prompt, its columns, its number of rollouts and its sampling.

    Not over `prompt_id` and `epoch`: those are what the content is compared for.
    """
    content = {
        "format": _FORMAT,
        "messages": None if prompt.messages is None else [dict(message) for message in prompt.messages],
        "text": prompt.text,
        "token_ids": None if prompt.token_ids is None else prompt.token_ids.tolist(),
        "columns": dict(prompt.columns),
        "num_generations": prompt.num_generations,
        "sampling": dict(prompt.sampling),
    }
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).digest()
