"""Each patch here takes one safeguard away; the one test it names must then fail: `python -m mutants.run [name ...]`.

What always holds: patches are applied to copies in a temporary folder, never to this tree; a test counts as having
caught a patch only if it passes without it, and only if it failed by itself (not by an error of collection); the exit
status is 0 if and only if every patch applied and was caught.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
COPIED = ("rollout_service", "trainer_client", "tests", "examples", "pyproject.toml")
IGNORED = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
TESTS_FAILED = 1
"""pytest's exit status; any other one than 0 means that no test could fail."""
WITHIN_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One patch file: `# what: …` and `# test: …`, then a unified diff."""

    name: str
    what: str
    test: str
    diff: str

    @classmethod
    def read(cls, path: Path) -> Mutant:
        text = path.read_text()
        header = dict(re.findall(r"^# (what|test): (.+)$", text, re.MULTILINE))
        return cls(name=path.stem, what=header["what"], test=header["test"], diff=text[text.index("--- a/") :])


def main(names: list[str]) -> int:
    mutants = [Mutant.read(path) for path in sorted(HERE.glob("*.patch")) if not names or path.stem in names]
    if not mutants or len(mutants) < len(set(names)):
        print(f"no such patches in {HERE}: {names}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        whole = _copy(Path(folder, "whole"))
        code, said = _test(whole, *{mutant.test for mutant in mutants})
        if code != 0:
            print(f"without any patch the named tests do not pass:\n{said}")
            return 1
        faults = [fault for mutant in mutants if (fault := _fault(mutant, Path(folder, mutant.name))) is not None]
    for fault in faults:
        print(fault)
    print(f"mutants: {len(mutants)}, caught: {len(mutants) - len(faults)}")
    return 1 if faults else 0


def _fault(mutant: Mutant, folder: Path) -> str | None:
    """Why the mutant is not caught; None where it is."""
    tree = _copy(folder)
    applying = ["git", "apply", "-p1", "-"]
    applied = subprocess.run(  # noqa: S603  # a patch of this folder, applied to a copy
        applying, cwd=tree, input=mutant.diff, text=True, capture_output=True, check=False
    )
    if applied.returncode != 0:
        return f"{mutant.name}: the patch no longer applies; make it anew: {applied.stderr.strip()}"
    code, said = _test(tree, mutant.test)
    if code == TESTS_FAILED:
        print(f"{mutant.name}: caught by {mutant.test} ({mutant.what})", flush=True)
        return None
    return f"{mutant.name}: {mutant.test} does not fail ({mutant.what}); pytest ended with {code}:\n{said[-2000:]}"


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for name in COPIED:
        source = TREE / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=IGNORED)
        else:
            shutil.copy(source, folder)
    return folder


def _test(tree: Path, *tests: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: S603  # the test a patch of this folder names
        command, cwd=tree, env=environ, text=True, capture_output=True, check=False, timeout=WITHIN_S
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
