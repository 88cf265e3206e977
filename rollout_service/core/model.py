"""Values of the domain. Every value is frozen; nothing here reads a clock, an id source or a random source.

Token arrays are `array("i")` (int32 ids) and `array("f")` (float32 logprobs, the precision in which engines compute
them); they are shared, never copied, and nobody writes to one after it was made.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GroupState(StrEnum):
    """Where a group is in its life."""

    PENDING = "pending"
    """Waits for its next attempt; has no policy version."""
    GENERATING = "generating"
    """At least one rollout of the current attempt was dispatched, not all are settled."""
    SCORING = "scoring"
    """All rollouts are settled; rewards are being computed for the survivors."""
    READY = "ready"
    """Scored; waits for a lease."""
    LEASED = "leased"
    """Handed to one consumer until ack, release or expiry."""
    ACKED = "acked"
    """Terminal: the trainer has it."""
    STALE = "stale"
    """Terminal: too old, and nothing of it is generated again."""
    DROPPED = "dropped"
    """Terminal: left out for a `DropReason`."""
    FAILED = "failed"
    """Terminal: every rollout failed."""

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({GroupState.ACKED, GroupState.STALE, GroupState.DROPPED, GroupState.FAILED})
OUTSTANDING = frozenset(GroupState) - TERMINAL


class DropReason(StrEnum):
    """Why a group was dropped."""

    TOO_FEW_SURVIVORS = "too_few_survivors"
    """Fewer than `min_group_size` rollouts survived."""
    UNSCORABLE = "unscorable"
    """Fewer than `min_group_size` survivors were scored by any reward."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards are equal and the configuration drops such groups."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt does not fit the engine's context."""
    REWARD_CANCELLED = "reward_cancelled"
    """A reward raised a cancellation of its own."""
    CANCELLED = "cancelled"
    """An operator cancelled the group."""


class FailureReason(StrEnum):
    """Why one rollout failed, after all its attempts."""

    CONNECTION = "connection"
    """The connection broke: connect error, read error, half an answer."""
    TIMEOUT = "timeout"
    """An engine request ran past `request_timeout_s`."""
    DEADLINE = "deadline"
    """The rollout ran past `rollout_timeout_s`."""
    SERVER_ERROR = "server_error"
    """The engine answered 408, 429 or 5xx."""
    REJECTED = "rejected"
    """The engine refused the request for good (another 4xx)."""
    BAD_ANSWER = "bad_answer"
    """A 200 that is no completion: malformed, misaligned, without ids, not finite."""
    ABORTED = "aborted"
    """A 200 with finish_reason `abort`, `error`, null or unknown that nobody here asked for."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt does not fit the engine's context; the whole group is dropped."""
    ENGINE_UNAVAILABLE = "engine_unavailable"
    """No healthy engine for `engine_wait_s`."""
    PROGRAM = "program"
    """The program raised, or ended without a generation."""
    ENVIRONMENT = "environment"
    """The environment failed or could not be reached."""
    INTERNAL = "internal"
    """A fault of this service; its traceback is in the log."""


class FinishReason(StrEnum):
    """The engine's finish reasons that make a completion (design 3.2.7)."""

    STOP = "stop"
    """The policy ended, or a stop sequence did."""
    LENGTH = "length"
    """Cut by max_tokens or the context: delivered with `truncated`."""
    TOOL_CALLS = "tool_calls"
    """The policy asked for tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One dataset row. Exactly one of `messages`, `text`, `token_ids` is set."""

    prompt_id: str
    """Identity together with `epoch`."""
    epoch: int = 0
    messages: Sequence[Mapping[str, Any]] | None = None
    """Chat messages as the OpenAI API takes them."""
    text: str | None = None
    token_ids: array[int] | None = None
    """int32, at least one id."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every further field of the row; rewards read them."""
    num_generations: int
    """Rollouts of the group, n >= 1."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of `[sampling]`."""


def prompt_size(prompt: Prompt) -> int:
    """Bytes a prompt takes in memory, roughly; a measure for bounds, not an account."""
    size = 512 + len(prompt.text or "") + 4 * len(prompt.token_ids or ())
    size += sum(len(str(message)) for message in prompt.messages or ())
    return size + sum(len(str(value)) for value in prompt.columns.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One generation of a rollout, exactly as the engine gave it."""

    prompt_ids: array[int]
    """int32 (P,): the ids the engine read."""
    output_ids: array[int]
    """int32 (T,), T >= 1: the ids the engine sampled."""
    logprobs: array[float]
    """float32 (T,): their logprobs, all finite."""
    finish_reason: FinishReason
    text: str
    """The engine's own text of the completion (valid Unicode)."""
    message: Mapping[str, Any] | None = None
    """Chat only: the assistant message (role, content, tool_calls where present)."""
    weight_versions: Sequence[Mapping[str, Any]] = ()
    """Spans `{"version", "start", "end"}` where the engine reports them."""
    engine: str
    """Id of the engine that answered."""
    version: int | None = None
    """Policy version current when the engine was asked; None where nobody noted it."""


def agreed(samplings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several samplings as one: a field in which they differ is None, for no one value is true of all."""
    first = dict(samplings[0]) if samplings else {}
    for other in samplings[1:]:
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                first[name] = None
    return first


FORK_THRESHOLD_TOKENS = 1024
"""Default of `program.fork_threshold_tokens`, TRL's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A rollout that survived: its turns, and what rewards see of it."""

    index: int
    """Row in the group, 0-based."""
    prompt: Sequence[Mapping[str, Any]] | str | None
    """Messages for prompts given as messages, else text; None where the engine cannot give the text of ids."""
    completion: Sequence[Mapping[str, Any]] | str
    turns: Sequence[Turn]
    """At least one; the last one's finish_reason is the rollout's."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Floats only: duration_s, attempts, ..."""
    logprobs_mode: str | None = None
    """What the engine's logprobs are of ("raw_logprobs", "processed_logprobs"); None where it does not say."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What was asked of the engine: the configured sampling of that moment with the prompt's own on top."""
    reward: float | None = None
    """The rollout's own reward, beside those of the reward functions: a program's or an environment's. Finite."""
    fork_threshold: int = FORK_THRESHOLD_TOKENS
    """See core.sequences; kept here so that the same rollout makes the same samples after every restart."""

    @property
    def finish_reason(self) -> FinishReason:
        return self.turns[-1].finish_reason

    @property
    def output_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def payload_bytes(self) -> int:
        """Bytes of token data, the measure of `max_ready_bytes` and `max_lease_bytes`: 9 a token and the texts."""
        tokens = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in self.turns)
        return 9 * tokens + sum(len(turn.text) for turn in self.turns) + 256


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRollout:
    """A rollout that is left out."""

    index: int
    reason: FailureReason
    error: str
    """For people: the engine's own message where there is one, at most 2,000 characters."""
    engine: str | None = None
    """URL of the engine that failed last, if one did."""
    attempts: int = 0
    """Counted engine attempts."""
    wasted_tokens: int = 0
    """Tokens generated in bad or partial answers, as far as known."""


def rollout_id(group_id: str, attempt: int, index: int) -> str:
    """What one attempt at a row is called towards engines, in their logs and in ours."""
    return f"{group_id}.{attempt}.{index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutJob:
    """What is needed to make one rollout."""

    group_id: str
    attempt: int
    index: int
    policy_version: int
    prompt: Prompt

    @property
    def rollout_id(self) -> str:
        """Names this one attempt at the row."""
        return rollout_id(self.group_id, self.attempt, self.index)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """New weights that every engine is to load."""

    version: int
    """The policy version they are."""
    path: str
    """Folder of the weights or of the adapter, as the engines see it."""
    lora_name: str | None = None
    """The adapter's name; None: these are the weights of the model itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreJob:
    """What is needed to score the survivors of a group, row i of everything being survivor i."""

    group_id: str
    attempt: int
    prompt: Prompt
    rollouts: Sequence[FinishedRollout]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherTokens:
    """What a teacher gives the T trained tokens of one sample, K = its top_k + 1 candidates each."""

    teacher_id: str
    ids: array[int]
    """int32 (T * K,), row by row: the teacher's most likely ids and the sampled one; -1 fills up."""
    logprobs: array[float]
    """float32 (T * K,): theirs; -inf where the id is -1."""
    columns: int
    """K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What the reward functions said, row i being survivor i of the job."""

    rewards: Mapping[str, Sequence[float | None]]
    """Function name -> one value a survivor; None: not scored by this function. Values are finite."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Function name -> why it scored nobody in this group (timeout, exception, wrong length)."""
    teacher: Sequence[Sequence[TeacherTokens] | None] = ()
    """Distillation: one entry a survivor, with one item for each sample it makes; None: its teacher failed."""
    cancelled: str | None = None
    """Set: user code raised a cancellation, with this message; the group is dropped (`reward_cancelled`)."""
