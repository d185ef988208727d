"""Define `launcher local`, which trains on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import load_config
from pretrain.config.arguments import AllowChanged, Config, Overrides
from pretrain.config.trajectory import allow_options, check_allowed
from pretrain.launcher.options import Resume
from pretrain.rundir.states import ExitCode


def local(
    config: Config,
    nproc: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of processes: one per GPU, or a few that share the CPU's cores.",
        ),
    ],
    overrides: Overrides = [],  # noqa: B006  typer copies it
    resume: Resume = None,
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train on this machine.

    Rank 0 writes to this terminal. What every rank writes is kept in RUN/logs/rank-<rank>.log.

    When a rank fails or hangs, all ranks are ended and started again from the newest checkpoint.
    [recovery] in the config sets how often, and after what time without progress.

    \b
    Signals, to this command:
      SIGINT    (Ctrl-C) save a checkpoint, then exit with code 80; a second one leaves at once,
                with code 130, and so does the first one before training has begun
      SIGTERM   (kill PID) save a checkpoint, then exit with code 80
      SIGHUP    the same, when the terminal is closed
      SIGUSR1   save a checkpoint and start the ranks again
    A second SIGTERM or SIGHUP ends ranks that do not stop.

    \b
    Examples:
      launcher local configs/demo.toml --nproc 2
      launcher local configs/demo.toml --nproc 2 --set train.num_steps=100 \\
          --set run.directory=runs/try
    """
    from pretrain.launcher.login.tables import print_summary
    from pretrain.launcher.node.local import run_locally
    from pretrain.rundir.jobs import LocalLaunch
    from pretrain.rundir.starts import already_done, check_data, is_done

    run = load_config(config, overrides)
    check_allowed(allow_changed)
    # Refuse a layout that does not fit `nproc` here, once, before every process does.
    run.layout(nproc)
    if resume in (None, "auto") and is_done(run, allow_changed):
        print(already_done(run), file=sys.stderr)
        return
    check_data(run)
    settings = [word for override in overrides for word in ("--set", override)]
    # Part of the command and not of the config's arguments, which a restart replaces.
    train = [sys.executable, "-m", "pretrain", "train", *allow_options(allow_changed)]
    # Without --resume: from here on the run has its own checkpoint to go on from.
    again = ["launcher", "local", str(config), f"--nproc={nproc}", *settings]
    again += allow_options(allow_changed)
    launch = LocalLaunch(tuple(again), str(Path.cwd()), nproc)
    code = run_locally(run, nproc, train, [str(config), *settings], resume, launch=launch)
    print_summary(run.directory, code)
    _print_goes_on(run.directory, code, again)
    raise typer.Exit(code)


def _print_goes_on(run: Path, code: int, command: Sequence[str]) -> None:
    """Print what a run that was stopped has saved, and the command that goes on from there.

    Args:
        run: The run's directory.
        code: The exit code of its last attempt.
        command: The command, without --resume.
    """
    from pretrain.launcher.login.tables import stopped

    if code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        print(f"{stopped(run)}; go on with:\n  {shlex.join(command)}", file=sys.stderr, flush=True)
