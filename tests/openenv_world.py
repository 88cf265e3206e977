"""An environment for the tests of OpenEnv, and its server: `python -m tests.openenv_world PORT FOLDER PLACES`.

The environment writes what happens to it to FOLDER/events.jsonl, a line each: `made`, `reset`, `step`, `stepped`
and `close`, with its own number. A step waits while FOLDER/hold exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from examples.processes import Process, free_port

REPOSITORY = Path(__file__).resolve().parent.parent
READY_S = 90.0
"""Importing openenv takes many seconds on a small machine."""


class World:
    """A running server; `events` is what its environments wrote."""

    def __init__(self, folder: Path, places: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.places, self.port = folder, places, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Process | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.openenv_world", str(self.port), str(self.folder)]
        environ = {"PYTHONPATH": str(REPOSITORY)}
        log = self.folder / "server.log"
        self.process = Process("openenv", [*command, str(self.places)], log, env=environ, cwd=REPOSITORY)
        self.process.wait_ready(f"{self.url}/health", READY_S)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def let_go(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["event"])]

    def clear(self) -> None:
        """Forget what was; all environments must be closed."""
        (self.folder / "events.jsonl").unlink(missing_ok=True)

    def open_sessions(self) -> int:
        return len(self.events("made")) - len(self.events("close"))


@contextlib.contextmanager
def world(folder: Path, places: int = 64) -> Iterator[World]:
    """A server that runs inside the `with` block."""
    server = World(folder, places)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        print(f"--- end of the openenv server's log\n{server.process.tail() if server.process else 'not started'}")


def serve(port: int, folder: Path, places: int) -> None:
    """Serves until the process is told to end."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    numbers = count()

    class Said(Action):
        message: str = ""
        add: int | None = None

    class Seen(Observation):
        text: str = ""
        total: int | None = None

    class Counting(Environment[Said, Seen, State]):
        """Each step adds `add`, or the length of the message, to a total; the rewards are 1, 2, 3; the third step ends.

        Arguments of reset change that: `start`, the first total; `steps`, after how many it ends; `fails_at`, the step
        that raises (0: the reset); `unscored`, no rewards; `over`, done at once.
        """

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.number, self.steps, self.total = next(numbers), 0, 0
            self.arguments: dict[str, Any] = {}
            self.write("made")

        def write(self, event: str, **more: Any) -> None:
            with open(folder / "events.jsonl", "a") as file:
                file.write(json.dumps({"event": event, "env": self.number, **more}) + "\n")

        def reset(self, seed: int | None = None, episode_id: str | None = None, **arguments: Any) -> Seen:
            self.write("reset", seed=seed, episode_id=episode_id, arguments=arguments)
            self.arguments = arguments
            self.steps, self.total = 0, arguments.get("start", 0)
            self.fail_where_told()
            return Seen(text=f"total {self.total}", reward=100.0, done=arguments.get("over", False))

        def step(self, action: Said, timeout_s: float | None = None, **more: Any) -> Seen:
            self.steps += 1
            self.write("step", action=action.model_dump(exclude={"metadata"}))
            while (folder / "hold").exists():
                time.sleep(0.01)
            self.write("stepped")
            self.fail_where_told()
            self.total += len(action.message) if action.add is None else action.add
            reward = None if self.arguments.get("unscored") else self.steps
            done = self.steps == self.arguments.get("steps", 3)
            return Seen(text=f"total {self.total}", total=self.total, reward=reward, done=done)

        def fail_where_told(self) -> None:
            if self.arguments.get("fails_at") == self.steps:
                raise ValueError("the board is on fire")

        @property
        def state(self) -> State:
            return State(step_count=self.steps)

        def close(self) -> None:
            self.write("close")

    app = create_fastapi_app(Counting, Said, Seen, max_concurrent_envs=places)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # a step that still holds must not keep the process
