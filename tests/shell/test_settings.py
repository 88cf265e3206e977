"""The configuration: what is taken, what wins, and the one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError

from rollout_service.errors import ConfigError
from rollout_service.settings import SamplingOverrides, SamplingSettings, Settings, StoreSettings, load_settings
from rollout_service.settings.problems import table_of
from rollout_service.settings.tables import EngineSettings
from rollout_service.settings.urls import DnsName, EnginesFile

REWARD = '[[rewards]]\nname = "accuracy"\nfunction = "my_rewards:accuracy"\n'
ENGINE = '[[engines]]\nurl = "http://127.0.0.1:8000"\n'
LEAST = ENGINE + REWARD
"""The least configuration that can serve."""


@pytest.fixture
def load(tmp_path: Path):
    """Loads a TOML text in an environment of its own."""

    def load(text: str = LEAST, environ: dict[str, str] | None = None, **options: Any) -> Settings:
        path = tmp_path / "rollout.toml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, environ=environ or {}, **options)

    return load


@pytest.fixture
def refusal(load):
    """The line a configuration is refused with."""

    def refusal(text: str = LEAST, environ: dict[str, str] | None = None, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, environ, **options)
        line = str(caught.value)
        assert line.isprintable()
        return line

    return refusal


def tables(model: type[BaseModel] = Settings) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        if table := table_of(field.annotation):
            found += tables(table)
    return found


def test_names_and_defaults_are_those_of_the_contract(load):
    assert load().model_dump() == {
        "mode": "grpo",
        "model": "",
        "engines": [
            {
                "url": "http://127.0.0.1:8000",
                "max_inflight": 256,
                "max_inflight_ceiling": 1024,
                "api_key_env": "",
            }
        ],
        "registration": {"allowed": [], "max_engines": 64, "api_key_env": ""},
        "discovery": {"interval_s": 5.0, "drain_s": 30},
        "prompts": {"path": "", "epochs": 1, "shuffle_seed": -1},
        "groups": {
            "num_generations": 8,
            "max_staleness": 4,
            "min_group_size": 2,
            "on_stale": "drop",
            "max_group_attempts": 3,
            "advantage": "grpo",
            "zero_variance": "keep",
            "halt_after_failed_groups": 1,
            "halt_after_unproductive_groups": 32,
            "max_pending_groups": 10000,
            "max_ready_groups": 64,
            "max_ready_bytes": 1073741824,
        },
        "dispatch": {
            "max_inflight_rollouts": 128,
            "admission": "slots",
            "groups_per_step": 0,
            "max_attempts": 3,
            "request_timeout_s": 600,
            "rollout_timeout_s": 1800,
            "engine_wait_s": 300,
            "probe_interval_s": 2,
            "wait_for_version": 0,
            "cache_salt": True,
        },
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 2048,
            "stop": None,
            "stop_token_ids": None,
            "presence_penalty": None,
            "frequency_penalty": None,
            "chat_template_kwargs": None,
            "seed_per_attempt": False,
            "allow_raw_logprobs": False,
        },
        "program": {
            "target": "",
            "tools": [],
            "openenv": "",
            "openenv_action": "",
            "openenv_observation": "",
            "openenv_reward": "sum",
            "openenv_seed_by": "group",
            "max_turns": 8,
            "tool_timeout_s": 30.0,
            "fork_threshold_tokens": 1024,
            "threads": 64,
            "grace_s": 5.0,
        },
        "teachers": [],
        "rewards": [
            {"name": "accuracy", "function": "my_rewards:accuracy", "url": "", "weight": 1.0, "timeout_s": 30.0}
        ],
        "reward_workers": {"processes": 2},
        "store": {
            "url": "sqlite:///rollout.db",
            "max_lease_bytes": 268435456,
            "pool_size": 8,
            "statement_timeout_s": 10.0,
        },
        "replica": {"name": "", "lease_s": 10.0},
        "weights": {"allowed_paths": [], "timeout_s": 600.0},
        "server": {
            "host": "127.0.0.1",
            "port": 8080,
            "keys": [],
            "keys_file": "",
            "insecure": False,
            "allowed_hosts": [],
        },
        "tracing": {"endpoint": "", "sample_ratio": 1.0},
    }


@pytest.mark.parametrize("table", [*tables(), SamplingOverrides])
def test_every_number_is_bounded_at_both_ends_and_finite(table: type[BaseModel]):
    assert table.model_config["allow_inf_nan"] is False
    assert table.model_config["extra"] == "forbid"
    assert table.model_config["strict"] is True
    for name, field in table.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if kinds & {int, float}:
            kinds_of_bounds = {type(bound) for bound in field.metadata}
            assert kinds_of_bounds & {Ge, Gt}, f"{table.__name__}.{name} has no least value"
            assert kinds_of_bounds & {Le, Lt}, f"{table.__name__}.{name} has no greatest value"


@pytest.mark.parametrize("table", tables())
def test_every_field_that_is_no_table_says_what_it_is(table: type[BaseModel]):
    for name, field in table.model_fields.items():
        is_table = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        assert is_table or field.description, f"{table.__name__}.{name}"


def test_settings_made_directly_read_no_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_MODEL", "from-environment")
    assert Settings(engines=[{}], rewards=[{"name": "a", "function": "m:f"}]).model == ""


def test_settings_do_not_change_once_they_exist(load):
    with pytest.raises(ValidationError):
        load().groups.max_staleness = 9


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load_settings(tmp_path / "absent.toml", environ={})


def test_a_directory_is_no_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_settings(tmp_path, environ={})


def test_a_syntax_error_names_its_line(refusal):
    assert "rollout.toml: not TOML: " in (line := refusal('mode = "grpo"\n[groups\nx = 1\n'))
    assert "line 2" in line


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "rollout.toml"
    path.write_bytes(b'model = "\xff"')
    with pytest.raises(ConfigError, match=r"rollout\.toml: not UTF-8 \(byte 9\)"):
        load_settings(path, environ={})


def test_a_byte_order_mark_does_no_harm(load):
    assert load("\ufeff" + LEAST).mode == "grpo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bogus = 1\n" + LEAST, "rollout.toml: bogus: unknown key"),
        ("_env_file = 'x'\n" + LEAST, "rollout.toml: _env_file: unknown key"),
        (LEAST + "[Groups]\n", "Groups: unknown key; did you mean groups?"),
        (LEAST + "[groups]\nmax_stalenes = 1\n", "groups.max_stalenes: unknown key; did you mean max_staleness?"),
        (ENGINE + "max_inflite = 1\n" + REWARD, "engines[0].max_inflite: unknown key; did you mean max_inflight?"),
        (LEAST + 'timeout = "9"\n', "rewards[0].timeout: unknown key; did you mean timeout_s?"),
        (LEAST + '[groups]\nmax_staleness = "4"\n', 'groups.max_staleness: expected an integer, got "4"'),
        (LEAST + "[groups]\nmax_staleness = 4.0\n", "groups.max_staleness: expected an integer, got 4.0"),
        (LEAST + "[groups]\nmax_staleness = true\n", "groups.max_staleness: expected an integer, got true"),
        (LEAST + "[groups]\nmax_staleness = -1\n", "groups.max_staleness: expected at least 0, got -1"),
        (LEAST + "[groups]\nnum_generations = 5000\n", "groups.num_generations: expected at most 1024, got 5000"),
        (LEAST + '[groups]\non_stale = "keep"\n', "groups.on_stale: expected 'drop' or 'requeue', got \"keep\""),
        (LEAST + "[sampling]\ntemperature = nan\n", "sampling.temperature: expected a finite number, got NaN"),
        (LEAST + "[sampling]\ntemperature = inf\n", "sampling.temperature: expected a finite number, got Infinity"),
        (LEAST + "[sampling]\ntemperature = true\n", "sampling.temperature: expected a number, got true"),
        (LEAST + "[sampling]\ntop_p = 0\n", "sampling.top_p: expected more than 0"),
        (LEAST + "[sampling]\nallow_raw_logprobs = 1\n", "sampling.allow_raw_logprobs: expected true or false, got 1"),
        ("model = 2026-01-01\n" + LEAST, "model: expected text, got a date"),
        ("groups = 3\n" + LEAST, "rollout.toml: groups: expected a table, got 3"),
        ("engines = 3\n" + REWARD, "engines: expected a list, got 3"),
        (ENGINE + '[[rewards]]\nfunction = "m:f"\n', "rewards[0].name: is required"),
    ],
)
def test_what_a_file_may_not_say_is_refused_by_name(refusal, text: str, expected: str):
    assert expected in refusal(text)


def test_integers_are_taken_for_numbers(load):
    timeout = load(LEAST + "[dispatch]\nrequest_timeout_s = 5\n").dispatch.request_timeout_s
    assert timeout == 5.0
    assert type(timeout) is float


def test_several_problems_share_one_line(refusal):
    line = refusal(LEAST + '[groups]\nmax_staleness = "4"\nnum_generations = 0\n')
    assert "groups.num_generations: expected at least 1, got 0; " in line
    assert line.count("rollout.toml: ") == 2


def test_many_problems_are_counted(refusal):
    text = LEAST + "".join(f"[unknown{number}]\n" for number in range(9))
    assert refusal(text).endswith("unknown4: unknown key (and 4 more)")


def test_a_refused_value_is_shortened(refusal):
    assert len(refusal(LEAST + f'[groups]\nmax_staleness = "{"x" * 9999}"\n')) < 400


def test_the_environment_wins_over_the_file(load):
    text = LEAST + "[groups]\nmax_staleness = 7\nnum_generations = 6\n"
    groups = load(text, {"ROLLOUT_GROUPS__MAX_STALENESS": "2"}).groups
    assert (groups.max_staleness, groups.num_generations) == (2, 6)


@pytest.mark.parametrize(
    ("name", "value", "path", "expected"),
    [
        ("ROLLOUT_MODEL", "7", "model", "7"),
        ("ROLLOUT_PROMPTS__PATH", "[1].jsonl", "prompts.path", "[1].jsonl"),
        ("ROLLOUT_GROUPS__ON_STALE", "requeue", "groups.on_stale", "requeue"),
        ("ROLLOUT_GROUPS__MAX_STALENESS", "0", "groups.max_staleness", 0),
        ("ROLLOUT_DISPATCH__ENGINE_WAIT_S", "1e2", "dispatch.engine_wait_s", 100.0),
        ("ROLLOUT_SAMPLING__ALLOW_RAW_LOGPROBS", "True", "sampling.allow_raw_logprobs", True),
        ("ROLLOUT_SAMPLING__SEED_PER_ATTEMPT", "0", "sampling.seed_per_attempt", False),
        ("ROLLOUT_SAMPLING__MIN_P", ".25", "sampling.min_p", 0.25),
        ("ROLLOUT_SAMPLING__STOP", '["</a>", "b"]', "sampling.stop", ["</a>", "b"]),
        ("ROLLOUT_SAMPLING__STOP", "</answer>", "sampling.stop", ["</answer>"]),
        ("ROLLOUT_SAMPLING__STOP_TOKEN_IDS", "[7]", "sampling.stop_token_ids", [7]),
        ("ROLLOUT_SAMPLING__PRESENCE_PENALTY", "-1.5", "sampling.presence_penalty", -1.5),
        ("ROLLOUT_SAMPLING__CHAT_TEMPLATE_KWARGS", '{"x": 1}', "sampling.chat_template_kwargs", {"x": 1}),
        ("ROLLOUT_GROUPS", '{"max_staleness": 3}', "groups.max_staleness", 3),
    ],
)
def test_environment_values_are_parsed_by_the_type_of_their_field(load, name: str, value: str, path: str, expected):
    found: Any = load(LEAST, {name: value})
    for part in path.split("."):
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


def test_a_list_in_the_environment_is_json_and_replaces_the_files(load):
    engines = [{"url": "http://a:1"}, {"url": "http://b:1", "max_inflight": 4}]
    settings = load(LEAST, {"ROLLOUT_ENGINES": json.dumps(engines)})
    assert [(engine.url, engine.max_inflight) for engine in settings.engines] == [
        ("http://a:1", 256),
        ("http://b:1", 4),
    ]


def test_a_field_refines_its_table_in_the_environment(load):
    environ = {"ROLLOUT_GROUPS__MAX_STALENESS": "2", "ROLLOUT_GROUPS": '{"max_staleness": 9, "num_generations": 5}'}
    groups = load(LEAST, environ).groups
    assert (groups.max_staleness, groups.num_generations) == (2, 5)


def test_the_environment_alone_is_enough():
    rewards = '[{"name": "a", "function": "m:f"}]'
    settings = load_settings(None, environ={"ROLLOUT_ENGINES": "[{}]", "ROLLOUT_REWARDS": rewards})
    assert settings.rewards[0].name == "a"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"ROLLOUT_GROUPS__MAX_STALENESS": "two"},
            'ROLLOUT_GROUPS__MAX_STALENESS: groups.max_staleness: expected an integer, got "two"',
        ),
        ({"ROLLOUT_GROUPS__MAX_STALENESS": "2.0"}, 'expected an integer, got "2.0"'),
        ({"ROLLOUT_GROUPS__MAX_STALENESS": "1_0"}, 'expected an integer, got "1_0"'),
        ({"ROLLOUT_GROUPS__MAX_STALENESS": ""}, 'expected an integer, got ""'),
        ({"ROLLOUT_SAMPLING__TEMPERATURE": "nan"}, 'sampling.temperature: expected a number, got "nan"'),
        ({"ROLLOUT_SAMPLING__ALLOW_RAW_LOGPROBS": "maybe"}, 'expected true or false, got "maybe"'),
        ({"ROLLOUT_ENGINES": "http://a:1"}, "ROLLOUT_ENGINES: engines: expected a list"),
        ({"ROLLOUT_ENGINES": '[{"url": 1}]'}, "ROLLOUT_ENGINES: engines[0].url: expected text, got 1"),
        ({"ROLLOUT_SERVER__HOST": "10.0.0.1"}, "ROLLOUT_SERVER__HOST: server.host: another address"),
        (
            {"ROLLOUT_GROUPS__NUM_GENERATIONS": "1"},
            "ROLLOUT_GROUPS__NUM_GENERATIONS: groups.num_generations: 1 is below",
        ),
        ({"ROLLOUT_MAX_STALENESS": "2"}, "ROLLOUT_MAX_STALENESS: sets nothing: no such setting"),
        (
            {"ROLLOUT_GROUPS__MAX_STALNESS": "2"},
            "ROLLOUT_GROUPS__MAX_STALNESS: sets nothing: no such setting; did you mean ROLLOUT_GROUPS__MAX_STALENESS?",
        ),
        ({"ROLLOUT_GROUPS__MAX_STALENESS__X": "2"}, "ROLLOUT_GROUPS__MAX_STALENESS__X: sets nothing"),
        ({"ROLLOUT_ENGINES__0__URL": "x"}, "a list is given whole, as JSON: ROLLOUT_ENGINES='[{…}]'"),
        ({"ROLLOUT_PORT": "80"}, "ROLLOUT_PORT: sets nothing"),
        ({"ROLLOUT_": "80"}, "ROLLOUT_: sets nothing"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_by_name(refusal, environ: dict[str, str], expected: str):
    assert expected in refusal(LEAST, environ)


def test_an_unknown_variable_is_refused_beside_another_problem(refusal):
    line = refusal(LEAST + "[groups]\nmax_staleness = -1\n", {"ROLLOUT_BOGUS": "1"})
    assert "ROLLOUT_BOGUS: sets nothing" in line
    assert "groups.max_staleness: expected at least 0" in line


def test_variables_of_kubernetes_for_a_service_named_rollout_are_no_settings(load):
    environ = {
        "ROLLOUT_SERVICE_HOST": "10.0.0.7",
        "ROLLOUT_SERVICE_PORT": "8080",
        "ROLLOUT_SERVICE_PORT_HTTP": "8080",
        "ROLLOUT_PORT": "tcp://10.0.0.7:8080",
        "ROLLOUT_PORT_8080_TCP_ADDR": "10.0.0.7",
        "ROLLOUT_SERVER__PORT": "9090",
    }
    assert load(LEAST, environ).server.port == 9090


def test_the_command_line_wins_over_everything(load):
    settings = load(LEAST + "[server]\nport = 1\n", {"ROLLOUT_SERVER__PORT": "2"}, host="::1", port=3)
    assert (settings.server.host, settings.server.port) == ("::1", 3)


def test_the_command_line_is_named_as_the_origin(refusal):
    assert refusal(LEAST, host="10.0.0.1").startswith("--host: server.host: another address")
    assert refusal(LEAST, port=70_000).startswith("--port: server.port: expected at most 65535")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REWARD, "engines: at least one [[engines]] table is required"),
        (ENGINE, "rewards: at least one [[rewards]] table is required: without it no group can be scored"),
        ('mode = "distillation"\n' + LEAST, 'teachers: mode "distillation" needs at least one [[teachers]] table'),
        (LEAST + '[[teachers]]\nurl = "http://t"\n', 'teachers: teachers score in mode "distillation" only'),
        (
            'mode = "distillation"\n' + LEAST + '[[teachers]]\nurl = "http://t"\n[[teachers]]\nurl = "http://u"\n',
            'teachers[1].id: "teacher" is used twice',
        ),
        (LEAST + '[[teachers]]\nid = "t"\n', "teachers[0].url"),
        ('mode = "ppo"\n' + LEAST, "mode: expected 'grpo' or 'distillation', got \"ppo\""),
        (LEAST + "[groups]\nnum_generations = 3\nmin_group_size = 4\n", "3 is below groups.min_group_size (4)"),
        (
            LEAST + '[groups]\nadvantage = "rloo"\nmin_group_size = 1\n',
            'groups.min_group_size: groups.advantage "rloo" compares a rollout with the others',
        ),
        (
            LEAST + '[groups]\nzero_variance = "drop"\nmin_group_size = 1\nnum_generations = 1\n',
            'groups.zero_variance: "drop" with groups.num_generations = 1 would drop every group',
        ),
        (LEAST + '[dispatch]\nadmission = "pace"\n', 'dispatch.groups_per_step: dispatch.admission "pace" needs'),
        (LEAST + '[program]\ntarget = "m.f"\n', 'program.target: expected "package.module:name"'),
        (LEAST + '[program]\ntools = ["m:f", "f"]\n', 'program.tools: expected "package.module:name"'),
        (LEAST + '[program]\ntools = ["m:f"]\ntarget = "m:g"\n', "program: expected one of target, tools and openenv"),
        (LEAST + '[program]\nopenenv = "ws://e"\n', "program.openenv: expected an http:// or https:// URL"),
        (LEAST + '[store]\nurl = "postgresql://u:secret@h"\n', "store.url: expected postgresql://user@host/database"),
        (LEAST + '[store]\nurl = "postgresql+psycopg://h/db"\n', "store.url: expected postgresql:// alone: the driver"),
        (LEAST + "[store]\npool_size = 1\n", "store.pool_size: expected at least 2, got 1"),
        (LEAST + "[replica]\nlease_s = 0.5\n", "replica.lease_s: expected at least 1.0, got 0.5"),
        (LEAST + '[replica]\nname = "a\\u0007"\n', "replica.name: expected printable characters"),
        (LEAST + '[store]\nurl = "mysql://h/db"\n', "store.url: expected sqlite:/// and the path of a file"),
        (LEAST + '[store]\nurl = "rollout.db"\n', "store.url: expected sqlite:/// and the path of a file"),
        (LEAST + '[store]\nurl = "sqlite:///"\n', "store.url: expected sqlite:/// and the path of a file"),
        (LEAST + '[store]\nurl = "sqlite://rollout.db"\n', "store.url: expected sqlite:/// and the path of a file"),
        (LEAST + '[store]\nurl = "sqlite:///a.db?mode=ro"\n', "store.url: expected a plain path"),
        (LEAST + '[store]\nurl = "sqlite:///:memory:"\n', "store.url: expected a plain path"),
        (LEAST + REWARD, 'rewards[1].name: "accuracy" is used twice'),
        (ENGINE + '[[rewards]]\nname = "a"\n', "rewards[0]: expected exactly one of function and url"),
        (LEAST + 'url = "http://judge:1/score"\n', "rewards[0]: expected exactly one of function and url"),
        (ENGINE + '[[rewards]]\nname = "a b"\nfunction = "m:f"\n', "rewards[0].name: expected text that matches"),
        (ENGINE + '[[rewards]]\nname = "a"\nfunction = "m.f"\n', 'rewards[0].function: expected "package.module:name"'),
        (ENGINE + '[[rewards]]\nname = "a"\nfunction = "m/n:f"\n', "rewards[0].function: expected"),
        (ENGINE + '[[rewards]]\nname = "a"\nfunction = ":f"\n', "rewards[0].function: expected"),
        (ENGINE + '[[rewards]]\nname = "a"\nurl = "judge:1"\n', "rewards[0].url: expected an http:// or https:// URL"),
        (ENGINE + '[[rewards]]\nname = "a"\nurl = "http://u:p@j/"\n', "rewards[0].url: credentials"),
        (ENGINE + ENGINE + REWARD, "engines[0].url: the same engine stands here twice"),
        ('[[engines]]\nurl = "http://H"\n[[engines]]\nurl = "http://h:80/"\n' + REWARD, "the same engine"),
        (ENGINE + 'api_key_env = "sk-12"\n' + REWARD, "engines[0].api_key_env: expected the name of an environment"),
        (ENGINE + 'api_key_env = "KEY"\n' + REWARD, "engines[0].api_key_env: the environment variable it names"),
        (
            ENGINE + REWARD + '[registration]\nallowed = ["http://gpu"]\n',
            "registration.allowed: expected scheme://host",
        ),
        (
            ENGINE + REWARD + '[registration]\nallowed = ["http://10.0.0.7/8:1"]\n',
            "registration.allowed: 10.0.0.7/8 has",
        ),
        (ENGINE + REWARD + "[registration]\nmax_engines = 0\n", "registration.max_engines: expected at least 1, got 0"),
        (ENGINE + REWARD + '[registration]\napi_key_env = "sk-1"\n', "registration.api_key_env: expected the name"),
        (
            ENGINE + REWARD + '[registration]\napi_key_env = "KEY"\n',
            "registration.api_key_env: the environment variable",
        ),
        (
            ENGINE
            + ENGINE.replace("8000", "8001")
            + REWARD
            + '[registration]\nallowed = ["http://a:1"]\nmax_engines = 1\n',
            "registration.max_engines: is below the 2 engines configured",
        ),
        (LEAST + "[prompts]\npath = 'a\\u0000'\n".replace("'", '"'), "prompts.path: a path without control"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(refusal, text: str, expected: str):
    assert expected in refusal(text)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", "got nothing"),
        ("127.0.0.1:8000", "expected an http:// or https:// URL"),
        ("ftp://h", "expected an http:// or https:// URL with a host"),
        ("http://", "with a host"),
        ("http://:8000", "with a host"),
        ("http://h:99999", "not a URL"),
        ("http://h:0", "port 0"),
        ("http://[::1", "not a URL"),
        ("http://h/v1", "without /v1"),
        ("http://h/v1/", "without /v1"),
        ("http://h?x=1", "a query"),
        ("http://h#x", "a fragment"),
        ("http://h /", "without spaces"),
        ("http://user:pass@h", "credentials"),
        ("http://user@h", "credentials"),
    ],
)
def test_a_url_that_names_no_engine_is_refused(refusal, url: str, expected: str):
    line = refusal(f"[[engines]]\nurl = {json.dumps(url)}\n" + REWARD)
    assert "engines[0].url: " in line
    assert expected in line


def test_engine_urls_lose_the_slash_at_their_end(load):
    text = '[[engines]]\nurl = "https://Host:8443/vllm/"\n' + REWARD
    assert load(text).engines[0].url == "https://host:8443/vllm"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("dns://vllm.default.svc", "a port from 1 to 65535"),
        ("dns://vllm:", "a port from 1 to 65535"),
        ("dns://vllm:0", "a port from 1 to 65535"),
        ("dns://vllm:65536", "a port from 1 to 65535"),
        ("dns://vllm:8000/", "nothing behind it"),
        ("dns://vllm:8000?x=1", "nothing behind it"),
        ("dns://u:hunter2@vllm:8000", "credentials"),
        ("dns://:8000", "the name of letters"),
        ("dns://a..b:8000", "the name of letters"),
        ("dns://-a:8000", "the name of letters"),
        ("dns://füü:8000", "the name of letters"),
        ("dns://a b:8000", "the name of letters"),
        ("dns://" + "a" * 64 + ":8000", "the name of letters"),
        ("dns://" + "a." * 127 + ":8000", "the name of letters"),
        ("dns://10.0.0.7:8000", "takes a name"),
        ("dns://2130706433:8000", "takes a name"),
        ("dns://[::1]:8000", "expected dns://name:port"),
        ("dns:vllm:8000", "expected an http:// or https:// URL"),
        ("file:", "expected file: and the path"),
        ("file:engines/", "expected file: and the path"),
        ("file:///", "expected file: and the path"),
        ("file://host/engines.txt", "would name a host"),
        ("file:engines.txt?x", "without ? and #"),
        ("file:a\x00b", "no control characters"),
        ("file:" + "a" * 2048, "at most 2048 characters"),
    ],
)
def test_a_source_that_lists_no_engines_is_refused(refusal, url: str, expected: str):
    line = refusal(f"[[engines]]\nurl = {json.dumps(url)}\n" + REWARD)
    assert "engines[0].url: " in line
    assert expected in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("url", "spelling", "source"),
    [
        ("dns://vLLM.default.svc:8000", "dns://vllm.default.svc:8000", DnsName(host="vllm.default.svc", port=8000)),
        ("DNS://vllm_0.x.:080", "dns://vllm_0.x.:80", DnsName(host="vllm_0.x.", port=80)),
        ("file:engines.txt", "file:engines.txt", EnginesFile(path=Path("engines.txt"))),
        ("file:./run/Engines", "file:run/Engines", EnginesFile(path=Path("run/Engines"))),
        ("file:/etc/engines", "file:/etc/engines", EnginesFile(path=Path("/etc/engines"))),
        ("File:///etc/engines", "file:/etc/engines", EnginesFile(path=Path("/etc/engines"))),
        ("http://h:1", "http://h:1", None),
    ],
)
def test_an_entry_may_name_where_engines_are_listed(load, url: str, spelling: str, source: object):
    (entry,) = load(f"[[engines]]\nurl = {json.dumps(url)}\n" + REWARD).engines
    assert (entry.url, entry.source) == (spelling, source)
    assert EngineSettings(url=entry.url).source == source


def test_one_source_twice_is_refused(refusal):
    twice = '[[engines]]\nurl = "file:a"\n[[engines]]\nurl = "file:./a"\n'
    assert "engines[0].url: the same source stands here twice" in refusal(twice + REWARD)


@pytest.mark.parametrize("value", ['"Auto"', '""', "0", "100001", "-1", "1.0", "true", "[]", '"256"'])
def test_max_inflight_is_a_number_or_auto(refusal, value: str):
    line = refusal(ENGINE + f"max_inflight = {value}\n" + REWARD)
    assert 'engines[0].max_inflight: expected an integer from 1 to 100000, or "auto", got' in line
    assert line.count("engines[0]") == 1


def test_max_inflight_may_set_itself_up_to_a_ceiling(load, refusal):
    (entry,) = load(ENGINE + 'max_inflight = "auto"\nmax_inflight_ceiling = 512\n' + REWARD).engines
    assert (entry.max_inflight, entry.max_inflight_ceiling) == ("auto", 512)
    named = {
        "ROLLOUT_ENGINES": '[{"url": "dns://vllm:8000", "max_inflight": "auto"}]',
        "ROLLOUT_DISCOVERY__DRAIN_S": "7",
    }
    settings = load(LEAST, named)
    assert (settings.engines[0].max_inflight, settings.engines[0].max_inflight_ceiling) == ("auto", 1024)
    assert settings.discovery.drain_s == 7
    line = refusal(ENGINE + "max_inflight = 64\nmax_inflight_ceiling = 512\n" + REWARD)
    assert 'engines[0].max_inflight_ceiling: has a meaning only with max_inflight = "auto"' in line
    assert "max_inflight is 64" in line
    assert "engines[0].max_inflight_ceiling: expected at most" in refusal(
        ENGINE + 'max_inflight = "auto"\nmax_inflight_ceiling = 100001\n' + REWARD
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interval_s = 0.0", "discovery.interval_s: expected at least 0.1, got 0.0"),
        ("interval_s = 1e9", "discovery.interval_s: expected at most 3600"),
        ("drain_s = -1", "discovery.drain_s: expected at least 0, got -1"),
        ("drain = 1", "discovery.drain: unknown key; did you mean drain_s?"),
    ],
)
def test_discovery_is_bounded(refusal, text: str, expected: str):
    assert expected in refusal(LEAST + f"[discovery]\n{text}\n")


def test_no_secret_reaches_the_line(refusal):
    text = '[[engines]]\nurl = "http://u:hunter2@h"\napi_key_env = "sk-hunter2"\napi_key = "hunter2"\n' + REWARD
    assert "hunter2" not in refusal(text)
    assert "hunter2" not in refusal(LEAST, {"ROLLOUT_ENGINES": "http://u:hunter2@h"})
    assert "hunter2" not in refusal(LEAST + '[store]\nurl = "postgresql://u:hunter2@h"\n')
    assert "hunter2" not in refusal(ENGINE + 'api_key_env = "hunter2"\n' + REWARD)


def test_an_engines_key_may_stand_in_any_variable(load):
    text = ENGINE + 'api_key_env = "ROLLOUT_ENGINE_KEY"\n' + REWARD
    assert load(text, {"ROLLOUT_ENGINE_KEY": "sk-1"}).engines[0].api_key_env == "ROLLOUT_ENGINE_KEY"


HASH = "sha256:" + 64 * "0"
ANYWHERE = "0.0.0.0"  # noqa: S104 - it is refused


@pytest.mark.parametrize("host", [ANYWHERE, "::", "10.0.0.1", "example.org", "", "localhost.example.org"])
def test_only_loopback_is_listened_on_while_there_are_no_keys(refusal, host: str):
    line = refusal(LEAST + f'[server]\nhost = "{host}"\n')
    assert "server.host: another address than a loopback one" in line
    assert "needs API keys" in line
    assert "--insecure" in line


@pytest.mark.parametrize("host", [ANYWHERE, "::", "example.org"])
def test_any_address_is_listened_on_with_keys_or_where_somebody_says_insecure(load, host: str):
    key = f'[[server.keys]]\nname = "a"\nrole = "admin"\nhash = "{HASH}"\n'
    for more in (key, 'keys_file = "keys.toml"\n', "insecure = true\n"):
        assert load(LEAST + f'[server]\nhost = "{host}"\n{more}').server.host == host
    assert load(LEAST, host=host, insecure=True).server.insecure


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"role": "root"}, "server.keys[0].role: expected one of admin, trainer, submit, read"),
        ({"name": "a b"}, "server.keys[0].name"),
        ({"hash": "rsk_hunter2"}, "server.keys[0].hash: expected sha256:"),
        ({"hash": "sha256:12"}, "server.keys[0].hash"),
    ],
)
def test_a_key_that_is_none_is_refused_and_not_shown(refusal, table: dict[str, str], field: str):
    keys = json.dumps([{"name": "a", "role": "admin", "hash": HASH} | table])
    line = refusal(LEAST, {"ROLLOUT_SERVER__KEYS": keys})
    assert field in line
    assert "hunter2" not in line


def test_two_keys_of_one_name_or_one_hash_are_refused(refusal):
    other = HASH.replace("0", "1")
    for first, second, field in ((("a", HASH), ("a", other), "name"), (("a", HASH), ("b", HASH), "hash")):
        keys = json.dumps([{"name": name, "role": "read", "hash": digest} for name, digest in (first, second)])
        assert f"server.keys[1].{field}: stands there twice" in refusal(LEAST, {"ROLLOUT_SERVER__KEYS": keys})


def test_names_a_service_may_be_called_by_are_host_names(load, refusal):
    assert load(LEAST + '[server]\nallowed_hosts = ["Rollout.example"]\n').server.allowed_hosts == ["rollout.example"]
    for never in ("http://rollout.example", "a:80", "*", "fd00::1", "", "a b", "user@a", ".a"):
        assert "server.allowed_hosts" in refusal(LEAST + f'[server]\nallowed_hosts = ["{never}"]\n'), never
    for good in ("rollout.example", "10.0.0.1", "[fd00::1]"):
        assert load(LEAST + f'[server]\nallowed_hosts = ["{good}"]\n').server.allowed_hosts == [good]


@pytest.mark.parametrize("path", ["ckpt", "", "/", "//", "/ckpt/../etc", "/ck\\u0000pt", "s3://bucket/ckpt"])
def test_weights_are_loaded_from_named_folders_only(load, path: str):
    with pytest.raises(ConfigError, match=r"weights\.allowed_paths"):
        load(LEAST + f'[weights]\nallowed_paths = ["/ckpt", "{path}"]\n')


@pytest.mark.parametrize("model", ["policy-{version}", "{}", "policy-{policy_version", "a}b"])
def test_a_models_name_has_no_other_placeholder_than_the_version(load, model: str):
    with pytest.raises(ConfigError, match="policy_version"):
        load(f'model = "{model}"\n' + LEAST)
    assert load('model = "policy-v{policy_version}"\n' + LEAST).model == "policy-v{policy_version}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_every_loopback_address_is_taken(load, host: str):
    assert load(LEAST + f'[server]\nhost = "{host}"\n').server.host == host


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///rollout.db", "rollout.db"),
        ("sqlite:///state/rollout.db", "state/rollout.db"),
        ("sqlite:////var/lib/rollout.db", "/var/lib/rollout.db"),
        ("memory://", None),
    ],
)
def test_the_store_is_a_file_or_memory(url: str, path: str | None):
    assert StoreSettings(url=url).sqlite_path == (None if path is None else Path(path))


def test_pace_with_a_step_is_taken(load):
    assert load(LEAST + '[dispatch]\nadmission = "pace"\ngroups_per_step = 4\n').dispatch.groups_per_step == 4


@pytest.mark.parametrize("name", ["n", "stream", "logprobs", "model", "seed"])
def test_what_the_service_decides_itself_is_refused_with_the_reason(refusal, name: str):
    assert f"sampling.{name}: not taken: " in refusal(LEAST + f"[sampling]\n{name} = 2\n")
    with pytest.raises(ValidationError, match=f"{name}: not taken: "):
        SamplingOverrides.model_validate({name: 2})


def test_chat_template_kwargs_are_strict_json(refusal):
    text = LEAST + "[sampling]\nchat_template_kwargs = {a = {b = [1, inf]}}\n"
    assert "sampling.chat_template_kwargs.a.b[1]: inf is not a finite number" in refusal(text)
    assert "has no JSON form" in refusal(LEAST + "[sampling]\nchat_template_kwargs = {day = 2026-01-01}\n")


def test_what_the_engine_would_fill_in_is_always_sent():
    assert SamplingSettings().request_fields() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 2048,
    }


def test_what_is_set_is_sent_and_what_is_ours_is_not():
    fields = SamplingSettings(stop=["x"], seed_per_attempt=True, allow_raw_logprobs=True).request_fields()
    assert fields["stop"] == ["x"]
    assert not {"seed_per_attempt", "allow_raw_logprobs"} & fields.keys()


def test_overrides_hold_only_what_is_set():
    overrides = SamplingOverrides.model_validate({"temperature": 0, "max_tokens": None, "stop": "x"}).overrides()
    assert overrides == {"temperature": 0.0, "stop": ["x"]}


def test_null_is_not_set_in_overrides():
    assert SamplingOverrides.model_validate(dict.fromkeys(SamplingOverrides.model_fields)).overrides() == {}


def test_overrides_have_the_names_and_bounds_of_the_table():
    ours = {"allow_raw_logprobs"}
    assert set(SamplingOverrides.model_fields) == set(SamplingSettings.model_fields) - ours
    for name in SamplingOverrides.model_fields:
        for value in (-3, 101, 2**40, "1", True, [], {}):
            outcomes = []
            for table in (SamplingSettings, SamplingOverrides):
                try:
                    outcomes.append(getattr(table.model_validate({name: value}), name))
                except ValidationError:
                    outcomes.append("refused")
            assert outcomes[0] == outcomes[1], (name, value)


def test_where_engines_may_register_none_has_to_be_configured(load):
    settings = load(REWARD + '[registration]\nallowed = ["http://10.0.0.0/8:8000", "http://*.vllm.svc:*"]\n')
    assert settings.engines == []
    assert len(settings.registration.patterns) == 2


def test_the_key_of_added_engines_may_have_a_name_with_our_prefix(load):
    text = ENGINE + REWARD + '[registration]\napi_key_env = "ROLLOUT_ENGINES_KEY"\n'
    assert load(text, {"ROLLOUT_ENGINES_KEY": "sk-1"}).registration.api_key_env == "ROLLOUT_ENGINES_KEY"
