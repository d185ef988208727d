"""Run `pretrain import`: turn a Hugging Face folder into a run's directory, and verify the weights.

transformers reads the folder, and the table of its class maps settings and weights to ours. The
run's directory appears only after stock transformers and our model have computed the same results.

An export contains the config of its run. The new run takes over that config, including data and
schedule, if it still describes the folder's model.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.manifest import Origin, TrainerState, open_checkpoint
from pretrain.checkpoint.save import put_tokenizer, write_checkpoint
from pretrain.config import (
    ConfigError,
    RunConfig,
    RunFailed,
    dump_config,
    load_config,
    num_parameters,
    parse_config,
    writing,
)
from pretrain.config.errors import Refusal
from pretrain.config.load import key_of
from pretrain.config.schema import Effect
from pretrain.config.trajectory import TOKENIZER, allow_options, changed_function, differences
from pretrain.data.shards import JSON, MODEL
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.huggingface.base import HuggingFaceClass
from pretrain.huggingface.classes import CLASSES
from pretrain.huggingface.export import longest_comparison, recorded_logits
from pretrain.huggingface.folder import MARKER, ORIGINAL_TOKENIZERS, ORIGINALS, check_new
from pretrain.huggingface.parity import check_parity
from pretrain.rundir.checkpoints import Branch, new_id
from pretrain.rundir.files import new_directory, replace_file
from pretrain.rundir.paths import RunPaths, check_apart, claim_version

CONFIG = "config.json"
DEFAULT_LENGTH = 2048
"""Training length in tokens if the folder does not state one: that of the published Blooms."""
PARITY_ROWS = 2
"""Number of random sequences that are compared at each length."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    # The smallest micro batch, because the memory is not known here.
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    # Low, because the weights are trained already.
    "optimizer": {"learning_rate": 1e-5},
    "train": {"num_steps": 1000},
}
"""Settings without a default in the schema, for the run of a model that was not exported here."""


@dataclass(frozen=True)
class Source:
    """A folder's model as its config.json describes it."""

    folder: Path
    target: HuggingFaceClass
    settings: Any
    """The transformers config."""

    @property
    def stated_length(self) -> int | None:
        """Return the longest sequence in tokens that the folder states; None if it states none."""
        return getattr(self.settings.get_text_config(), self.target.length_key, None)

    @property
    def max_length(self) -> int:
        """Return the stated length, or DEFAULT_LENGTH."""
        return self.stated_length or DEFAULT_LENGTH

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        return int(self.settings.get_text_config().vocab_size)

    @property
    def is_export(self) -> bool:
        """Return True if the folder is an export of ours, which contains the run's config."""
        return (self.folder / MARKER).is_file()


def import_folder(
    folder: Path, out: Path, overrides: Sequence[str] = (), *, advice: bool = True
) -> None:
    """Turn a Hugging Face folder into a run's directory, and print the comparison.

    Args:
        folder: Folder with config.json and the weights.
        out: Directory of the run to create. Its config.toml is a complete config, and
            checkpoints/step-00000000 holds the weights, with moments of zero.
        overrides: `section.key=value` settings for config.toml. Settings of [position] apply from
            the first training step on; the checkpoint has the folder's positions.
        advice: Also print what to do with the run.

    Raises:
        ConfigError: The folder is damaged, our model cannot hold its model, or `out` is not empty.
        RunFailed: Our model computes another function, or `out` cannot be written.
    """
    check_new(out)
    check_apart(out)
    source = read_source(folder)
    tokenizer, lacking = None, ""
    try:
        tokenizer = tokenizer_of_folder(source)
    except ConfigError as error:
        lacking = (
            f"{error}.\nSo the run has no tokenizer, and is evaluated on text and exported only "
            "with a data set that the model's own tokenizer made"
        )
    config = run_config(source, out, overrides, tokenizer)
    # The checkpoint computes what the folder computes; changed positions apply from training on.
    kept = [each for each in overrides if not key_of(each).startswith("position.")]
    own = run_config(source, out, kept, tokenizer)
    # In fp32, by the names of the class's state_dict.
    weights = load_model(source, torch.float32).state_dict()
    tensors = dict(_tensors(source, own, weights))
    del weights
    with new_run(out, config, own, tensors, tokenizer) as checkpoint:
        del tensors
        _check_parity(source, out, checkpoint)
    if not advice:
        return
    print(f"{folder} -> {out} ({num_parameters(own):,} parameters)")
    print(_advice(source, config, out, tokenizer) if tokenizer is not None else lacking)
    if changed := changed_function(own, config):
        allowed = [d.key for d in differences(own, config) if d.effect is Effect.FUNCTION]
        print(
            f"The first training step begins with {changed}: give `pretrain train` "
            f"{' '.join(allow_options(allowed))}"
        )


@contextlib.contextmanager
def new_run(
    out: Path,
    config: RunConfig,
    own: RunConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    step: int = 0,
) -> Iterator[Path]:
    """Write a run with one checkpoint and yield the checkpoint; then give the run its final name.

    Args:
        out: The run's directory.
        config: The run's config.
        own: The checkpoint's config.
        tensors: The weights by global name.
        tokenizer: The model's tokenizer, if it is known.
        step: Step of the checkpoint.
    """
    with writing(out), new_directory(out.absolute()) as partial:
        claim_version(partial)
        replace_file(RunPaths(partial).config, dump_config(config))
        put_tokenizer(tokenizer, partial)
        data = {TOKENIZER: tokenizer.fingerprint} if tokenizer is not None else {}
        origin = Origin(branches=(Branch(new_id(), 0),), data=data)
        state = TrainerState(step, step * own.batch.global_batch_size)
        checkpoint = write_checkpoint(partial, own, tensors, state, origin, tokenizer)
        # Free the weights before the caller, which drops them too, builds a model.
        del tensors
        yield checkpoint


@contextlib.contextmanager
def as_run(source: Path) -> Iterator[tuple[bool, Path]]:
    """Yield (True, source) for a run or checkpoint, else (False, a temporary run made from it).

    Raises:
        ConfigError: As `import_folder`.
    """
    if not (source / CONFIG).is_file():
        yield True, source
        return
    with tempfile.TemporaryDirectory(prefix="pretrain-import-") as folder:
        in_fp32 = ["train.precision=fp32", "parallel.gradient_reduce_dtype=fp32"]
        import_folder(source, Path(folder) / "run", in_fp32, advice=False)
        yield False, Path(folder) / "run"


# ---- The folder's model --------------------------------------------------------------------------
class OtherClass(HuggingFaceClass):
    """A class without a table: transformers loads and evaluates it, and nothing is converted.

    Args:
        trust_remote_code: Run code that the folder contains.
    """

    def __init__(self, trust_remote_code: bool) -> None:
        self.trust_remote_code = trust_remote_code

    def sections(self, settings: Any) -> tuple[dict[str, dict[str, Any]], list[Refusal]]:
        return {}, [Refusal("model_type", settings.model_type, "it has no table", "Evaluate it")]

    @property
    def config_class(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig


def read_source(folder: Path, other: OtherClass | None = None) -> Source:
    """Read and check config.json, without the weights.

    Args:
        folder: The folder.
        other: Takes the place of classes that cannot be imported; None refuses them.

    Raises:
        ConfigError: config.json is missing, is damaged, or describes a model of another class.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}). Give the folder of a downloaded or exported model"
        ) from None
    model_type = values.get("model_type") if isinstance(values, dict) else None
    target = CLASSES.get(model_type, other) if isinstance(model_type, str) else None
    if target is None:
        raise ConfigError(
            f"{path}: model_type = {model_type!r}: cannot be imported. {', '.join(CLASSES)} can"
        )
    try:
        settings = target.read_config(folder)
    # transformers validates a config with errors of many kinds.
    except Exception as error:
        raise ConfigError(f"{path}: transformers cannot read it: {in_a_line(error)}") from None
    return Source(folder, target, settings)


def in_a_line(error: Exception) -> str:
    """Return the class and message of another library's error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def load_model(source: Source, dtype: torch.dtype) -> Any:
    """Return the model that transformers loads.

    Raises:
        ConfigError: The weights cannot be loaded, or do not fit the model that config.json
            describes.
    """
    folder = source.folder
    options = {"config": source.settings, "output_loading_info": True}
    try:
        # transformers loads torch's files with weights_only.
        model, found = source.target.load(folder, dtype=dtype, **options)
    # Errors of the file system, safetensors, pickle and transformers.
    except Exception as error:
        raise ConfigError(
            f"{folder}: transformers cannot load the weights: {in_a_line(error)}"
        ) from None
    # transformers only warns: it gives missing weights random values, and ignores unexpected ones.
    for kind in ("missing", "unexpected"):
        if names := sorted(found[f"{kind}_keys"]):
            raise ConfigError(
                f"{folder}: {kind} for the model that {CONFIG} describes: {', '.join(names[:5])}"
            )
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ConfigError(f"{folder}: {name} holds a NaN or an infinity. Get a sound copy")
    return model


def _tensors(
    source: Source, config: RunConfig, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors by global name.

    Args:
        source: The folder's model.
        config: The run's config.
        weights: The folder's weights.
    """
    from safetensors.torch import load_file

    target = source.target
    for name, key in target.settings_tensors.items():
        if name in config.position.tensors(config):
            yield name, torch.tensor(getattr(source.settings, key), dtype=torch.float32)
    originals = source.folder / ORIGINALS
    stored = load_file(originals) if source.is_export and originals.is_file() else {}
    yield from target.restore(config, weights.__getitem__, stored)


# ---- The run's config ----------------------------------------------------------------------------
def run_config(
    source: Source, out: Path, overrides: Sequence[str], tokenizer: Tokenizer | None = None
) -> RunConfig:
    """Return the config of the run that an import makes.

    Args:
        source: The folder's model.
        out: The run's directory.
        overrides: `section.key=value` settings of the user.
        tokenizer: The folder's tokenizer, which is copied into the run.

    Raises:
        ConfigError: Our model cannot hold the folder's, or an override changes the model or the
            run's directory.
    """
    values = _exported_values(source) if source.is_export else _new_values(source, out, tokenizer)
    values["run"] = values.get("run", {}) | {"directory": str(out)}
    # Always set, so that a build never trains a new tokenizer, whose ids would not match the
    # model's embeddings.
    values["data"]["tokenizer"] = str(out / (tokenizer.file_name if tokenizer else JSON))
    origin = str(source.folder / (MARKER if source.is_export else CONFIG))
    found, config = parse_config(values, origin), parse_config(values, origin, overrides)
    free = ["data.vocab_size"] * (found.padded_vocab_size == config.padded_vocab_size)
    for d in differences(found, config):
        if d.key == "run.directory" or (d.effect is Effect.FIXED and d.key not in free):
            raise ConfigError(
                f"{d.key} = {d.after}: an import makes it {d.before}. Remove the --set"
            )
    return config


def stock_config(
    source: Source, overrides: Sequence[str], world_size: int
) -> tuple[RunConfig, str]:
    """Return the config for evaluating a folder with transformers' own model.

    Its [model] describes the folder's model if ours can hold it. If not, it has the width and the
    vocabulary size, which the estimate of memory needs, and the positions are unknown.

    Args:
        source: The folder's model.
        overrides: `section.key=value` settings of the user.
        world_size: Number of processes, each with the whole model.

    Returns:
        The config, and the position method: "unknown (MODEL_TYPE)" if our model cannot hold it.

    Raises:
        ConfigError: An override changes the model, or the length or the text is not known.
    """
    method = ""
    if source.is_export:
        values = _exported_values(source) | {"parallel": {}}
        # An export holds the fp32 weights. Some classes would lose accuracy in 16 bit.
        values["train"]["precision"] = "fp32"
    else:
        sections, refusals = source.target.sections(source.settings)
        if refusals:
            text = source.settings.get_text_config()
            sizes = {"hidden_size": text.hidden_size, "num_layers": 1, "num_attention_heads": 1}
            sizes["make_vocab_size_divisible_by"] = text.vocab_size
            sections = {"model": sizes, "position": {"method": "none"}}
            method = f"unknown ({source.settings.model_type})"
        length = source.stated_length
        data = {"vocab_size": source.vocab_size, **({"sequence_length": length} if length else {})}
        values = {**_DEFAULTS, **sections, "data": data}
    values["run"] = values.get("run", {}) | {"directory": str(source.folder)}
    values |= {"batch": {"micro_batch_size": 1, "global_batch_size": world_size}}
    config = parse_config(values, f"{source.folder}, completed by --text and --set", overrides)
    for key in map(key_of, overrides):
        if key.startswith(("model.", "position.", "parallel.")):
            raise ConfigError(
                f"--set {key}: {source.folder} is evaluated as transformers loads it, whole on "
                f"each process. `pretrain import {source.folder} RUN` makes a run of it, which "
                "takes such settings"
            )
    return config, method or config.position_name


def _exported_values(source: Source) -> dict[str, Any]:
    """Return the sections of the run that the folder was exported from."""
    config = load_config(source.folder / MARKER)
    values = config.model_dump(mode="json", exclude_none=True)
    if config.position.table_end(config) is not None:
        # Set, because its default is data.sequence_length, which the user may override.
        values["position"]["max_position_embeddings"] = source.max_length
    return values


def _new_values(source: Source, out: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the sections of a run for a model that was not trained here.

    Raises:
        ConfigError: The model computes something that ours cannot; a line for each reason.
    """
    sections, refusals = source.target.sections(source.settings)
    if refusals:
        path = source.folder / CONFIG
        raise ConfigError("\n".join(f"{path}: {refusal}" for refusal in refusals))
    return {
        **sections,
        **_DEFAULTS,
        # The run exports to the same class, even if others could hold the model.
        "export": {"model_type": source.target.model_type},
        "data": {
            "directory": str(out / "data"),
            "sequence_length": source.max_length,
            "vocab_size": (tokenizer or source.settings).vocab_size,
            "source": "text",
            "paths": ["corpus/**/*.txt"],
        },
    }


# ---- The comparison ------------------------------------------------------------------------------
def _check_parity(source: Source, out: Path, checkpoint: Path) -> None:
    """Compare our model, loaded from the checkpoint, with the stock one, and print the comparison.

    The tokens are random, because the folder's tokenizer may be of an unknown kind.

    Args:
        source: The folder's model.
        out: The run's directory, for the message.
        checkpoint: The checkpoint that was made from it.

    Raises:
        RunFailed: They compute different results.
    """
    opened = open_checkpoint(checkpoint)
    # In fp32, like the master weights, and for this single process.
    config = opened.load_config(["train.precision=fp32"])
    lengths = [config.data.sequence_length, 4 * config.data.sequence_length]
    most = longest_comparison(config)
    if source.target.is_bounded:
        most = min(most, source.max_length)
    lengths = [min(length, most) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, source.settings.vocab_size, (PARITY_ROWS, length), generator=generator)
        for length in sorted(set(lengths))
    ]
    with recorded_logits(config, opened, ids, checkpoint.parents[1]) as ours:
        report = check_parity(ours, source.folder, ids)
    print(report.format())
    if not report.passed:
        raise RunFailed(
            f"{source.folder}: our model does not compute what transformers computes, so {out} was "
            f"not made. If the folder was changed after its export, remove its {MARKER}. Else this "
            f"is a defect of the import, or rounding in very large weights if the difference is "
            f"near the limit: report it with the folder's {CONFIG}"
        )


# ---- The tokenizer -------------------------------------------------------------------------------
def tokenizer_of_folder(source: Source) -> Tokenizer:
    """Return the folder's tokenizer.

    Raises:
        ConfigError: It has none of a known kind, or one with more pieces than embeddings.
    """
    names = ORIGINAL_TOKENIZERS.values() if source.is_export else (JSON, MODEL)
    paths = (source.folder / name for name in names)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{source.folder}: has no {JSON} and no {MODEL}. For a tokenizer in another form, "
            f"transformers' AutoTokenizer.from_pretrained(F).save_pretrained(F) writes a {JSON}"
        )
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > source.vocab_size:
        raise ConfigError(
            f"{path}: has {tokenizer.vocab_size} pieces, the model {source.vocab_size} embeddings. "
            "Give the tokenizer that the model was trained with"
        )
    return tokenizer


def _advice(source: Source, config: RunConfig, out: Path, tokenizer: Tokenizer) -> str:
    """Return what the user must know about the tokenizer and the data before using the run."""
    eos, other = source.settings.eos_token_id, ""
    if eos not in (None, tokenizer.eos_id):
        other = (
            f"{CONFIG} has eos_token_id = {eos}; here documents end with token {tokenizer.eos_id}, "
            f"as {tokenizer.file_name} names it.\n"
        )
    return other + (
        f"`pretrain evaluate {out} --text FILE` and `pretrain export` need nothing else. To train "
        f"on, data.directory = {config.data.directory} needs tokens of "
        f"{out / tokenizer.file_name}: set data.paths and run `pretrain data build "
        f"{out}/config.toml`"
    )
