"""Put a program in front of one of Slurm's that counts its calls, is slow, and fails at times.

The calls that do not fail are answered by the real program.
"""

from __future__ import annotations

import random
import shlex
import shutil
from pathlib import Path

NUM_CALLS = 1000
"""After so many calls the pattern of failures starts again."""
TIMED_OUT = "slurm_load_jobs error: Socket timed out on send/recv operation"
# The lock makes the count right when several processes call at once. It is not held while the
# program sleeps, so that slow calls run side by side, as they do at a slow slurmctld.
SCRIPT = """#!/bin/sh
number=$(
    flock 9
    printf '%s' "$*" | tr '\\n' ' ' >&9
    echo >&9
    wc -l <{calls}
) 9>>{calls}
sleep {seconds}
if [ "$(sed -n "$(((number - 1) % {count} + 1))p" {pattern})" = fails ]; then
    echo {message} >&2
    exit 1
fi
exec {program} "$@"
"""


class StandIn:
    """A program named as one of Slurm's, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        name: str,
        search_path: str,
        *,
        failing: float = 0,
        seed: int = 0,
        seconds: float = 0,
        message: str = TIMED_OUT,
    ) -> None:
        """Write the program. It may be written anew while jobs use it, with other values.

        Args:
            folder: Gets the folder NAME.stand-in.
            name: The program's name, such as "squeue".
            search_path: The PATH on which the real one is found.
            failing: The share of calls that fail.
            seed: Chooses the calls that fail.
            seconds: How long each call takes before it fails or calls the real program.
            message: What a failing call writes to stderr.
        """
        real = shutil.which(name, path=search_path)
        assert real, f"no {name} on {search_path}"
        self.folder = folder / f"{name}.stand-in"
        self.folder.mkdir(exist_ok=True)
        self.path = f"{self.folder}:{search_path}"
        """PATH with this program first."""
        self._calls = self.folder / "calls"
        self._calls.touch()
        draw = random.Random(seed)
        pattern = self.folder / "pattern"
        pattern.write_text(
            "".join("fails\n" if draw.random() < failing else "\n" for _ in range(NUM_CALLS))
        )
        written = self.folder / "written"
        written.write_text(
            SCRIPT.format(
                calls=shlex.quote(str(self._calls)),
                seconds=seconds,
                count=NUM_CALLS,
                pattern=shlex.quote(str(pattern)),
                message=shlex.quote(message),
                program=shlex.quote(real),
            )
        )
        written.chmod(0o755)
        # Renamed into its place: a shell reads its script while it runs it.
        written.rename(self.folder / name)

    @property
    def calls(self) -> list[str]:
        """The arguments of each call so far, joined by spaces."""
        return self._calls.read_text().splitlines()
