"""Saving beside training: the same bytes as saving in between, and no failure goes unnoticed."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from pretrain import platform
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.tools import verify_checkpoint
from pretrain.config import RunConfig, RunFailed
from pretrain.rundir.checkpoints import checkpoint_step, complete_checkpoints
from tests.conftest import ALL_LAYOUTS, directories, tiny_config


def _config(directory, data, parallel=None, interval=1, steps=3, **checkpoint):
    return tiny_config(
        **directories(directory, data),
        model={"num_layers": 2},
        parallel=parallel or {},
        batch={"micro_batch_size": 4},
        train={"num_steps": steps},
        schedule={"lr_warmup_steps": 1},
        checkpoint={"interval_steps": interval, **checkpoint},
        evaluation={"interval_steps": 100, "max_tokens": 64},
    )


# test_without_memory_for_the_copy_training_waits says the same of ZeRO 1 in fp32.
@pytest.mark.parametrize(("layout", "precision"), [("zero3-dp2", "bf16")])
def test_the_same_bytes_as_without_training_beside(pools, tiny_data, tmp_path, layout, precision):
    """Every step is saved, and every copy begins only after the next step has."""
    processes, parallel = ALL_LAYOUTS[layout]

    def run(name, **options):
        config = _config(tmp_path / name, tiny_data, parallel, asynchronous=name != "between")
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"precision": precision})}
        )
        return pools(processes).run(digests_of_saves, config, **options)[0]

    between = run("between")
    beside = run("beside", late=True)
    assert between.pop("overlap") == 0 and beside.pop("overlap") == 2
    assert len(between) == 3 * processes
    assert beside == between
    lineages = [open_checkpoint(path).lineage for path in complete_checkpoints(tmp_path / "beside")]
    assert [lineage.parent for lineage in lineages] == [None, *(x.id for x in lineages[:-1])]
    assert len({lineage.id for lineage in lineages}) == 3
    assert len({lineage.branches for lineage in lineages}) == 1


@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        ("killed", 0, "the process that writes checkpoints"),
        ("disk", 1, "cannot be written (No such file or directory"),
        ("no memory", 1, "cannot be written (Cannot allocate memory"),
        ("nan", 1, "not finite"),
    ],
)
def test_a_failure_beside_training_ends_all_ranks_soon(
    pools, tiny_data, tmp_path, how, rank, words
):
    """The save after step 2 fails; no rank gets to the save after step 4, nor to the end."""
    config = _config(tmp_path / "run", tiny_data, interval=2, steps=5)
    results = pools(2).run(train_with_a_bad_writer, config, how, rank)
    assert words in results[0] and results == [results[0]] * 2
    found = complete_checkpoints(tmp_path / "run")
    assert [checkpoint_step(path.name) for path in found] == [2]
    assert verify_checkpoint(found[0])[0] == []
    # No hidden directory is left: a disk that is full gets its room back.
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    assert pools(2).run(nothing_of_the_writers_is_left) == [0, 0]


def test_signals_to_all_processes_of_a_job_do_not_end_a_write(pools, tiny_data, tmp_path):
    config = _config(tmp_path / "run", tiny_data)
    assert pools(2).run(train_with_a_bad_writer, config, "signals", 0) == ["", ""]
    assert len(complete_checkpoints(tmp_path / "run")) == 3


def test_without_memory_for_the_copy_training_waits(pools, tiny_data, tmp_path):
    good = pools(2).run(digests_of_saves, _config(tmp_path / "good", tiny_data), late=True)[0]
    less = pools(2).run(digests_with_little_memory, _config(tmp_path / "less", tiny_data))[0]
    assert less.pop("overlap") == 0 and good.pop("overlap") == 2
    assert less == good


# ---- tasks of the ranks --------------------------------------------------------------------------
def digests_of_saves(config: RunConfig, late: bool = False) -> dict[str, Any] | None:
    """Train a run and return the SHA-256 of what each of its checkpoints holds of the optimizer.

    Args:
        config: The run's config.
        late: Begin each copy of the state only when a step waits for it before its update.

    Returns:
        On rank 0, file name -> digest, for the files of tensors of all checkpoints, and "overlap":
        how many steps began their forward pass while a copy was still under way.
    """
    from pretrain.checkpoint.save import Saver
    from pretrain.training import loop

    seen = {"overlap": 0}
    copies: list[Any] = []
    may_copy = threading.Event()
    copy_all, queue_step = platform._copy_all, loop.queue_step
    start, before_change = platform.HostCopy.__init__, Saver._before_change

    def copied(pairs: Any) -> None:
        if late:
            may_copy.wait()
        copy_all(pairs)

    def noted(self: Any, *args: Any) -> None:
        may_copy.clear()
        start(self, *args)
        copies.append(self._thread)

    def counted(*args: Any) -> Any:
        seen["overlap"] += bool(copies) and copies[-1].is_alive()
        try:
            return queue_step(*args)
        finally:
            # A step that has waited for no copy has changed what is copied now.
            may_copy.set()

    def awaited(self: Any) -> None:
        may_copy.set()
        before_change(self)

    with (
        patch.object(platform, "_copy_all", copied),
        patch.object(loop, "queue_step", counted),
        patch.object(platform.HostCopy, "__init__", noted),
        patch.object(Saver, "_before_change", awaited),
    ):
        assert loop.train(config) == 0
    if dist.get_rank():
        return None
    digests = {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for checkpoint in complete_checkpoints(config.directory)
        for path in sorted(checkpoint.glob("*.safetensors"))
    }
    return {**digests, **seen}


def train_with_a_bad_writer(config: RunConfig, how: str, rank: int) -> str:
    """Train a run in which something befalls the writing process of one rank.

    Args:
        config: The run's config.
        how: "killed", "stopped for good before it publishes", "disk" (it cannot write), "nan" (a
            moment is not finite at the second save), or "signals" (all that a job gets, harmless).
        rank: The rank.

    Returns:
        The message that ended the run, "" without.
    """
    from pretrain.checkpoint import save
    from pretrain.checkpoint.save import Saver
    from pretrain.training import loop

    begin = Saver.begin
    saves = {"count": 0}

    def disturbed(self: Any, *args: Any) -> Any:
        saves["count"] += 1
        is_second = saves["count"] == 2 and dist.get_rank() == rank
        if is_second and how == "nan":
            self._optimizer.state().fragments[0].tensors["exp_avg_sq"][0] = float("inf")
        if is_second and how == "disk":
            # The process has been started by the first save: it gets a directory that is not there.
            write = self._writer.write
            self._writer.write = lambda directory, *given: write(directory / "gone", *given)
        if saves["count"] == 2:
            self.finish()
        if is_second and how == "killed":
            # So that it is killed before it has written.
            self._writer._process.send_signal(signal.SIGSTOP)
        if is_second and how == "no memory":
            # The process has died while it had nothing to do, and another cannot be started.
            self._writer._process.kill()
            self._writer._process.wait()
            self._writer._start = Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
        if is_second and how == "signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                os.kill(self._writer._process.pid, number)
        result = begin(self, *args)
        if is_second and how == "killed":
            self._writer._process.kill()
        return result

    queue_step = loop.queue_step

    def counted(run: Any, *args: Any) -> Any:
        # The failure may need a moment to arrive.
        time.sleep(0.05)
        return queue_step(run, *args)

    error = ""
    with (
        patch.object(Saver, "begin", disturbed),
        patch.object(loop, "queue_step", counted),
        # A rank waits so long for the parts of others, which never come where a state is not
        # finite.
        patch.object(save, "CLOSE_SECONDS", 3),
    ):
        try:
            loop.train(config)
        except RunFailed as failure:
            error = str(failure)
    return error


def digests_with_little_memory(config: RunConfig) -> dict[str, Any] | None:
    """Return `digests_of_saves` on a machine that has no memory for the copy."""

    with (
        # Evaluations ask the same, and would be refused.
        patch.object(platform, "free_memory", lambda: 1 << 40),
        patch.object(platform, "available_memory", lambda: 1000),
    ):
        return digests_of_saves(config)


def nothing_of_the_writers_is_left() -> int:
    """Return how many child processes of this rank are left."""
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
