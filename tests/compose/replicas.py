"""The profile `replicas`, seen working: three replicas on PostgreSQL behind HAProxy, one killed every 5 seconds.

What always holds: the run comes to its end through the load balancer alone, by the client that trainers use; at that
end every prompt was acked exactly once, and both sides of the identity of groups are equal at every replica.

Where the images of PostgreSQL and HAProxy can be neither found nor pulled, those of Debian stand in for them, under
their names, and the first step says so.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.compose.stack import (
    ROLE_KEYS,
    ROOT,
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
)
from trainer_client import RolloutClient

PROJECT = "rollout-service-compose-test-replicas"
REPLICAS = 3
SERVICES = ("vllm-cpu", "rollout-service", "replica", "load-balancer", "prometheus")
"""The single service is named so that SINGLE_SERVICE=0 is what leaves it out."""
STAND_INS = {"postgres": "postgres.Dockerfile", "load-balancer": "haproxy.Dockerfile"}
KILL_EVERY_S = 5.0
KILLS = 12
AHEAD = 24
"""Prompts outstanding while the killing goes on: more than the slots of three replicas hold."""
SAMPLING = {"max_tokens": 24}


def stack(folder: Path) -> Stack:
    variables = {"COMPOSE_PROFILES": "cpu,replicas,monitoring", "SINGLE_SERVICE": "0"}
    return Stack(folder, name=PROJECT, door="REPLICAS_PORT", variables=variables)


def run_steps(stack: Stack) -> None:
    images(stack)
    up(stack)
    doors(stack)
    confinement(stack)
    prometheus(stack)
    trainer = Trainer(stack)
    killed(stack, trainer)
    restarted(stack, trainer)
    database_restarted(stack, trainer)
    ended(stack, trainer)
    quiet_logs(stack)


def images(stack: Stack) -> None:
    config = json.loads(stack.compose("config", "--format", "json"))
    for service, file in STAND_INS.items():
        name = config["services"][service]["image"]
        if not run("docker", "image", "ls", "-q", name).strip() and not pulled(name):
            folder = ROOT / "tests" / "compose"
            run("docker", "build", "-q", "-f", str(folder / file), "-t", name, str(folder))
        made = run("docker", "image", "inspect", "-f", '{{index .Config.Labels "rollout-service.stand-in"}}', name)
        kind = "a stand-in of Debian's package" if "true" in made else "the stock image"
        step(f"{service}: {name}, {kind}")


def pulled(name: str) -> bool:
    return subprocess.run(["docker", "pull", "-q", name], capture_output=True, timeout=580).returncode == 0


def up(stack: Stack) -> None:
    with timed() as took:
        stack.compose("build", timeout=580)
    step(f"built in {took():.0f} s")
    with timed() as took:
        stack.compose("up", "--detach", "--wait", "--wait-timeout", str(START_WITHIN_S), *SERVICES, timeout=590)
    need(len(replicas(stack)) == REPLICAS, f"replicas: {replicas(stack)}")
    need(not stack.compose("ps", "--all", "--quiet", "rollout-service").strip(), "the single service was started too")
    stack.read_keys("replica")
    need(all(re.fullmatch(r"rsk_[\w-]{43}", stack.keys[role]) for role in ROLE_KEYS), "a key does not look like one")
    seen = until(lambda: all_there(stack), f"{REPLICAS} replicas in GET /status", within_s=30)
    step(f"up --wait: PostgreSQL, {REPLICAS} replicas, HAProxy healthy after {took():.0f} s; GET /status has {seen}")


def replicas(stack: Stack) -> list[str]:
    """Container ids."""
    return stack.compose("ps", "--all", "--quiet", "replica").split()


def status(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = answer(f"{stack.url}/status", key=stack.keys["read"])
    return found


def all_there(stack: Stack) -> list[str]:
    """Names of the replicas that `GET /status` lists, where there are as many as there should be."""
    names = [str(replica["name"]) for replica in status(stack).get("replicas", [])]
    return names if len(names) == REPLICAS else []


def doors(stack: Stack) -> None:
    need(curl(f"{stack.url}/livez")[0] == 200, "/livez wants a key")
    for path in ("/status", "/metrics", "/groups"):
        need(curl(f"{stack.url}{path}")[0] == 401, f"{path} answers without a key")
    answer(f"{stack.url}/leases", key=stack.keys["submit"], body={"max_groups": 1}, status=403)
    status, text = curl(f"{stack.url}/groups/g-1", key=stack.keys["read"])
    need(status == 404 and json.loads(text)["type"].startswith("/problems/"), f"a problem comes through as {text}")
    step("doors: 401 without a key, 403 beyond a role, problems as the service words them, through HAProxy")


def confinement(stack: Stack) -> None:
    for name in ("postgres", "replica", "load-balancer"):
        found = stack.container(name)
        host = found["HostConfig"]
        need("ALL" in host["CapDrop"] and "no-new-privileges:true" in host["SecurityOpt"], f"{name} is not confined")
        need(host["ReadonlyRootfs"], f"{name} can write its root")
        published = [at["HostIp"] for ports in found["NetworkSettings"]["Ports"].values() for at in ports or []]
        need(published == (["127.0.0.1"] if name == "load-balancer" else []), f"{name} is published at {published}")
    networks = set(stack.container("postgres")["NetworkSettings"]["Networks"])
    need(networks == {f"{PROJECT}_database"}, f"PostgreSQL is on {networks}")
    password = stack.execute("postgres", "cat", "/password/password")
    need(len(password) > 40, "there is no password")
    inspected = run("docker", "inspect", *stack.compose("ps", "--all", "--quiet").split())
    need(password not in inspected, "docker inspect shows the password of the database")
    refused = "PGPASSWORD=wrong psql -h 127.0.0.1 -U rollout -d rollout -c 'select 1'"
    need("authentication" in stack.execute("postgres", "sh", "-c", refused, check=False), "any password will do")
    step("confinement: read-only roots, no capabilities; PostgreSQL on its own network, its password in no container's")


def prometheus(stack: Stack) -> None:
    def ask(expression: str) -> list[dict[str, Any]]:
        status, text = curl(f"{stack.prometheus}/api/v1/query?query={expression}")
        need(status == 200, f"Prometheus on {expression}: {text[:300]}")
        found: list[dict[str, Any]] = json.loads(text)["data"]["result"]
        return found

    def targets() -> set[str]:
        rows = ask("up%20%3D%3D%201")
        return {row["metric"]["instance"] for row in rows if row["metric"]["job"] == "rollout-service"}

    found = until(lambda: len(targets()) == REPLICAS and targets(), "Prometheus scrapes every replica")
    step(f"Prometheus: scrapes {len(found)} replicas by themselves")


class Trainer:
    """A trainer and whoever submits prompts, through the load balancer."""

    def __init__(self, stack: Stack) -> None:
        # A call that finds every replica ending or starting is repeated for a minute.
        self.client = RolloutClient(stack.url, api_key=stack.keys["trainer"])
        self.submitted = 0
        self.leased: Counter[str] = Counter()
        self.acked: Counter[str] = Counter()
        """Prompt id -> how often."""

    def submit(self, count: int, *, final: bool = False) -> None:
        prompts = [
            {"prompt_id": f"p{number}", "prompt": "The sea", "sampling": SAMPLING}
            for number in range(self.submitted, self.submitted + count)
        ]
        self.client.submit(prompts, final=final)
        self.submitted += count

    def train(self) -> bool:
        """One step: lease and ack; False once the run is exhausted."""
        lease = self.client.lease(max_groups=4, wait_s=20, lease_s=120)
        for group in lease.groups:
            self.leased[group.prompt_id] += 1
            need(not self.acked[group.prompt_id], f"{group.prompt_id} was leased again after its ack")
        if lease.groups:
            self.client.ack(lease)
            self.acked.update(group.prompt_id for group in lease.groups)
        return lease.status != "exhausted"

    def keep_going(self) -> None:
        """A step, with more prompts where they run out."""
        while self.submitted - len(self.acked) < AHEAD:
            self.submit(8)
        self.train()


@contextmanager
def killing(stack: Stack) -> Iterator[list[float]]:
    """Kills a replica every `KILL_EVERY_S` and starts it again; yields when it did so."""
    kills: list[float] = []
    trouble: list[str] = []
    end = threading.Event()
    choose = random.Random(8)

    def work() -> None:
        due = time.monotonic() + KILL_EVERY_S
        while not end.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + KILL_EVERY_S  # however long it takes to start one again
            number = choose.choice(containers)
            try:
                run("docker", "kill", number)
                kills.append(time.monotonic())
                run("docker", "start", number)
            except Failed as error:
                trouble.append(str(error))
                return

    containers = replicas(stack)
    thread = threading.Thread(target=work, name="killer")
    thread.start()
    try:
        yield kills
    finally:
        end.set()
        thread.join()
    need(not trouble, f"killing: {trouble}")


def killed(stack: Stack, trainer: Trainer) -> None:
    with timed() as took, killing(stack) as kills:
        while len(kills) < KILLS:
            trainer.keep_going()
    until(lambda: ready(stack) and all_there(stack), f"{REPLICAS} replicas after the kills", within_s=60)
    identity(stack)
    done, again = len(trainer.acked), sum(count - 1 for count in trainer.leased.values())
    step(f"{len(kills)} kills in {took():.0f} s: {done} groups acked meanwhile, {again} of them leased more than once")


def identity(stack: Stack) -> dict[str, Any]:
    """Both sides of it, at every replica the load balancer gives; returns the last status."""
    for _ in range(REPLICAS * 2):
        found = status(stack)
        groups = found["groups"]
        need(found["submitted"] == sum(groups.values()), f"submitted {found['submitted']}, groups {groups}")
        ended = sum(groups[state] for state in ("acked", "stale", "dropped", "failed"))
        need(found["submitted"] == ended + found["outstanding"], f"outstanding {found['outstanding']}, groups {groups}")
    return found


def restarted(stack: Stack, trainer: Trainer) -> None:
    """One after the other, as docs/replicas.md has it, while the trainer goes on."""
    health = "{{.State.Health.Status}}"
    with timed() as took:
        for number in replicas(stack):
            run("docker", "restart", number)
            state = json.loads(run("docker", "inspect", number))[0]["State"]
            need(not state["OOMKilled"], f"a replica ran out of memory: {state}")
            deadline = time.monotonic() + 90
            while run("docker", "inspect", "-f", health, number).strip() != "healthy":
                need(time.monotonic() < deadline, "a replica that was restarted is not healthy again")
                trainer.keep_going()
    identity(stack)
    step(f"rolling restart in {took():.0f} s: no call failed; {len(trainer.acked)} groups acked by now")


def database_restarted(stack: Stack, trainer: Trainer) -> None:
    before = len(trainer.acked)
    with timed() as took:
        stack.compose("restart", "postgres")
        while len(trainer.acked) < before + AHEAD:
            trainer.keep_going()
    until(lambda: ready(stack) and all_there(stack), f"{REPLICAS} replicas after the restart", within_s=60)
    identity(stack)
    step(f"PostgreSQL restarted: {AHEAD} more groups acked {took():.0f} s after; no call failed")


def ended(stack: Stack, trainer: Trainer) -> None:
    trainer.submit(8, final=True)
    while trainer.train():
        pass
    found = identity(stack)
    groups = {state: count for state, count in found["groups"].items() if count}
    need(groups == {"acked": trainer.submitted}, f"{trainer.submitted} submitted, the end is {groups}")
    once = Counter(trainer.acked.values())
    need(once == {1: trainer.submitted}, f"acked so often: {once}")
    need(found["outstanding"] == 0, f"outstanding: {found['outstanding']}")
    trainer.client.close()
    step(f"the end: submitted {trainer.submitted} = acked {groups['acked']}; every prompt acked exactly once")


def quiet_logs(stack: Stack) -> None:
    logs = stack.compose("logs", "--no-color")
    password = stack.execute("postgres", "cat", "/password/password")
    need("rsk_" not in logs and password not in logs, "logs show a key or the database's password")
    need("The sea" not in stack.compose("logs", "--no-color", "replica", "load-balancer"), "a log shows a prompt")
    need("Traceback" not in stack.compose("logs", "--no-color", "replica"), "a replica's log has a traceback")
    step(f"logs: no key, no password, no prompt, no traceback (image {TAG})")
