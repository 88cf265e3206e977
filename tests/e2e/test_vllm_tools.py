"""Tools on a real vLLM server: what is trained over several turns is what the engine sampled, and a policy learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.cpu_tools.demo import TOOL_FLAGS, WANTED_GAIN, Step, problems
from examples.cpu_tools.policy import CHAT_TEMPLATE, POSITIONS, calculator_tokenizer, calling, encoded, make_policy
from examples.cpu_tools.rewards import right
from examples.engine.server import VllmServer
from tests.e2e.conftest import REPOSITORY, Service
from trainer_client import Group, Sample

DEMO = [sys.executable, "-u", "-m", "examples.cpu_tools.demo"]
TOLERANCE = 1e-4
SUMS = [(7, 5), (37, 48), (99, 1), (12, 60), (4, 88), (50, 50)]
PROGRAM = {"tools": ["examples.cpu_tools.calculator:add"], "max_turns": 3}
# Of a call: a template that renders it with another gap between its arguments makes its history drift.
ARGUMENT_GAP = "{{ name }}={{ value }}{{ ', ' if not loop.last }}"

CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": {"a": 37, "b": 48}}}
SCHEMA = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "37+48="},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "name": "add", "content": "85"},
    {"role": "assistant", "content": "85"},
]


def course(called: list[float], rewards: list[float] | None = None) -> list[Step]:
    """Steps with these shares of calls; the rewards are the same unless `rewards` says otherwise."""
    return [
        Step(
            step=n,
            reward=reward,
            called=share,
            samples=1.0,
            staleness=0.0,
            groups_per_s=1.0,
            failed=0,
            stale=0,
            engine_version=str(n + 1),
        )
        for n, (share, reward) in enumerate(zip(called, rewards or called, strict=True), start=1)
    ]


RISING = [0.3] * 5 + [0.5] * 5 + [0.9] * 5


def test_a_run_in_which_calls_and_reward_rose_is_a_success() -> None:
    assert problems(course(RISING), wanted=15) == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (course(RISING[:-1]), "14 of 15 steps"),
        (course(RISING, [0.3] * 15), "the reward rose by 0.000"),
        (course([0.3] * 15, RISING), "call the tool rose by 0.000"),
        ([], "0 of 15 steps"),
    ],
)
def test_a_run_that_fell_short_says_how(steps: list[Step], problem: str) -> None:
    assert problem in " ".join(problems(steps, wanted=15))


def test_the_policy_is_taught_what_the_template_writes() -> None:
    tokenizer = calculator_tokenizer()
    rendered = tokenizer.apply_chat_template(CONVERSATION, tools=[SCHEMA], tokenize=False)
    assert rendered == calling(37, 48)
    asked = tokenizer.apply_chat_template(CONVERSATION[:1], tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(asked)


def test_the_policy_is_taught_only_what_it_says_itself() -> None:
    tokenizer = calculator_tokenizer()
    ids, labels = encoded(tokenizer, [calling(37, 48), calling(1, 2)])
    assert labels.shape == ids.shape
    assert [tokenizer.decode(row[row >= 0]) for row in labels] == [
        "[add(a=37, b=48)]<eos>85<eos>",
        "[add(a=1, b=2)]<eos>3<eos>",
    ]


def test_the_reward_reads_the_policys_last_word_and_nothing_else() -> None:
    said = {"role": "assistant", "content": "85"}
    completions = [CONVERSATION[1:], [said], [{**said, "content": "86"}], CONVERSATION[1:3], CONVERSATION[1:2]]
    assert right(completions, [85] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_demo_refuses_the_simulator_in_one_line() -> None:
    done = subprocess.run(DEMO, cwd=REPOSITORY, env={**os.environ, "ENGINE": "sim"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["This demo needs the real engine (ENGINE=vllm): the simulator calls no tools."]


@pytest.fixture(scope="module")
def policy() -> Path:
    """The policy that calls the tool in a third of its answers, from the cache or made."""
    return make_policy()


# Stands before the module's own server is started: no two of them run side by side.
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_demos_policy_learns_to_call_the_tool(engine_python: Path, policy: Path, tmp_path: Path) -> None:
    summary_path = tmp_path / "summary.json"
    done = subprocess.run(
        [*DEMO, "--steps", "20", "--json", str(summary_path)],
        cwd=REPOSITORY,
        env={**os.environ, "ENGINE": "vllm", "KEEP": ""},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(summary_path.read_text())
    assert summary["problems"] == []
    assert [step["step"] for step in summary["steps"]] == list(range(1, 21))
    assert summary["steps"][-1]["called"] > summary["steps"][0]["called"] + WANTED_GAIN / 2
    assert all(step["samples"] >= 1 for step in summary["steps"])


@pytest.fixture(scope="module")
def tool_server(engine_python: Path, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A warm vLLM server of that policy; `chat_template_kwargs = {"gap": …}` changes how it renders a call."""
    folder = tmp_path_factory.mktemp("vllm-tools")
    template = folder / "template.jinja"
    assert CHAT_TEMPLATE.count(ARGUMENT_GAP) == 1
    template.write_text(CHAT_TEMPLATE.replace(ARGUMENT_GAP, ARGUMENT_GAP.replace("', '", "(gap | default(', '))")))
    flags = [*TOOL_FLAGS, "--chat-template", str(template)]
    with VllmServer(engine_python, policy, folder / "engine.log", max_model_len=POSITIONS, flags=flags) as server:
        server.ready()
        yield server


def lease_sums(service: Service, **prompt: Any) -> list[Group]:
    """Groups of all `SUMS`, acked."""
    client = service.client
    client.submit([{"prompt_id": f"{a}+{b}", "prompt": f"{a}+{b}=", **prompt} for a, b in SUMS], final=True)
    lease = client.lease(max_groups=len(SUMS), min_groups=len(SUMS), wait_s=60)
    client.ack(lease)
    assert len(lease.groups) == len(SUMS)
    return lease.groups


def spans(sample: Sample) -> list[list[int]]:
    """Runs of tokens to train, in order."""
    found: list[list[int]] = []
    before = 0
    for token, mask in zip(sample.input_ids, sample.completion_mask, strict=True):
        if mask and not before:
            found.append([])
        if mask:
            found[-1].append(int(token))
        before = mask
    return found


def assert_torch_agrees(model: torch.nn.Module, sample: Sample) -> None:
    """Every trained token has the logprob the model itself gives it after the delivered ids; context has 0.0."""
    ids = torch.tensor([[int(token) for token in sample.input_ids]])
    with torch.no_grad():
        table = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    own = [0.0, *table.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()]
    wanted = [value if mask else 0.0 for value, mask in zip(own, sample.completion_mask, strict=True)]
    assert [float(value) for value in sample.old_log_probs] == pytest.approx(wanted, abs=TOLERANCE, rel=0)


@pytest.mark.vllm
@pytest.mark.timeout(900)  # the first test pays for the policy and for the server's start
def test_a_conversation_with_a_tool_is_one_sample_of_the_engines_own_tokens(
    tool_server: VllmServer, policy: Path, service: Callable[..., Service]
) -> None:
    running = service(tool_server.url, program=PROGRAM, groups={"num_generations": 16})
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    called = right_answers = 0
    for group in lease_sums(running):
        assert [sample.index for sample in group.samples] == list(range(16))
        for sample in group.samples:
            assert_torch_agrees(model, sample)
            said = [message for message in sample.completion if message["role"] == "assistant"]
            texts = [tokenizer.decode(ids) for ids in spans(sample)]
            if not sample.truncated:
                assert len(texts) == len(said)
                assert all(text.endswith("<eos>") for text in texts)
            if sample.metrics["tool_calls"] == 1:
                a, b = group.prompt_id.split("+")
                asked, answered, repeated = sample.completion[:3]
                assert answered == {**answered, "role": "tool", "name": "add"}
                arguments = json.loads(asked["tool_calls"][0]["function"]["arguments"])
                assert answered["content"] == str(arguments["a"] + arguments["b"])
                called += 1
                right_answers += repeated["content"] == str(int(a) + int(b))
    assert called > 10
    assert right_answers > called / 2


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("threshold", "rows"), [(1024, 1), (0, 2)], ids=["realigned", "forked"])
def test_a_history_that_renders_otherwise_trains_no_token_outside_its_context(
    tool_server: VllmServer, policy: Path, service: Callable[..., Service], threshold: int, rows: int
) -> None:
    program = {**PROGRAM, "fork_threshold_tokens": threshold}
    running = service(tool_server.url, program=program, groups={"num_generations": 16})
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    seen = 0
    for group in lease_sums(running, sampling={"chat_template_kwargs": {"gap": " ,"}}):
        for index in range(16):
            samples = [sample for sample in group.samples if sample.index == index]
            for sample in samples:
                assert_torch_agrees(model, sample)
            if samples[0].metrics["tool_calls"] != 1:
                continue
            seen += 1
            assert len(samples) == rows
            whole = tokenizer.decode([int(token) for token in samples[-1].input_ids])
            assert " ,b=" in whole
            first = tokenizer.decode(spans(samples[0])[0])
            # Realigned, a call is trained up to where the template differs; forked, all of it is, in a row of its own.
            assert first.endswith(")]<eos>") == (rows == 2)
            assert len(spans(samples[-1])) == (1 if rows == 2 else 2)
    assert seen > 10
