"""Send a run's numbers to Weights & Biases, whose package `wandb` need not be installed."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig
from pretrain.rundir.files import replace_file
from pretrain.rundir.metrics import Record
from pretrain.rundir.paths import RunPaths
from pretrain.train.figures import length_picture
from pretrain.train.tags import (
    FIGURE,
    GROUPS,
    SECONDS,
    STEP,
    TOKENS,
    Axes,
    evaluation_tags,
    step_tags,
)

INIT_SECONDS = 15
"""With an API key and no network, wandb would block far longer before it raises."""
FINISH_SECONDS = 60
"""What is not uploaded by then stays on disk for `wandb sync`."""
INSTALL = "pip install 'pretrain[wandb]'"


def is_installed() -> bool:
    """Return True if the package wandb can be imported.

    A folder of that name in the working directory, as below a run, is no package.
    """
    found = importlib.util.find_spec("wandb")
    return found is not None and found.origin is not None


def check_wandb(config: RunConfig) -> None:
    """Raise ConfigError if the run is to be sent to W&B and there is nothing to send it with."""
    if config.logging.wandb == "online" and not is_installed():
        raise ConfigError(
            "logging.wandb = online: the package wandb is not installed. Install it "
            f'({INSTALL}), or set logging.wandb = "disabled"'
        )


def settings() -> Any:
    """Return wandb's settings for whatever of ours is sent: silent, and with bounded waits."""
    import wandb

    return wandb.Settings(
        silent=True,
        # Capturing the terminal would break the progress bar.
        console="off",
        init_timeout=INIT_SECONDS,
        login_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
    )


class Wandb:
    """Weights & Biases. The run directory holds the id, so a resumed run continues its curves."""

    def __init__(self, config: RunConfig, run_directory: Path, axes: Axes) -> None:
        # Importing wandb takes about a second, which a run that does not use it should not pay.
        import wandb

        mode = config.logging.wandb
        self._axes, self._train_length = axes, config.data.sequence_length
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=run_directory.name,
            dir=str(run_directory),
            id=_run_id(RunPaths(run_directory).wandb_run_id),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=config.model_dump(mode="json"),
            settings=settings(),
        )
        # The x axis is our own step. wandb's must only grow, and a resume may go back a few steps.
        # All three are in every row, so that a chart can be drawn over each.
        for axis in (STEP, TOKENS, SECONDS):
            self._run.define_metric(axis)
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric=STEP)
        if mode == "online":
            print(f"wandb: {self._run.url}", file=sys.stderr, flush=True)

    def step(self, record: Record) -> None:
        self._log(record["step"], step_tags(record))

    def evaluation(self, records: list[Record]) -> None:
        import wandb

        figure = wandb.Image(length_picture(records, self._train_length))
        self._log(records[0]["step"], {**evaluation_tags(records), FIGURE: figure})

    def _log(self, step: int, values: Record) -> None:
        self._run.log({STEP: step, **self._axes.values(), **values})

    def go_back(self, step: int) -> None:
        """Do nothing: as after a resume, the curves show both."""

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path) -> str:
    """Return the run's id, which `path` keeps from the first start on: one directory is one run.

    A run that ended before its first checkpoint starts from scratch, and still keeps its id.
    """
    if path.exists() and (identifier := path.read_text().strip()):
        return identifier
    identifier = uuid.uuid4().hex[:12]
    replace_file(path, identifier + "\n")
    return identifier
