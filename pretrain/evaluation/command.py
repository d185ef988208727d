"""Run `pretrain evaluate`: score checkpoints, print one table and write one report.

The command runs on as many processes as it is started with, alone or under torchrun or srun.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.models.gpt import GPTModel

import pretrain.topology
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
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, num_parameters, writing
from pretrain.config.run import MASKED, PROTOCOLS, STREAM
from pretrain.config.trajectory import TRAINING, changed_function, settings_hash
from pretrain.data.files import find
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.sources import Corpus, Piece, Task, read
from pretrain.data.stream import TokenStream, open_stream
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluation.perplexity import (
    Evaluation,
    Evaluator,
    check_memory,
    find_keys,
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
    Losses,
    bounded_exp,
    check_objectives,
    fields_of,
)
from pretrain.evaluation.report import (
    check_overwrites,
    format_table,
    read_evaluations,
    write_report,
)
from pretrain.evaluation.windows import NONOVERLAPPING, Protocol, ScoredText, choose_protocols
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
    checkpoint: Checkpoint, request: EvaluationRequest, overrides: list[str]
) -> RunConfig:
    """Return a checkpoint's config with the layout of an evaluation, and what was asked for.

    Checkpoints load on any layout, so the one that the run was trained on does not matter here. All
    processes are data-parallel replicas unless the overrides set another layout.

    Args:
        checkpoint: The checkpoint, opened.
        request: Lengths, protocols, stride and token limit from the command line.
        overrides: `section.key=value` settings.

    Raises:
        ConfigError: The overrides describe a model that does not fit the weights, or change the
            training length.
    """
    world_size = pretrain.topology.Process.from_environment().world_size
    # The run's own are for the evaluations in its training loop. A --set of them is for this one.
    not_own = ["evaluation.max_tokens=", "evaluation.protocols="]
    config = checkpoint.load_config([*not_own, *overrides], world_size)
    if request.max_tokens is None:
        request = replace(request, max_tokens=config.evaluation.max_tokens)
    # Both is the default of --protocols.
    if request.protocols == PROTOCOLS and "protocols" in config.evaluation.model_fields_set:
        request = replace(request, protocols=config.evaluation.protocols)
    check_model(config, checkpoint)
    trained = checkpoint.config.data.sequence_length
    # data.sequence_length is the training length L of every table; lengths are chosen separately.
    if config.data.sequence_length != trained:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length}: {checkpoint.path} was "
            f"trained at {trained} tokens. Use --lengths to choose the lengths to evaluate at"
        )
    config = request.applied_to(config, str(checkpoint.path / CONFIG))
    # Not in `applied_to`: of a masked model, both stand for its own protocol.
    evaluation = config.evaluation.model_copy(update={"protocols": request.protocols})
    return config.model_copy(update={"evaluation": evaluation})


def open_validation(checkpoint: Checkpoint, config: RunConfig) -> TokenStream:
    """Open the validation split to score a checkpoint on. Rank 0 says when it is not its own.

    Another corpus is a fair question to ask of a model; another tokenizer is none.

    Args:
        checkpoint: The checkpoint, opened.
        config: Its config, with the overrides of the command line.

    Raises:
        ConfigError: The data cannot be used, or was made by another tokenizer.
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
) -> list[dict[str, Any]]:
    """Evaluate runs or checkpoints, print one table of all, and write a report if asked to.

    Args:
        sources: Run directories (their newest checkpoint is evaluated) or checkpoint directories.
        request: Lengths, protocols, stride and token limit from the command line.
        overrides: `section.key=value` settings for every checkpoint.
        out: FILE.json of the report, whose other files are written beside it; None for no report.
        short_context: Tokens of LongPPL's short context; None for no LongPPL. The first source
            finds the key tokens, for all sources.

    Returns:
        One record for each checkpoint, protocol and length (`records.Record`).

    Raises:
        ConfigError: A source is not a run or checkpoint, the data has another tokenizer, the text
            is shorter than a length, there is not enough memory for one, or the report cannot be
            written to `out`.
    """
    # The input is checked before the process group starts, which takes seconds.
    jobs = [_prepare(source, request, overrides) for source in sources]
    check_objectives((job.run, protocol.name) for job in jobs for protocol in job.protocols)
    if out is not None:
        check_overwrites(out)
    texts = {
        (job.stream.identity, job.stream.tokenizer_sha256, job.config.evaluation.max_tokens)
        for job in jobs
    }
    if short_context and (len(texts) > 1 or any(job.config.is_masked for job in jobs)):
        raise ConfigError(
            "--longppl: the key tokens of the first source are those of all, so that all need one "
            "tokenizer and one text, and predict next tokens. Evaluate them one by one"
        )
    keys: dict[tuple[str, int, int], Any] = {}

    def score(job: Job) -> Iterator[dict[str, Any]]:
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
            record = job.record(result, text)
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

    return measure_all(jobs, score, format_table, write_report, out)


def measure_all(
    jobs: Sequence[Any],
    measure: Callable[[Any], Iterable[dict[str, Any]]],
    show: Callable[[list[dict[str, Any]]], str],
    write: Callable[[Path, list[dict[str, Any]]], object],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Measure checkpoints, print tables of all records, and write the report. Collective.

    Args:
        jobs: The checkpoints, each Opened.
        measure: Yields the records of one.
        show: Makes the tables.
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
        # All from now on: while one is measured, its run may go on and delete the next one.
        for job in jobs:
            held.enter_context(hold(job.checkpoint.path))
        records = [record for job in jobs for record in measure(job)]
    if is_main():
        # The table is printed first: its numbers are not lost if the report cannot be written.
        print("\n" + show(records))
        if out is not None:
            with writing(out):
                write(out, records)
            print(f"\nReport written to {out}, with tables and plots beside it")
    pretrain.topology.finish()
    return records


@dataclass(frozen=True)
class Opened:
    """A checkpoint and the text that it is measured on."""

    checkpoint: Checkpoint
    run: str
    """The run's directory as the user gave it, or the checkpoint's path if it stands alone."""
    config: RunConfig
    """Its config, with the layout to evaluate on (see `evaluation_config`)."""
    stream: TokenStream
    """The validation split."""

    def common(self) -> dict[str, Any]:
        """Return what all records of the checkpoint say, under the keys of `records.FIELDS`."""
        # What the checkpoint was trained with, whatever the command line has set.
        trained = self.checkpoint.config
        changed = changed_function(trained, self.config)
        method = trained.position.method
        return {
            "run": self.run,
            "step": self.checkpoint.trainer_state.step,
            "method": f"{method}{EVALUATED_WITH}{changed}" if changed else method,
            "seed": trained.run.seed,
            "train_length": trained.data.sequence_length,
            "tokenizer": self.stream.tokenizer_sha256[:HASH_DIGITS],
            "validation": self.stream.identity[:HASH_DIGITS],
            "precision": self.config.train.precision,
            "checkpoint": str(self.checkpoint.path),
            "code": running_code(),
            "parameters": num_parameters(trained),
            "trained_tokens": self.trained_tokens,
        }

    @property
    def trained_tokens(self) -> int | None:
        """Return the tokens that the run trained on; None of a model that it did not train."""
        found = self.checkpoint
        if found.origin.provenance is None:
            return None
        return trained_tokens(found.config, found.trainer_state, found.origin.changes)

    def load(self, protocols: Iterable[Protocol]) -> tuple[list[GPTModel], Topology]:
        """Build the model with the checkpoint's weights. Collective.

        Args:
            protocols: What is to be measured.

        Raises:
            ConfigError: There is not enough memory for one of the lengths.
        """
        topology = pretrain.topology.initialize(self.config)
        chunks = build_model(self.config)
        check_positions(self.config, chunks)
        load_weights(self.checkpoint, chunks)
        check_memory(self.config, topology, protocols)
        return chunks, topology


@dataclass(frozen=True)
class Job(Opened):
    """A checkpoint and what is measured of it."""

    protocols: tuple[Protocol, ...]

    def outlook(self) -> str:
        """Return the line that says which checkpoint is evaluated."""
        path, step = self.checkpoint.path, self.checkpoint.trainer_state.step
        line = f"{self.run}: step {step} of {self.checkpoint.config.train.num_steps}"
        run = _run_of(path)
        newest = newest_checkpoint_step(run) if run else None
        return line if newest in (None, step) else f"{line}; the run's newest is step {newest}"

    def record(self, result: Evaluation, text: ScoredText) -> dict[str, Any]:
        """Return the record of one of its evaluations, on a text."""
        training = self.checkpoint.origin.data.get(TRAINING)
        changes = [(c.step, c.key, c.before, c.after) for c in self.checkpoint.origin.changes]
        settings = settings_hash(self.checkpoint.config, training, changes)[:HASH_DIGITS]
        of_text = {"text": text.sha256 and text.sha256[:HASH_DIGITS]}
        record = fields_of(
            {**self.common(), "settings": settings, **of_text, **result.record(), **result.cost}
        )
        record[BLOCKS] = Losses(result.block_losses, result.block_tokens)
        # Sliding windows score few positions: loss by position is that without overlap.
        if result.protocol.name == NONOVERLAPPING:
            record[POSITIONS] = Binned.of(result.by_position)
        return record

    def unchanged(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the run's own record of what was measured with other positions.

        None where the positions are its own, or the run has not measured the same. A record of its
        evaluation jobs has losses by block, and is preferred to one of its training loop.
        """
        method, has_changed, _ = record["method"].partition(EVALUATED_WITH)
        run = _run_of(self.checkpoint.path)
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


def open_source(source: Path, request: EvaluationRequest, overrides: list[str]) -> Opened:
    """Open what a source names, a run's directory or a checkpoint's.

    Raises:
        ConfigError: It is neither, or it cannot be evaluated as asked.
    """
    checkpoint = open_checkpoint(find_checkpoint(source))
    run = _run_of(checkpoint.path)
    config = evaluation_config(checkpoint, request, overrides)
    stream = open_validation(checkpoint, config)
    return Opened(checkpoint, str(run or checkpoint.path), config, stream)


def _prepare(source: Path, request: EvaluationRequest, overrides: list[str]) -> Job:
    """Open a source, and choose what is measured of it.

    Raises:
        ConfigError: As `evaluate_sources`.
    """
    found = open_source(source, request, overrides)
    total = len(found.stream)
    if STREAM in found.config.evaluation.protocols:
        check_stream(found.config, pretrain.topology.Process.from_environment().world_size)
    protocols, notes = choose_protocols(
        found.config,
        found.config.evaluation.protocols,
        min(total, found.config.evaluation.max_tokens or total),
        total,
    )
    for note in notes:
        say(f"{found.checkpoint.path}: {note}")
    return Job(**vars(found), protocols=protocols)


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint belongs to, as the user wrote its path.

    None for a copy elsewhere, and for one in RUN/abandoned, which the run has turned away from.
    """
    run = run_of(checkpoint)
    if run is None or checkpoint.absolute().parent != RunPaths(run).checkpoints:
        return None
    written = checkpoint.parents[1] if len(checkpoint.parts) > 2 else run
    return written if written.absolute() == run else run


def _text_line(job: Job, text: ScoredText) -> str:
    """Return the line that says what is scored."""
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
    # One block has no spread.
    bits = record["bits_per_byte"]
    in_bits = "bits per byte unknown" if bits is None else f"{bits:.4f} bits per byte"
    interval = "no interval" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
    return (
        f"{record['method']:<12} {record['protocol']:<15} {record['length']:>7} tokens  "
        f"perplexity {record['perplexity']:9.3f}  ({interval})  "
        + ("of masked tokens" if record["protocol"] == MASKED else in_bits)
        + (f"  LongPPL {record[LONGPPL]:.3f}" if LONGPPL in record else "")
        + (f" of {record['key_tokens']:,} key tokens" if "key_tokens" in record else "")
    )


def _against(record: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return the line that compares a result with that of the run's own positions."""
    ratio = bounded_exp(record["loss_nats"] - own["loss_nats"])
    return f"  {ratio:.3f} times the run's own, {own['perplexity']:.3f}"


def _cache_line(decoder: Decoder) -> str:
    """Return the line that says what the cache of a stream holds at its end, on this rank."""
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


# ---- a user's own text ---------------------------------------------------------------------------
TOKENS_PER_BLOCK = 2**16


@contextlib.contextmanager
def text_data_set(sources: Sequence[Path], patterns: Sequence[str]) -> Iterator[str]:
    """Yield the directory of a data set of text files, which is removed at the end.

    Each file is a document, and ends with the end-of-document token.

    Args:
        sources: Run or checkpoint directories, whose own tokenizer makes the tokens.
        patterns: Names of text files, or glob patterns.

    Raises:
        ConfigError: A file cannot be read or is no text, or the sources have several tokenizers.
    """
    tokenizer = _tokenizer_of(sources)
    with tempfile.TemporaryDirectory(prefix="pretrain-text-") as folder:
        _write_text(Path(folder), tokenizer, patterns)
        yield folder


def _tokenizer_of(sources: Sequence[Path]) -> Tokenizer:
    """Return the tokenizer of all sources."""
    found: dict[str, tuple[Path, Tokenizer]] = {}
    for source in sources:
        opened = open_checkpoint(find_checkpoint(source))
        config = opened.config
        if opened.tokenizer_file is None:
            # An imported model came without one; its data set has the tokenizer.
            config = with_data_set(config, opened)
        tokenizer = tokenizer_of(opened, Path(config.data.directory))
        found.setdefault(tokenizer.fingerprint, (source, tokenizer))
    (first, tokenizer), *others = found.values()
    if others:
        raise ConfigError(
            f"--text: {first} and {others[0][0]} have different tokenizers. Evaluate them one by "
            "one, and compare their bits per byte"
        )
    return tokenizer


def _write_text(folder: Path, tokenizer: Tokenizer, patterns: Sequence[str]) -> None:
    """Write the validation split of a data set into an empty folder, and say what is in it."""
    (folder / tokenizer.file_name).write_bytes(tokenizer.content)
    directory = folder / "validation"
    directory.mkdir()
    files = find("--text", tuple(patterns))
    corpus = Corpus("text", "text", tuple(patterns), "")
    task = Task(0, corpus.name, tuple(Piece(file.path, 0, file.size) for file in files))
    sizes = {"vocab_size": tokenizer.vocab_size, "tokens_per_block": TOKENS_PER_BLOCK}
    sizes["tokens_per_shard"] = 64 * TOKENS_PER_BLOCK
    writer = ShardWriter(directory, split="validation", corpus=corpus.name, task=0, **sizes)
    for document in read(task, corpus, skip=None):
        ids = [*tokenizer.encode(document.text).tolist(), tokenizer.eos_id]
        writer.add(np.array(ids), len(document.text.encode()))
    manifest = finish_split(
        directory,
        [writer.close()],
        split="validation",
        tokenizer=tokenizer.file_name,  # type: ignore[arg-type]  # one of TOKENIZER_FILES
        tokenizer_sha256=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        **sizes,
    )
    if is_main():
        print(
            f"--text: {len(files)} documents, {manifest.text_bytes:,} bytes, "
            f"{manifest.tokens:,} tokens with an end-of-document token after each",
            flush=True,
        )
