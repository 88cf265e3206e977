"""The package's public names, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import trainer_client
from trainer_client import AsyncRolloutClient, RolloutClient, errors, types

IMPORT_MS = 150.0
PROBE = """
import sys, time
before = time.process_time()
import trainer_client
print((time.process_time() - before) * 1e3)
print(*sorted({"httpx", "numpy", "torch", "asyncio", "safetensors", "rollout_service"} & set(sys.modules)))
"""


def public(module: object) -> set[str]:
    """Classes that are defined in a module and not private."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")  # type: ignore[attr-defined]  # modules have a name
    }


def test_every_error_and_every_value_is_exported_and_nothing_else():
    expected = public(errors) | public(types) | {"RolloutClient", "AsyncRolloutClient"}
    assert set(trainer_client.__all__) == expected
    assert sorted(trainer_client.__all__) == trainer_client.__all__
    assert all(hasattr(trainer_client, name) for name in trainer_client.__all__)


def test_both_clients_have_the_same_calls_with_the_same_parameters():
    def calls(client: type) -> dict[str, list[str]]:
        found = inspect.getmembers(client, inspect.isroutine)
        return {name: list(inspect.signature(call).parameters) for name, call in found if not name.startswith("_")}

    blocking, awaited = calls(RolloutClient), calls(AsyncRolloutClient)
    assert blocking.pop("close") == awaited.pop("aclose")
    assert blocking == awaited
    assert blocking["lease"][1:] == ["max_groups", "min_groups", "wait_s", "lease_s", "consumer", "request_id"]
    assert all(inspect.getdoc(getattr(RolloutClient, name)) for name in blocking)


def test_importing_the_package_is_cheap_and_brings_in_nothing_heavy():
    """CPU time, the best of five: other work on the machine does not count."""
    runs = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
        took, _, modules = done.stdout.partition("\n")
        runs.append(float(took))
        assert modules.strip() == ""
    print(f"import trainer_client: {min(runs):.0f} ms of CPU (best of {[round(run) for run in runs]})")
    assert min(runs) < IMPORT_MS
