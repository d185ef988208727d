"""Run `pretrain evaluate`: score checkpoints, print one table and write one report.

The command runs on as many processes as it is started with, alone or under torchrun or srun.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pretrain.topology
from pretrain import platform
from pretrain.checkpoint.format import CONFIG
from pretrain.checkpoint.load import load_weights
from pretrain.checkpoint.manifest import (
    Checkpoint,
    check_model,
    check_tokenizer,
    is_its_validation_split,
    open_checkpoint,
    trained_tokens,
    with_data_set,
)
from pretrain.checkpoint.save import tokenizer_of
from pretrain.config import (
    ConfigError,
    EvaluationRequest,
    RunConfig,
    in_bytes,
    num_parameters,
    writing,
)
from pretrain.config.run import MASKED, PROTOCOLS, STREAM
from pretrain.config.trajectory import TRAINING, changed_function, settings_hash
from pretrain.data.files import find
from pretrain.data.shards import Manifest, ShardWriter, finish_split
from pretrain.data.sources import Corpus, Task, read, source_of
from pretrain.data.stream import TokenStream, open_stream
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.evaluation.perplexity import (
    Evaluation,
    Evaluator,
    StockChunk,
    check_memory,
    find_keys,
    free_memory,
    longppl,
    short_protocol,
)
from pretrain.evaluation.records import (
    BLOCKS,
    EVALUATED_WITH,
    FIELDS,
    HASH_DIGITS,
    LONGPPL,
    POSITIONS,
    Binned,
    bounded_exp,
    fields_of,
)
from pretrain.evaluation.report import (
    check_objectives,
    check_overwrites,
    format_table,
    read_evaluations,
    write_report,
)
from pretrain.evaluation.windows import (
    NONOVERLAPPING,
    Protocol,
    ScoredText,
    choose_protocols,
    documents,
)
from pretrain.huggingface import import_model
from pretrain.model import flops_per_token
from pretrain.model.attention import check_positions
from pretrain.model.forward import Decoder, check_stream
from pretrain.model.gpt import build_model
from pretrain.rundir.checkpoints import (
    find_checkpoint,
    hold,
    newest_checkpoint_step,
    run_of,
)
from pretrain.rundir.files import make_directory
from pretrain.rundir.jobs import running_code
from pretrain.rundir.metrics import evaluation_records
from pretrain.rundir.paths import RunPaths
from pretrain.topology import Topology


def evaluation_config(
    checkpoint: Checkpoint, request: EvaluationRequest, overrides: Sequence[str]
) -> RunConfig:
    """Return a checkpoint's config with the layout of an evaluation and the requested settings.

    Checkpoints load on any layout, so the layout of the training run does not matter. All processes
    are data-parallel replicas unless the overrides set another layout.

    Args:
        checkpoint: The opened checkpoint.
        request: Lengths, protocols, stride and token limit from the command line.
        overrides: `section.key=value` settings.

    Raises:
        ConfigError: The overrides describe a model that does not fit the weights, or change the
            training length.
    """
    world_size = pretrain.topology.Process.from_environment().world_size
    config = checkpoint.load_config([*_NOT_OWN, *overrides], world_size)
    check_model(config, checkpoint)
    trained = checkpoint.config.data.sequence_length
    # data.sequence_length is the training length L of every table; lengths are chosen separately.
    if config.data.sequence_length != trained:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length}: {checkpoint.path} was "
            f"trained at {trained} tokens. Use --lengths to choose the lengths to evaluate at"
        )
    return _as_asked(config, request, checkpoint.path / CONFIG)


_NOT_OWN = ("evaluation.max_tokens=", "evaluation.protocols=")
"""Keys that are not taken from the run, where they are for evaluations in the training loop; --set
still sets them here."""


def _as_asked(config: RunConfig, request: EvaluationRequest, origin: Path) -> RunConfig:
    """Return a config with the requested settings, from the command line or from --set."""
    if request.max_tokens is None:
        request = replace(request, max_tokens=config.evaluation.max_tokens)
    # If --protocols has its default, which is both protocols, --set decides.
    if request.protocols == PROTOCOLS and "protocols" in config.evaluation.model_fields_set:
        request = replace(request, protocols=config.evaluation.protocols)
    config = request.applied_to(config, str(origin))
    # Not in `applied_to`, because for a masked model both names mean its own protocol.
    evaluation = config.evaluation.model_copy(update={"protocols": request.protocols})
    return config.model_copy(update={"evaluation": evaluation})


def open_validation(checkpoint: Checkpoint, config: RunConfig) -> TokenStream:
    """Open the validation split to score a checkpoint on. Rank 0 reports if it is not the run's.

    A model can be evaluated on another corpus, but not with another tokenizer.

    Args:
        checkpoint: The opened checkpoint.
        config: Its config, with the overrides of the command line.

    Raises:
        ConfigError: The data cannot be used, or was made with another tokenizer.
    """
    stream = open_stream(with_data_set(config, checkpoint), "validation")
    check_tokenizer(stream, checkpoint)
    if not is_its_validation_split(stream, checkpoint):
        say(
            f"{stream.directory}: not the validation split that {checkpoint.path} was evaluated on "
            "while it trained"
        )
    return stream


def evaluate_sources(
    sources: list[Path],
    request: EvaluationRequest,
    overrides: list[str],
    out: Path | None,
    short_context: int | None = None,
    text: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate models, print one table of all, and write a report if `out` is given.

    Args:
        sources: Run directories (their newest checkpoint is evaluated), checkpoint directories, or
            Hugging Face folders.
        request: Lengths, protocols, stride and token limit from the command line.
        overrides: `section.key=value` settings for every checkpoint.
        out: FILE.json of the report, whose other files are written beside it; None for no report.
        short_context: Tokens of LongPPL's short context; None for no LongPPL. The first source
            determines the key tokens for all sources.
        text: Names of text files, or glob patterns, to score in place of validation splits.
        trust_remote_code: Run code that a Hugging Face folder contains.

    Returns:
        One record for each model, protocol and length (`records.Record`).

    Raises:
        ConfigError: A source is none of these, the data has another tokenizer, the text is shorter
            than a length, memory is too small for a length, or the report cannot be written.
    """
    with temporary_texts(text) as texts:
        # The input is checked before the process group starts, which takes seconds.
        opened = [
            open_source(source, request, overrides, texts, trust_remote_code) for source in sources
        ]
        return _evaluate([_prepare(each) for each in opened], out, short_context)


def _evaluate(
    jobs: Sequence[Opened], out: Path | None, short_context: int | None
) -> list[dict[str, Any]]:
    """Evaluate the opened models; see `evaluate_sources`."""
    check_objectives((job.run, protocol.name) for job in jobs for protocol in job.protocols)
    if out is not None:
        check_overwrites(out)
    # The identity is also that of the tokenizer.
    texts = {(job.stream.identity, job.config.evaluation.max_tokens) for job in jobs}
    if short_context and (len(texts) > 1 or any(job.config.is_masked for job in jobs)):
        raise ConfigError(
            "--longppl: the key tokens of the first source are used for all, so all sources need "
            "one tokenizer and one text, and must predict next tokens. Evaluate them one by one"
        )
    longest = max(protocol.length for job in jobs for protocol in job.protocols)
    if short_context and short_context >= longest:
        raise ConfigError(
            f"--longppl {short_context}: no token of the longest window, of {longest} tokens, has "
            "more context than that. Choose less"
        )
    keys: dict[tuple[str, int, int], Any] = {}

    def score(job: Opened) -> Iterator[dict[str, Any]]:
        """Yield the records of one model."""
        text, config = ScoredText(job.stream, job.config.evaluation.max_tokens), job.config
        if is_main():
            print(f"{job.outlook()}\n{_text_line(job, text)}", flush=True)
        short = short_protocol(short_context) if short_context else None
        chunks, topology = job.load([*job.protocols, *filter(None, [short])])
        evaluator = Evaluator(
            chunks,
            topology,
            text,
            tokens_per_batch=config.evaluation.tokens_per_batch,
            mask_id=config.mask_id if config.is_masked else None,
            by_token=short is not None,
        )
        of_short = evaluator.evaluate(short, progress=True) if short and not keys else None
        for protocol in job.protocols:
            result = evaluator.evaluate(protocol, progress=True)
            record = job.record(result, text, chunks)
            if short_context and of_short:
                keys[protocol.key] = find_keys(of_short, result, short_context)
            if short_context and protocol.key in keys:
                record |= longppl(result, keys[protocol.key], text.block_ends, short_context)
            own = job.unchanged(record)
            if is_main():
                print(_result_line(record), flush=True)
                if evaluator.decoder is not None:
                    print(_cache_line(evaluator.decoder), flush=True)
                if own is not None:
                    print(_against(record, own), flush=True)
            yield from [record] if own is None else [own, record]

    records = (record for job in jobs for record in score(job))
    return measure_all(jobs, records, format_table, write_report, out)


def measure_all(
    opened: Sequence[Opened],
    measured: Iterable[dict[str, Any]],
    show: Callable[[list[dict[str, Any]]], str],
    write: Callable[[Path, list[dict[str, Any]]], object],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Measure models, print tables of all records, and write the report. Collective.

    Args:
        opened: The models.
        measured: Iterator that measures them one by one and yields their records.
        show: Formats the tables.
        write: Writes the report.
        out: FILE.json of the report; None for no report.

    Raises:
        RunFailed: The report cannot be written.
    """
    if out is not None:
        # A bad --out fails before the measurement, not after.
        with writing(out):
            make_directory(out.parent)
    with contextlib.ExitStack() as held:
        # Hold all of them from the start: while one is measured, a run may delete the next one.
        for each in opened:
            held.enter_context(each.held())
        records = list(measured)
    if is_main():
        # Print the table first, so that no numbers are lost if the report cannot be written.
        print("\n" + show(records))
        if out is not None:
            with writing(out):
                write(out, records)
            print(f"\nReport written to {out}, with tables and plots beside it")
    pretrain.topology.finish()
    return records


@dataclass(frozen=True)
class Opened(ABC):
    """A model and the text that it is measured on."""

    path: Path
    """The checkpoint, or the Hugging Face folder."""
    run: str
    """The run's directory as the user gave it, or the path if it stands alone."""
    config: RunConfig
    """Its config, with the layout to evaluate on, and the requested settings."""
    stream: TokenStream
    """The validation split."""
    protocols: tuple[Protocol, ...] = field(default=(), kw_only=True)
    """The protocols to measure."""

    def common(self) -> dict[str, Any]:
        """Return the values that all records of the model share, by keys of `records.FIELDS`."""
        return {
            "run": self.run,
            **self.facts(),
            "tokenizer": self.stream.manifest.tokenizer_sha256[:HASH_DIGITS],
            "validation": self.stream.identity[:HASH_DIGITS],
            "precision": self.config.train.precision,
            "checkpoint": str(self.path),
        }

    def record(
        self, result: Evaluation, text: ScoredText, chunks: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Return the record of one evaluation of the model's chunks on a text."""
        origin = {
            "text": text.sha256 and text.sha256[:HASH_DIGITS],
            "code": running_code(),
            "parameters": self.parameters(chunks),
        }
        record = fields_of({**self.common(), **origin, **result.record(), **result.cost})
        record[BLOCKS] = result.by_block
        # Not for sliding windows, which score only a few positions.
        if result.protocol.name == NONOVERLAPPING:
            record[POSITIONS] = Binned.of(result.by_position)
        return record

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the values of records about the training."""

    @abstractmethod
    def outlook(self) -> str:
        """Return the line about what will be evaluated."""

    @abstractmethod
    def parameters(self, chunks: Sequence[nn.Module]) -> int:
        """Return the number of the whole model's parameters."""

    @abstractmethod
    def load(self, protocols: Collection[Protocol]) -> tuple[list[Any], Topology]:
        """Build the model, as the chunks that `run_schedule` takes. Collective.

        Args:
            protocols: The protocols to measure.

        Raises:
            ConfigError: There is not enough memory for one of the lengths.
        """

    def held(self) -> AbstractContextManager[None]:
        """Keep the model from being deleted while the block runs."""
        return contextlib.nullcontext()

    def unchanged(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the run's own record to compare with one that was measured with changed positions.

        None if the positions are unchanged, or if the run has no record of the same measurement.
        """
        return None


@dataclass(frozen=True)
class OpenedCheckpoint(Opened):
    """A checkpoint of a run."""

    checkpoint: Checkpoint

    def facts(self) -> dict[str, Any]:
        # From the checkpoint's own config, whatever the command line has set.
        found, trained = self.checkpoint, self.checkpoint.config
        origin, state = found.origin, found.trainer_state
        changed = changed_function(trained, self.config)
        method = trained.position_name
        changes = [(c.step, c.key, c.before, c.after) for c in origin.changes]
        settings = settings_hash(trained, origin.data.get(TRAINING), changes)
        # Without provenance the model was imported, and its training data is not known.
        is_own = origin.provenance is not None
        tokens = trained_tokens(trained, state, origin.changes) if is_own else {}
        flop = sum(n * flops_per_token(trained, at, causal=False) for at, n in tokens.items())
        return {
            "step": state.step,
            "method": f"{method}{EVALUATED_WITH}{changed}" if changed else method,
            "seed": trained.run.seed,
            "train_length": trained.data.sequence_length,
            "settings": settings[:HASH_DIGITS],
            "trained_tokens": sum(tokens.values()) if is_own else None,
            "training_flop": flop if is_own else None,
        }

    def outlook(self) -> str:
        step = self.checkpoint.trainer_state.step
        line = f"{self.run}: step {step} of {self.checkpoint.config.train.num_steps}"
        run = _run_of(self.path)
        newest = newest_checkpoint_step(run) if run else None
        return line if newest in (None, step) else f"{line}; the run's newest is step {newest}"

    def parameters(self, chunks: Sequence[nn.Module]) -> int:
        return num_parameters(self.checkpoint.config)

    def load(self, protocols: Collection[Protocol]) -> tuple[list[Any], Topology]:
        topology = pretrain.topology.initialize(self.config)
        chunks = build_model(self.config)
        check_positions(self.config, chunks)
        load_weights(self.checkpoint, chunks)
        check_memory(self.config, topology, protocols)
        return chunks, topology

    def held(self) -> AbstractContextManager[None]:
        return hold(self.path)

    def unchanged(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        # Prefer a record of its evaluation jobs, which has losses by block, to one of its training
        # loop.
        method, has_changed, _ = record["method"].partition(EVALUATED_WITH)
        run = _run_of(self.path)
        if not has_changed or run is None:
            return None
        of_jobs = read_evaluations(run / "evaluations").records
        of_loop = evaluation_records(RunPaths(run).metrics, record["step"])
        same = ("step", "protocol", "stride", "length", "tokens", "tokenizer", "validation")
        for found in (*of_jobs, *of_loop):
            if all(found.get(key) == record[key] for key in same):
                known = {key: found[key] for key in (*FIELDS, BLOCKS, POSITIONS) if key in found}
                return {key: record[key] for key in FIELDS} | known | {"method": method}
        return None


@dataclass(frozen=True)
class OpenedFolder(Opened):
    """A Hugging Face folder, whose model transformers computes."""

    source: import_model.Source
    method: str
    """Its position method."""

    def facts(self) -> dict[str, Any]:
        content = (self.path / import_model.CONFIG).read_bytes()
        return {
            "step": 0,
            "method": self.method,
            "seed": self.config.run.seed if self.source.is_export else 0,
            "train_length": self.config.data.sequence_length,
            "settings": hashlib.sha256(content).hexdigest()[:HASH_DIGITS],
        }

    def outlook(self) -> str:
        return f"{self.run}: {self.source.settings.model_type} of transformers, {self.method}"

    def parameters(self, chunks: Sequence[nn.Module]) -> int:
        return sum(each.numel() for each in chunks[0].parameters())

    def load(self, protocols: Collection[Protocol]) -> tuple[list[Any], Topology]:
        topology = pretrain.topology.initialize(self.config)
        dtype = platform.DTYPES[self.config.train.precision]
        # The first of these patterns that matches is what transformers loads.
        patterns = "model*.safetensors", "pytorch_model*.bin", "*.safetensors"
        files = next(filter(None, ([*self.path.glob(each)] for each in patterns)), [])
        stored = getattr(self.source.settings, "dtype", None) or torch.float32
        needed = sum(file.stat().st_size for file in files) * dtype.itemsize // stored.itemsize
        if needed > (free := free_memory()):
            raise ConfigError(
                f"{self.path}: its weights take about {in_bytes(needed)} in "
                f"{self.config.train.precision} on each process, which holds them whole, and "
                f"{in_bytes(free)} are free. Use a larger machine, fewer processes on it, or --set "
                "train.precision=bf16"
            )
        model = import_model.load_model(self.source, dtype).to(platform.device())
        check_memory(self.config, topology, protocols)
        longest = max(protocol.pass_length for protocol in protocols)
        ids = torch.zeros(1, longest, dtype=torch.long, device=platform.device())
        try:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        # Each class raises a different error beyond its last position.
        except Exception as error:
            raise ConfigError(
                f"length {longest}: {self.path} does not compute so many tokens at once "
                f"({import_model.in_a_line(error)}). Choose shorter --lengths"
            ) from None
        if _looks_ahead(model, ids.new_zeros(1, 8)):
            raise ConfigError(
                f"{self.path}: a token's prediction depends on the tokens after it, as in an "
                "encoder, so it has no perplexity. Name a model that predicts the next token"
            )
        return [StockChunk(model, self.config)], topology


@torch.no_grad()
def _looks_ahead(model: Any, ids: Tensor) -> bool:
    """Return True if other tokens after the fourth change the logits of the first four."""
    both = ids, torch.cat([ids[:, :4], torch.ones_like(ids[:, 4:])], 1)
    seen, other = (model(input_ids=each, use_cache=False).logits[:, :4].float() for each in both)
    return bool((seen - other).abs().max() > 1e-3 * seen.abs().max())


def open_source(
    source: Path,
    request: EvaluationRequest,
    overrides: Sequence[str],
    texts: Texts,
    trust_remote_code: bool = False,
) -> Opened:
    """Open a source: a run's directory, a checkpoint's, or a Hugging Face folder.

    Raises:
        ConfigError: It is none of these, or cannot be evaluated as requested.
    """
    if (source / import_model.CONFIG).is_file():
        return _open_folder(source, request, overrides, texts, trust_remote_code)
    path = find_checkpoint(source)
    checkpoint, run = open_checkpoint(path), _run_of(path)
    if texts.patterns:
        overrides = [*overrides, texts.of_files(tokenizer_of_source(path))]
    config = evaluation_config(checkpoint, request, overrides)
    stream = open_validation(checkpoint, config)
    return OpenedCheckpoint(path, str(run or path), config, stream, checkpoint)


def _open_folder(
    path: Path,
    request: EvaluationRequest,
    overrides: Sequence[str],
    texts: Texts,
    trust_remote_code: bool,
) -> Opened:
    """Open a Hugging Face folder; see `open_source`."""
    source = import_model.read_source(path, import_model.OtherClass(trust_remote_code))
    tokenizer = import_model.tokenizer_of_folder(source)
    if texts.patterns:
        overrides = [*overrides, texts.of_files(tokenizer)]
    world_size = pretrain.topology.Process.from_environment().world_size
    config, method = import_model.stock_config(source, [*_NOT_OWN, *overrides], world_size)
    config = _as_asked(config, request, path / import_model.CONFIG)
    if STREAM in config.evaluation.protocols:
        raise ConfigError(
            f"--stream: {path} is computed by transformers, in windows. `pretrain import {path} "
            "RUN` makes a run of it, which can read a stream"
        )
    # Not by `open_stream`, which would refuse a data set of another vocabulary.
    stream = TokenStream(Path(config.data.directory) / "validation")
    if stream.manifest.tokenizer_sha256 != tokenizer.fingerprint:
        stream = texts.again(stream, tokenizer)
        say(f"{path}: reads the same text by its own tokenizer, in {len(stream):,} tokens")
    return OpenedFolder(path, str(path), config, stream, source, method)


def _prepare(found: Opened) -> Opened:
    """Choose what to measure for a model.

    Raises:
        ConfigError: As `evaluate_sources`.
    """
    total = len(found.stream)
    if STREAM in found.config.evaluation.protocols:
        check_stream(found.config, pretrain.topology.Process.from_environment().world_size)
    protocols, notes = choose_protocols(found.config, total)
    for note in notes:
        say(f"{found.path}: {note}")
    return replace(found, protocols=protocols)


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint belongs to, with its path as the user wrote it.

    None for a copy elsewhere, and for an abandoned checkpoint in RUN/abandoned.
    """
    run = run_of(checkpoint)
    if run is None or checkpoint.absolute().parent != RunPaths(run).checkpoints:
        return None
    written = checkpoint.parents[1] if len(checkpoint.parts) > 2 else run
    return written if written.absolute() == run else run


def _text_line(job: Opened, text: ScoredText) -> str:
    """Return the line about the text that is scored."""
    share = "all" if text.tokens == text.total else f"{text.tokens:,} of the"
    if job.config.is_masked:
        share = f"the masked ones of {share}"
    size = f"{text.bytes:,} bytes of text" if text.bytes else "an unknown number of bytes"
    return (
        f"  scores {share} {text.total:,} tokens of {job.stream.directory}: {size}, in "
        f"{len(text.block_ends)} blocks for the confidence intervals"
    )


def _result_line(record: Mapping[str, Any]) -> str:
    """Return the line of one result."""
    low, high = (bounded_exp(record[key]) for key in ("loss_low", "loss_high"))
    keys = ""
    if "key_tokens" in record:
        value = f"{record[LONGPPL]:.3f}" if LONGPPL in record else "-"
        keys = f"  LongPPL {value} of {record['key_tokens']:,} key tokens"
    # Bits per byte may be unknown, and a text of a single block has no interval.
    bits = record["bits_per_byte"]
    in_bits = "bits per byte unknown" if bits is None else f"{bits:.4f} bits per byte"
    interval = "no interval" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
    return (
        f"{record['method']:<12} {record['protocol']:<15} {record['length']:>7} tokens  "
        f"perplexity {record['perplexity']:9.3f}  ({interval})  "
        + ("of masked tokens" if record["protocol"] == MASKED else in_bits)
        + keys
    )


def _against(record: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return the line that compares a result with the one for the run's own positions."""
    ratio = bounded_exp(record["loss_nats"] - own["loss_nats"])
    return f"  {ratio:.3f} times the run's own, {own['perplexity']:.3f}"


def _cache_line(decoder: Decoder) -> str:
    """Return the line about what the cache of a stream holds at its end, on this rank."""
    kept = decoder.kept()
    return (
        f"  cache: {kept.device / 1e6:.1f} MB of keys and values on the device and "
        f"{kept.host / 1e6:.1f} MB on the host, of {decoder.full_bytes() / 1e6:.1f} MB; "
        f"{kept.fetches} fetches from the host"
    )


def is_main() -> bool:
    """Return True on the rank that prints and writes."""
    return pretrain.topology.Process.from_environment().rank == 0


def say(line: str) -> None:
    """Print a line to stderr, once for all ranks."""
    if is_main():
        print(line, file=sys.stderr, flush=True)


# ---- The text as ids of a tokenizer --------------------------------------------------------------
TOKENS_PER_BLOCK = 2**16


class Texts:
    """The text to score: the documents in the files of --text, or validation splits.

    Args:
        folder: Folder for data sets made from a text, one for each tokenizer.
        patterns: Names of text files, or glob patterns; empty for validation splits.
    """

    def __init__(self, folder: Path, patterns: Sequence[str]) -> None:
        self.folder, self.patterns = folder, patterns

    def of_files(self, tokenizer: Tokenizer) -> str:
        """Return the setting data.directory of the files in a tokenizer's ids.

        Raises:
            ConfigError: A file cannot be read or is no text.
        """
        folder = self.folder / tokenizer.fingerprint
        if not folder.exists():
            manifest = _write_split(folder, tokenizer, _documents_of(self.patterns))
            if is_main():
                print(
                    f"--text: {manifest.documents} documents, {manifest.text_bytes:,} bytes, "
                    f"{manifest.tokens:,} tokens with an end-of-document token after each",
                    flush=True,
                )
        return f"data.directory={folder}"

    def again(self, stream: TokenStream, tokenizer: Tokenizer) -> TokenStream:
        """Return a validation split's documents as ids of another tokenizer."""
        folder = self.folder / f"{tokenizer.fingerprint}-{stream.identity[:HASH_DIGITS]}"
        if not folder.exists():
            own = load_tokenizer(stream.tokenizer_path)
            *whole, last = documents(own, stream.read(0, len(stream)))
            found = [*whole, last] if len(last) else whole
            _write_split(folder, tokenizer, (own.decode(ids.tolist()) for ids in found))
        return TokenStream(folder / "validation")


@contextlib.contextmanager
def temporary_texts(patterns: Sequence[str] = ()) -> Iterator[Texts]:
    """Yield a `Texts`, whose data sets are removed on exit."""
    with tempfile.TemporaryDirectory(prefix="pretrain-text-") as folder:
        yield Texts(Path(folder), patterns)


def tokenizer_of_source(source: Path) -> Tokenizer:
    """Return the tokenizer of a run or a checkpoint."""
    opened = open_checkpoint(find_checkpoint(source))
    config = opened.config
    if opened.tokenizer_file is None:
        # A model that was imported without a tokenizer: its data set has one.
        config = with_data_set(config, opened)
    return tokenizer_of(opened, Path(config.data.directory))


def _documents_of(patterns: Sequence[str]) -> Iterator[str]:
    """Yield the texts of files, whose format is that which the ends of their names tell."""
    files = find("--text", tuple(patterns))
    corpus = Corpus("text", None, tuple(patterns), None)
    parts = (source_of(corpus, file.path).parts(corpus, file, sys.maxsize) for file in files)
    pieces = tuple(piece for of_file in parts for piece, _ in of_file)
    is_empty = True
    for document in read(Task(0, corpus.name, pieces), corpus, skip=None):
        is_empty = False
        yield document.text
    if is_empty:
        raise ConfigError(f"--text = {', '.join(patterns)}: no document is in these files")


def _write_split(folder: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> Manifest:
    """Write the validation split of a data set into a new folder."""
    directory = folder / "validation"
    directory.mkdir(parents=True)
    (folder / tokenizer.file_name).write_bytes(tokenizer.content)
    sizes = {"vocab_size": tokenizer.vocab_size, "tokens_per_block": TOKENS_PER_BLOCK}
    sizes["tokens_per_shard"] = 64 * TOKENS_PER_BLOCK
    writer = ShardWriter(directory, split="validation", corpus="text", task=0, **sizes)
    for text in texts:
        ids = [*tokenizer.encode(text).tolist(), tokenizer.eos_id]
        writer.add(np.array(ids), len(text.encode()))
    return finish_split(
        directory,
        [writer.close()],
        split="validation",
        tokenizer=tokenizer.file_name,  # type: ignore[arg-type]  # one of TOKENIZER_FILES
        tokenizer_sha256=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        **sizes,
    )
