"""Rows to prompts. A `Prompt` that leaves here can be sent to an engine, stored and delivered as JSON as it stands.

A row has exactly one of `messages`, `prompt` and `prompt_token_ids`. Nothing is coerced; what is null in a reserved
field is not there. An error names the row, the field and what is wrong with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, Unpack
from unicodedata import category

import msgspec
from pydantic import ValidationError

from rollout_service.core.model import Prompt
from rollout_service.errors import InvalidField
from rollout_service.settings.json_values import is_json, json_problem
from rollout_service.settings.problems import printable, problems_of, shown
from rollout_service.settings.sampling import SamplingOverrides
from rollout_service.settings.tables import MAX_GROUP_SIZE

CONTENT_FIELDS = ("messages", "prompt", "prompt_token_ids")
RESERVED = frozenset({*CONTENT_FIELDS, "prompt_id", "num_generations", "sampling"})
"""Fields of a dataset row that are no columns."""
SUBMITTED = RESERVED | {"epoch", "columns"}
"""Every field of a prompt of `POST /prompts`."""
TEACHER_ID = "teacher_id"
"""The column that names a row's teacher."""
REWARD_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""Arguments every reward is called with; a column cannot have such a name."""
MAX_ID_CHARACTERS = 512
MAX_PATH_CHARACTERS = 200
"""Of a field's path in an error; keys of a row have any length."""
MAX_TOKEN_ID = 2**31 - 1
MAX_PROMPT_IDS = 2**20
"""Token ids of one prompt: beyond every context length there is, and 4 MiB in the store."""
MAX_PROMPT_BYTES = 2**24
"""Of a prompt's text in UTF-8, or of its messages as JSON: images in them fit, and a row that holds a whole file by
mistake is told apart from a prompt."""
MAX_EPOCH = 2**31 - 1


_JSON = msgspec.json.Encoder()


class RowError(InvalidField):
    """A row is no prompt. `facts`: `where` (file:line, `prompts[3]`) and `field`."""

    def __init__(self, where: str, field: str, what: str) -> None:
        field = printable(field if len(field) <= MAX_PATH_CHARACTERS else field[:MAX_PATH_CHARACTERS] + "…")
        detail = f"{where}: {field}: {what}" if field else f"{where}: {what}"
        super().__init__(printable(detail), where=where, field=field)


class RowRules(TypedDict):
    """What the run asks of every row."""

    default_num_generations: int
    min_group_size: int
    """A group of fewer rollouts would always be dropped, so a row that asks for fewer is refused."""
    max_num_generations: NotRequired[int]
    """A row that asks for more is refused; default and most: `MAX_GROUP_SIZE`."""
    teachers: NotRequired[Sequence[str]]
    """Ids of the teachers, of which `teacher_id` names one (the only one, where it names none). Without teachers it is
    a column like any other."""


class RowDefaults(RowRules):
    """And what one row does not say itself."""

    where: str
    """Names the row in errors: `train.jsonl:7`, `prompts[3]`."""
    default_prompt_id: str


def parse_row(row: Any, *, epoch: int, **defaults: Unpack[RowDefaults]) -> Prompt:
    """A dataset row as a prompt: every field that is not reserved is a column. Raises RowError."""
    where = defaults["where"]
    fields = _object(row, where)
    columns = {name: value for name, value in fields.items() if name not in RESERVED}
    return _prompt(fields, columns, "", epoch, defaults)


def parse_submitted(row: Any, **defaults: Unpack[RowDefaults]) -> Prompt:
    """A prompt of `POST /prompts`: columns stand under `columns`, unknown fields are refused. Raises RowError."""
    where = defaults["where"]
    fields = _object(row, where)
    for name in fields:
        if name not in SUBMITTED:
            raise RowError(where, name, "unknown field; columns belong under `columns`")
    columns = fields.get("columns")
    epoch = fields.get("epoch")
    if columns is not None and not isinstance(columns, Mapping):
        raise RowError(where, "columns", f"expected an object, got {shown(columns)}")
    if columns and (size := len(_JSON.encode(columns))) > MAX_PROMPT_BYTES:
        raise RowError(where, "columns", f"{size} bytes, more than the {MAX_PROMPT_BYTES} a prompt's columns may have")
    if epoch is None:
        epoch = 0
    return _prompt(fields, dict(columns or {}), "columns.", _integer(epoch, where, "epoch", 0, MAX_EPOCH), defaults)


def _object(row: Any, where: str) -> dict[str, Any]:
    """The row, in which everything is strict JSON: what is left to check is its shape."""
    if not isinstance(row, Mapping):
        raise RowError(where, "", f"expected an object, got {shown(row)}")
    fields = row if isinstance(row, dict) else dict(row)
    if not is_json(fields) and (problem := json_problem(fields, "")):
        raise RowError(where, *problem)
    return fields


def _prompt(
    fields: Mapping[str, Any], columns: dict[str, Any], prefix: str, epoch: int, defaults: RowDefaults
) -> Prompt:
    where = defaults["where"]
    _check_columns(columns, where, prefix)
    _check_teacher(columns, where, prefix, defaults.get("teachers", ()))
    content = [name for name in CONTENT_FIELDS if fields.get(name) is not None]
    if len(content) != 1:
        found = " and ".join(content) if content else "none"
        raise RowError(where, "", f"expected exactly one of messages, prompt, prompt_token_ids; found {found}")
    name = content[0]
    value = fields[name]
    conversational = name == "prompt" and isinstance(value, list) and all(isinstance(item, dict) for item in value)
    prompt_id = fields.get("prompt_id")
    count = fields.get("num_generations")
    return Prompt(
        prompt_id=defaults["default_prompt_id"] if prompt_id is None else _prompt_id(prompt_id, where),
        epoch=epoch,
        messages=_messages(value, where, name) if name == "messages" or conversational else None,
        text=_text(value, where) if name == "prompt" and not conversational else None,
        token_ids=_token_ids(value, where) if name == "prompt_token_ids" else None,
        columns=columns,
        num_generations=_num_generations(count, defaults),
        sampling=_sampling(fields.get("sampling"), where),
    )


def _check_columns(columns: Mapping[str, Any], where: str, prefix: str) -> None:
    for name in columns:
        if name in REWARD_ARGUMENTS:
            raise RowError(where, f"{prefix}{name}", "the name of an argument of every reward; rename the column")
        if not name:
            raise RowError(where, f'{prefix}""', "a column needs a name")


def _check_teacher(columns: Mapping[str, Any], where: str, prefix: str, teachers: Sequence[str]) -> None:
    named = columns.get(TEACHER_ID)
    if not teachers or named in teachers or (named is None and len(teachers) == 1):
        return
    known = ", ".join(teachers[:8]) + (", …" if len(teachers) > 8 else "")
    raise RowError(where, f"{prefix}{TEACHER_ID}", f"expected the id of a teacher ({known}), got {shown(named)}")


def _messages(value: Any, where: str, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError(where, field, f"expected a list of messages, not empty, got {_kind(value)}")
    for position, message in enumerate(value):
        path = f"{field}[{position}]"
        if not isinstance(message, dict):
            raise RowError(where, path, f"expected an object with role and content, got {shown(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RowError(where, f"{path}.role", f"expected text, not empty, got {_given(message, 'role')}")
        _check_content(message, where, path)
    size = len(_JSON.encode(value))
    if size > MAX_PROMPT_BYTES:
        raise RowError(where, field, f"{size} bytes, more than the {MAX_PROMPT_BYTES} a prompt may have")
    return value


def _check_content(message: Mapping[str, Any], where: str, path: str) -> None:
    content = message.get("content")
    if isinstance(content, list):
        for part, item in enumerate(content):
            if not isinstance(item, dict):
                raise RowError(where, f"{path}.content[{part}]", f"expected an object, got {shown(item)}")
    # A message that only calls tools may leave its content out; anywhere else that is a slip in the dataset.
    elif not isinstance(content, str) and (content is not None or not ({"content", "tool_calls"} & message.keys())):
        expected = "expected text, a list of parts or null"
        raise RowError(where, f"{path}.content", f"{expected}, got {_given(message, 'content')}")


def _text(value: Any, where: str) -> str:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        raise RowError(where, "prompt", "expected text or a list of messages; token ids belong under prompt_token_ids")
    if not isinstance(value, str) or not value:
        raise RowError(where, "prompt", f"expected text, not empty, or a list of messages, got {_kind(value)}")
    # A character is one byte at least and four at most: most texts need not be encoded to be measured.
    if len(value) * 4 > MAX_PROMPT_BYTES and (size := len(value.encode())) > MAX_PROMPT_BYTES:
        raise RowError(where, "prompt", f"{size} bytes, more than the {MAX_PROMPT_BYTES} a prompt may have")
    return value


def _token_ids(value: Any, where: str) -> array[int]:
    field = "prompt_token_ids"
    if not isinstance(value, list) or not value:
        raise RowError(where, field, f"expected a list of token ids, not empty, got {_kind(value)}")
    if len(value) > MAX_PROMPT_IDS:
        raise RowError(where, field, f"{len(value)} ids, more than the {MAX_PROMPT_IDS} a prompt may have")
    for position, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise RowError(where, f"{field}[{position}]", f"expected an integer from 0 to 2^31 - 1, got {shown(item)}")
    return array("i", value)


def _prompt_id(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise RowError(where, "prompt_id", f"expected text of 1 to {MAX_ID_CHARACTERS} characters, got {shown(value)}")
    if not value.isprintable() and any(category(character) == "Cc" for character in value):
        raise RowError(where, "prompt_id", "expected text without control characters")
    return value


def _num_generations(value: Any, defaults: RowDefaults) -> int:
    where, field = defaults["where"], "num_generations"
    most = defaults.get("max_num_generations", MAX_GROUP_SIZE)
    count = _integer(defaults["default_num_generations"] if value is None else value, where, field, 1, most)
    if count < defaults["min_group_size"]:
        raise RowError(where, field, f"{count} is below groups.min_group_size ({defaults['min_group_size']})")
    return count


def _sampling(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(where, "sampling", f"expected an object, got {shown(value)}")
    try:
        return SamplingOverrides.model_validate(dict(value)).overrides()
    except ValidationError as error:
        problem = problems_of(error, SamplingOverrides)[0]
        raise RowError(where, f"sampling.{problem.field}", problem.what) from None


def _integer(value: Any, where: str, field: str, least: int, greatest: int) -> int:
    if type(value) is not int or not least <= value <= greatest:
        raise RowError(where, field, f"expected an integer from {least} to {greatest}, got {shown(value)}")
    return value


def _kind(value: Any) -> str:
    return "an empty list" if value == [] and isinstance(value, list) else shown(value)


def _given(fields: Mapping[str, Any], name: str) -> str:
    return shown(fields[name]) if name in fields else "nothing"


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a typed table (parquet, datasets) without the nulls its format puts where a row has no such key.

    Such a format gives each message and each `sampling` every key any row has. `content` keeps its null.
    """
    cleaned = dict(row)
    for name in ("messages", "prompt"):
        if isinstance(cleaned.get(name), list):
            cleaned[name] = [_pruned(message, keep="content") for message in cleaned[name]]
    if isinstance(cleaned.get("sampling"), dict):
        cleaned["sampling"] = _pruned(cleaned["sampling"], keep="")
    return cleaned


def _pruned(value: Any, *, keep: str) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item, keep="") for key, item in value.items() if item is not None or key == keep}
    if isinstance(value, list):
        return [_pruned(item, keep="") for item in value]
    return value
