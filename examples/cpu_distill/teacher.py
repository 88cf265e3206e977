"""A teacher for the demo: the tiny model, trained in seconds to go on with English letters after whatever it reads.

python -m examples.cpu_distill.teacher OUT_DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.engine.make_tiny_model import make_tiny_model

TEXT = (
    "the sea was calm that morning and the boats lay still in the harbour. an old man sat on the wall and mended his "
    "nets while the gulls cried over the roofs. down by the water a child counted the stones that the tide had left, "
    "and when she lost count she laughed and began again. nobody was in a hurry. the bread was still warm, the sun "
    "stood low over the hills, and somewhere a door was opened to let the summer in. "
)
STEPS = 120
ROWS = 16
LENGTH = 64
NOISE = 0.3
"""Share of the tokens read that are drawn at random: the student writes noise at first, and the teacher has to have an
opinion of what should follow it."""
SEED = 1


def make_teacher(directory: Path) -> Path:
    """Write the teacher's checkpoint to `directory`; returns it. The same weights every time on the same machine."""
    make_tiny_model(directory, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = torch.tensor(tokenizer.encode(TEXT * 2))
    draw = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT), (ROWS,), generator=draw).tolist()
        wanted = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        noise = torch.randint(len(tokenizer), wanted.shape, generator=draw)
        read = torch.where(torch.rand(wanted.shape, generator=draw) < NOISE, noise, wanted)
        log_probs = model(input_ids=read[:, :-1]).logits.log_softmax(-1)
        loss = -log_probs.gather(-1, wanted[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's teacher.")
    parser.add_argument("directory", type=Path)
    print(make_teacher(parser.parse_args().directory))


if __name__ == "__main__":
    main()
