"""The one request every client of these benchmarks sends: 16 prompt ids, 64 completion tokens with logprobs."""

from __future__ import annotations

import json

PROMPT_IDS = list(range(65, 81))
TOKENS = 64
BODY = json.dumps(
    {
        "model": "simulated",
        "prompt": PROMPT_IDS,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
).encode()
ENGINE_OPTIONS = ("--lengths", "fixed", "--mean-tokens", str(TOKENS))
