"""Define every key of a study file, and read one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, PositiveInt, ValidationError

from pretrain.config import ConfigError, EvaluationRequest
from pretrain.config.load import expand_path, explain, key_of, read_toml
from pretrain.config.schema import Section

FIELDS = ("config", "methods", "training_lengths", "tokens_per_step")
"""Keys that make runs of one config, and have no meaning beside `configs`."""


class StudyEvaluation(Section):
    """[evaluation]: what `pretrain evaluate` measures of all finished runs, alike for all."""

    lengths: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1, strict=False)
    """Window lengths in tokens. Default: 1, 2, 4, 8 and 16 times every training length, as far as
    the text reaches."""

    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping", "sliding"), min_length=1, strict=False
    )
    """Protocols of the evaluation."""

    stride: int | None = Field(default=None, gt=0)
    """sliding: tokens from one window to the next. Default: the shortest of the lengths."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of the validation text that are scored. Default: all of them."""


class StudyEfficiency(Section):
    """[efficiency]: speed and memory of every method at every training length."""

    rounds: int = Field(default=0, ge=0)
    """How often each method and length takes its turn; 0 measures nothing."""


class StudyFile(Section):
    """A study file: the runs, and what is measured of them."""

    title: str = Field(min_length=1)
    """Title of the report."""

    directory: str = Field(min_length=1)
    """Directory of the study, relative to where the command is started: study.json, runs/,
    evaluation/ and report/. ~ and $VARIABLE are expanded when the file is read."""

    published: Literal["wikitext103", "cc100_roberta"] | None = None
    """Published numbers that the report puts beside those of the study. Default: none."""

    config: str | None = None
    """Config file that all runs have in common, relative to the study file."""

    methods: tuple[str, ...] = Field(default=(), strict=False)
    """Values of position.method. Each is trained at each of training_lengths."""

    training_lengths: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Values of data.sequence_length."""

    tokens_per_step: int | None = Field(default=None, gt=0)
    """Tokens of a training step, the same at every length: batch.global_batch_size is this divided
    by the length. Default: as many as a step of the config takes. batch.micro_batch_size is that of
    the config at its own length, and at the others holds as many whole sequences as fit into its
    tokens, one at least."""

    configs: tuple[str, ...] = Field(default=(), strict=False)
    """Config files of a family, relative to the study file, or patterns such as "*.toml": a run of
    each. They stand in place of config, methods, training_lengths and tokens_per_step."""

    seeds: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """Values of run.seed: each method and length is trained with each of them. Default: the seed of
    the config. Two or more show which differences are noise."""

    settings: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of all runs, each as --set takes it, such as "train.num_steps=320"."""

    evaluation: StudyEvaluation = StudyEvaluation()
    efficiency: StudyEfficiency = StudyEfficiency()

    @property
    def root(self) -> Path:
        """Return the study's directory."""
        return Path(self.directory)


def load_study_file(path: Path) -> StudyFile:
    """Read a study file and check what can be checked without its configs.

    Raises:
        ConfigError: The file cannot be read, or its values cannot work together; the message names
            the file, the key, the value and the remedy.
    """
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such study file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable study file: {error}") from None
    return parse_study(values, path)


def parse_study(values: dict[str, Any], path: Path) -> StudyFile:
    """Build and check a study file from its values.

    Args:
        values: As tomllib returns them.
        path: The file that they come from, for messages.

    Raises:
        ConfigError: The values cannot work together.
    """
    if {"model", "run"} & set(values):
        raise ConfigError(
            f"{path}: the config of a run, not a study file. A study names it: config = "
            f'"{path.name}"; `launcher local` trains it by itself'
        )
    try:
        study = StudyFile.model_validate(values)
        if problem := _problem(study):
            raise ConfigError(problem)
        return study.model_copy(update={"directory": expand_path("directory", study.directory)})
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(e)}" for e in error.errors())) from None
    except ConfigError as error:
        raise ConfigError(
            "\n".join(f"{path}: {line}" for line in str(error).splitlines())
        ) from None


def _explain(error: Any) -> str:
    """Return a pydantic error as a line; for an unknown key, with the study key that is meant."""
    if error["type"] != "extra_forbidden":
        return explain(error)
    *sections, name = map(str, error["loc"])
    parts: dict[str, type[Section]] = {
        "evaluation": StudyEvaluation,
        "efficiency": StudyEfficiency,
    }
    keys = list((parts[sections[0]] if sections else StudyFile).model_fields)
    near = difflib.get_close_matches(name.lower(), keys, 1)
    key = ".".join([*sections, name])
    meant = f", did you mean {near[0]}?" if near else f"; there are {', '.join(keys)}"
    return f"{key}: no such key{meant}"


def dump_study(study: StudyFile) -> str:
    """Return a study file as TOML, every key with its value, defaults included."""
    return tomli_w.dumps(study.model_dump(mode="json", exclude_none=True))


def request_of(evaluation: StudyEvaluation, lengths: tuple[int, ...]) -> EvaluationRequest:
    """Return what `pretrain evaluate` is asked for.

    Args:
        evaluation: The study's section.
        lengths: The window lengths, chosen.

    Raises:
        ConfigError: The stride or the token limit does not go with the lengths.
    """
    return EvaluationRequest.parse(
        ",".join(map(str, lengths)),
        ",".join(evaluation.protocols),
        evaluation.stride or min(lengths),
        evaluation.max_tokens,
    )


def _problem(study: StudyFile) -> str:
    """Return what is wrong with the keys together; empty when nothing is."""
    given = [name for name in FIELDS if getattr(study, name)]
    if study.configs and given:
        return (
            f"configs and {given[0]}: choose one. configs lists a config file for each method and "
            "length; config, methods and training_lengths make the runs from one file"
        )
    if not study.configs:
        missing = [name for name in FIELDS[:3] if not getattr(study, name)]
        if missing:
            return (
                f"{missing[0]}: missing. Name a config, methods and training_lengths, or list "
                "config files in configs"
            )
    if study.directory.startswith("-"):
        return f"directory = {study.directory}: commands take this for an option. Name another"
    if not all(study.methods):
        # An empty value would remove the key, and train its default in place of what was asked.
        return 'methods = "": expected a value of position.method, such as "alibi"'
    return _setting_problem(study)


def _setting_problem(study: StudyFile) -> str:
    """Return what is wrong with `settings`; empty when nothing is."""
    own = {"run.directory": "directory"}
    if not study.configs:
        own |= {
            "position.method": "methods",
            "data.sequence_length": "training_lengths",
            "batch.global_batch_size": "tokens_per_step",
        }
    if study.seeds is not None:
        own["run.seed"] = "seeds"
    for setting in study.settings:
        if key := own.get(key_of(setting)):
            return f'settings = "{setting}": {key} says this. Leave it out of settings'
    return ""
