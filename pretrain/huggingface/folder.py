"""Write a model as a complete folder that `transformers` loads.

The folder holds the weights (safetensors), the config and generation config, the tokenizer, a model
card, and the run's resolved config as pretrain.toml.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pretrain.checkpoint.format import safetensors_header
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config, num_parameters, writing
from pretrain.config.tensors import model_tensors
from pretrain.data.shards import JSON, MODEL
from pretrain.data.tokenizer import PROBES, Tokenizer, load_tokenizer
from pretrain.evaluation.records import Table, bounded_exp, number, protocol_name
from pretrain.huggingface.base import CODE, EMBEDDING, HuggingFaceClass, same_bits
from pretrain.huggingface.classes import class_of
from pretrain.huggingface.parity import ParityReport
from pretrain.rundir.files import new_directory

MARKER = "pretrain.toml"
"""The run's resolved config. A folder with this file is one of our exports."""
ORIGINALS = "pretrain.originals"
"""Our weights, by global name, that cannot be restored bit for bit from what the class stores.

The content is safetensors, but the name has no such ending, because vLLM loads every *.safetensors
of a folder into the model (default_loader.py), and fails on names that the class does not have.
"""
CARD = "README.md"
_NO_FACTS: Mapping[str, str] = {}


def check_new(out: Path) -> None:
    """Check that a folder can be created without replacing anything.

    Raises:
        ConfigError: The path exists and is not an empty folder.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(
            f"{out}: already exists and is not an empty folder. Remove it, or choose another"
        )


# ---- The folder ----------------------------------------------------------------------------------
def to_huggingface(
    config: RunConfig,
    state: Mapping[str, Tensor],
    tokenizer_path: str | Path,
    out_dir: str | Path,
    *,
    max_length: int,
    curve: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, str] = _NO_FACTS,
    finish: Callable[[Path], None] = lambda folder: None,
) -> str:
    """Write a model to `out_dir` for AutoModelForCausalLM and AutoTokenizer.

    The folder appears complete or not at all. Only one tensor of the weights is in memory at once.

    Args:
        config: The run's resolved config.
        state: Full fp32 tensors by global name, as a checkpoint holds them.
        tokenizer_path: File of the tokenizer that the run's data was made with.
        out_dir: Folder to write.
        max_length: Longest sequence in tokens that the export must accept. It is a limit for OPT
            and MPT; other classes only record it. A learned position table has its own limit.
        curve: Evaluation records of `pretrain evaluate` for the model card. If empty, the card has
            no table of perplexities.
        facts: Name -> value of further rows in the model card's table of properties.
        finish: Called with the complete folder before it gets its final name. If it raises, the
            folder is removed.

    Returns:
        The name of the transformers class, such as "BloomForCausalLM".

    Raises:
        ConfigError: No transformers class can hold the model, the tokenizer cannot be exported or
            does not fit the model, or `out_dir` exists and is not an empty folder.
        RunFailed: The folder cannot be written, for example because the disk is full.
    """
    from transformers import GenerationConfig

    target, out = class_of(config), Path(out_dir).absolute()
    max_length = config.position.table_end(config) or max_length
    check_new(out)
    tokenizer = load_tokenizer(tokenizer_path)
    ids = special_ids(tokenizer)
    settings = target.transformers_config(config, max_length, ids, state)
    # Only the ids, as in published base models. A limit on new tokens would override the max_length
    # that programs such as lm-eval pass, and with a max_length every call that passes
    # max_new_tokens would warn that both are set.
    generation = GenerationConfig(**ids)  # type: ignore[no-untyped-call]  # untyped in transformers
    with writing(out), new_directory(out) as folder:
        stock = fast_tokenizer(tokenizer, max_length=max_length)
        if tokenizer.vocab_size > settings.vocab_size:
            raise ConfigError(
                f"{tokenizer.path}: has {tokenizer.vocab_size} pieces, but the model has "
                f"{settings.vocab_size} embeddings. Is this another run's tokenizer?"
            )
        for each in (settings, generation, stock):
            each.save_pretrained(folder)
        check_same_ids(tokenizer, folder, settings)
        _write_weights(folder, config, target, state, max_length)
        if target.stock:
            (folder / CODE.name).write_bytes(CODE.read_bytes())
        write_card(folder, config, target, settings, str(stock.eos_token), curve, facts)
        (folder / ORIGINAL_TOKENIZERS[tokenizer.file_name]).write_bytes(tokenizer.content)
        (folder / MARKER).write_text(dump_config(config), encoding="utf-8")
        finish(folder)
    return target.name


# ---- Weights, a tensor at a time -----------------------------------------------------------------
SHARD_BYTES = 5 * 10**9
"""Larger weights are split into files of at most this size, with an index."""


def _write_weights(
    folder: Path,
    config: RunConfig,
    target: HuggingFaceClass,
    state: Mapping[str, Tensor],
    max_length: int,
) -> None:
    """Write the weights like transformers, and the ORIGINALS that an import needs.

    Args:
        folder: The folder.
        config: The run's config.
        target: The class.
        state: Full fp32 tensors by global name.
        max_length: Longest sequence in tokens.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import safe_open

    factors = target.factors(config, state[f"{EMBEDDING}.weight"])
    shapes = {each.name: torch.empty(each.shape, device="meta") for each in model_tensors(config)}
    stored = dict(target.converted(config, factors, shapes, max_length))
    plan = split_torch_state_dict_into_shards(
        stored, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(_safetensors(folder / name, {n: stored[n] for n in names}))
            for name, names in plan.filename_to_tensors.items()
        }
        for name, tensor in target.converted(config, factors, state, max_length):
            files[plan.tensor_to_filename[name]].write(tensor.numpy().data)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def read(name: str) -> Tensor:
        # Reopened for each tensor, because pages of an open file count as this process's memory.
        with safe_open(folder / plan.tensor_to_filename[name], "pt") as file:
            return file.get_tensor(name).clone()  # type: ignore[no-any-return]  # untyped in safetensors

    # For `pretrain import`, so that it restores the run's model bit for bit.
    lossy = [name for name, t in target.restore(config, read, {}) if not same_bits(t, state[name])]
    if lossy:
        with _safetensors(folder / ORIGINALS, {name: shapes[name] for name in lossy}) as file:
            for name in lossy:
                file.write(state[name].contiguous().numpy().data)


@contextmanager
def _safetensors(path: Path, shapes: Mapping[str, Tensor]) -> Iterator[BinaryIO]:
    """Create a safetensors file of fp32 tensors; yield it for writing their values in this order.

    The library's own writer needs all tensors in memory, and copies them.

    Args:
        path: The file.
        shapes: Name -> a tensor of the shape.
    """
    header = safetensors_header(((name, shapes[name].shape) for name in shapes), format="pt")
    with path.open("xb") as file:
        file.write(header)
        yield file


# ---- Put a tokenizer into a Hugging Face folder, so that `AutoTokenizer` gives the same ids ----


ORIGINAL_JSON = "pretrain.tokenizer.json"
"""The unchanged tokenizer.json with which the run's data was made.

transformers writes its own tokenizer.json. The original may add tokens to every text, which the
data does not have, and which the written one does not add.
"""
ORIGINAL_TOKENIZERS = {MODEL: MODEL, JSON: ORIGINAL_JSON}
"""Name in a data set or a checkpoint -> name of the unchanged file in an export."""


def fast_tokenizer(tokenizer: Tokenizer, *, max_length: int) -> Any:
    """Return a tokenizer as a PreTrainedTokenizerFast with the same ids.

    It adds no BOS or EOS to a text and pads on the left, as generation needs. The name of a
    special token in a text, such as "</s>", becomes that token, as chat templates and trainers
    expect. In the run's data it was plain text, as with
    `from_pretrained(..., split_special_tokens=True)`.

    Args:
        tokenizer: The run's tokenizer.
        max_length: Longest sequence in tokens, beyond which the tokenizer warns.

    Raises:
        ConfigError: A Hugging Face tokenizer would not give the same ids.
    """
    from transformers import PreTrainedTokenizerFast

    stock = tokenizer.to_hugging_face()
    ids = {name.removesuffix("_id"): i for name, i in special_ids(tokenizer).items()}
    if (unknown := tokenizer.special.get("unk")) is not None:
        ids["unk_token"] = unknown
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=stock,
        **{role: stock.id_to_token(i) for role, i in ids.items()},
        split_special_tokens=False,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
    )


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return bos_token_id, eos_token_id and pad_token_id.

    In training every text followed the EOS of the text before it. EOS is therefore also BOS,
    whatever BOS the tokenizer's own file has: lm-eval and other programs put the BOS before a text,
    and a token that training never saw would make the text less probable. EOS also pads if the
    tokenizer has no padding token.
    """
    eos = tokenizer.eos_id
    return {
        "bos_token_id": eos,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.special.get("pad", eos),
    }


def check_same_ids(tokenizer: Tokenizer, directory: Path, settings: Any = None) -> None:
    """Load the tokenizer saved in `directory` as a user would and compare it with the run's.

    Args:
        tokenizer: The run's.
        directory: The folder.
        settings: The model's transformers config. Without it transformers looks for one in the
            folder, and asks whether it may run the folder's code.

    Raises:
        RunFailed: It gives other ids for a probe, or does not recognize a special token's name.
            Either AutoTokenizer chose a special tokenizer for the model's class (as for Qwen2), or
            the conversion is wrong.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory, config=settings, local_files_only=True)
    wanted = [(text, True, tokenizer.encode(text).tolist()) for text in PROBES]
    names = [str(token) for token in theirs.added_tokens_decoder.values() if token.special]
    plain = [text for text in PROBES if not any(name in text for name in names)]
    wanted += [(text, False, tokenizer.encode(text).tolist()) for text in plain]
    eos = tokenizer.eos_id
    declared = {*special_ids(tokenizer).values(), tokenizer.special.get("unk", eos)}
    wanted += [(str(theirs.convert_ids_to_tokens(i)), False, [i]) for i in declared]
    for text, split, ids in wanted:
        got = theirs(text, split_special_tokens=split)["input_ids"]
        if got != ids:
            raise RunFailed(
                f"{tokenizer.path}: the exported tokenizer encodes {text!r} as {got}, not as {ids} "
                f"(split_special_tokens = {split}). Some classes of transformers have a tokenizer "
                "of their own: set export.model_type to another"
            )
    found = {role: getattr(theirs, role) for role in special_ids(tokenizer)}
    if found != special_ids(tokenizer):
        raise RunFailed(
            f"{tokenizer.path}: the exported tokenizer has {found}, the run's is "
            f"{special_ids(tokenizer)}"
        )


# ---- The model card ------------------------------------------------------------------------------
def write_card(
    folder: Path,
    config: RunConfig,
    target: HuggingFaceClass,
    settings: Any,
    eos: str,
    curve: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, str] = _NO_FACTS,
) -> None:
    """Write the model card, with the metadata block that the Hub reads.

    Args:
        folder: The export.
        config: The run's resolved config.
        target: Class that the model was exported as.
        settings: Its transformers config.
        eos: Name of the token that ends a document.
        curve: As for `to_huggingface`.
        facts: As for `to_huggingface`.
    """
    # Imported here: only an export needs it.
    import jinja2

    method, m = config.position.method, config.model
    length = config.data.sequence_length
    longest = getattr(settings, target.length_key)
    rows = {
        "Class": f"`{target.name}`",
        "Position method": method,
        "Parameters": f"{num_parameters(config):,}",
        "Layers, hidden size, heads": f"{m.num_layers}, {m.hidden_size}, {m.num_attention_heads}",
        "Key and value heads in training": config.num_query_groups,
        "Training length": f"{length} tokens",
        "Exported for": f"up to {longest} tokens",
        "Vocabulary": f"{config.data.vocab_size:,} pieces, padded to {config.padded_vocab_size:,}",
        **facts,
    }
    if config.data.per_document_attention:
        rows["Documents"] = (
            "each was trained on as if it stood alone, so give the model one at a time"
        )
    values = {
        "metadata": metadata(config, curve),
        "title": config.position.title or method,
        "about": config.position.about,
        "length": length,
        "rows": rows,
        "own": target.stock,
        "note": target.note(config, settings).rstrip(),
        "eos": eos,
        "curve": curve_table(curve),
        "intervals": any(_interval(record) for record in curve),
    }
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    text = environment.from_string(template).render(values)
    (folder / CARD).write_text(text, encoding="utf-8")


def add_proofs(
    folder: Path, report: ParityReport, programs: Sequence[str], *, is_text: bool = True
) -> None:
    """Add to the model card in which precisions and programs the export matches the trained model.

    Args:
        folder: The export, with its card.
        report: The comparison of the export with the trained model.
        programs: A sentence without a full stop about each program other than transformers.
        is_text: False if they were compared on random tokens.
    """
    # Perplexities of random tokens are far above those of text, and say nothing about quality.
    random = "random tokens, because the run's data was not at hand"
    what = "a piece of validation text" if is_text else random
    title = f"The weights are float32. Perplexity of {what}, by the trained model and this folder"
    lines = [
        "## Precision",
        "",
        report.table(title).markdown(),
        "",
        "Whether it is the trained model when it is loaded so:",
        "",
        *(f"- {verdict}" for verdict in report.verdicts()),
        "",
        "## Other programs",
        "",
        *(f"- {line}." for line in programs),
        "",
    ]
    with (folder / CARD).open("a", encoding="utf-8") as card:
        card.write("\n" + "\n".join(lines))


def metadata(config: RunConfig, curve: Sequence[Mapping[str, Any]]) -> str:
    """Return the metadata that the Hub reads, as YAML: with perplexities as a model-index.

    Args:
        config: The run's resolved config.
        curve: Evaluation records. Records with numbers that are not finite are left out.
    """
    from huggingface_hub import ModelCardData

    results = [result for record in curve for result in _results(config, record)]
    data = ModelCardData(
        language=list(config.export.language) or None,
        license=config.export.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.position.method],
        datasets=list(config.export.datasets) or None,
        # A model name is needed only for results.
        model_name=(Path(config.run.directory).name or "model") if results else None,
        eval_results=results or None,
    )
    return data.to_yaml().strip()


def _results(config: RunConfig, record: Mapping[str, Any]) -> list[Any]:
    """Return the model-index entries of one evaluation record.

    Args:
        config: The run's resolved config.
        record: The record.
    """
    from huggingface_hub import EvalResult

    datasets, length = config.export.datasets, record["length"]
    keys = ("protocol", "stride", "length", "tokens", "tokenizer", "validation")
    titles = {"perplexity": "Perplexity per token", "bits_per_byte": "Bits per byte"}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=datasets[0] if datasets else "text",
            dataset_name=f"{datasets[0]}, held-out part" if datasets else "validation text",
            dataset_split="validation",
            metric_type=key,
            metric_value=record[key],
            metric_name=f"{title} in windows of {length} tokens, {record['protocol']}",
            metric_args={k: record[k] for k in keys if record.get(k) is not None},
        )
        for key, title in titles.items()
        if math.isfinite(number(record.get(key)))
    ]


def curve_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of perplexities: a row for each length, a column for each curve.

    Columns are in the order of their first records. The last one says how many tokens were scored.
    """
    if not curve:
        return ""
    # metrics.jsonl has null for numbers that are not finite.
    cells = {
        (f"{r['method']}, {protocol_name(r)}", r["length"]): (
            f"{number(r['perplexity']):.2f}{_interval(r)}"
        )
        for r in curve
    }
    titles = list(dict.fromkeys(column for column, _ in cells))
    rows = []
    for length in sorted({r["length"] for r in curve}):
        scored = dict.fromkeys(f"{r['tokens']:,}" for r in curve if r["length"] == length)
        found = [cells.get((title, length), "") for title in titles]
        rows.append([f"{length:,}", *found, " / ".join(scored)])
    title = "Perplexity of the validation text, read in windows of so many tokens"
    return Table(title, ["tokens", *titles, "tokens scored"], rows, names=0).markdown()


def _interval(record: Mapping[str, Any]) -> str:
    """Return the confidence interval of a record's perplexity in brackets.

    "" if it is unknown, because the text has too few blocks.
    """
    low, high = (bounded_exp(number(record.get(key))) for key in ("loss_low", "loss_high"))
    return f" ({low:.2f} to {high:.2f})" if math.isfinite(high) else ""
