"""Define every key of a study file, read one, and resolve it into runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from pretrain.config.section import Section


class StudyEvaluation(Section):
    """[evaluation]: what `pretrain evaluate` measures of all finished runs."""

    lengths: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1, strict=False)
    """Window lengths in tokens, the same for all runs. Default: 1, 2, 4, 8 and 16 times every
    training length."""

    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping", "sliding"), min_length=1, strict=False
    )
    """Protocols of the evaluation."""

    stride: int | None = Field(default=None, gt=0)
    """sliding: tokens from one window to the next. Default: the shortest of the lengths."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of the validation stream that are scored. Default: all of them."""


class StudyEfficiency(Section):
    """[efficiency]: speed and memory of every method, measured in turns."""

    rounds: int = Field(default=0, ge=0)
    """Times that each method is measured; 0 measures nothing."""


class StudyFile(Section):
    """A whole study file: the runs, and what is measured of them."""

    title: str = Field(min_length=1)
    """Title of the report."""

    directory: str = Field(min_length=1)
    """Directory of the study, relative to where the command is started. ~ and $VARIABLE are
    expanded."""

    published: Literal["wikitext103", "cc100_roberta"] | None = None
    """Published numbers that the report puts beside the study's. Default: none."""

    config: str | None = None
    """Config file that the runs have in common, relative to the study file."""

    methods: tuple[str, ...] = Field(default=(), strict=False)
    """Values of position.method."""

    training_lengths: tuple[PositiveInt, ...] = Field(default=(), strict=False)
    """Values of data.sequence_length."""

    tokens_per_step: int | None = Field(default=None, gt=0)
    """Tokens of a training step at every length: batch.global_batch_size is this divided by the
    length. Default: the config's own batch.global_batch_size times its data.sequence_length."""

    configs: tuple[str, ...] = Field(default=(), strict=False)
    """Config files or patterns of a family, relative to the study file, instead of config, methods
    and training_lengths: one run each."""

    seeds: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """Values of run.seed; a run for each. Default: the config's own seed."""

    settings: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of all runs, each as --set takes it: "train.num_steps=320"."""

    evaluation: StudyEvaluation = StudyEvaluation()
    efficiency: StudyEfficiency = StudyEfficiency()
