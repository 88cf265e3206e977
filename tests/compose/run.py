"""docker-compose.yml, seen working: `make compose-test`, on whatever Docker engine the environment names.

What always holds: the compose file, its images' settings and `.env.example` are taken as they stand, but for free ports
and, by tests/compose/override.yml, vLLM's image; what this started is down, its volumes too, when it ends; each step
prints a line; the first that fails ends it with exit status 1 and the containers' last lines. A machine without Docker
is a failure, not a skip.

    python -m tests.compose.run
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.engine import environment
from examples.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "rollout-service-compose-test"
FILES = ("docker-compose.yml", "tests/compose/override.yml")
SERVICES = ("vllm-cpu", "rollout-service", "prometheus")
"""Not Grafana: its provisioning and its expressions have tests of their own, which need no image of half a gigabyte."""
MAX_IMAGE_MB = 300
STOP_WITHIN_S = 10.0
START_WITHIN_S = 420
ROLE_KEYS = ("admin", "trainer", "submit", "read")


class Failed(Exception):
    """A step did not come out as it should."""


def main() -> int:
    if reason := why_impossible():
        print(f"compose-test: {reason}", file=sys.stderr)
        return 1
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compose-test-") as folder:
        stack = Stack(Path(folder))
        try:
            stack.prepare()
            run_steps(stack)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED {error}")
            print(stack.compose("logs", "--no-color", "--tail=40", check=False))
            return 1
        finally:
            stack.down()
    print(f"compose-test passed in {time.monotonic() - started:.0f} s")
    return 0


def why_impossible() -> str:
    """Empty where Docker and Compose v2 answer, else the reason in one line."""
    if shutil.which("docker") is None:
        return "there is no docker command on this machine"
    if shutil.which("curl") is None:
        return "there is no curl command on this machine"
    engine = subprocess.run(["docker", "info", "-f", "{{.ServerVersion}}"], capture_output=True, text=True)
    if engine.returncode or not engine.stdout.strip():  # some answer 0 and nothing
        return f"no Docker engine answers: {' '.join(engine.stderr.split())}"
    compose = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True)
    version = compose.stdout.strip().removeprefix("v")
    if compose.returncode or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 20):
        return f"Compose 2.20 or newer is needed, this is {version or 'none'}"
    step(f"Docker engine {engine.stdout.strip()}, Compose {version}")
    return environment.why_impossible()


def step(text: str) -> None:
    print(f"  {text}", flush=True)


def need(condition: object, text: str) -> None:
    """Raises Failed with `text` unless `condition` holds."""
    if not condition:
        raise Failed(text)


class Stack:
    """The compose project of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env_file = folder / "env"
        self.ports = {name: free_port() for name in ("SERVICE_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
        self.url = f"http://127.0.0.1:{self.ports['SERVICE_PORT']}"
        self.prometheus = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}"
        self.keys: dict[str, str] = {}
        self._environ: dict[str, str] = {}

    def prepare(self) -> None:
        """The engine's environment, its model and the env file."""
        engine = environment.make()
        model = self.folder / "model"
        run(sys.executable, "-m", "examples.engine.make_tiny_model", str(model))
        # Made in a folder that is its owner's alone; in the container somebody else may read it.
        self.folder.chmod(0o755)
        example = (ROOT / ".env.example").read_text()
        changed = {
            "COMPOSE_PROFILES": "cpu,monitoring",
            "SERVICE_TAG": "compose-test",
            "PROMETHEUS_TAG": os.environ.get("PROMETHEUS_TAG", "latest"),
            "ENGINE_PYTHON": str(engine),
            "ENGINE_ENVIRONMENT": str(engine.parents[1]),
            "ENGINE_BASE_PYTHON": str(engine.resolve().parents[1]),
            "ENGINE_MODEL": str(model),
            **{name: str(port) for name, port in self.ports.items()},
        }
        # A later line of the same name wins.
        self.env_file.write_text(example + "\n" + "".join(f"{name}={value}\n" for name, value in changed.items()))
        names = {line.partition("=")[0] for line in self.env_file.read_text().splitlines()}
        # The shell's own variables would win over the file.
        self._environ = {name: value for name, value in os.environ.items() if name not in names}

    def compose(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        """Output of `docker compose …` on this project. Raises Failed where it fails and `check` is set."""
        files = [part for name in FILES for part in ("-f", str(ROOT / name))]
        command = ["docker", "compose", "--ansi", "never", "-p", PROJECT, "--project-directory", str(ROOT), *files]
        command += ["--env-file", str(self.env_file), *arguments]
        return run(*command, check=check, timeout=timeout, env=self._environ)

    def container(self, service: str) -> dict[str, Any]:
        """`docker inspect` of a service's container."""
        number = self.compose("ps", "--all", "--quiet", service).split()[0]
        found: dict[str, Any] = json.loads(run("docker", "inspect", number))[0]
        return found

    def execute(self, service: str, *command: str, check: bool = True) -> str:
        return self.compose("exec", "-T", service, *command, check=check)

    def down(self) -> None:
        """Containers, networks and volumes go; says so if any stayed."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10", check=False)
        label = f"label=com.docker.compose.project={PROJECT}"
        left = run("docker", "ps", "-aq", "--filter", label) + run("docker", "volume", "ls", "-q", "--filter", label)
        step("down: no container and no volume is left" if not left.strip() else f"LEFT BEHIND: {left.split()}")


def run(*command: str, check: bool = True, timeout: float = 600, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=ROOT)
    if check and done.returncode:
        raise Failed(
            f"{' '.join(command[:2])} … {' '.join(command[-3:])} exited {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def curl(url: str, *, key: str = "", body: object = None, method: str = "") -> tuple[int, str]:
    """Status and body of one call with curl. The key goes by standard input, so that no process list shows it."""
    command = ["curl", "-sS", "--max-time", "90", "-w", "\n%{http_code}", "--config", "-", url]
    if method:
        command += ["-X", method]
    if body is not None:
        command += ["-d", json.dumps(body)]
    config = f'header = "Authorization: Bearer {key}"\n' if key else ""
    done = subprocess.run(command, input=config, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"curl {url}: {done.stderr.strip()}")
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def answer(url: str, *, key: str = "", body: object = None, method: str = "", status: int = 200) -> Any:
    """The JSON of a call that has to answer `status`."""
    got, text = curl(url, key=key, body=body, method=method)
    need(
        got == status,
        f"{method} {url}: {got}, wanted {status}: {text[:500]}",
    )
    return json.loads(text)


def until(condition: Callable[[], Any], what: str, within_s: float = 60) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        need(time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}")
        time.sleep(0.25)
    return value


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    started = time.monotonic()
    yield lambda: time.monotonic() - started


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
    image = json.loads(run("docker", "image", "inspect", "rollout-service:compose-test"))[0]
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
    for role in ROLE_KEYS:
        stack.keys[role] = stack.execute("rollout-service", "cat", f"/keys/{role}.key").strip()
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


def ready(stack: Stack) -> bool:
    try:
        return curl(f"{stack.url}/readyz")[0] == 200
    except Failed:
        return False  # not listening yet


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
