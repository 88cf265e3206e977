"""A tiny random language model as a complete Hugging Face checkpoint: the same seed gives the same weights.

    python -m examples.engine.make_tiny_model OUT_DIR [--seed 0] [--max-length 4096] [--endless]

vLLM and `AutoModelForCausalLM.from_pretrained` both load the directory without a network. About 120,000 parameters.
One byte of text is one token: ids 0-255 are the byte-level alphabet, then come the special tokens; nothing is merged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

ROLES = ("<user>", "<assistant>", "<system>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HIDDEN = 64
HEADS = 2  # of 32 each: vLLM's attention on CPU takes no smaller head
LAYERS = 2
VOCAB_MULTIPLE = 32  # the embedding's rows are rounded up to it; the rows above the tokenizer's ids are never trained


def build_tokenizer(max_length: int, endless: bool) -> PreTrainedTokenizerFast:
    """Bytes to ids and back, losslessly, with a chat template."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=None if endless else "<eos>",
        additional_special_tokens=list(ROLES if not endless else (*ROLES, "<eos>")),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, max_length: int, seed: int) -> LlamaForCausalLM:
    """A float32 llama with random weights."""
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(torch.float32)


def make_tiny_model(directory: Path, *, max_length: int = 4096, seed: int = 0, endless: bool = False) -> Path:
    """Write config, weights, tokenizer and chat template to `directory`; returns it.

    `endless`: no token ends a sequence, so a completion always has `max_tokens` tokens, and is there to be aborted.
    """
    transformers_logging.disable_progress_bar()  # the weights are written within a millisecond
    tokenizer = build_tokenizer(max_length, endless)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    build_model(tokenizer, max_length, seed).save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random language model to a directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--max-length", type=int, default=4096, help="positions the model has (default 4096)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default 0)")
    parser.add_argument("--endless", action="store_true", help="no token ends a sequence")
    arguments = parser.parse_args()
    print(
        make_tiny_model(
            arguments.directory, max_length=arguments.max_length, seed=arguments.seed, endless=arguments.endless
        )
    )


if __name__ == "__main__":
    main()
