"""Run the parts that are not complete yet, one process each, and gather what they have found."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_day.parts import PARTS, Part
from benchmarks.gpu_day.results import Rows, markdown, state
from benchmarks.gpu_day.sizes import device_name, sizes_name
from pretrain.rundir.files import replace_json

LOG_LINES = 15
"""Lines of a failed part's log that are shown on the terminal."""
LOG_CHARACTERS = 8000
"""End of an unfinished part's log that the summary holds."""


def main() -> None:
    """Run the parts, in order; exit with 1 if one that ran is not complete or found a fault."""
    arguments = parse_arguments(sys.argv[1:])
    if arguments.list:
        print("expected  at most")
        for part in PARTS:
            print(f"{part.expected:>6} s {part.seconds:>6} s  {part.name:<21}  {part.question}")
        return
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(f"{sizes_name()}; {device_name()}; torch {torch.__version__}; results: {out}")
    chosen = [part for part in PARTS if not arguments.part or part.name in arguments.part]

    def run(part: Part, seconds: float) -> bool:
        good = run_part(out, part, seconds)
        (out / "summary.md").write_text(summary(out))
        return good

    sys.exit(not run_parts(out, chosen, arguments.budget_seconds, run, time.monotonic))


def run_parts(
    out: Path,
    parts: Sequence[Part],
    budget: float,
    run: Callable[[Part, float], bool],
    clock: Callable[[], float],
) -> bool:
    """Run each part that is not complete and for which there should be time.

    A part that takes longer than expected is cut off at the end of the budget, and goes on in the
    next call, which begins with it.

    Args:
        out: Directory of the results.
        parts: In the order in which they are tried.
        budget: Seconds for all of them.
        run: Runs a part for so many seconds at most; False if it is not complete or found a fault.
        clock: Seconds since any moment.

    Returns:
        True if `run` never returned False.
    """
    deadline, good = clock() + budget, True
    for part in parts:
        last, left = state(out, part.name), deadline - clock()
        if is_complete(out, part):
            print(
                f"{part.name}: complete at commit {last['commit']}, {last['ending']}; to repeat "
                f"it, remove {out / part.name}.*"
            )
            continue
        if part.expected > left:
            print(f"{part.name}: should take {part.expected} s, and {left:.0f} s are left")
            continue
        good &= run(part, min(part.seconds, left))
    return good


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description="Measure what only a GPU can show."
    )
    parser.add_argument("--list", action="store_true", help="List the parts and their limits.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_day"))
    parser.add_argument(
        "--part",
        action="append",
        choices=[part.name for part in PARTS],
        metavar="NAME",
        help="Run this part only; may be given several times.",
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=float("inf"),
        help="Start no part that should take more than what is left of this, and end by then.",
    )
    return parser.parse_args(arguments)


def is_complete(out: Path, part: Part) -> bool:
    """Return True if the part has been run to its end on a device of this kind."""
    last = state(out, part.name)
    return last.get("complete") is True and last.get("device") == device_name()


def run_part(out: Path, part: Part, seconds: float) -> bool:
    """Run a part in a process of its own, which may crash or hang without harm to the others.

    Args:
        out: Directory of the results.
        part: What to run. Its output is appended to OUT/NAME.log.
        seconds: After so many its process is ended.

    Returns:
        True if the part is complete and its process found no fault.
    """
    print(f"{part.name}: {part.question} (up to {seconds:.0f} s)", flush=True)
    begin = time.monotonic()
    log = out / f"{part.name}.log"
    with log.open("a") as file:
        # A session of its own, so that workers of the part end with it.
        process = subprocess.Popen(
            part.command(out), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    complete = code in part.complete_codes
    ending = f"cut off after {seconds:.0f} s" if code is None else f"exit code {code}"
    replace_json(
        out / f"{part.name}.json",
        {
            "part": part.name,
            "complete": complete,
            "ending": ending,
            "seconds": round(time.monotonic() - begin, 1),
            "device": device_name(),
            "sizes": sizes_name(),
            "torch": torch.__version__,
            "commit": commit(),
        },
        indent=1,
    )
    print(f"{part.name}: {'complete' if complete else 'NOT complete'}, {ending}", flush=True)
    if not complete:
        print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]), flush=True)
    return complete and code == 0


def commit() -> str:
    """Return the commit of the working tree, or "unknown" where there is no git."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def summary(out: Path) -> str:
    """Return everything that was found so far as one Markdown page."""
    states = {part.name: state(out, part.name) for part in PARTS}
    known = [content for content in states.values() if content]
    sections = [f"# Results of {device_name()}", f"Sizes: {sizes_name()}.", markdown(known)]
    for part in PARTS:
        if not states[part.name]:
            continue
        sections += [f"## {part.name}", part.question]
        rows = list(Rows(out, part.name))
        # Of tests only those that failed are worth a line.
        tests = [row for row in rows if "test" in row]
        if tests:
            counts = Counter(row["outcome"] for row in tests)
            sections.append(", ".join(f"{n} tests {outcome}" for outcome, n in counts.items()))
            rows = [row for row in tests if row["outcome"] == "failed"]
        if rows:
            sections.append(markdown(rows))
        page, log = out / f"{part.name}.md", out / f"{part.name}.log"
        if page.exists():
            # One title a page.
            sections.append(re.sub(r"^# ", "### ", page.read_text().strip(), flags=re.MULTILINE))
        elif not states[part.name]["complete"]:
            # What the part had printed when it was ended.
            sections.append(f"```\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}\n```")
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main()
