"""Do the stages of a build, or find that the data set is up to date."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.config import ConfigError, NoSpace, RunConfig, writing
from pretrain.config.data_schema import WORDS, DataSection
from pretrain.config.errors import free_bytes, in_bytes
from pretrain.data.build import report
from pretrain.data.build.finish import BUILD_RECORD, finish, note_finished, with_digests
from pretrain.data.build.folder import (
    BuildFolder,
    is_leftover,
    locked,
    own_files,
    remove_build,
)
from pretrain.data.build.merge import merge
from pretrain.data.build.merged import load_merge, token_tasks
from pretrain.data.build.output import RECORD, is_done
from pretrain.data.build.plan import (
    LIMIT,
    SPLITS,
    Plan,
    differences,
    make_plan,
    save_plan,
    saved_finish,
    saved_inputs,
    task_sizes,
)
from pretrain.data.build.progress import Progress
from pretrain.data.build.work import Stage
from pretrain.data.manifest import read_manifest
from pretrain.data.stream import TokenStream, check_local
from pretrain.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from pretrain.rundir.files import Json, make_directory, read_json, remove

KEPT_BYTES = 1_000_000_000
"""Of a corpus this large, what is done is kept when the build ends with an error in the config or
the text. A smaller one is soon done again."""

RunStage = Callable[[BuildFolder, Stage, int], None]
"""Does every task of a stage that is not done: (folder, stage, number of tasks)."""


def build(config: RunConfig, workers: int = 1, run_stage: RunStage | None = None) -> None:
    """Build the data set of a config in data.directory, and print what was built.

    A build that was interrupted goes on with the tasks that are not done. A data set that was built
    earlier from the same settings and text is checked and left unchanged.

    Args:
        config: The config.
        workers: Processes on this machine. Does not change what is built.
        run_stage: Does the tasks of a stage elsewhere, such as on a cluster.

    Raises:
        ConfigError: if data.directory holds something else or a data set built from other inputs,
            if another process builds it, or if the corpus or the tokenizer cannot be used.
        RunFailed: if the data set cannot be written.
    """
    check_local(config)
    if importlib.util.find_spec("datatrove") is None:
        raise ConfigError(
            "pretrain data build: datatrove is not installed. Run `pip install 'pretrain[data]'`"
        )
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    given = config.data_directory
    directory = _real_directory(given)
    folder = BuildFolder.beside(directory)
    if _is_up_to_date(directory, plan):
        _remove_leftovers(folder)
        print(f"{given}: up to date (same settings, same text), nothing to do")
        return

    def run_here(folder: BuildFolder, stage: Stage, tasks: int) -> None:
        # Here, because it imports datatrove, which not every installation has.
        from pretrain.data.build.executor import run_locally

        run_locally(folder, stage, tasks, workers)

    with writing(folder.path), locked(folder):
        if _is_up_to_date(directory, plan):
            # By another process, since the look above.
            remove_build(folder)
            print(f"{given}: up to date (same settings, same text), nothing to do")
            return
        _take_up(folder, plan)
        try:
            if not folder.finish.exists():
                _do_tasks(folder, plan, tokenizer, run_stage or run_here)
        except ConfigError:
            # After the config or the text has been corrected, the build cannot go on from here.
            if sum(task_sizes(plan)) < KEPT_BYTES:
                remove_build(folder)
            raise
        content = finish(folder, directory)
        remove_build(folder)
    shards = {split: len(read_manifest(directory / split).shards) for split in SPLITS}
    used = load_tokenizer(find_tokenizer(directory))
    print("\n".join(report.lines(given, used, content, shards)))


def build_on_cluster(
    config: RunConfig, command: Sequence[str], workers: int, array_size: int
) -> None:
    """Build the same data set as `build`, with the tasks as job arrays on a cluster.

    Args:
        config: The config.
        command: Runs a job array; see `cluster.Cluster`.
        workers: The most tasks that run at the same time.
        array_size: The most jobs of an array.

    Raises:
        ConfigError: as `build`.
        RunFailed: if the cluster refused the jobs, or some ended without a result.
    """

    def run_there(folder: BuildFolder, stage: Stage, tasks: int) -> None:
        # Here, because it imports datatrove, which not every installation has.
        from pretrain.data.build.cluster import Cluster, run_on_cluster

        run_on_cluster(folder, stage, tasks, Cluster(tuple(command), workers, array_size))

    build(config, run_stage=run_there)


def _real_directory(given: Path) -> Path:
    """Return the folder to which data.directory leads, and make the folders above it.

    What is built gets its name by a rename, which replaces no symlink and crosses no disk.

    Raises:
        ConfigError: A disk is mounted there.
        RunFailed: The folders above it cannot be made.
    """
    # Also those of new/../data, or nobody could read the data set by that name.
    with writing(given):
        make_directory(given.absolute().parent)
    directory = Path(os.path.realpath(given))
    if os.path.ismount(directory) and not (directory / BUILD_RECORD).exists():
        raise ConfigError(
            f"data.directory = {given}: a disk is mounted there, and a data set gets its name by a "
            f"rename. Choose a folder on that disk, such as data.directory={given / 'data'}"
        )
    return directory


def load_given_tokenizer(data: DataSection) -> Tokenizer | None:
    """Return the tokenizer that data.tokenizer names, or None if one is to be trained.

    Raises:
        ConfigError: if it has another number of pieces than data.vocab_size, or could not be
            exported with a model.
    """
    if data.tokenizer is None or data.tokenizer == WORDS:
        return None
    tokenizer = load_tokenizer(data.tokenizer)
    tokenizer.check_trainable()
    if tokenizer.vocab_size != data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: the model in data.tokenizer = {data.tokenizer} "
            f"has {tokenizer.vocab_size} pieces. Set data.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _is_up_to_date(directory: Path, plan: Plan) -> bool:
    """Return True if the data set is there and was built from this plan; False if none is there.

    Raises:
        ConfigError: Something else is there, or a data set that was built from other inputs.
    """
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if is_empty or not os.path.lexists(directory):
        return False
    remedy = f"Choose another data.directory, or remove {directory} to build it anew"
    try:
        recorded = json.loads((directory / BUILD_RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        recorded = None
    if not isinstance(recorded, dict):
        raise ConfigError(
            f"data.directory = {directory}: exists, but holds no finished data set (no readable "
            f"{BUILD_RECORD}). {remedy}"
        )
    if different := differences(recorded.get("inputs"), plan):
        raise ConfigError(
            f"data.directory = {directory}: holds a data set built from other inputs: "
            f"{'; '.join(different)}. Nothing was changed. {remedy}"
        )
    for split in SPLITS:
        TokenStream(directory / split)
    return True


def _remove_leftovers(folder: BuildFolder) -> None:
    """Remove what a build left that was killed after its data set got its name."""
    if folder.path.is_dir():
        # Whoever holds the lock is about to remove it.
        with contextlib.suppress(ConfigError), writing(folder.path), locked(folder):
            if is_leftover(folder):
                remove_build(folder)


def _take_up(folder: BuildFolder, plan: Plan) -> None:
    """Go on with the build that the folder holds, or begin one.

    Raises:
        ConfigError: The folder holds a build from other inputs.
    """
    if not folder.plan.exists():
        for path in own_files(folder):
            remove(path)
        _check_space(folder, plan)
        save_plan(plan, folder)
        return
    recorded = saved_inputs(folder)
    if folder.finish.exists():
        recorded = saved_finish(folder)
    elif recorded:
        recorded["files"] = _saved_files(folder, plan, recorded["files"])
        # What is done is the same with a higher limit, and to raise it is what the error asks for.
        before, now = recorded["settings"].get(LIMIT), plan.settings[LIMIT]
        if isinstance(before, int) and before < now:
            recorded["settings"][LIMIT] = now
    if different := differences(recorded, plan):
        raise ConfigError(
            f"{folder.path}: holds an unfinished build from other inputs: {'; '.join(different)}. "
            f"Nothing was changed. Go on with those inputs, or remove {folder.path} to start over"
        )
    if not folder.finish.exists():
        # Names and times of files may be new.
        save_plan(plan, folder)


def _saved_files(folder: BuildFolder, plan: Plan, recorded: Json) -> Json:
    """Return the recorded files with the digests that the scan has made of them.

    The tasks are those of the plan, because their ranges follow from sizes and settings; where
    these differ, no digest is asked for.
    """
    try:
        return {
            split: [[*before[:3], new.digests] for before, new in zip(recorded[split], files)]
            if len(recorded[split]) == len(files)
            else recorded[split]
            for split, files in with_digests(folder, plan).items()
        }
    except (LookupError, TypeError):
        # `differences` says so of what is no list of files.
        return recorded


def _check_space(folder: BuildFolder, plan: Plan) -> None:
    """Refuse to begin where the tokens cannot fit: a tokenizer makes few of more than 8 bytes."""
    itemsize = 2 if plan.data.vocab_size <= 1 << 16 else 4
    least = sum(task_sizes(plan)) * itemsize // 8
    free = free_bytes(folder.path)
    if free is not None and free < least:
        raise NoSpace(
            f"{folder.path}: the tokens of this corpus take at least {in_bytes(least)}; "
            f"{in_bytes(free)} are free. Make room or choose another data.directory"
        )


def _do_tasks(
    folder: BuildFolder, plan: Plan, tokenizer: Tokenizer | None, run_stage: RunStage
) -> None:
    """Do what is not done of scan, merge and tokenize."""
    scans = sum(len(plan.tasks[split]) for split in SPLITS)
    finals = [folder.scan(rank) for rank in range(scans)]
    with Progress(folder, "scan", finals, task_sizes(plan)):
        run_stage(folder, "scan", scans)
    done = is_done(folder.merge)
    merged = load_merge(folder) if done else merge(folder, plan, tokenizer)
    tasks = token_tasks(merged)
    finals = [folder.tokens(task.split, task.number) for task in tasks]
    sizes = [read_json(folder.scan(task.planned) / RECORD)["text_bytes"] for task in tasks]
    with Progress(folder, "tokenize", finals, sizes):
        run_stage(folder, "tokenize", len(tasks))
    note_finished(folder, plan, merged)
