"""Replicas in network namespaces of their own, with a cable to the database, one to the engines and one to callers.

What always holds: a cut cable drops what is sent, it resets nothing; namespaces and bridges go with the context that
made them, whatever happened in between. Needs root.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from enum import StrEnum

import pytest


class Cable(StrEnum):
    """What a replica is connected to."""

    DATABASE = "d"
    ENGINES = "e"
    CALLERS = "c"


class Network:
    """A bridge for each kind of cable; this process sits at all of them. Use as a context manager."""

    def __init__(self, replicas: int) -> None:
        self.replicas = range(replicas)
        self._prefix = f"rs{os.getpid()}"
        self._net = ""

    def __enter__(self) -> Network:
        _require()
        self._net = _free_net()
        try:
            for at, cable in enumerate(Cable):
                bridge = f"{self._prefix}{cable}"
                _ip("link", "add", bridge, "type", "bridge")
                _ip("addr", "add", f"{self._net}.{at}.1/24", "dev", bridge)
                _ip("link", "set", bridge, "up")
            for n in self.replicas:
                self._add(n)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for n in self.replicas:
            _ip("netns", "del", self._name(n), check=False)  # its ends of the cables go, and with them ours
        for cable in Cable:
            _ip("link", "del", f"{self._prefix}{cable}", check=False)

    @property
    def range(self) -> str:
        """Of all addresses."""
        return f"{self._net}.0.0/16"

    def around(self, n: int) -> tuple[str, ...]:
        """A command that runs the one that follows it as replica `n`'s host would."""
        return ("ip", "netns", "exec", self._name(n))

    def here(self, cable: Cable) -> str:
        """Address of this process at that kind of cable."""
        return f"{self._net}.{list(Cable).index(cable)}.1"

    def there(self, n: int, cable: Cable) -> str:
        """Address of replica `n`."""
        return f"{self._net}.{list(Cable).index(cable)}.{n + 2}"

    def cut(self, n: int, cable: Cable) -> None:
        _ip("link", "set", self._ours(n, cable), "down")

    def heal(self, n: int, cable: Cable) -> None:
        _ip("link", "set", self._ours(n, cable), "up")

    def part(self, *, parted: bool = True) -> None:
        """Replicas hear nothing of each other any more, on any cable; this process does."""
        for n in self.replicas:
            for cable in Cable:
                _run("bridge", "link", "set", "dev", self._ours(n, cable), "isolated", "on" if parted else "off")

    def reaches(self, n: int, address: str, port: int) -> bool:
        """Whether replica `n`'s host can connect there, within a second."""
        code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"
        command = [*self.around(n), "python3", "-c", code, address, str(port)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _add(self, n: int) -> None:
        name = self._name(n)
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        for cable in Cable:
            ours = self._ours(n, cable)
            _ip("link", "add", ours, "type", "veth", "peer", "name", cable.name.lower(), "netns", name)
            _ip("link", "set", ours, "master", f"{self._prefix}{cable}", "up")
            _ip("-n", name, "addr", "add", f"{self.there(n, cable)}/24", "dev", cable.name.lower())
            _ip("-n", name, "link", "set", cable.name.lower(), "up")

    def _name(self, n: int) -> str:
        return f"{self._prefix}-{n}"

    def _ours(self, n: int, cable: Cable) -> str:
        return f"{self._prefix}{cable}{n}"


def _require() -> None:
    reason = ""
    if os.geteuid() != 0:
        reason = "only root may make network namespaces"
    elif not (shutil.which("ip") and shutil.which("bridge")):
        reason = "ip and bridge are not installed (Debian: apt install iproute2)"
    if not reason:
        probe = f"rsprobe{os.getpid()}"
        made = subprocess.run(
            ["ip", "link", "add", probe, "type", "bridge"], capture_output=True, check=False, text=True
        )
        if made.returncode == 0:
            _ip("link", "del", probe)
        else:
            reason = f"this kernel makes no bridges here: {made.stderr.strip()}"
    if reason and os.environ.get("REQUIRE_TOOLS") == "1":
        pytest.fail(f"REQUIRE_TOOLS=1, but {reason}")
    if reason:
        pytest.skip(reason)


def _free_net() -> str:
    """The first half of addresses nobody here uses."""
    used = subprocess.run(["ip", "-o", "addr"], capture_output=True, check=True, text=True).stdout
    while True:
        net = f"10.{random.randrange(128, 255)}"
        if f" {net}." not in used:
            return net


def _ip(*arguments: str, check: bool = True) -> None:
    _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
