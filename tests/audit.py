"""`make check`'s look at known faults of what we depend on: pip-audit over the lock of the service's environment.

Exit 0: no known fault, or no advisory could be had (said aloud, for then nothing was checked); 1: faults, one a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LOCK = "requirements/dev.txt"
ANSWERED: Mapping[str, str] = {}
"""Id of an advisory → why it does not touch us."""


def judge(document: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Exit status and lines for people, of pip-audit's JSON."""
    packages: Sequence[Mapping[str, Any]] = document["dependencies"]
    looked_up = [package for package in packages if "skip_reason" not in package]
    lines: list[str] = []
    status = 0
    for package in looked_up:
        for fault in package["vulns"]:
            known = [answer for name in (fault["id"], *fault.get("aliases", [])) if (answer := ANSWERED.get(name))]
            if known:
                lines.append(f"{package['name']} {package['version']}: {fault['id']}: answered: {known[0]}")
            else:
                fixed = ", ".join(fault["fix_versions"]) or "none yet"
                lines.append(f"{package['name']} {package['version']}: {fault['id']}: fixed in: {fixed}")
                status = 1
    if not looked_up:
        lines.append(f"pip-audit: NOTHING WAS CHECKED: no advisory could be had for any of {len(packages)} packages")
    else:
        lines.append(f"pip-audit: {len(looked_up)} of {len(packages)} packages checked")
    return status, lines


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "-r", LOCK, "--no-deps", "--disable-pip", "-f", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        sys.stdout.write(f"pip-audit: NOTHING WAS CHECKED: {last}\n")
        return 0
    status, lines = judge(document)
    sys.stdout.write("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
