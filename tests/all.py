"""Run all tests: `make test`. Those that wait come first, and those that compute fill the gaps.

    python tests/all.py [PYTEST ARGUMENTS]

WAITING run one after the other: Slurm's clocks, ranks that wait for each other, and commands that
are killed and timed. COMPUTING run beside them from the beginning, with the time of the processors
that is left. A low priority by itself does nothing here: Linux shares the processors out among
sessions first (sched(7), autogroups), and every daemon of Slurm and every job has a session of its
own. Therefore the tests that compute are a session, whose share is made small as a whole until
they are alone.

The exit code is that of the first pytest that failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NICENESS = 10
"""Of the tests that compute: a tenth of the share of a session that waits."""
TWO_PROCESSES = ("-n", "2", "--dist", "loadfile")
DEADLINES = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        "attempts",
        "gpu_day",
        "launcher_local",
        "local_sweep",
        "preflight",
        "rendezvous",
        "reporter",
        "srun",
        "supervise",
    )
)
"""Files in which a process that gets no core for a second counts as hung."""
WAITING = (
    ("tests/slurm", *TWO_PROCESSES),
    ("tests/distributed",),
    ("tests/end_to_end", *DEADLINES, *TWO_PROCESSES),
)
COMPUTING = (
    "tests/unit",
    "tests/kernels",
    *(f"--ignore={file}" for file in DEADLINES),
    *TWO_PROCESSES,
)


def give_way(session: int, niceness: int) -> None:
    """Set the priority with which a whole session takes part in sharing out the processors."""
    # Not where the kernel groups by something else, as by the cgroups of a container.
    with contextlib.suppress(OSError):
        Path(f"/proc/{session}/autogroup").write_text(str(niceness))


def begin_low() -> None:
    os.nice(NICENESS)
    give_way(os.getpid(), NICENESS)


def main(arguments: list[str]) -> int:
    absent = [file for file in DEADLINES if not (ROOT / file).is_file()]
    assert not absent, f"DEADLINES names files that are gone: {absent}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pytest = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        computing = subprocess.Popen(
            [*pytest, *COMPUTING],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=begin_low,
        )
        try:
            codes = [subprocess.call([*pytest, *words], cwd=ROOT) for words in WAITING]
            give_way(computing.pid, 0)
            codes.append(computing.wait())
        finally:
            if computing.poll() is None:
                os.killpg(computing.pid, signal.SIGINT)
                computing.wait()
            output.seek(0)
            print("tests/unit and tests/kernels, beside the others:", output.read(), sep="\n")
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
