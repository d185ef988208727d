"""Start the ranks of an attempt: as a step of this process's Slurm job, or on this machine.

For ranks on this machine, torchrun is not used, because it turns every exit code into 1, prints a
traceback of its own after a plain message about bad input, and imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError, RunConfig, dump_config, writing
from pretrain.config.errors import moment, say
from pretrain.config.run import is_url
from pretrain.launcher import agent, slurm, slurm_job
from pretrain.launcher.supervise import SIGNAL_CODE, Signals, Supervisor
from pretrain.processes import (
    KILL_AFTER_SECONDS,
    dies_with_parent,
    signals_blocked,
    terminate,
)
from pretrain.rundir.attempts import Attempt, Owner
from pretrain.rundir.checkpoints import saved_checkpoints
from pretrain.rundir.files import (
    Json,
    make_directory,
    open_own,
    parse_json,
    read_text,
    replace_file,
)
from pretrain.rundir.paths import ExitCode, RunPaths, check_apart
from pretrain.rundir.trust import check_trusted

KILL_SECONDS = 60.0
"""Time for Slurm to end the processes of a job step, and for the other ranks to end after one has
finished."""
ANSWER_SECONDS = 10.0
"""Time for the agents to kill their ranks."""
SETTLE_SECONDS = 0.5
"""Time after the first failure in which other ranks may report theirs, before they are killed."""
TOGETHER = {*ExitCode} - {ExitCode.FINISHED, ExitCode.FAILED, ExitCode.KILLED}
"""Exit codes with which all ranks end by themselves within moments, once one rank does."""
LOST_SECONDS = 3 * agent.BEAT_SECONDS
"""The time of silence after which an agent and its node count as lost."""
IN_COLLECTIVE = b"distributed_c10d.py"
"""The source file of torch in which a rank waits for the others, as its stack shows."""


class SrunRanks:
    """The ranks of one attempt as a step of this process's job; an implementation of `Ranks`.

    srun starts an agent for each rank (agent.py), which starts the rank, passes signals on to it
    and reports how it ended. Only what an agent reported counts as the end of its rank: the exit
    code of srun may come from a container, or from slurmstepd if it found no Python.

    All output of srun goes to the log. The output of rank 0 and of srun itself also goes to the
    stdout of this process, which is the job's log.
    """

    def __init__(
        self,
        step: Sequence[str],
        command: Sequence[str],
        job_id: str,
        name: str,
        environment: Mapping[str, str],
        log: Path,
        nodes: Sequence[str] = (),
    ) -> None:
        """Start the ranks.

        Args:
            step: srun with its options and the container.
            command: The command of each rank, beginning with its Python.
            job_id: The job this process runs in.
            name: The name by which Slurm finds the job step.
            environment: Environment variables to add.
            log: The file to append the output to.
            nodes: The nodes of the job to start the ranks on, in Slurm's order; by default srun
                chooses.

        Raises:
            ConfigError: srun cannot be started.
            RunFailed: The log cannot be written.
        """
        self.failure = ""
        self.nodes: tuple[str, ...] = ()
        self._job_id, self._name, self._log = job_id, name, log
        self._where = slurm_job.nodes_of_ranks(step, nodes)
        self._num_tasks = slurm_job.num_tasks(step)
        self._dumped_from = 0
        self._code: int | None = None
        self._is_asked, self._deadline = False, float("inf")
        self._heard: dict[int, float] = {}
        """When the agent of a rank last reported, by time.monotonic."""
        self._ends: dict[int, int] = {}
        """How ranks ended by themselves, in the order of their reports: the exit code, or -n for
        signal n."""
        self._ended: set[int] = set()
        """The ranks that have ended for any reason."""
        self._ordered_end = False
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            file = open_own(log)  # closed by _copy_output
        self._srun = start_srun(
            [*slurm_job.named_step(step, name, nodes), command[0], "-m", agent.MODULE, *command],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
        )
        output = self._srun.stdout
        self._copier = threading.Thread(target=self._copy_output, args=(output, file), daemon=True)
        self._copier.start()
        self._order(agent.HELLO)
        self._last_look = time.monotonic()

    def poll(self) -> int | None:
        """Return None while the ranks run, then 0 or the exit code of the rank that failed first.

        The first failure also ends the other ranks, which wait for the failed one in a collective
        operation and would never end.
        """
        if self._code is None and (self._srun.poll() is not None or self._is_over()):
            is_lost = self._srun.poll() is not None
            self.kill()
            self._code = self._judge(is_lost)
        return self._code

    @property
    def has_started(self) -> bool:
        """Return True if srun has started a rank."""
        return bool(self._heard)

    @property
    def have_ended(self) -> bool:
        """Return True if the agents have reported the end of every rank, or are lost."""
        now, heard = time.monotonic(), dict(self._heard)
        lost = {rank for rank, at in heard.items() if now - at > LOST_SECONDS}
        return len(self._ended | lost) == self._num_tasks

    def signal(self, number: int) -> None:
        """Have the agents send a signal to every rank."""
        if number == signal.SIGUSR2:
            with contextlib.suppress(OSError):
                self._dumped_from = self._log.stat().st_size
        self._is_asked |= number in PASSED_ON
        self._order(number)

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return the nodes of ranks that wrote no stack, or of the one rank not in a collective."""
        try:
            with open(self._log, "rb") as log:
                log.seek(self._dumped_from)
                stacks = log.read()
        except OSError:
            return ()
        return _stuck_nodes(stacks, self._where)

    def kill(self) -> None:
        """Have the agents kill the ranks and end; have Slurm kill what is left."""
        self._ordered_end = True
        if self._srun.stdin is not None:
            with contextlib.suppress(OSError):
                self._srun.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # No waiting if srun has started no task: it would wait until all tasks have started.
            self._srun.wait(ANSWER_SECONDS if self._heard else 0)
        if self._srun.poll() is None:
            slurm.end_step(self._srun, self._job_id, self._name, KILL_SECONDS)
        self._copier.join(KILL_SECONDS)

    def _order(self, order: int) -> None:
        """Send an order to all agents."""
        if self._srun.stdin is not None:
            # The write fails if srun has ended.
            with contextlib.suppress(OSError, ValueError):
                self._srun.stdin.write(bytes([order]))
                self._srun.stdin.flush()

    def _is_over(self) -> bool:
        """Return True if no rank can do any more work, although srun runs."""
        now = time.monotonic()
        if now - self._last_look > agent.BEAT_SECONDS:
            # This process was suspended, and maybe the agents too, so their silence does not count.
            self._heard = dict.fromkeys(self._heard, now)
        self._last_look = now
        is_lost = any(now - at > LOST_SECONDS for at in list(self._heard.values()))
        return len(self._ends) == self._num_tasks or is_lost or now > self._deadline

    def _judge(self, is_lost: bool) -> int:
        """Return the exit code of all ranks, and set the failure.

        Args:
            is_lost: srun ended first, so agents could not report any more.
        """
        ends = {rank: code for rank, code in list(self._ends.items()) if code}
        silent = [] if is_lost else sorted(self._heard.keys() - self._ended)
        first = next(iter(ends), None)
        if not self._is_asked and len(self._heard) < self._num_tasks and first is not None:
            # If a task exited before its agent began, its container failed, and Slurm ended the
            # other ranks. A task that is still starting has not exited.
            is_ended = ends[first] in (-signal.SIGTERM, -signal.SIGKILL)
            lines = read_text(self._log, None).splitlines()
            first = None if is_ended and slurm.has_exited(lines) else first
        if silent and len(silent) < len(self._heard):
            self.nodes = self._nodes_of(silent)
            where = ", ".join(self.nodes) or f"the node of rank {silent[0]}"
            self.failure = f"{where} failed (rank {silent[0]} gives no sign of life)"
            code = ExitCode.KILLED if first is None else _exit_code(ends[first])
        elif first is not None:
            node, how = self._nodes_of([first]), _how(ends[first])
            self.failure = " ".join([f"rank {first}", *(f"on {name}" for name in node), how])
            # A bug ends ranks on all nodes; the fault of a node ends only the ranks on that node.
            alike = self._nodes_of([rank for rank in ends if ends[rank] == ends[first]])
            self.nodes = node if ends[first] < 0 else alike if len(alike) == 1 else ()
            code = _exit_code(ends[first])
        elif self._ends and not ends:
            return ExitCode.FINISHED
        else:
            code = _exit_code(self._srun.returncode)
            lines = read_text(self._log, None).splitlines()
            self.failure, self.nodes = slurm.first_failure(lines, code)
            # Without a rank's own report, a code of `ExitCode` must not be taken for one of ours.
            code = ExitCode.FAILED if code in list(ExitCode) else code
        self.failure += f"; see {self._log}"
        return code

    def _nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the nodes of ranks, each once, if they are known."""
        known = (self._where[rank] for rank in ranks if rank < len(self._where))
        return tuple(dict.fromkeys(known))

    def _hear(self, rank: int, said: Json) -> None:
        """Process a report from a rank's agent."""
        self._heard[rank] = now = time.monotonic()
        code = said.get("code")
        if not isinstance(code, int):
            return
        self._ended.add(rank)
        if self._ordered_end or rank in self._ends:
            return
        self._ends[rank] = code
        if code in TOGETHER or (code and self._is_asked):
            # The others end by themselves, and one of them may still have to report the reason.
            patience = KILL_AFTER_SECONDS
        elif code:
            patience = SETTLE_SECONDS
        else:
            # It may have left before rank 0, which waits for its upload.
            return
        self._deadline = min(self._deadline, now + patience)

    def _copy_output(self, source: IO[bytes], log: IO[bytes]) -> None:
        """Copy srun's output to the log, and the lines of rank 0 and of srun to stdout, unlabeled.

        The agents' reports are removed from the copies.
        """
        with source, log:
            for line in source:
                rank, text = slurm.labelled(line) or (0, line)
                printed, mark, report = text.partition(agent.SAYS.encode())
                if mark and (said := parse_json(report.decode(errors="replace"))):
                    self._hear(rank, said)
                    if not printed:
                        continue
                    # Before the report stands a line of the rank without its line break.
                    line = line.partition(mark)[0] + b"\n"
                    text = printed + b"\n"
                copies = [(log, line)]
                if rank == 0:
                    copies.append((sys.stdout.buffer, text))
                for file, copy in copies:
                    # A full disk must not end this thread: srun would block on a full pipe, and so
                    # would every rank that prints.
                    with contextlib.suppress(OSError):
                        file.write(copy)
                        file.flush()


def attempt_environment(attempt: Attempt) -> dict[str, str]:
    """Return the variables that tell ranks the attempt's directory and where to meet."""
    return dict.fromkeys(("PRETRAIN_ATTEMPT", "PRETRAIN_RENDEZVOUS"), str(attempt.directory))


def start_srun(
    words: Sequence[str],
    stdout: int | IO[bytes],
    stdin: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start srun.

    Args:
        words: The command line.
        stdout: The destination of its output, errors included.
        stdin: The source of its input.
        env: Its environment; by default this process's.

    Raises:
        ConfigError: srun cannot be started.
    """
    try:
        with signals_blocked(*agent.BLOCKED_AT_START):
            # In its own process group, because a signal that is sent to the group of this process
            # must reach the ranks only once, passed on by the supervisor.
            return subprocess.Popen(
                words,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,
                # On SIGTERM srun ends its tasks, which SIGKILL would leave running.
                preexec_fn=dies_with_parent(signal.SIGTERM),
            )
    except OSError as error:
        raise ConfigError(
            f"{words[0]}: cannot be started on this node ({error.strerror})"
        ) from None


def _stuck_nodes(stacks: bytes, where: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of the ranks that hang by themselves, and do not just wait for others.

    Args:
        stacks: Output of the ranks since they were asked for their stacks, with labels.
        where: The node of each rank.
    """
    said: dict[int, bytes] = {}
    for line in stacks.splitlines():
        if found := slurm.labelled(line):
            rank, text = found
            said[rank] = said.get(rank, b"") + text + b"\n"
    wrote = {rank for rank, text in said.items() if b"most recent call first" in text}
    alone = [rank for rank in range(len(where)) if rank not in wrote]
    if not alone:
        # All have written stacks, so the culprit is the one rank that the others wait for.
        alone = [rank for rank in wrote if IN_COLLECTIVE not in said[rank]]
        alone = alone if len(alone) == 1 else []
    if not wrote or len(alone) >= len(where):
        return ()
    return tuple(dict.fromkeys(where[rank] for rank in sorted(alone)))


COPY_SECONDS = 1.0
"""Time to copy the last output of rank 0 after it has ended."""
CHUNK_BYTES = 64 * 1024
"""Bytes that are copied at a time."""
LOG_LINES_SHOWN = 20
"""Lines of a failed rank's log that are repeated on the terminal."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the launcher passes on to the ranks; each asks them to end."""


def run_locally(
    config: RunConfig,
    nproc: int,
    command: Sequence[str],
    arguments: Sequence[str],
    resume: str | None = None,
) -> int:
    """Run `nproc` copies of `command` with `arguments` until the run is over.

    Ranks that fail or hang are started again from the newest checkpoint, at most
    recovery.max_restarts times without progress. Ranks that have saved on SIGUSR1 are also started
    again. SIGINT, SIGTERM and SIGHUP are passed on, so that the run can save and stop; a second
    SIGINT ends the ranks at once.

    Args:
        config: The run.
        nproc: Number of ranks.
        command: The command of each rank without arguments: [python, "-m", "pretrain", "train"].
        arguments: The config file and its --set options, from which `config` was loaded.
        resume: The value of --resume for the first attempt; None leaves the option out.

    Returns:
        The exit code of the last attempt.

    Raises:
        ConfigError: The run's directory cannot be made, has another layout, or lies inside
            another run's.
        RunBusy: Another process trains this run.
        RunFailed: A file cannot be written.
    """
    run = config.directory
    _make_logs(run)
    before = _saved_ids(run)
    # Before the attempt begins, because a user who sees it may send a signal.
    with Signals(*PASSED_ON) as signals:
        attempt = Attempt.begin(run, Owner.here(num_processes=nproc))
        first = attempt.number

        def start(attempt: Attempt) -> LocalRanks:
            """Start the ranks of an attempt; restarts use the config as it was first read."""
            again = attempt.number > first
            config_arguments = arguments
            if again:
                # The user may have edited the config file, or a base of it, since it was read.
                frozen = attempt.directory / "config.toml"
                replace_file(frozen, dump_config(config))
                config_arguments = [str(frozen)]
            # Once this series of attempts has saved the newest checkpoint, a restart must not start
            # from --resume again. `auto` resumes from that checkpoint, because checkpoints of other
            # branches were set aside, and falls back to an earlier one if it is damaged.
            start_from = resume
            if again and resume and (resume == "none" or _saved_since(run, before, resume)):
                start_from = "auto"
            resume_words = ["--resume", start_from] if start_from else []
            return LocalRanks(
                [*command, *config_arguments, *resume_words],
                nproc,
                RunPaths(run),
                attempt_environment(attempt),
                attempt.number,
            )

        supervisor = Supervisor(config, signals, lambda record: record.number >= first, local=True)
        while (end := supervisor.make_attempt(attempt, start)).again:
            attempt = Attempt.begin(run, Owner.here(num_processes=nproc))
        return end.verdict.code


def _make_logs(run: Path) -> None:
    """Make the folder for the ranks' logs; the run's directory must be this user's own."""
    logs = RunPaths(run).logs
    try:
        check_trusted(run)
        check_apart(run)
        make_directory(logs)
    except OSError as error:
        raise ConfigError(
            f"run.directory: cannot create {logs} ({error.strerror}). Choose another directory"
        ) from None


def _saved_ids(run: Path) -> list[str]:
    """Return the ids of a run's complete checkpoints, oldest first."""
    return [saved.lineage.id for saved in saved_checkpoints(run) if saved.lineage]


def _saved_since(run: Path, before: Sequence[str], resume: str) -> bool:
    """Return True if the newest checkpoint is a new one, and was not downloaded by --resume URL."""
    newest = next((s.lineage for s in reversed(saved_checkpoints(run)) if s.lineage), None)
    if newest is None or newest.id in before:
        return False
    # The parent of what was downloaded to an empty disk is not here.
    return not is_url(resume) or newest.parent in _saved_ids(run)


class LocalRanks:
    """The ranks of one attempt as processes of this machine; an implementation of `Ranks`.

    Every rank writes to RUN/logs/rank-<rank>.log, to which all attempts append; rank 0 also writes
    to the stdout and stderr of this process. When a rank fails, the others get SIGTERM and, 10 s
    later, SIGKILL. No process is left behind, not even when this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        paths: RunPaths,
        environment: Mapping[str, str] | None = None,
        attempt: int = 1,
    ) -> None:
        """Start the ranks.

        Args:
            command: The command of each rank.
            nproc: Number of ranks.
            paths: The run's paths. RUN/logs must exist.
            environment: Environment variables to add, the same for all ranks.
            attempt: The attempt's number, printed at the beginning of its part of each log.
        """
        self.failure = ""
        # Always empty: on one machine there is no other node to choose.
        self.nodes: tuple[str, ...] = ()
        self._paths = paths
        self._processes: list[subprocess.Popen[bytes]] = []
        self._copiers: list[threading.Thread] = []
        self._asked_to_end, self._deadline = False, 0.0
        self._failed_rank: int | None = None
        bind = dies_with_parent()
        head = f"--- attempt {attempt}, {moment(time.time())} ---\n"
        try:
            with signals_blocked(*agent.BLOCKED_AT_START):
                for rank in range(nproc):
                    variables = _rank_environment(rank, nproc) | dict(environment or {})
                    with open_own(paths.rank_log(rank), buffering=0) as log:
                        # A full disk is reported where the run itself fails to write.
                        with contextlib.suppress(OSError):
                            log.write(head.encode())
                        # In its own process group, for two reasons. Ctrl-C on the terminal then
                        # reaches only the launcher, which passes it on once; and a rank can be
                        # killed together with the processes that it has started.
                        process = subprocess.Popen(
                            command,
                            env=variables,
                            stdin=subprocess.DEVNULL,
                            stdout=log if rank else subprocess.PIPE,
                            stderr=log if rank else subprocess.PIPE,
                            process_group=0,
                            preexec_fn=bind,
                        )
                    self._processes.append(process)
            first = self._processes[0]
            # Threads are started after all ranks, because a fork copies only the calling thread.
            for source, stream in ((first.stdout, 1), (first.stderr, 2)):
                copy = (source, stream, paths.rank_log(0))
                self._copiers.append(threading.Thread(target=_tee, args=copy, daemon=True))
                self._copiers[-1].start()
        except BaseException:
            self.kill()
            raise

    def poll(self) -> int | None:
        """Return None while the ranks run, then 0 or the exit code of the rank that failed first.

        The first failure also ends the other ranks, which wait for the failed one in a collective
        operation and would never end.
        """
        codes = [process.poll() for process in self._processes]
        if self._failed_rank is None and any(codes):
            self._failed_rank = next(rank for rank, code in enumerate(codes) if code)
            # Ranks that were asked to end, or that saved together, end one by one within moments.
            # SIGTERM would disturb them, so they get some time to end by themselves.
            code = codes[self._failed_rank]
            is_ending = self._asked_to_end or code in (ExitCode.RESTART, ExitCode.STOPPED)
            self._deadline = time.monotonic() + (KILL_AFTER_SECONDS if is_ending else 0)
        if None in codes and (self._failed_rank is None or time.monotonic() < self._deadline):
            return None
        self.end()
        if self._failed_rank is None:
            return 0
        code = self._processes[self._failed_rank].returncode
        self._report(self._failed_rank, code)
        return _exit_code(code)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        self._asked_to_end |= number in PASSED_ON
        for process in self._processes:
            process.send_signal(number)

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return (): on one machine there is no other node to choose."""
        return ()

    def end(self) -> None:
        """Send SIGTERM to every rank that runs and, 10 s later, SIGKILL to those that are left."""
        terminate(self._processes, KILL_AFTER_SECONDS)
        # Also if all ranks have ended, because processes that they started may be left.
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to every rank's process group."""
        for process in self._processes:
            # ProcessLookupError: the whole group has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for copier in self._copiers:
            # Processes that the rank has left behind may hold the pipe open.
            copier.join(COPY_SECONDS)

    def _report(self, rank: int, code: int) -> None:
        """Print which rank failed first, and the end of its log.

        Args:
            rank: The rank that failed first.
            code: Its exit code as subprocess gives it, -n for signal n.
        """
        self.failure = f"rank {rank} {_how(code)}"
        if code in (ExitCode.RESTART, ExitCode.STOPPED):
            # The rank saved a checkpoint, which is not a failure.
            return
        if code == self._processes[0].returncode > 0:
            # Rank 0 failed in the same way, and its message is on the terminal already.
            return
        if not rank:
            say(self.failure)
            return
        log = self._paths.rank_log(rank)
        say(f"{self.failure}; the end of {log}:")
        lines = log.read_text(errors="replace").splitlines()
        begins = [n for n, line in enumerate(lines, start=1) if line.startswith("--- attempt ")]
        say("\n".join(lines[max(begins, default=0) :][-LOG_LINES_SHOWN:]))


def _tee(source: IO[bytes], stream: int, path: Path) -> None:
    """Copy what rank 0 writes to one of this process's own streams, and append it to a log."""
    with source, open_own(path, buffering=0) as log:
        while chunk := os.read(source.fileno(), CHUNK_BYTES):
            # Neither a full disk nor a closed terminal must end this thread.
            with contextlib.suppress(OSError):
                log.write(chunk)
            with contextlib.suppress(OSError):
                while chunk:
                    chunk = chunk[os.write(stream, chunk) :]


def _rank_environment(rank: int, nproc: int) -> dict[str, str]:
    """Return the environment of a rank, with the variables that tell its number.

    A MASTER_PORT set by the user is dropped, because a second run on this machine would connect to
    the first run there. Rank 0 finds a free port and publishes it.

    OMP_NUM_THREADS divides the cores that this process may use, unless the user has set it, because
    by default every rank would start one thread per core.
    """
    cores = len(os.sched_getaffinity(0))
    distributed = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
    }
    # Ranks may import modules from the working directory only if this process may, as it does under
    # `python -m`, because other users may have put a json.py there.
    here = {"", os.getcwd()} & set(sys.path)
    safe_path = {} if here else {"PYTHONSAFEPATH": "1"}
    return {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        # Python buffers output to a file or a pipe, and a killed rank would lose the buffer.
        "PYTHONUNBUFFERED": "1",
        **safe_path,
        **{name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
        **{name: str(value) for name, value in distributed.items()},
    }


def _how(code: int) -> str:
    """Return in words how a process ended, from subprocess's code, -n for signal n."""
    ended_by = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
    return ended_by or f"ended with exit code {code}"


def _exit_code(code: int) -> int:
    """Convert subprocess's code -n, for a process that signal n ended, to a shell's 128 + n."""
    return SIGNAL_CODE - code if code < 0 else code
