"""Every benchmark, one after the other, and one table of what they found.

A benchmark that fails leaves its figures out, is named at the end, and makes the exit code 1; a figure that misses its
goal does not: the table says so. bench.json is written after each benchmark, so that a run that is broken off keeps
what it has. A run of all of them begins with an empty bench.json.

    python -m benchmarks [--rounds 5] [--only throughput,memory] [--quick] [--output bench.json]
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from typing import cast

from benchmarks.report import Bench, Figure, arguments, machine, rounds_of, say, table, write

BENCHES = (
    "throughput",
    "trl_worker",
    "vllm_tokens",
    "aborts",
    "waste",
    "refill",
    "lag",
    "leases",
    "prefetch",
    "memory",
    "restart",
    "replicas",
)
"""In the order of the table."""


def bench(name: str) -> Bench:
    # Imported when it runs: one imports torch, and what it holds would be in the memory others see as taken.
    return cast(Bench, importlib.import_module(f"benchmarks.{name}"))


def main() -> int:
    parser = arguments("every benchmark and one table")
    parser.add_argument("--only", type=lambda text: text.split(","), default=None, help=f"of {', '.join(BENCHES)}")
    given = parser.parse_args()
    unknown = [name for name in given.only or () if name not in BENCHES]
    if unknown:
        parser.error(f"--only: no benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    if given.only is None:
        given.output.unlink(missing_ok=True)
    rounds, figures, failed = rounds_of(given), list[Figure](), list[str]()
    begun = time.monotonic()
    for name in given.only or BENCHES:
        say(f"{name} …")
        started = time.monotonic()
        try:
            found = bench(name).measure(rounds, quick=given.quick)
        except Exception:
            # The other figures are worth having; this one is named at the end.
            traceback.print_exc()
            failed.append(name)
            continue
        figures += found
        write(found, given.output, rounds=rounds, quick=given.quick)
        say(f"{name}: {time.monotonic() - started:.0f} s")
    print("\n".join(f"{what}: {value}" for what, value in machine().items()))
    quick = ", with short windows: no measurement" if given.quick else ""
    minutes = (time.monotonic() - begun) / 60
    print(f"\nmedians of {rounds} alternating runs{quick}; {minutes:.0f} minutes\n\n{table(figures)}")
    if failed:
        print(f"\nfailed, their figures are missing: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
