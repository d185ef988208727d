"""Run `pretrain evaluate --harness`: export checkpoints and score them with lm-evaluation-harness.

lm-eval runs as a program of its own, on the export alone and offline, so that it measures what any
user of the export would measure: stock transformers in fp32.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain import platform, topology
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.config import ConfigError, EvaluationRequest, RunFailed, writing
from pretrain.config.evaluation import PROTOCOLS
from pretrain.evaluation.curves import Table
from pretrain.evaluation.report import check_report_path
from pretrain.huggingface.classes import class_of, export_length
from pretrain.huggingface.export import checked_length, export_source
from pretrain.huggingface.folder import is_export_of
from pretrain.processes import Processes, Stopped
from pretrain.rundir.checkpoints import find_checkpoint, run_of
from pretrain.rundir.files import make_directory, read_json, replace_json
from pretrain.rundir.paths import RunPaths

INSTALL = "pip install 'pretrain[lm-eval]'"
ENVIRONMENT = (
    *("env", "-u", "RANK", "-u", "LOCAL_RANK", "-u", "WORLD_SIZE"),
    *("HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1"),
)
"""Keeps lm-eval and its libraries from the network, and from taking itself for a rank of ours."""
VERSION = "lm_eval_version"
"""The key of a results file by which it is known."""


@dataclass(frozen=True)
class Scored:
    """A checkpoint that lm-eval scores."""

    checkpoint: Checkpoint
    run: Path | None
    """The run that it belongs to; None for one outside of RUN/checkpoints."""
    windows: tuple[int, ...]
    """The longest sequences in tokens that the model is given, one pass of lm-eval for each."""

    @property
    def export_length(self) -> int:
        """Return the longest sequence in tokens that its export has to accept."""
        return max(export_length(self.checkpoint.config), *self.windows)


def evaluate_with_harness(
    sources: Sequence[Path],
    tasks: str,
    request: EvaluationRequest,
    overrides: Sequence[str],
    out: Path | None,
    text: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Score checkpoints with lm-eval, print one table of all, and write the results if asked to.

    Args:
        sources: Run directories (their newest checkpoint is scored) or checkpoint directories.
        tasks: A task file, a folder of them, or a task's name; see `find_tasks`.
        request: The window lengths; without any, the training length.
        overrides: `data.directory=PATH`, where a checkpoint's data set was moved.
        out: FILE.json of the results; None for no file.
        text: --text, which lm-eval has no use for.

    Returns:
        One record for each checkpoint, window, task and metric.

    Raises:
        ConfigError: lm-eval is missing, no transformers class holds a model, a task or a length
            cannot work, or `out` is another file. Nothing has been written.
        RunFailed: An export differs from its model, or lm-eval fails.
    """
    name, folder_of_tasks = find_tasks(tasks)
    _check_options(request, overrides, out, text)
    scored = [_prepare(source, request) for source in sources]
    # Last: what is wrong with the input shall be known before anything is installed for it.
    for package in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--harness: {package} is not installed. Run: {INSTALL}")
    records: list[dict[str, Any]] = []
    answers = []
    processes = Processes()
    try:
        with processes.listening():
            for each in scored:
                with _exported(each, overrides) as folder:
                    for window in each.windows:
                        print(f"lm-eval at {window} tokens: {tasks}", flush=True)
                        settings = _settings(each, folder, name, window)
                        if folder_of_tasks is None:
                            settings["include_path"] = str(folder.absolute())
                        start = folder_of_tasks or folder
                        answer = _run(settings, start, tasks, processes)
                        answers.append(answer)
                        records += _records(each, window, answer)
    except Stopped:
        # Now that lm-eval has ended and temporary files are gone, it takes its usual effect.
        signal.raise_signal(processes.heard or signal.SIGTERM)
        raise
    print("\n" + _table(records, tasks).plain())
    if out is not None:
        version = answers[0].get(VERSION)
        with writing(out):
            make_directory(out.parent)
            replace_json(out, {VERSION: version, "records": records, "results": answers})
        print(f"\nResults written to {out}")
    return records


# ---- what is checked before anything is written --------------------------------------------------
def find_tasks(value: str) -> tuple[str, Path | None]:
    """Return what lm-eval calls the tasks, and the folder that it is started in; None: the export.

    A task's data_files are found from that folder.

    Args:
        value: A task file, a folder of task files, or the name of a task: that of the export, or
            one of lm-eval's own.

    Raises:
        ConfigError: It looks like a path and is not there, or holds no task file.
    """
    path = Path(value)
    if path.is_dir():
        if not any(path.glob("*.yaml")):
            raise ConfigError(f"--harness {value}: the folder holds no task, a file *.yaml")
        # Started in the folder, lm-eval needs no path, whatever characters there are in it.
        return ".", path
    if path.is_file() and path.suffix == ".yaml" and "," not in path.name:
        return path.name, path.parent
    if path.exists():
        raise ConfigError(
            f"--harness {value}: lm-eval reads tasks from files named *.yaml, without a comma in "
            "the name. Rename it"
        )
    if path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
        raise ConfigError(f"--harness {value}: no such file or folder")
    return value, None


def _check_options(
    request: EvaluationRequest, overrides: Sequence[str], out: Path | None, text: Sequence[str]
) -> None:
    """Check the options that do not depend on a checkpoint.

    Args:
        request: The options of an evaluation.
        overrides: The settings of --set.
        out: FILE.json of the results.
        text: --text.
    """
    if topology.Process.from_environment().world_size > 1:
        raise ConfigError("--harness: lm-eval runs in one process. Start it without torchrun, srun")
    ours = {
        "--text": bool(text),
        "--protocols": set(request.protocols) != set(PROTOCOLS),
        "--stride": request.stride is not None,
        "--max-tokens": request.max_tokens is not None,
    }
    for option, is_given in ours.items():
        if is_given:
            raise ConfigError(
                f"{option}: with --harness, the task says what is scored and lm-eval how. Leave it "
                "out"
            )
    for override in overrides:
        if override.partition("=")[0].strip() != "data.directory":
            raise ConfigError(
                f"--set {override}: --harness scores the model as it was trained. It takes "
                "data.directory alone, where the data set was moved"
            )
    if out is not None:
        check_report_path(out)
        if out.exists() and VERSION not in read_json(out, None):
            raise ConfigError(
                f"--out {out}: already exists, and `pretrain evaluate --harness` did not write it. "
                "Choose another file"
            )


def _prepare(source: Path, request: EvaluationRequest) -> Scored:
    """Open what a source names, and check that it can be exported and scored as asked."""
    checkpoint = open_checkpoint(find_checkpoint(source))
    config = checkpoint.config
    class_of(config)
    # Refuses, for example, lengths beyond a learned table of positions.
    request.applied_to(config, str(checkpoint.path))
    run = run_of(checkpoint.path)
    if run is not None and checkpoint.path.absolute().parent != RunPaths(run).checkpoints:
        run = None
    scored = Scored(checkpoint, run, request.lengths or (config.data.sequence_length,))
    checked_length(config, scored.export_length)
    return scored


# ---- the export ----------------------------------------------------------------------------------
@contextmanager
def _exported(scored: Scored, overrides: Sequence[str]) -> Iterator[Path]:
    """Yield a folder with the checkpoint as a Hugging Face model that has passed the comparison.

    An export of this checkpoint in the run's directory is used again; otherwise one is made in
    RUN/exports, where it stays. A checkpoint without a run of this user's gets a temporary one.

    Args:
        scored: The checkpoint.
        overrides: `data.directory=PATH`, for the comparison.

    Raises:
        RunFailed: The export differs from the trained model.
    """
    if (found := _existing(scored)) is not None:
        print(f"{found}: this checkpoint's export, made earlier")
        yield found
        return
    own = scored.run is not None and os.access(scored.run, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="pretrain-harness-") as temporary:
        root = RunPaths(scored.run).exports if own and scored.run else Path(temporary)
        folder = root / scored.checkpoint.path.name
        with writing(root):
            make_directory(root)
        source = scored.checkpoint.path
        if not export_source(source, folder, None, scored.export_length, overrides=overrides):
            raise RunFailed(f"{folder}: differs from the trained model, so it is not scored")
        yield folder


def _existing(scored: Scored) -> Path | None:
    """Return an export of the checkpoint in its run's directory; None if there is none to use."""
    if scored.run is None:
        return None
    paths = RunPaths(scored.run)
    folders = sorted([*paths.exports.glob("*/"), *scored.run.glob("*/")])
    made = (scored.checkpoint.lineage.id, scored.export_length)
    return next((folder for folder in folders if is_export_of(folder, *made)), None)


# ---- lm-eval -------------------------------------------------------------------------------------
def _settings(scored: Scored, export: Path, tasks: str, window: int) -> dict[str, Any]:
    """Return lm-eval's settings for a checkpoint at a window length in tokens."""
    config = scored.checkpoint.config
    model = {"pretrained": str(export.absolute()), "dtype": "float32", "max_length": window}
    if class_of(config).stock:
        # What no stock class computes. The code in the folder is the one of the export, whose every
        # file was compared with its digest.
        model["trust_remote_code"] = True
    return {
        "model": "hf",
        "model_args": model,
        "tasks": [tasks],
        "device": "cuda" if platform.has_cuda() else "cpu",
        "batch_size": max(1, config.evaluation.tokens_per_batch // window),
    }


def _run(settings: dict[str, Any], folder: Path, given: str, processes: Processes) -> Any:
    """Run lm-eval in a folder and return what it writes.

    Args:
        settings: lm-eval's.
        folder: Where it is started.
        given: The value of --harness, for messages.
        processes: Runs lm-eval, which ends with this command.

    Raises:
        RunFailed: lm-eval fails. Its output is kept.
        Stopped: A signal asked to end; lm-eval has ended.
    """
    with tempfile.TemporaryDirectory(prefix="pretrain-harness-") as temporary:
        # A file, since on lm-eval's command line a path may hold neither a comma nor a "=".
        config, output = Path(temporary, "lm_eval.yaml"), Path(temporary, "output.log")
        config.write_text(json.dumps(settings | {"output_path": f"{temporary}/results.json"}))
        # -P: nothing that lies beside a task stands in for a library's module.
        command = [*ENVIRONMENT, sys.executable, "-P", "-m", "lm_eval", "run", "--config"]
        with output.open("wb") as file:
            code = processes.run([[*command, str(config)]], folder, file)
        if processes.stopped:
            raise Stopped
        written = sorted(Path(temporary).glob("results_*.json"))
        if code or not written:
            said = output.read_text(errors="replace")
            descriptor, log = tempfile.mkstemp(prefix="lm_eval-", suffix=".log", text=True)
            with os.fdopen(descriptor, "w") as kept:
                kept.write(said)
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
            raise RunFailed(
                f"--harness {given}: lm-eval failed with exit code {code}: {last.strip()}\n"
                "It runs offline, so a task's data must be in files or in Hugging Face's cache. "
                f"All of its output is in {log}"
            )
        answer = json.loads(written[-1].read_text())
    # Hundreds of lines about the machine, which a run's own provenance holds.
    answer.pop("pretty_env_info", None)
    return answer


def _records(scored: Scored, window: int, answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each task and metric of lm-eval's answer.

    Args:
        scored: The checkpoint.
        window: The longest sequence in tokens that the model was given.
        answer: What lm-eval wrote.
    """
    checkpoint = scored.checkpoint
    for task, values in answer["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not filtered:
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            samples = answer.get("n-samples", {}).get(task, {})
            yield {
                "run": str(scored.run or checkpoint.path),
                "step": checkpoint.trainer_state.step,
                "method": checkpoint.config.position.method,
                "seed": checkpoint.config.run.seed,
                "train_length": checkpoint.config.data.sequence_length,
                "checkpoint": str(checkpoint.path),
                "precision": "fp32",
                "window": window,
                "task": task,
                "version": answer.get("versions", {}).get(task),
                "metric": metric,
                "filter": filtered,
                "value": value,
                "stderr": error if isinstance(error, int | float) else None,
                "documents": samples.get("effective"),
            }


def _table(records: Sequence[Mapping[str, Any]], given: str) -> Table:
    """Return the table of all records.

    Args:
        records: As `_records` yields them.
        given: The value of --harness.
    """
    header = ["run", "positions", "step", "task", "metric", "tokens", "documents", "value", "+-"]
    rows = []
    for r in records:
        name = r["metric"] if r["filter"] == "none" else f"{r['metric']} ({r['filter']})"
        numbers = [str(r["window"]), str(r["documents"] or "-"), f"{r['value']:.6g}"]
        error = "-" if r["stderr"] is None or math.isnan(r["stderr"]) else f"{r['stderr']:.2g}"
        rows.append([r["run"], r["method"], str(r["step"]), r["task"], name, *numbers, error])
    return Table(f"lm-eval, {given}; +- is its standard error", header, rows, names=5)
