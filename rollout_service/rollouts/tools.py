"""Python functions as tools: their schema from signature and docstring, and one call of one of them.

What always holds: a call gives a message for the policy: bad JSON, arguments of the wrong type, an unknown name, an
exception and a timeout are answers the policy can react to. It raises only the cancellation of its own task, and
ProgramFault where no thread can be had any more, which no policy should learn from.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docstring_parser
import structlog
from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from rollout_service.core.model import FailureReason
from rollout_service.errors import ConfigError
from rollout_service.loading import clean, load_first_in
from rollout_service.rollouts.faults import ProgramFault
from rollout_service.rollouts.threads import NoThreads, Threads

MAX_ANSWER = 1_000_000
"""Characters of a tool's answer: more fits no context, and would fill the store."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One function the policy may call."""

    name: str
    schema: Mapping[str, Any]
    """As the OpenAI API takes it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    call: Callable[..., Any]
    """Checks its arguments (pydantic), then calls the function."""
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAnswer:
    """What one call came to."""

    message: dict[str, Any]
    """`{"role": "tool", "tool_call_id", "name", "content"}`."""
    failed: bool


def load_tools(targets: Sequence[str], path: Sequence[str]) -> list[Tool]:
    """The functions behind `package.module:function` each; `path` goes in front of sys.path. Raises ConfigError."""
    tools: dict[str, Tool] = {}
    for position, target in enumerate(targets):
        where = f"program.tools[{position}]"
        tool = make_tool(load_first_in(path, where, target).call, where)
        if tool.name in tools:
            raise ConfigError(f"{where}: there is another tool named {tool.name!r}; the policy calls them by name")
        tools[tool.name] = tool
    return list(tools.values())


def make_tool(function: Callable[..., Any], where: str) -> Tool:
    """A function with type hints and a docstring as a tool. Raises ConfigError where it cannot be called by name."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {name!r} has no signature to make a schema of") from None
    if odd := [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ConfigError(f"{where}: the policy names every argument, so {name!r} cannot have {odd[0]!r}")
    try:
        checked = validate_call(function)
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]  # pydantic takes functions too
        schema = adapter.json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, NameError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{where}: no schema for the arguments of {name!r}: {said}") from error
    told = docstring_parser.parse(inspect.getdoc(function) or "")
    properties = schema.get("properties", {})
    for argument in properties.values():
        argument.pop("title", None)
    for parameter in told.params:
        if parameter.arg_name in properties and parameter.description:
            properties[parameter.arg_name]["description"] = parameter.description
    description = "\n\n".join(part for part in (told.short_description, told.long_description) if part)
    return Tool(
        name=name,
        schema={"type": "function", "function": {"name": name, "description": description, "parameters": schema}},
        call=checked,
        is_async=inspect.iscoroutinefunction(function),
    )


class ToolBox:
    """The tools of a run. Plain functions run in threads."""

    def __init__(self, tools: Sequence[Tool], *, threads: Threads, timeout_s: float) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._threads, self._timeout_s = threads, timeout_s

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, call: Mapping[str, Any]) -> ToolAnswer:
        """Make one call of the policy's: `{"id", "function": {"name", "arguments": JSON text}}`."""
        asked = call.get("function")
        function: Mapping[str, Any] = asked if isinstance(asked, Mapping) else {}
        name = str(function.get("name") or "")
        try:
            content, failed = await self._content(name, function.get("arguments")), False
        except _Fault as fault:
            content, failed = str(fault), True
        message = {"role": "tool", "tool_call_id": str(call.get("id") or ""), "name": name, "content": content}
        return ToolAnswer(message=message, failed=failed)

    async def _content(self, name: str, arguments: Any) -> str:
        tool = self._tools.get(name)
        if tool is None:
            raise _Fault(f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}")
        try:
            result = await self._called(tool, _arguments(arguments))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or name}: {e['msg']}" for e in error.errors())
            raise _Fault(f"Error: {wrong}") from error
        try:
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
        except Exception as error:  # conversions of the tool's own objects may raise anything
            words = f"Error: what {name} returned cannot be shown: {type(error).__name__}: {_said(error)}"
            raise _Fault(clean(words)) from error
        if len(content) > MAX_ANSWER:
            raise _Fault(f"Error: the answer of {name} has {len(content)} characters, more than {MAX_ANSWER}")
        return clean(content, MAX_ANSWER)

    async def _called(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        call = functools.partial(tool.call, **arguments)
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        loop = asyncio.get_running_loop()
        try:
            # Waiting for a thread is not the tool's time: its limit begins when it does.
            async with asyncio.timeout(self._timeout_s if tool.is_async else None) as limit:
                if tool.is_async:
                    return await call()
                began = functools.partial(_begin, limit, loop, self._timeout_s)
                result = await self._threads.run(call, name=f"tool-{tool.name}", started=began)
                return await result if inspect.isawaitable(result) else result
        except ValidationError:
            raise
        except NoThreads as error:  # no fault of the policy's: it must not learn from it
            raise ProgramFault(str(error), FailureReason.INTERNAL) from error
        except TimeoutError as error:
            if limit.expired():
                raise _Fault(f"Error: {tool.name} did not answer in {self._timeout_s:g} s") from error
            raise _Fault(clean(f"Error: TimeoutError: {error}")) from error
        except asyncio.CancelledError as error:
            if task is None or task.cancelling() > before:
                raise  # ours
            raise _Fault(f"Error: {tool.name} was cancelled") from error
        except BaseException as error:  # SystemExit too: in a task it would end the service
            log.info("tool_raised", tool=tool.name, exc_info=error)
            raise _Fault(clean(f"Error: {type(error).__name__}: {error}")) from error


def _begin(limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    limit.reschedule(loop.time() + seconds)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own words may fail too
        return "(no words)"


def _plain(value: Any) -> Any:
    """numpy and torch values as the plain ones they hold; nothing else is JSON that json does not know."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


class _Fault(Exception):
    """The call failed; the text is for the policy."""


def _arguments(given: Any) -> Mapping[str, Any]:
    """The arguments as a mapping; engines give JSON text."""
    value = given
    if given is None or (isinstance(given, str) and not given.strip()):
        value = {}
    elif isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise _Fault(f"Error: the arguments are not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise _Fault(f"Error: the arguments are {type(value).__name__}, no object")
    return value
