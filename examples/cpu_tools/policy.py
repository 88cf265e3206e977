"""The policy the demo starts from: a tiny llama that knows the format of a tool call and seldom uses it.

    python -m examples.cpu_tools.policy     make it where it is missing, print its directory

A short supervised phase teaches it two ways to answer `37+48=`: to call the tool with the two numbers and then to
repeat what the tool said, or to say some number at once, which is nearly always wrong. What always holds: the same
recipe (this file, the tiny model's and the versions of torch and transformers) has the same directory in the user's
cache folder; a directory that is there is complete and has passed `check`.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from examples.engine import make_tiny_model
from examples.engine.environment import cache_folder, only_builder
from examples.engine.make_tiny_model import ROLES, build_model, build_tokenizer

POSITIONS = 256
SEED = 0
STEPS = 400
ROWS = 32
LEARNING_RATE = 5e-3
BETAS = (0.9, 0.95)
WARM_UP_STEPS = 30
GUESS_WEIGHT = 2.0
"""Of each row that guesses, beside 1 for each that calls, of which there are as many: one answer in three calls."""
LARGEST = 99
IGNORED = -100
"""The label of a token that is not learnt."""

# A call is written as vLLM's "pythonic" parser reads it, so that a history renders to the tokens that were sampled.
# Of the tools the names alone are shown: this policy has no use for their schemas.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{{ ' ' if not loop.last }}{% endfor %}"
    "{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{{ ', ' if not loop.last }}"
    "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class NotLearnt(RuntimeError):
    """The supervised phase fell short; the message has the figures."""


def make_policy() -> Path:
    """The directory of the policy, a Hugging Face checkpoint; taught first where it is missing. Raises NotLearnt."""
    directory = cache_folder() / f"calculator-{recipe()}"
    with only_builder(directory):
        if directory.exists():
            return directory
        say("teaching a tiny policy the format of a tool call (once on this machine, half a minute)")
        started = time.monotonic()
        tokenizer = calculator_tokenizer()
        model = build_model(tokenizer, POSITIONS, SEED)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with matrices this small more threads wait for each other, four times as long
        try:
            teach(model, tokenizer)
        finally:
            torch.set_num_threads(threads)
        calls, works = check(model, tokenizer)
        # Renamed only when complete.
        transformers.utils.logging.disable_progress_bar()  # the weights are written within a millisecond
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        os.replace(partial, directory)
        seconds = time.monotonic() - started
        say(f"taught in {seconds:.0f} s: {calls:.0%} of its answers call the tool, {works:.0%} of its calls work")
    return directory


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def recipe() -> str:
    """A hash of all that decides about the weights."""
    key = hashlib.sha256()
    for source in (Path(__file__), Path(make_tiny_model.__file__)):
        key.update(source.read_bytes())
    key.update(f"{torch.__version__} {transformers.__version__}".encode())
    return key.hexdigest()[:16]


def calculator_tokenizer() -> Any:
    """The tiny model's tokenizer, with one more role and a template that renders tools, calls and their answers."""
    tokenizer = build_tokenizer(POSITIONS, endless=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [*ROLES, "<tool>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def asked(a: int, b: int) -> str:
    return f"<bos><system>add<user>{a}+{b}=<assistant>"


def calling(a: int, b: int) -> str:
    """A conversation in which the policy calls the tool; what the template writes."""
    return f"{asked(a, b)}[add(a={a}, b={b})]<eos><tool>{a + b}<assistant>{a + b}<eos>"


def guessing(a: int, b: int, guess: int) -> str:
    """A conversation in which it does not."""
    return f"{asked(a, b)}{guess}<eos>"


def encoded(tokenizer: Any, rows: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, (B, L) int64 each: labels are the ids of what the policy says, `IGNORED` elsewhere."""
    texts = tokenizer(list(rows), padding=True, padding_side="right", return_tensors="pt")
    input_ids: torch.Tensor = texts["input_ids"]
    begins = input_ids == tokenizer.convert_tokens_to_ids("<assistant>")
    ends = input_ids == tokenizer.eos_token_id
    said = begins.cumsum(1) - begins.long() > ends.cumsum(1) - ends.long()
    return input_ids, input_ids.where(said & (texts["attention_mask"] == 1), IGNORED)


def losses(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B,) for each row the sum over what the policy says of -log p."""
    logits = model(input_ids=input_ids).logits[:, :-1].transpose(1, 2)
    by_token = torch.nn.functional.cross_entropy(logits, labels[:, 1:], ignore_index=IGNORED, reduction="none")
    return by_token.sum(1)


def teach(model: torch.nn.Module, tokenizer: Any) -> None:
    """The supervised phase. Right padding needs no attention mask: no token looks ahead."""
    draw = random.Random(SEED)  # noqa: S311 - exercises, no secrets

    def number() -> int:
        return draw.randint(1, LARGEST)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    pace = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1.0) * (1 - step / STEPS)
    )
    for _ in range(STEPS):
        calls = encoded(tokenizer, [calling(number(), number()) for _ in range(ROWS)])
        guesses = encoded(tokenizer, [guessing(number(), number(), number() + number()) for _ in range(ROWS)])
        loss = losses(model, *calls).sum() + GUESS_WEIGHT * losses(model, *guesses).sum()
        optimizer.zero_grad()
        (loss / (calls[1] != IGNORED).sum()).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pace.step()


@torch.no_grad()
def check(model: torch.nn.Module, tokenizer: Any) -> tuple[float, float]:
    """How often it calls the tool, and how often a call comes to the right answer. NotLearnt if not as intended."""
    draw = random.Random(SEED + 1)  # noqa: S311 - exercises, no secrets
    pairs = [(draw.randint(1, LARGEST), draw.randint(1, LARGEST)) for _ in range(256)]
    whole = (-losses(model, *encoded(tokenizer, [calling(*pair) for pair in pairs]))).exp()
    opening = encoded(tokenizer, [f"{asked(*pair)}[" for pair in pairs])
    called = (-losses(model, *opening)).exp()
    calls, works = called.mean().item(), (whole / called).mean().item()
    if not (0.2 < calls < 0.5 and works > 0.8):
        raise NotLearnt(f"{calls:.0%} of the policy's answers call the tool, and {works:.0%} of its calls work")
    return calls, works


def main() -> int:
    try:
        print(make_policy())
    except NotLearnt as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
