"""Tokens, and the JSON of many tokens at once.

Always holds:
- A token id below 256 is that byte; ids up to `VOCABULARY` exist, those from 256 on are special and have no text.
- A `TokenRing` never changes after it was made. What an answer needs of it (ids, logprobs, token strings, whole
  logprob entries) stands ready as one byte string a column, so a completion of any length is a few slices.
- A `Content` is a fixed walk over a ring: two pieces from two places, so that two completions of one prompt do not
  coincide, and perhaps the end-of-sequence token. Token k is the same however the completion is cut.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache

import msgspec

VOCABULARY = 288
BOS, EOS, USER, ASSISTANT, SYSTEM = 257, 258, 259, 260, 261
SPECIALS = {256: "<pad>", BOS: "<bos>", EOS: "<eos>", USER: "<user>", ASSISTANT: "<assistant>", SYSTEM: "<system>"}
LONGEST_TOKEN = max(map(len, SPECIALS.values()))
"""Characters of the longest token: a text with more than this many a token cannot fit, and is not even tokenized."""

RING_TOKENS = 2**14
"""Two places in it give 2**28 walks; its largest column is about 1.5 MB and builds in a few milliseconds."""

_ALPHABET = "etaoin shrdlu cmfwyp vbgkjqxz ETAOINSHRDLU 0123456789 .,;:!?'\"\\/+-*=()[]{}<>\n éüß語🙂"
"""Mostly letters, with what JSON escapes and with characters of 2, 3 and 4 bytes, whose token strings are empty."""
_EOS_LOGPROB = -0.25

_encode = msgspec.json.encode


def encode_text(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode("utf-8", "surrogatepass"))


def decode_ids(ids: Iterable[int], *, specials: bool = False) -> str:
    """Text of `ids`; special tokens have none unless `specials`."""
    parts = (bytes((i,)) if 0 <= i < 256 else SPECIALS.get(i, "").encode() if specials else b"" for i in ids)
    return b"".join(parts).decode("utf-8", "replace")


def chat_prompt(messages: Iterable[tuple[str, str]], *, generation_prompt: bool = True) -> list[int]:
    """The chat template: <bos>, then each (role, content) as its marker and text, then the assistant's marker."""
    markers = {"user": [USER], "assistant": [ASSISTANT], "system": [SYSTEM]}
    ids = [BOS]
    for role, content in messages:
        ids += markers.get(role) or encode_text(f"<{role}>")
        ids += encode_text(content)
    return [*ids, ASSISTANT] if generation_prompt else ids


class Column:
    """One JSON fragment a token, each with its comma, end to end; `eos` is that of the end-of-sequence token."""

    __slots__ = ("_data", "_size", "_starts", "eos")

    def __init__(self, fragments: Iterable[bytes], eos: bytes) -> None:
        pieces = [fragment + b"," for fragment in fragments]
        self._data = b"".join(pieces)
        self._starts = array("Q", itertools.accumulate(map(len, pieces), initial=0))
        self._size = len(pieces)
        self.eos = eos + b","

    def take(self, at: int, count: int) -> bytes:
        """The fragments of `count` tokens from place `at` on, round the ring as often as it takes."""
        starts, end = self._starts, at + count
        if end <= self._size:
            return self._data[starts[at] : starts[end]]
        rounds, rest = divmod(end - self._size, self._size)
        return self._data[starts[at] :] + self._data * rounds + self._data[: starts[rest]]


class TokenRing:
    """`tokens` (bytes) with a logprob each, and the columns that answers are cut from, made when first needed."""

    def __init__(self, tokens: bytes, logprobs: array[float]) -> None:
        self.tokens = tokens
        self._logprobs = [_encode(value) for value in logprobs]
        self._strings = [_encode(text) for text in _token_strings(tokens)]
        self._lengths = bytes(map(len, _token_strings(tokens)))

    @cached_property
    def ids(self) -> Column:
        return Column((b"%d" % token for token in self.tokens), b"%d" % EOS)

    @cached_property
    def logprobs(self) -> Column:
        return Column(self._logprobs, _encode(_EOS_LOGPROB))

    @cached_property
    def strings(self) -> Column:
        return Column(self._strings, _encode(SPECIALS[EOS]))

    @cached_property
    def completion_tops(self) -> Column:
        return self._entries(lambda token, logprob, string: b"{%b:%b}" % (string, logprob))

    @cached_property
    def chat_entries(self) -> Column:
        def entry(token: int, logprob: bytes, string: bytes) -> bytes:
            raw = _encode(list(msgspec.json.decode(string).encode()))
            return b'{"token":%b,"logprob":%b,"bytes":%b,"top_logprobs":[]}' % (string, logprob, raw)

        return self._entries(entry)

    @cached_property
    def generate_entries(self) -> Column:
        def entry(token: int, logprob: bytes, string: bytes) -> bytes:
            inner = b'"token_id":%d,"logprob":%b,"rank":1' % (token, logprob)
            return b'{%b,"top_logprobs":[{%b}]}' % (inner, inner)

        return self._entries(entry)

    def _entries(self, entry: Callable[[int, bytes, bytes], bytes]) -> Column:
        rows = zip(self.tokens, self._logprobs, self._strings, strict=True)
        return Column(itertools.starmap(entry, rows), entry(EOS, _encode(_EOS_LOGPROB), _encode(SPECIALS[EOS])))

    def raw(self, at: int, count: int) -> bytes:
        return _round(self.tokens, at, count)

    def string_lengths(self, at: int, count: int) -> bytes:
        """Characters of each token string, one byte each."""
        return _round(self._lengths, at, count)


@lru_cache(maxsize=8)
def seeded_ring(seed: int) -> TokenRing:
    """The ring of a seed; the same object for the same seed, so that many simulators in one process share it."""
    draws = hashlib.shake_256(f"ring {seed}".encode()).digest(3 * RING_TOKENS)
    tokens = "".join(_ALPHABET[draw % len(_ALPHABET)] for draw in draws[:RING_TOKENS]).encode()[:RING_TOKENS]
    uniform = array("H", draws[RING_TOKENS:])
    # Squared, so that most tokens are likely ones; float32, as an engine computes them.
    logprobs = array("f", (-6.0 * (draw / 65536) ** 2 - 1e-3 for draw in uniform))
    return TokenRing(tokens, logprobs)


def scripted_ring(text: str) -> TokenRing:
    """A ring that is exactly `text`, with logprobs that differ from position to position."""
    tokens = text.encode("utf-8", "surrogatepass")
    return TokenRing(tokens, array("f", (-((token + at) % 16 + 1) / 8 for at, token in enumerate(tokens))))


class Content:
    """The tokens of one completion: `split` from place `first`, the rest from `second`, then <eos> if `ends`."""

    __slots__ = ("_body", "_first", "_second", "_split", "ends", "length", "ring")

    def __init__(self, ring: TokenRing, *, first: int, second: int, split: int, length: int, ends: bool) -> None:
        self.ring = ring
        self._first, self._second, self._split = first, second, split
        self._body = length - ends
        self.length = length
        self.ends = ends

    @classmethod
    def whole(cls, ring: TokenRing) -> Content:
        """All of a ring, then <eos>."""
        size = len(ring.tokens)
        return cls(ring, first=0, second=0, split=size, length=size + 1, ends=True)

    def column(self, column: Column, start: int, stop: int) -> bytes:
        """The column's fragments for tokens start..stop, comma-separated: the inside of a JSON array."""
        joined = self._walk(column.take, start, stop)
        if stop > self._body:
            joined += column.eos
        return joined[:-1]

    def raw(self, start: int, stop: int) -> bytes:
        """The bytes of tokens start..stop; <eos> has none."""
        return self._walk(self.ring.raw, start, stop)

    def text_offsets(self, start: int, stop: int, base: int = 0) -> list[int]:
        """Where each token's string starts in the text of all token strings, from `base` on."""
        lengths = self._walk(self.ring.string_lengths, start, min(stop, self._body))
        offsets = list(itertools.accumulate(lengths, initial=base))
        return offsets[: stop - start]

    def _walk(self, take: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
        stop = min(stop, self._body)
        split = self._split
        if start >= stop:
            return b""
        if stop <= split:
            return take(self._first + start, stop - start)
        if start >= split:
            return take(self._place(start), stop - start)
        return take(self._first + start, split - start) + take(self._second, stop - split)

    def _place(self, index: int) -> int:
        return (self._second + index - self._split) % len(self.ring.tokens)


def _round(data: bytes, at: int, count: int) -> bytes:
    end = at + count
    if end <= len(data):
        return data[at:end]
    rounds, rest = divmod(end - len(data), len(data))
    return data[at:] + data * rounds + data[:rest]


def _token_strings(tokens: bytes) -> list[str]:
    """What vLLM shows for each token: the character with its last byte, and nothing for the bytes before."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    return [decode(bytes((token,))) for token in tokens]
