"""Check that the batch script loses no signal and no exit code, with the bash of this machine."""

import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pretrain.launcher.site import parse_site
from pretrain.launcher.slurm_job import Job, launcher_command
from tests.end_to_end.commands import TIMEOUT_SECONDS, executable, wait_for
from tests.unit.test_site import CPU


class Script:
    """A batch script that runs in a session of its own, as under Slurm."""

    def __init__(self, folder: Path, command: Sequence[str], is_launcher: bool = True) -> None:
        self.folder = folder
        given = launcher_command("attempt", "RUN") if is_launcher else tuple(command)
        job = Job("a", parse_site(CPU, "site"), folder, folder, (given,))
        words = shlex.join(command).replace("\\", r"\\")
        script = executable(folder / "job.sbatch", re.sub(r"(?<=set -- ).*", words, job.script()))
        self.process = subprocess.Popen([script], start_new_session=True)

    def wait_for(self, name: str) -> None:
        def exists() -> bool:
            assert self.process.poll() is None, self.process.returncode
            return (self.folder / name).exists()

        wait_for(exists)


@pytest.mark.parametrize("seed", range(6))
def test_the_exit_code_is_the_command_s_whenever_signals_come(seed, tmp_path):
    """Many signals around the moment at which the command ends."""
    dice, code = random.Random(seed), 100 + seed
    command = f"trap '' USR1 TERM; kill -s USR2 $PRETRAIN_BATCH_SCRIPT; : > started; exit {code}"
    script = Script(tmp_path, ["bash", "-c", command])
    while script.process.poll() is None:
        if (tmp_path / "started").exists():
            script.process.send_signal(dice.choice([signal.SIGUSR1, signal.SIGTERM]))
        time.sleep(dice.random() / 1000)
    assert script.process.returncode == code


def test_the_exit_code_is_read_whole_when_the_time_to_read_ends_inside_it(tmp_path):
    """On a busy machine bash may lose the processor between two digits until its second is over."""
    job = Job("a", parse_site(CPU, "site"), tmp_path, tmp_path, (("true",),))
    read, write = os.pipe()
    starts = re.compile(r"^exec 3< <\(\n.*?^\)\n", re.DOTALL | re.MULTILINE)
    script, count = starts.subn(f"exec 3<&{read}\n", job.script())
    assert count == 1
    with subprocess.Popen(
        ["bash", "-x", "-c", script], stderr=subprocess.PIPE, text=True, pass_fds=[read]
    ) as process:
        os.write(write, b"1\n8")
        # bash -x prints a command before it runs it.
        reads = (line for line in process.stderr if "read -r -t 1" in line)
        next(reads), next(reads)
        os.write(write, b"0\n")
        os.close(write)
        # To its end: a pipe that is closed before would end bash.
        process.stderr.read()
    os.close(read)
    assert process.returncode == 80


def test_a_command_that_is_no_launcher_gets_signals_at_once(tmp_path):
    """Such as a task of a data build: nobody says that it handles signals, and it does not."""
    script = Script(tmp_path, ["bash", "-c", ": > started; exec sleep 600"], is_launcher=False)
    script.wait_for("started")
    script.process.send_signal(signal.SIGTERM)
    assert script.process.wait(TIMEOUT_SECONDS) == 128 + signal.SIGTERM
