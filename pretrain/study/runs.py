"""Define every key of a study file, resolve a file into runs, and determine their states.

A study is sizes x methods x lengths x seeds, with one run for each combination. A run in the
study's directory is refused if it belongs to another experiment.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import operator
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, PositiveInt, ValidationError

from pretrain.checkpoint.format import DamagedCheckpoint
from pretrain.checkpoint.manifest import Change, data_hashes, open_checkpoint
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, dump_config, load_config
from pretrain.config.load import expand_path, explain, read_values
from pretrain.config.run import LENGTH_FACTORS
from pretrain.config.schema import Effect, Section
from pretrain.config.trajectory import data_differences, differences, scheduled_changes
from pretrain.data.stream import open_stream
from pretrain.evaluation.records import Table, grouped, read_records, records_json
from pretrain.evaluation.windows import NONOVERLAPPING, SLIDING
from pretrain.positions.base import layers
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import (
    complete_checkpoints,
    find_checkpoint,
    newest_checkpoint_step,
)
from pretrain.rundir.files import make_directory, read_json, read_text, replace_file, replace_json
from pretrain.rundir.jobs import check_goes_on, is_done, missing_data
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import ENDED_WELL, Outcome, RunPaths, in_words

FIELDS = ("config", "methods", "training_lengths", "tokens_per_step")
"""Keys that make runs from one config. They have no meaning together with `configs`."""


class StudyEvaluation(Section):
    """[evaluation]: what `pretrain evaluate` measures, the same for all finished runs."""

    lengths: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1, strict=False)
    """Window lengths in tokens. Default: 1, 2, 4, 8 and 16 times every training length, as far as
    the text reaches."""

    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping", "sliding"), min_length=1, strict=False
    )
    """Protocols of the evaluation."""

    stride: int | None = Field(default=None, gt=0)
    """sliding: tokens from one window to the next. Default: the shortest of the lengths. At L,
    windows overlap only with a stride below L, which claims about sliding windows need."""

    max_tokens: int | None = Field(default=None, gt=0)
    """The most tokens of the validation text that are scored. Default: all of them."""


class StudyEfficiency(Section):
    """[efficiency]: speed and memory of every method at every training length.

    Runs with phases of several lengths are left out.
    """

    rounds: int = Field(default=0, ge=0)
    """How often each method and length takes its turn; 0 measures nothing."""


class StudyFile(Section):
    """A study file: the runs, and what is measured about them."""

    title: str = Field(min_length=1)
    """Title of the report."""

    directory: str = Field(pattern="^[^-]")
    """Directory of the study, relative to where the command is started: study.json, runs/,
    evaluation/ and report/. ~ and $VARIABLE are expanded when the file is read. It must not begin
    with "-", because commands would take it for an option."""

    published: Literal["wikitext103", "cc100_roberta", "cc100_roberta_equal_time"] | None = None
    """Published numbers that the report puts beside those of the study. Default: none."""

    config: str | None = None
    """Config file that all runs have in common, relative to the study file."""

    methods: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)
    """Values of position.method. Each is trained at each of training_lengths."""

    training_lengths: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Values of data.sequence_length."""

    tokens_per_step: int | None = Field(default=None, gt=0)
    """Tokens of a training step, the same at every length: batch.global_batch_size is this divided
    by the length. Default: as many as a step of the config takes. batch.micro_batch_size is that of
    the config at its own length; at other lengths it is the number of whole sequences that fit into
    as many tokens, at least one."""

    configs: tuple[str, ...] = Field(default=(), strict=False)
    """Config files of a family, relative to the study file, or patterns such as "*.toml": each file
    makes a run. They replace config, methods, training_lengths and tokens_per_step."""

    seeds: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """Values of run.seed: each method and length is trained with each of them. Default: the seed of
    the config. Two or more show which differences are noise."""

    further_seeds: dict[str, list[int]] = Field(default={})
    """Method and length, such as "alibi-128" -> further seeds of these runs alone, for comparisons
    that the seeds of all runs leave open."""

    settings: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of all runs, each in the form of --set, such as "train.num_steps=320". The study's
    own keys, such as methods and seeds, override them."""

    sizes: dict[Annotated[str, Field(pattern=r"^\d[\w.]*$")], list[str]] = Field(default={})
    """Size, such as "3m" -> settings of its runs, usually of the model and its steps. They override
    those of all runs. Methods are compared within a size. Each size has its own report, and
    STUDY/report shows how the gap between methods changes with the compute of a training."""

    evaluation: StudyEvaluation = StudyEvaluation()
    efficiency: StudyEfficiency = StudyEfficiency()


def load_study_file(path: Path) -> StudyFile:
    """Read a study file, which may have a base like a config, and check it without its configs.

    Raises:
        ConfigError: The file cannot be read, or its values cannot work together; the message names
            the file, the key, the value and the remedy.
    """
    try:
        study = StudyFile.model_validate(read_values(path))
    except ValidationError as error:
        lines = [explain(e, StudyFile.model_fields) for e in error.errors()]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None
    if problem := _problem(study):
        raise ConfigError(f"{path}: {problem}")
    directory = expand_path(f"{path}: directory", study.directory)
    return study.model_copy(update={"directory": directory})


def dump_study(study: StudyFile) -> str:
    """Return a study file as TOML, with the value of every key, including defaults."""
    return tomli_w.dumps(study.model_dump(mode="json", exclude_none=True))


def request_of(evaluation: StudyEvaluation, lengths: tuple[int, ...]) -> EvaluationRequest:
    """Return the request for `pretrain evaluate`.

    Args:
        evaluation: The study's section.
        lengths: The chosen window lengths, in tokens.

    Raises:
        ConfigError: The stride or the token limit does not fit the lengths.
    """
    return EvaluationRequest.parse(
        ",".join(map(str, lengths)),
        ",".join(evaluation.protocols),
        evaluation.stride or min(lengths),
        evaluation.max_tokens,
    )


def _problem(study: StudyFile) -> str:
    """Return what is wrong with the combination of keys; "" if nothing is."""
    given = [name for name in FIELDS if getattr(study, name)]
    if study.configs and given:
        return (
            f"configs and {given[0]}: choose one. configs lists a config file for each method and "
            "length; config, methods and training_lengths make the runs from one file"
        )
    missing = [name for name in FIELDS[:3] if not getattr(study, name)]
    if missing and not study.configs:
        return (
            f"{missing[0]}: missing. Name a config, methods and training_lengths, or list config "
            "files in configs"
        )
    if study.sizes and study.efficiency.rounds:
        return "sizes and efficiency.rounds: choose one. Speeds are measured of models of one size"
    return ""


# ---- the runs ------------------------------------------------------------------------------------
LOCK = ".lock"
"""File that a study's command keeps locked while it works."""
COMPARED = ("run.seed", "data.sequence_length")
"""Keys in which the runs of a study may differ. They may also differ in those of the position
methods and of the batch, which holds fewer sequences if they are longer."""
MARKS = (LOCK, "study.json", "records/*/record.json")
"""A directory with any of these is a study's directory; the first is written before all others."""
OWN_NAMES = ("study.toml", "configs", "runs", "records", "evaluation", "efficiency.json", "report")
"""Other names that a study writes in its directory."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    name: str
    """METHOD-L-sSEED, with METHOD as in `method`, or with several sizes SIZE-METHOD-L-sSEED. The
    name depends on the run alone, so that a study that is extended keeps its runs."""
    config: RunConfig
    source: Path
    """The config file from which the run comes."""
    size: str = ""
    """The run's key in `StudyFile.sizes`."""

    @property
    def method(self) -> str:
        """Return the position method; ALiBi with other slopes has another name."""
        return self.trained.position_name

    @property
    def trained(self) -> RunConfig:
        """Return the config of the run's last phase, by which its results are compared."""
        return self.config.parts[-1].config

    @property
    def train_length(self) -> int:
        """Return the training length in tokens."""
        return self.trained.data.sequence_length

    @property
    def seed(self) -> int:
        """Return the seed."""
        return self.config.run.seed

    @property
    def record(self) -> Path:
        """Return the folder of its record: all files that a report needs of a finished run."""
        return self.config.directory.parents[1] / "records" / self.name

    @property
    def metrics(self) -> Path:
        """Return its metrics.jsonl: from the record or, if there is none yet, from the run."""
        recorded = self.record / METRICS
        return recorded if recorded.exists() else self.config.directory / METRICS


@dataclass(frozen=True)
class Study:
    """A study file and its runs."""

    file: Path
    asked: StudyFile
    runs: tuple[StudyRun, ...]
    size: str = ""
    """The size of all runs, if this is the study of one size."""

    @property
    def parts(self) -> list[Study]:
        """Return the study of each size; if the file names no sizes, this study alone."""
        groups = grouped(self.runs, lambda run: run.size)
        return [replace(self, runs=tuple(runs), size=size) for size, runs in groups.items()]

    @property
    def title(self) -> str:
        """Return the title of its report."""
        return f"{self.asked.title}: {self.size}" if self.size else self.asked.title

    @property
    def directory(self) -> Path:
        """Return the study's directory."""
        return Path(self.asked.directory)

    @property
    def report(self) -> Path:
        """Return the folder of its report."""
        return self.directory / "report" / self.size

    def config_file(self, run: StudyRun) -> Path:
        """Return the path of a run's resolved config, which its ranks read."""
        return self.directory / "configs" / f"{run.name}.toml"

    @property
    def curve(self) -> Path:
        """Return the file with the evaluations of all records, from which the report is made."""
        return self.directory / "evaluation" / CURVE

    @property
    def command(self) -> str:
        """Return the command that works on the study."""
        return shlex.join(["pretrain", "study", str(self.file)])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the window lengths of the evaluation, in tokens, shortest first."""
        if self.asked.evaluation.lengths is not None:
            return tuple(sorted(set(self.asked.evaluation.lengths)))
        most = self.asked.evaluation.max_tokens or math.inf
        trained = {run.train_length for run in self.runs}
        found = {length * factor for length in trained for factor in LENGTH_FACTORS}
        return tuple(sorted(length for length in found if length <= most)) or (min(trained),)


def resolve(path: Path, asked: StudyFile) -> Study:
    """Return a study's runs: all methods at one length, then the next length, size and seed.

    Args:
        path: The study file.
        asked: The content of the file.

    Raises:
        ConfigError: A run cannot work, two runs have the same method, length and seed, or a pattern
            matches no file.
    """
    runs_of = _of_files if asked.configs else _of_fields
    asked_for = [
        (size, *each)
        for size, of_size in (asked.sizes or {"": []}).items()
        for each in runs_of(path, asked, [*asked.settings, *of_size])
    ]
    seeds: list[int | None] = [*(asked.seeds or (None,))]
    further = sorted({*itertools.chain(*asked.further_seeds.values())} - {*seeds})
    runs: dict[str, StudyRun] = {}
    met = set()
    for seed, (size, source, of_run) in itertools.product([*seeds, *further], asked_for):
        settings = [*of_run, *([] if seed is None else [f"run.seed={seed}"])]
        config = load_config(source, settings)
        trained = config.parts[-1].config
        kind = f"{trained.position_name}-{trained.data.sequence_length}"
        kind = f"{size}-{kind}" if size else kind
        met.add(kind)
        if seed not in (*seeds, *asked.further_seeds.get(kind, ())):
            continue
        name = f"{kind}-s{config.run.seed}"
        if twice := runs.get(name):
            raise ConfigError(
                f"{path}: {source} and {twice.source} are both {name}: one method, training length "
                "and seed. Leave one of the two out"
            )
        directory = json.dumps(str(Path(asked.directory, "runs", name)), ensure_ascii=False)
        own = [f"run.directory={directory}"]
        if url := config.checkpoint.upload_to:
            own.append(f"checkpoint.upload_to={url.rstrip('/')}/{name}")
        config = load_config(source, [*settings, *own])
        runs[name] = StudyRun(name, config, source, size)
    if unknown := ", ".join(sorted(asked.further_seeds.keys() - met)):
        raise ConfigError(
            f"{path}: further_seeds: {unknown}: the study has no such runs. Choose among "
            f"{', '.join(sorted(met))}"
        )
    study = Study(path, asked, tuple(runs.values()))
    _check_evaluation(study)
    return study


def check_runs(study: Study, nproc: int | None) -> None:
    """Check every run before the first run starts: its layout, and that it is this experiment.

    Args:
        study: The study.
        nproc: Processes of each run; None if a cluster's launcher checks the layout.

    Raises:
        ConfigError: A run cannot work with `nproc` processes or has a position method that only the
            calling script knows, or a run in the study's directory was trained on other data, or
            with other settings than the study file has now.
    """
    used = [m for run in study.runs for m in (run.trained.position, *layers(run.trained))]
    problems = [
        f"{study.file}: {each.__module__}.{each.__name__}: a study trains with `python -m "
        "pretrain`, which knows only the position methods in pretrain/positions. Put the class in "
        "a file there, or train the runs with your script and compare them with `pretrain report`"
        for each in dict.fromkeys(map(type, used))
        if not each.__module__.startswith("pretrain.positions.")
    ]
    if study.asked.efficiency.rounds:
        said = _values(study, "tokens a step", lambda c: c.parts[-1].config.tokens_per_step)
        more = "Speeds are compared at equally many: set batch.global_batch_size, or rounds = 0"
        problems += [f"{study.file}: efficiency.rounds: {line}. {more}" for line in said]
    more = "Runs of one size are evaluated on one text: make a study for each data set"
    for part in study.parts:
        said = _values(part, "data.directory", lambda c: os.path.realpath(c.data.directory))
        problems += [f"{study.file}: {line}. {more}" for line in said]
    for run in study.runs:
        try:
            if nproc is not None:
                run.config.layout(nproc)
            problems += [f"{study.file}: {run.name}: {line}" for line in _other_experiment(run)]
            if not problems:
                check_goes_on(run.config)
        except ConfigError as error:
            problems += [f"{study.file}: {run.name}: {line}" for line in str(error).splitlines()]
    if problems:
        raise ConfigError("\n".join(problems))


def check_directory(study: Study) -> None:
    """Check that a study would not overwrite files that are not its own.

    Raises:
        ConfigError: Its directory already has files of these names that no study has written.
    """
    if any(any(study.directory.glob(mark)) for mark in MARKS):
        return
    for name in OWN_NAMES:
        if (study.directory / name).exists():
            raise ConfigError(
                f"{study.file}: directory = {study.asked.directory}: {study.directory / name} is "
                "there and of no study. Name a directory for this study alone"
            )


def other_differences(study: Study) -> list[str]:
    """Return one line for each key besides method, length and seed in which runs of a size differ.

    Config files of a study may differ in any key. A comparison of methods then also compares that.
    """
    lines = []
    for part in study.parts:
        first = part.runs[0].config
        keys = {
            each.key: None
            for run in part.runs
            for each in differences(first, run.config)
            if each.effect is not Effect.FREE
        }
        for key in keys:
            if key in COMPARED or key.partition(".")[0] in ("position", "batch"):
                continue
            lines += _values(part, key, operator.attrgetter(key))
        lines += _values(part, "tokens a step", lambda config: config.tokens_per_step)
        lines += _values(part, "phases", _phases)
    return lines


def _phases(config: RunConfig) -> list[tuple[int, dict[str, Any]]]:
    """Return the last step of each phase, and how its training differs from the last phase's."""
    found = []
    for phase in config.parts if config.phases else ():
        other = differences(config.parts[-1].config, phase.config)
        unlike = {each.key: each.after for each in other if each.effect is not Effect.FREE}
        found.append((phase.end, {k: v for k, v in unlike.items() if k != "train.num_steps"}))
    return found


def _values(study: Study, what: str, value: Callable[[RunConfig], Any]) -> list[str]:
    """Return a line with each value and the runs that have it; [] if all runs agree."""
    runs = grouped(study.runs, lambda run: str(value(run.config)))
    said = "; ".join(f"{found} in {', '.join(r.name for r in of)}" for found, of in runs.items())
    return [f"{what}: {said}"] if len(runs) > 1 else []


def data_sets(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Return one run for each data set that has not been built."""
    by_directory = {run.config.data.directory: run for run in runs}
    return [run for run in by_directory.values() if missing_data(run.config) is not None]


def _of_files(
    path: Path, asked: StudyFile, settings: list[str]
) -> Iterator[tuple[Path, list[str]]]:
    """Yield each config file of a study that lists them, with the settings."""
    sources: dict[Path, RunConfig] = {}
    for pattern in asked.configs:
        names = glob.glob(pattern, root_dir=path.parent, recursive=True)
        if not (files := sorted(path.parent / name for name in names)):
            raise ConfigError(f"{path}: configs = {pattern!r}: no such file in {path.parent}")
        sources |= {file: load_config(file, settings) for file in files}
    # The shortest length comes first, and the methods of one length follow each other.
    for file in sorted(sources, key=lambda file: sources[file].data.sequence_length):
        yield file, settings


def _of_fields(
    path: Path, asked: StudyFile, settings: list[str]
) -> Iterator[tuple[Path, list[str]]]:
    """Yield the config file of a study of methods and lengths, with the settings of each run."""
    source = path.parent / str(asked.config)
    base = load_config(source, settings)
    if base.phases:
        raise ConfigError(
            f"{path}: training_lengths: {source} has [[phases]], which say the lengths. List the "
            "configs of the runs in place of config: configs = [...]"
        )
    tokens = asked.tokens_per_step or base.tokens_per_step
    micro_tokens = base.batch.micro_batch_size * base.data.sequence_length
    for length in asked.training_lengths:
        if tokens % length:
            raise ConfigError(
                f"{path}: training_lengths = {length}: does not divide the {tokens:,} tokens "
                "of tokens_per_step. Choose lengths that do, or another tokens_per_step"
            )
        # Micro batches have nearly equal numbers of tokens, as far as whole ones allow.
        batch = [f"batch.global_batch_size={tokens // length}"]
        sizes = range(1, max(1, micro_tokens // length) + 1)
        batch += [f"batch.micro_batch_size={max(n for n in sizes if tokens // length % n == 0)}"]
        for method in asked.methods:
            own = [f"position.method={method}", f"data.sequence_length={length}"]
            yield source, [*settings, *own, *batch]


def _check_evaluation(study: Study) -> None:
    """Raise ConfigError if a run cannot be evaluated as the study asks."""
    try:
        request = request_of(study.asked.evaluation, study.lengths)
    except ConfigError as error:
        raise ConfigError(f"{study.file}: [evaluation]: {error}") from None
    for run in study.runs:
        request.applied_to(run.trained, f"{study.file}: {run.name}")
        if study.asked.published == "wikitext103" and run.config.data.tokenizer != "words":
            raise ConfigError(
                f"{study.file}: published = wikitext103: its perplexities are of words, and "
                f"{run.name} predicts tokens of another kind (data.tokenizer = "
                f"{run.config.data.tokenizer}). Leave it out; ratios to L stand beside the "
                'published ones in any case. Or set data.tokenizer = "words"'
            )


Trained = tuple[list[RunConfig], list[RunConfig], Mapping[str, str], Sequence[Change], Path]
"""The configs of the phases that were trained, those that the study asks for up to there, the
hashes of the data, the changes on the way, and the path that says so."""


def _trained(run: StudyRun) -> Iterator[Trained]:
    """Yield what its record and its newest checkpoint say that a run was trained as.

    Both count, because a run may have been trained on since it was recorded.
    """
    asked = [part.config for part in run.config.parts]
    if recorded := read_json(run.record / RECORD):
        parts = [part.config for part in load_config(run.record / CONFIG).parts]
        yield parts, asked, recorded.get("data", {}), (), run.record
    for path in complete_checkpoints(run.config.directory)[-1:]:
        try:
            checkpoint = open_checkpoint(path)
        except DamagedCheckpoint:
            # Training resumes from the checkpoint before it; for a finished run, the evaluation
            # reports the damage.
            return
        origin, file = checkpoint.origin, RunPaths(run.config.directory).config
        # The phase of the last step that was taken, and those before it.
        last = max(checkpoint.trainer_state.step - 1, 0)
        asked = asked[: run.config.phase_after(last).number]
        if file.exists():
            whole = load_config(file)
            earlier = [part.config for part in whole.parts[: whole.phase_after(last).number - 1]]
        else:
            earlier, asked = [], asked[-1:]
        yield [*earlier, checkpoint.config], asked, origin.data, origin.changes, path


def _other_experiment(run: StudyRun) -> Iterator[str]:
    """Yield a line for each difference between a trained run and what the study file asks for.

    This check is stricter than that of a resumed run: more steps mean another schedule, and in a
    study every key has one value, so changes that were allowed during the run count as differences.
    Where the data is not built, the keys that decide it are compared in place of its hashes.
    """
    for parts, asked, data, changes, path in _trained(run):
        both = (each for before, after in zip(parts, asked) for each in differences(before, after))
        # Where data lies may differ between machines.
        found = [each for each in both if each.key != "data.directory"]
        if data and missing_data(run.config) is None:
            # The hashes decide, whichever keys the data was built with.
            found = [each for each in found if each.effect is not Effect.CONTENT]
            streams = open_stream(run.config, "train"), open_stream(run.config, "validation")
            found += data_differences(data, data_hashes(streams), run.config.data.directory)
        remedy = (
            "A study does not mix experiments: put it back, name another directory for this "
            f"study, or remove {path if path == run.record else run.config.directory}"
        )
        if len(parts) != len(asked):
            yield f"phases = {len(asked)}: {path} was trained with {len(parts)}. {remedy}"
        # A key may differ in several phases.
        for each in {(d.key, d.data): d for d in reversed(found)}.values():
            # Data counts even if FREE: with another validation text, losses could not be compared.
            if each.effect is not Effect.FREE or each.data:
                note = each.data or "its data is not built here" * (each.effect is Effect.CONTENT)
                what = f"{each.key} ({note})" if note else each.key
                after, before = each.shown(each.after), each.shown(each.before)
                yield f"{what} = {after}: {path} was trained with {before}. {remedy}"
        for change in changes:
            if change.key not in scheduled_changes(run.config, change.step):
                yield (
                    f"{change.key}: was changed from {change.before} to {change.after} after step "
                    f"{change.step} of {path}. {remedy}"
                )


# ---- Keep what a report needs of a finished run, without its weights ----
# A clone with the records of a study can continue the study on any machine, because runs with a
# record count as finished.


CONFIG, CURVE, METRICS = "config.toml", "curve.json", "metrics.jsonl"
"""Files of a record: the resolved config, the evaluation, and losses and evaluations by step."""
LOSS = "loss_nats"
RECORD = "record.json"
"""The request of the evaluation, and the hashes of the data; removed first and written last."""


def asked_of(study: Study) -> dict[str, Any]:
    """Return everything besides the run that decides the result of an evaluation, as JSON.

    All requests that measure the same are one.
    """
    asked = study.asked.evaluation
    stride = (asked.stride or study.lengths[0]) if SLIDING in asked.protocols else None
    own = {"lengths": list(study.lengths), "stride": stride}
    return asked.model_dump(mode="json") | own | {"protocols": sorted({*asked.protocols})}


def is_recorded(study: Study, run: StudyRun) -> bool:
    """Return True if a run's record is complete and has all that the study asks to evaluate."""
    recorded, asked = read_json(run.record / RECORD).get("asked", {}), asked_of(study)
    if SLIDING not in asked["protocols"]:
        del asked["stride"]
    # Which tokens are scored does not depend on the lengths and protocols.
    more = ("lengths", "protocols")
    has_all = all({*recorded.get(key, ())} >= {*asked.pop(key)} for key in more)
    return has_all and all(recorded.get(key) == value for key, value in asked.items())


def check_records(study: Study, again: Collection[str] = ()) -> None:
    """Raise ConfigError if records lack what the study asks, and no weights are there to evaluate.

    Without this check, the runs of a study that others trained would be trained again. Runs named
    in `again` are left out, because the user asked to train them.
    """
    for run in (each for each in study.runs if each.name not in again):
        record = run.record / RECORD
        has_weights = newest_checkpoint_step(run.config.directory)
        if record.exists() and not has_weights and not is_recorded(study, run):
            has = read_json(record).get("asked", {})
            other = {k: has.get(k) for k, v in asked_of(study).items() if has.get(k) != v}
            raise ConfigError(
                f"{study.file}: [evaluation]: {record} has {other}, and no checkpoint is there to "
                "evaluate. Set these values (lengths follow training_lengths), or give --again"
            )


def write_record(study: Study, run: StudyRun, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the record of a finished run.

    Args:
        study: The study.
        run: The run, whose checkpoint must exist.
        records: Its evaluation.
    """
    folder = run.record
    make_directory(folder)
    (folder / RECORD).unlink(missing_ok=True)
    lines = [
        row if is_evaluation(row) else {"step": row["step"], LOSS: row[LOSS]}
        for row in read_metrics(run.config.directory / METRICS)
        if LOSS in row
    ]
    replace_file(folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    replace_file(folder / CONFIG, dump_config(run.config))
    replace_file(folder / CURVE, records_json(records))
    data = open_checkpoint(find_checkpoint(run.config.directory)).origin.data
    replace_json(folder / RECORD, {"asked": asked_of(study), "data": data}, indent=1)


def records_of(study: Study) -> list[dict[str, Any]]:
    """Return the records of the evaluations done so far, in the study's order."""
    left_out = {NONOVERLAPPING, SLIDING} - {*study.asked.evaluation.protocols}
    found = []
    for run in (run for run in study.runs if is_recorded(study, run)):
        file = run.record / CURVE
        rows = [r for r in read_records(file) if r["length"] in study.lengths]
        lengths = {r["length"] for r in rows if Path(r["run"]).name == run.name}
        # Lengths beyond the text were left out.
        most = max((r["tokens"] for r in rows), default=math.inf)
        if lacks := {length for length in study.lengths if length <= most} - lengths:
            raise ConfigError(
                f"{file}: has no perplexity of {run.name} at {min(lacks)} tokens, which {RECORD} "
                f"lists. Put the file back, or remove {run.record} to evaluate or train again"
            )
        found += [r for r in rows if r["protocol"] not in left_out]
    return found


def compare_losses(run: StudyRun) -> tuple[bool, str]:
    """Compare the losses of a run that was trained again with those of its record.

    Returns:
        Whether all are equal, and a line that says so or names the first difference.
    """
    now, then = (
        {r["step"]: r[LOSS] for r in read_metrics(path) if LOSS in r and not is_evaluation(r)}
        for path in (run.config.directory / METRICS, run.record / METRICS)
    )
    other = [step for step in sorted(now.keys() | then.keys()) if now.get(step) != then.get(step)]
    if not other:
        return True, f"{run.name}: all {len(then):,} losses are those recorded"
    first = other[0]
    return False, (
        f"{run.name}: {len(other):,} of {len(then):,} losses are not those recorded; the first is "
        f"at step {first}: {now.get(first)}, and {then.get(first)} was recorded"
    )


# ---- Determine the states of a study's runs from their directories; record them in study.json ----


FINISHED, FAILED, WAITING = "finished", "failed", "waiting"
"""The states of a run in study.json."""


@dataclass(frozen=True)
class State:
    """State of a run, and the reason for it."""

    state: str
    """FINISHED, FAILED or WAITING."""
    reason: str = ""
    """Why it is not finished, in one line."""
    step: int = 0
    """The step of the newest checkpoint."""


def state_of(run: StudyRun, launched: str = "") -> State:
    """Return the state of a run: finished only if the checkpoint of its last step exists.

    Args:
        run: The run.
        launched: How the launcher failed in this command, for a run without an attempt that would
            record it.
    """
    directory, last = run.config.directory, run.config.train.num_steps
    step = newest_checkpoint_step(directory) or 0
    if is_done(run.config):
        if step == last:
            return State(FINISHED, step=step)
        # The run would not be trained again, but there is no checkpoint to evaluate.
        gone = f"finished, but its checkpoints are gone; remove {directory} to train it again"
        return State(FAILED, gone, step)
    attempts = read_attempts(directory)
    ended = attempts[-1].ended if attempts else None
    if ended and ended.outcome not in (*ENDED_WELL, Outcome.SUPERSEDED):
        return State(FAILED, f"{in_words(ended.outcome)}: {ended.reason}", step)
    if launched:
        return State(FAILED, launched, step)
    if not attempts:
        return State(WAITING, "not started")
    how = "stopped" if ended else "running, or interrupted"
    return State(WAITING, f"{how}; saved at step {step}", step)


def states_of(
    study: Study, launched: Mapping[str, str] | None = None
) -> list[tuple[StudyRun, State]]:
    """Return every run with its state, in the study's order.

    Args:
        study: The study.
        launched: Name of a run -> how the launcher failed in this command.
    """
    states = []
    for run in study.runs:
        state = State(FINISHED, step=run.config.train.num_steps)
        if not is_recorded(study, run):
            state = state_of(run, (launched or {}).get(run.name, ""))
        states.append((run, state))
    return states


def write_study(study: Study, states: Sequence[tuple[StudyRun, State]]) -> None:
    """Write study.json: every run with its state."""
    rows = [
        {
            "name": run.name,
            "method": run.method,
            "train_length": run.train_length,
            "seed": run.seed,
            "state": state.state,
            "reason": state.reason,
        }
        for run, state in states
    ]
    text = json.dumps({"title": study.asked.title, "runs": rows}, indent=1)
    write_changed(study.directory / "study.json", text + "\n")


def write_changed(path: Path, text: str) -> None:
    """Write a file atomically, unless it already has this text."""
    make_directory(path.parent)
    if read_text(path) != text:
        replace_file(path, text)


def runs_table(
    states: Sequence[tuple[StudyRun, State]], shown: Callable[[str], str] = str
) -> Table:
    """Return a table of the runs and their states.

    Args:
        states: Every run with its state.
        shown: Turns a reason into text that a cell can show.
    """
    header = ["run", "method", "L", "seed", "state", "reason"]
    rows = [
        [r.name, r.method, str(r.train_length), str(r.seed), s.state, shown(s.reason) or "-"]
        for r, s in states
    ]
    return Table("Runs of the study", header, rows, names=len(header))
