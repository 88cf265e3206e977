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

STARTS = 2**14
"""Places where a piece may start: two of them give 2**28 walks."""
RING_TOKENS = STARTS + 2**12
"""So much longer that a completion of up to 8,192 tokens never goes round. The largest column is about 1.5 MB."""

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

    __slots__ = ("data", "eos", "starts")

    def __init__(self, fragments: Iterable[bytes], eos: bytes) -> None:
        pieces = [fragment + b"," for fragment in fragments]
        self.data = b"".join(pieces)
        self.starts = array("Q", itertools.accumulate(map(len, pieces), initial=0))
        """Where each token's fragment starts; one more than there are tokens."""
        self.eos = eos + b","

    def take(self, at: int, count: int) -> bytes:
        """The fragments of `count` tokens from place `at` on, round the ring as often as it takes."""
        starts, size = self.starts, len(self.starts) - 1
        at %= size or 1
        end = at + count
        if end <= size:
            return self.data[starts[at] : starts[end]]
        rounds, rest = divmod(end - size, size)
        return self.data[starts[at] :] + self.data * rounds + self.data[: starts[rest]]


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

    @cached_property
    def completion_columns(self) -> tuple[Column, ...]:
        """What a completion with logprobs needs: ids, logprobs, strings, tops."""
        return self.ids, self.logprobs, self.strings, self.completion_tops

    def string_lengths(self) -> bytes:
        """Characters of each token string, one byte each."""
        return self._lengths


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

    __slots__ = ("_body", "_first", "_second", "_split", "length", "ring")

    def __init__(self, ring: TokenRing, first: int, second: int, split: int, length: int, ends: bool) -> None:
        self.ring = ring
        self._first = first
        self._second = second
        self._split = split
        self._body = length - ends
        self.length = length
        """All tokens, <eos> included."""

    @classmethod
    def whole(cls, ring: TokenRing) -> Content:
        """All of a ring, then <eos>."""
        size = len(ring.tokens)
        return cls(ring, 0, 0, size, size + 1, True)

    def fragments(self, columns: Iterable[Column], start: int, stop: int) -> list[bytes]:
        """Of each column the fragments of tokens start..stop, comma-separated: the insides of JSON arrays."""
        a, b, c, d = self._places(start, stop)
        ends = stop > self._body >= start
        if b > (size := len(self.ring.tokens)) or d > size:
            whole = [column.take(a, b - a) + column.take(c, d - c) for column in columns]
            return [(data + column.eos if ends else data)[:-1] for data, column in zip(whole, columns, strict=True)]
        if ends:
            return [
                ((data := column.data)[(at := column.starts)[a] : at[b]] + data[at[c] : at[d]] + column.eos)[:-1]
                for column in columns
            ]
        return [
            ((data := column.data)[(at := column.starts)[a] : at[b]] + data[at[c] : at[d]])[:-1] for column in columns
        ]

    def raw(self, start: int, stop: int) -> bytes:
        """The bytes of tokens start..stop; <eos> has none."""
        return self._cut(self.ring.tokens, start, stop)

    def text_offsets(self, start: int, stop: int, base: int = 0) -> list[int]:
        """Where each token's string starts in the text of all token strings, from `base` on."""
        offsets = list(itertools.accumulate(self._cut(self.ring.string_lengths(), start, stop), initial=base))
        # One more than the tokens of the walk: the start of <eos>, if that is asked for.
        return offsets[: stop - start]

    def _places(self, start: int, stop: int) -> tuple[int, int, int, int]:
        """The two runs of places that tokens start..stop walk over, <eos> left out; either may be empty."""
        split = self._split
        if stop > self._body:
            stop = self._body
        if stop <= split:
            first = self._first
            return first + start, first + (stop if stop > start else start), 0, 0
        second = self._second - split
        if start >= split:
            return 0, 0, second + start, second + (stop if stop > start else start)
        return self._first + start, self._first + split, self._second, second + stop

    def _cut(self, data: bytes, start: int, stop: int) -> bytes:
        a, b, c, d = self._places(start, stop)
        size = len(data)
        if b <= size and d <= size:
            return data[a:b] + data[c:d]
        return _round(data, a, b - a) + _round(data, c, d - c)


def _round(data: bytes, at: int, count: int) -> bytes:
    at %= len(data) or 1
    rounds, rest = divmod(max(0, at + count - len(data)), len(data) or 1)
    return data[at : at + count] + data * rounds + data[:rest]


def _token_strings(tokens: bytes) -> list[str]:
    """What vLLM shows for each token: the character with its last byte, and nothing for the bytes before."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    return [decode(bytes((token,))) for token in tokens]
