"""docker-compose.yml, seen working: `make compose-test`, on whatever Docker engine the environment names.

What always holds: each step prints a line; the first that fails ends it with exit status 1 and the containers' last
lines. A machine without Docker is a failure, not a skip.

    python -m tests.compose.run                         the single service
    python -m tests.compose.run --profile replicas      several of them on PostgreSQL, see tests/compose/replicas.py
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.compose import replicas
from tests.compose.stack import (
    START_WITHIN_S,
    TAG,
    Failed,
    Stack,
    answer,
    curl,
    need,
    ready,
    run,
    step,
    timed,
    until,
    why_impossible,
)
from trainer_client import ClientError

PROJECT = "rollout-service-compose-test"
SERVICES = ("vllm-cpu", "rollout-service", "prometheus")
"""Not Grafana: its provisioning and its expressions have tests of their own, which need no image of half a gigabyte."""
MAX_IMAGE_MB = 300
STOP_WITHIN_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose.run", description="docker-compose.yml, seen working")
    parser.add_argument("--profile", choices=("single", "replicas"), default="single")
    profile = parser.parse_args().profile
    if reason := why_impossible():
        print(f"compose-test: {reason}", file=sys.stderr)
        return 1
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compose-test-") as folder:
        stack = replicas.stack(Path(folder)) if profile == "replicas" else single(Path(folder))
        try:
            stack.prepare()
            (replicas.run_steps if profile == "replicas" else run_steps)(stack)
        except (Failed, ClientError, subprocess.TimeoutExpired) as error:
            print(f"FAILED {error}")
            print(stack.compose("logs", "--no-color", "--tail=40", check=False))
            return 1
        finally:
            stack.down()
    print(f"compose-test passed in {time.monotonic() - started:.0f} s")
    return 0


def single(folder: Path) -> Stack:
    return Stack(folder, name=PROJECT, door="SERVICE_PORT", variables={"COMPOSE_PROFILES": "cpu,monitoring"})


def run_steps(stack: Stack) -> None:
    up(stack)
    keys_made(stack)
    doors(stack)
    group_ids = rollouts(stack)
    rotated(stack)
    metrics(stack)
    prometheus(stack)
    confinement(stack)
    restarted(stack, group_ids)
    quiet_logs(stack)
    stopped(stack)


def up(stack: Stack) -> None:
    stack.compose("config", "--quiet")
    with timed() as took:
        stack.compose("build", timeout=580)
    image = json.loads(run("docker", "image", "inspect", f"rollout-service:{TAG}"))[0]
    size = image["Size"] / 1e6
    step(f"built in {took():.0f} s; the service's image has {size:.0f} MB")
    need(size < MAX_IMAGE_MB, f"the image has {size:.0f} MB, at most {MAX_IMAGE_MB} are wanted")
    config = image["Config"]
    need(config["User"] == "10001:10001", f"the image runs as {config['User']!r}")
    need(list(config["Volumes"]) == ["/data"], f"volumes of the image: {config['Volumes']}")
    need("/livez" in config["Healthcheck"]["Test"][-1], "the image's health check asks for /livez")
    with timed() as took:
        stack.compose("up", "--detach", "--wait", "--wait-timeout", str(START_WITHIN_S), *SERVICES, timeout=590)
    step(f"up --wait: keys made, vLLM, service and Prometheus healthy after {took():.0f} s (Grafana is left out here)")
    begun = {name: stack.container(name)["State"]["StartedAt"] for name in ("keys", "vllm-cpu", "rollout-service")}
    need(max(begun.values()) == begun["rollout-service"], f"the service did not start last: {begun}")


def keys_made(stack: Stack) -> None:
    stack.read_keys("rollout-service")
    need(all(re.fullmatch(r"rsk_[\w-]{43}", key) for key in stack.keys.values()), "a key does not look like one")
    hashes = stack.execute("rollout-service", "cat", "/keys/keys.toml")
    need("sha256:" in hashes and not any(key in hashes for key in stack.keys.values()), "keys.toml has hashes alone")
    stack.compose("run", "--rm", "keys")
    again = stack.execute("rollout-service", "cat", "/keys/admin.key").strip()
    need(again == stack.keys["admin"], "a second `key init` made another key")
    stack.execute("prometheus", "cat", "/keys/read.key")
    denied = stack.execute("prometheus", "cat", "/keys/admin.key", check=False)
    need("denied" in denied, f"Prometheus can read the admin's key: {denied[:20]}")
    step("keys: one a role in the volume, hashes in keys.toml, kept by a second run; Prometheus can read read.key only")


def doors(stack: Stack) -> None:
    need(curl(f"{stack.url}/livez")[0] == 200, "/livez wants a key")
    need(curl(f"{stack.url}/readyz")[0] == 200, "/readyz wants a key")
    for path in ("/status", "/metrics", "/groups"):
        need(curl(f"{stack.url}{path}")[0] == 401, f"{path} answers without a key")
    answer(f"{stack.url}/status", key="rsk_" + "A" * 43, status=401)
    answer(f"{stack.url}/leases", key=stack.keys["submit"], body={"max_groups": 1}, status=403)
    answer(f"{stack.url}/resume", key=stack.keys["trainer"], method="POST", status=403)
    answer(f"{stack.url}/resume", key=stack.keys["admin"], method="POST")
    step("doors: probes open; 401 without a key and with an unknown one; 403 beyond a role; the admin may resume")


def rollouts(stack: Stack) -> list[str]:
    prompts = [{"prompt_id": f"p{number}", "prompt": "The sea", "sampling": {"max_tokens": 24}} for number in range(4)]
    made = answer(f"{stack.url}/prompts", key=stack.keys["submit"], body={"prompts": prompts}, status=202)["groups"]
    need(len(made) == 4, f"4 prompts made {made}")
    wanted = {"max_groups": 4, "min_groups": 4, "wait_s": 60, "request_id": "step-1"}
    lease = answer(f"{stack.url}/leases", key=stack.keys["trainer"], body=wanted)
    need(
        lease["status"] == "ok" and len(lease["groups"]) == 4,
        f"lease: {lease['status']}, {len(lease['groups'])} groups",
    )
    samples = [sample for group in lease["groups"] for sample in group["samples"]]
    need(len(samples) == 32, f"{len(samples)} samples of 4 groups of 8")
    for sample in samples:
        lengths = {len(sample[name]) for name in ("input_ids", "completion_mask", "old_log_probs")}
        need(len(lengths) == 1 and any(sample["completion_mask"]), "a sample's arrays are not aligned")
    acked = answer(f"{stack.url}/leases/{lease['lease_id']}/ack", key=stack.keys["trainer"], method="POST")["acked"]
    need(sorted(acked) == sorted(group["group_id"] for group in made), f"acked {acked}")
    version = answer(f"{stack.url}/policy_version", key=stack.keys["trainer"], body={"version": 1})
    need(version["version"] == 1, f"version: {version}")
    tokens = sum(sum(sample["completion_mask"]) for sample in samples)
    step(f"rollouts: 4 prompts submitted, leased as 4 groups of 8 ({tokens} tokens of a real vLLM), acked; version 1")
    return list(acked)


def rotated(stack: Stack) -> None:
    """The way docs/operations.md gives: the key is revoked, `key init` makes what is missing."""
    old = stack.keys["trainer"]
    stack.compose("run", "--rm", "keys", "key", "revoke", "trainer", "--file", "/keys/keys.toml")
    until(lambda: curl(f"{stack.url}/status", key=old)[0] == 401, "the old key is refused", within_s=15)
    stack.compose("run", "--rm", "keys")
    stack.keys["trainer"] = stack.execute("rollout-service", "cat", "/keys/trainer.key").strip()
    new = stack.keys["trainer"]
    until(lambda: curl(f"{stack.url}/status", key=new)[0] == 200, "the new key is let in", within_s=15)
    need(curl(f"{stack.url}/status", key=stack.keys["read"])[0] == 200, "another role's key has gone too")
    step("rotation: the trainer's old key refused, a new one let in, without a restart and beside the others")


def metrics(stack: Stack) -> None:
    status, page = curl(f"{stack.url}/metrics", key=stack.keys["read"])
    need(status == 200, f"/metrics: {status}")
    for line in ("rollout_acked_groups_total 4.0", "rollout_finished_total 32.0", "rollout_policy_version 1.0"):
        need(line in page.splitlines(), f"/metrics has no line {line!r}")
    need('rollout_failed_total{reason="' in page, "rollout_failed_total is missing")
    step("metrics: 4 groups acked, 32 rollouts finished, rollout_failed_total there for every reason")


def prometheus(stack: Stack) -> None:
    def ask(expression: str) -> dict[str, float]:
        status, text = curl(f"{stack.prometheus}/api/v1/query?query={expression}")
        need(status == 200, f"Prometheus on {expression}: {text[:300]}")
        rows = json.loads(text)["data"]["result"]
        return {row["metric"].get("job", ""): float(row["value"][1]) for row in rows}

    until(lambda: ask("up") == {"rollout-service": 1.0, "vllm": 1.0}, "Prometheus scrapes both jobs")
    until(lambda: ask("sum(rollout_acked_groups_total)") == {"": 4.0}, "Prometheus has read the acks")
    failed = ask("sum%20by%20(job)(rollout_failed_total)")
    need(failed == {"rollout-service": 0.0}, f"rollout_failed_total: {failed}")

    def rules() -> list[dict[str, Any]]:
        groups = answer(f"{stack.prometheus}/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    loaded = len(rules())
    need(loaded > 9 and all(rule["health"] != "err" for rule in rules()), f"alert rules: {rules()}")
    # RolloutTargetDown may have fired while vLLM loaded its model; it ends with the next evaluation.
    until(lambda: not [rule for rule in rules() if rule.get("state") == "firing"], "no alert fires")
    step(f"Prometheus: up is 1 for both jobs, rollout_failed_total is 0, {loaded} rules loaded, none fires")


def confinement(stack: Stack) -> None:
    for name in SERVICES:
        found = stack.container(name)
        host = found["HostConfig"]
        need("ALL" in host["CapDrop"] and "no-new-privileges:true" in host["SecurityOpt"], f"{name} is not confined")
        need(not host["Privileged"] and host["NetworkMode"] != "host", f"{name} has the host's rights or network")
        need(host["LogConfig"]["Config"]["max-size"], f"{name}'s log grows for ever")
        published = [at for ports in found["NetworkSettings"]["Ports"].values() for at in ports or []]
        need(all(at["HostIp"] == "127.0.0.1" for at in published), f"{name} is published at {published}")
        need(bool(published) == (name != "vllm-cpu"), f"{name} publishes {published}")
    networks = {name: set(stack.container(name)["NetworkSettings"]["Networks"]) for name in SERVICES}
    need(networks["vllm-cpu"] == {f"{PROJECT}_engines"}, f"vLLM is on {networks['vllm-cpu']}")
    need(stack.execute("rollout-service", "id", "-u").strip() == "10001", "the service is not uid 10001")
    for path in ("/x", "/config/x", "/venv/x", "/keys/x"):
        refused = stack.execute("rollout-service", "touch", path, check=False)
        need("Read-only file system" in refused, f"the service can write {path}")
    for folder in ("/data", "/tmp"):  # noqa: S108 - of the container
        stack.execute("rollout-service", "touch", f"{folder}/x")
        stack.execute("rollout-service", "rm", f"{folder}/x")
    step("confinement: uid 10001, no capabilities, read-only root; ports on 127.0.0.1 only, vLLM's on none")


def restarted(stack: Stack, group_ids: Sequence[str]) -> None:
    prompt = {"prompt_id": "left", "prompt": "The sea", "sampling": {"max_tokens": 24}}
    answer(f"{stack.url}/prompts", key=stack.keys["submit"], body={"prompts": [prompt]}, status=202)
    before = answer(f"{stack.url}/status", key=stack.keys["read"])
    with timed() as took:
        stack.compose("restart", "rollout-service")
        until(lambda: ready(stack), "ready again after a restart")
    after = answer(f"{stack.url}/status", key=stack.keys["read"])
    for name in ("submitted", "policy_version"):
        need(after[name] == before[name], f"{name}: {before[name]} before, {after[name]} after")
    need(after["groups"]["acked"] == len(group_ids), f"acked after the restart: {after['groups']}")
    wanted = {"max_groups": 4, "wait_s": 60}
    lease = answer(f"{stack.url}/leases", key=stack.keys["trainer"], body=wanted)
    need([group["prompt_id"] for group in lease["groups"]] == ["left"], "the prompt left over was not leased")
    answer(f"{stack.url}/leases/{lease['lease_id']}/ack", key=stack.keys["trainer"], method="POST")
    step(f"restart: ready after {took():.1f} s; counts, version, keys as before; the prompt left over was leased")


def quiet_logs(stack: Stack) -> None:
    logs = stack.compose("logs", "--no-color")
    shown = [role for role, key in stack.keys.items() if key in logs]
    need(not shown and "rsk_" not in logs, f"logs show a key: {shown}")
    need("The sea" not in stack.compose("logs", "--no-color", "rollout-service"), "the service's log shows a prompt")
    step("logs: no key, no prompt")


def stopped(stack: Stack) -> None:
    number = stack.container("rollout-service")["Id"]
    with timed() as took:
        run("docker", "stop", number)
    seconds = took()
    state = json.loads(run("docker", "inspect", number))[0]["State"]
    need(state["ExitCode"] == 0 and not state["OOMKilled"], f"docker stop: {state}")
    need(seconds < STOP_WITHIN_S, f"docker stop took {seconds:.1f} s")
    step(f"docker stop: exit 0 after {seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
