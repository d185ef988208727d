"""Import a language model that fairseq trained, such as the models of "Train Short, Test Long".

The authors publish checkpoints of their fork of fairseq, which are pickles. torch's restricted
unpickler reads them: it loads tensors and plain values, turns fairseq's own types into empty
shells, and refuses everything else before calling any of it.

A checkpoint does not state its position method, because in the fork ALiBi has the same options as
sinusoidal positions. The user therefore gives the run's config, and the checkpoint is compared with
it. Names and options are those of fairseq/models/transformer.py, transformer_lm.py,
modules/adaptive_input.py and modules/adaptive_softmax.py in ofirpress/attention_with_linear_biases.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import (
    ConfigError,
    RunConfig,
    RunFailed,
    load_config,
    num_parameters,
)
from pretrain.config.tensors import model_tensors
from pretrain.data.tokenizer import WordTokenizer
from pretrain.huggingface.base import (
    ACTIVATIONS,
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    OUTPUT,
    POSITIONS,
    Both,
    Factors,
    Ours,
    PastPadding,
    Row,
    TensorTable,
    Theirs,
    refused,
    sizes,
)
from pretrain.huggingface.classes import Opt
from pretrain.huggingface.export import recorded_logits
from pretrain.huggingface.folder import check_new
from pretrain.huggingface.import_model import in_a_line, new_run
from pretrain.kernels.reference import attention_reference
from pretrain.rundir.paths import check_apart

NAME = "fairseq's TransformerDecoder"
PARITY_TOKENS = 64
"""Length of the sequence on which the run and fairseq's formula are compared."""
TOLERANCE = 1e-3
"""Largest allowed difference of a log probability. fp32 rounding through 16 layers is far smaller,
and a wrong position, norm or scale makes a far larger difference."""
_ACTIVATIONS = ACTIVATIONS | {"gelu_accurate": "gelu_pytorch_tanh"}
_BUFFERS = ("version", "_float_tensor")
"""Last parts of the names of buffers, which hold no weights."""


def _cutoffs(text: str | None) -> tuple[int, ...] | None:
    return tuple(int(word) for word in text.split(",")) if text else None


ROWS: tuple[Row, ...] = (
    *sizes(
        "decoder_embed_dim", "decoder_layers", "decoder_attention_heads", "decoder_ffn_embed_dim"
    ),
    Both("activation_fn", "model.hidden_act", read=_ACTIVATIONS.__getitem__),
    Both("no_decoder_final_norm", "model.final_layernorm", read=lambda left_out: not left_out),
    Both("adaptive_softmax_cutoff", "model.adaptive_cutoffs", read=_cutoffs),
    Both("tokens_per_sample", "data.sequence_length"),
    Theirs("decoder_normalize_before", True, "our LayerNorms stand before attention and MLP"),
    Theirs("layernorm_embedding", (False, None), "our models of words have no such LayerNorm"),
    Theirs("character_embeddings", (False, None), "our models read token ids"),
    Theirs("base_layers", (0, None), "our layers are all alike"),
    Ours("model.use_bias", True, "{name} has biases"),
    Ours("model.num_query_groups", lambda c: c.model.num_attention_heads, "{name} has no groups"),
    Ours("model.parallel_residual", False, "{name} computes the MLP behind attention"),
    Ours("model.embedding_layernorm", False, "{name} is read without one"),
    Ours("model.clip_qkv", None, "{name} does not clip"),
    Ours("model.layernorm_epsilon", 1e-5, "{name} has {only}"),
)


class FairseqDecoder(TensorTable):
    """Where fairseq stores our tensors, except those of an adaptive input and softmax."""

    modules: ClassVar = {
        EMBEDDING: "decoder.embed_tokens",
        POSITIONS: PastPadding("decoder.embed_positions"),
        FINAL_NORM: "decoder.layer_norm",
        OUTPUT: "decoder.output_projection",
    }
    layers = "decoder.layers"
    # OPT's layers have fairseq's code.
    layer = Opt.layer

    def left_out(self, config: RunConfig) -> dict[str, bool]:
        """Return which of these modules this run's model does not have."""
        is_adaptive = config.model.adaptive_cutoffs is not None
        found = super().left_out(config)
        return found | {
            EMBEDDING: is_adaptive,
            EMBEDDING_NORM: True,
            FINAL_NORM: not config.model.final_layernorm,
            OUTPUT: is_adaptive or found[OUTPUT],
        }

    def tensors(self, config: RunConfig, weights: Mapping[str, Tensor]) -> Iterator[_Found]:
        """Yield our name, our tensor, and fairseq's names for it."""
        for stored in self.stored_tensors(config, Factors()):
            yield (
                stored.name,
                stored.restore(config, [weights[name].float() for name in stored.theirs]),
                stored.theirs,
            )
        softmax, tied = "decoder.adaptive_softmax", config.model.tie_word_embeddings
        for i in range(len(config.adaptive_clusters)):
            words, tail = f"decoder.embed_tokens.embeddings.{i}", f"{softmax}.tail.{i - 1}"
            head = f"{softmax}.head.word_proj.weight"
            of_words = [f"{tail}.2.weight" if i else head] * tied
            of_projection = [f"{tail}.0.weight"] * (tied and i > 0)
            at = "embedding.word_embeddings"
            yield from _one(at, f"embedding_{i}", f"{words}.0.weight", weights, of_words)
            yield from _one(at, f"projection_{i}", f"{words}.1.weight", weights, of_projection)
        if config.adaptive_clusters:
            yield from _one("output_layer", "tails", f"{softmax}.head.class_proj.weight", weights)


_Found = tuple[str, Tensor, Sequence[str]]


def _one(
    module: str, ours: str, theirs: str, weights: Mapping[str, Tensor], shared: Sequence[str] = ()
) -> Iterator[_Found]:
    """Yield a tensor unchanged, after checking that tensors which must equal it do."""
    tensor = weights[theirs].float()
    for name in shared:
        if not torch.equal(weights[name].float(), tensor):
            raise ConfigError(f"{name} differs from {theirs}, which our model shares with it")
    yield f"{module}.{ours}", tensor, (theirs, *shared)


def import_checkpoint(
    path: Path, dictionary: Path, config_file: Path, out: Path, overrides: Sequence[str] = ()
) -> None:
    """Turn a fairseq checkpoint into a finished run, and compare it with fairseq's formula.

    Args:
        path: A checkpoint such as checkpoint_best.pt.
        dictionary: The dict.txt of the data that it was trained on.
        config_file: Config of the run to create, whose train.num_steps is the checkpoint's step.
        out: Directory of the run.
        overrides: `section.key=value` settings.

    Raises:
        ConfigError: The file is not a valid fairseq checkpoint, its model is not that of the
            config, or `out` is not empty.
        RunFailed: Our model computes another function, or `out` cannot be written.
    """
    check_new(out)
    check_apart(out)
    tokenizer = WordTokenizer(dictionary, dictionary.read_bytes())
    config = load_config(config_file, [*overrides, f'run.directory="{out}"'])
    settings, weights = read_checkpoint(path)
    _check_settings(path, settings, config)
    tensors = _tensors(path, config, weights)
    if tokenizer.vocab_size != config.data.vocab_size:
        raise ConfigError(
            f"{dictionary}: has {tokenizer.vocab_size:,} entries with the special ones, and "
            f"data.vocab_size = {config.data.vocab_size:,} in {config_file}. Set it to that"
        )
    with new_run(out, config, config, tensors, tokenizer, config.train.num_steps) as checkpoint:
        del tensors
        _check_parity(path, config, weights, checkpoint)
    print(f"{path} -> {out} ({num_parameters(config):,} parameters)")


def read_checkpoint(path: Path) -> tuple[argparse.Namespace, dict[str, Tensor]]:
    """Return the model's options and weights, without executing code from the file.

    Raises:
        ConfigError: The file cannot be read, or refers to code that is not torch's or fairseq's.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if foreign := [name for name in named if not name.startswith(("fairseq.", "argparse."))]:
            raise ConfigError(
                f"{path}: names {', '.join(foreign[:3])}, which no checkpoint of fairseq needs. "
                "Nothing of it was executed. Get it from where it was published"
            )
        known: list[Any] = [(_Shell, name) for name in named if name != "argparse.Namespace"]
        with torch.serialization.safe_globals([argparse.Namespace, *known]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = state["args"] if state.get("args") else state["cfg"]["model"]
        settings = found if isinstance(found, argparse.Namespace) else argparse.Namespace(**found)
        weights = {name: tensor for name, tensor in state["model"].items()}
        if not all(isinstance(tensor, Tensor) for tensor in weights.values()):
            raise TypeError("its model holds what is no tensor")
    except ConfigError:
        raise
    # Errors of the file system, zip and pickle, and of unexpected content.
    except Exception as error:
        raise ConfigError(
            f"{path}: cannot be read as a checkpoint of fairseq ({in_a_line(error)}). "
            "It has to be a zip archive of torch 1.6 or later with the keys model and args or cfg"
        ) from None
    return settings, weights


class _Shell:
    """Takes the place of fairseq's objects, none of which are needed."""

    def __init__(self, *given: Any) -> None:
        """Ignore the object's arguments."""


def _check_settings(path: Path, settings: argparse.Namespace, config: RunConfig) -> None:
    """Raise ConfigError with a line for each option that differs from the config."""
    lines = [f"{refusal}" for _, refusal in refused(ROWS, config, NAME)]
    given = vars(settings)
    for row in ROWS:
        value = None if isinstance(row, Ours) else given.get(row.theirs)
        if isinstance(row, Theirs):
            only = row.only if isinstance(row.only, tuple) else (row.only,)
            if value not in only:
                lines.append(f"{path}: {row.theirs} = {value!r}: {row.reason}")
        elif isinstance(row, Both):
            lines += _differs(path, row, value, config.value(row.ours))
    scale = 1.0 if given.get("no_scale_embedding") else config.model.hidden_size**0.5
    if config.embedding_scale != scale:
        lines.append(f"{path}: embeddings are scaled by {scale:g}, unlike model.embedding_scale")
    kind = "tie_adaptive_weights"
    if config.model.adaptive_cutoffs is None:
        kind = "share_decoder_input_output_embed"
    is_tied = given.get(kind)
    if bool(is_tied) != config.model.tie_word_embeddings:
        lines.append(f"{path}: tied output: {bool(is_tied)}, unlike model.tie_word_embeddings")
    if lines:
        raise ConfigError("\n".join(lines))


def _differs(path: Path, row: Both, value: Any, wanted: Any) -> Iterator[str]:
    """Yield why an option differs from the config."""
    try:
        found = row.read(value)
    except (KeyError, ValueError, AttributeError):
        yield f"{path}: {row.theirs} = {value!r}: our model cannot compute it"
        return
    if found != wanted:
        yield f"{path}: {row.theirs} = {value!r}: the config has {row.ours} = {wanted}. Set {found}"


def _tensors(path: Path, config: RunConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors by global name.

    Raises:
        ConfigError: A tensor is missing, has another shape, is not finite, or is unknown.
    """
    found, used = {}, set[str]()
    shapes = {each.name: each.shape for each in model_tensors(config)}
    try:
        for name, tensor, theirs in FairseqDecoder().tensors(config, weights):
            found[name] = tensor
            used.update(theirs)
            if tuple(tensor.shape) != shapes[name] or not tensor.isfinite().all():
                raise ConfigError(
                    f"{path}: {theirs[0]}: {tuple(tensor.shape)} or not finite; the config's model "
                    f"has {shapes[name]}"
                )
    except KeyError as missing:
        raise ConfigError(
            f"{path}: has no tensor {missing}, which the config's model has"
        ) from None
    rest = [n for n in weights.keys() - used if n.rsplit(".", 1)[-1] not in _BUFFERS]
    if rest or found.keys() != shapes.keys():
        odd = sorted(rest) or sorted(shapes.keys() - found.keys())
        raise ConfigError(f"{path}: not the tensors of the config's model: {', '.join(odd[:5])}")
    return found


# ---- The comparison ------------------------------------------------------------------------------
def _check_parity(
    path: Path, config: RunConfig, weights: Mapping[str, Tensor], checkpoint: Path
) -> None:
    """Compare the run's log probabilities with fairseq's formula; print the largest difference.

    Raises:
        RunFailed: The difference is above TOLERANCE.
    """
    opened = open_checkpoint(checkpoint)
    alone = opened.load_config(["train.precision=fp32"])
    generator = torch.Generator().manual_seed(0)
    shape = 1, min(PARITY_TOKENS, config.data.sequence_length)
    ids = torch.randint(4, config.data.vocab_size, shape, generator=generator)
    with recorded_logits(alone, opened, [ids], checkpoint.parents[1]) as run:
        found = run(ids)[0].double().log_softmax(-1)[:, : config.padded_vocab_size]
    error = float((found - log_probabilities(config, weights, ids[0])).abs().max())
    print(
        f"{path}: largest difference of a log probability from fairseq's formula in fp64, over "
        f"{ids.numel()} tokens: {error:.1e}"
    )
    if not error <= TOLERANCE:
        raise RunFailed(f"{path}: our model computes another function, so no run was created")


def log_probabilities(config: RunConfig, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Return log p of every word after each token, fp64 [T, V], by fairseq's names and formula.

    Args:
        config: The run, for the sizes and the position method.
        weights: fairseq's weights by name.
        ids: Token ids, [T].
    """
    m, position, T = config.model, config.position, len(ids)

    def weight(name: str) -> Tensor:
        return weights[name].double()

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weight(f"{name}.weight"), weight(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight(f"{name}.weight"), weight(f"{name}.bias"), 1e-5)

    def activate(x: Tensor) -> Tensor:
        if m.hidden_act == "relu":
            return x.relu()
        return F.gelu(x, approximate="none" if m.hidden_act == "gelu" else "tanh")

    words, clusters = "decoder.embed_tokens", config.adaptive_clusters
    if clusters:
        parts = [f"{words}.embeddings.{i}" for i in range(len(clusters))]
        table = torch.cat([weight(f"{n}.0.weight") @ weight(f"{n}.1.weight").T for n in parts])
        x = table[ids]
    else:
        x = weight(f"{words}.weight")[ids]
    x = x * config.embedding_scale
    added = position.embedded(config, torch.arange(T))
    if added is not None:
        x = x + added
    elif position.adds_to_embeddings(config):
        x = x + weight("decoder.embed_positions.weight")[PastPadding.ROWS :][:T]
    terms = position.score_terms(config, slice(0, m.num_attention_heads), {}, ids.device)
    for i in range(m.num_layers):
        at = f"decoder.layers.{i}."
        y = norm(x, f"{at}self_attn_layer_norm")
        q, k, v = (
            linear(y, f"{at}self_attn.{n}_proj").view(T, 1, m.num_attention_heads, -1)
            for n in "qkv"
        )
        out = attention_reference(q, k, v, **terms).reshape(T, -1)
        x = x + linear(out, f"{at}self_attn.out_proj")
        y = activate(linear(norm(x, f"{at}final_layer_norm"), f"{at}fc1"))
        x = x + linear(y, f"{at}fc2")
    if m.final_layernorm:
        x = norm(x, "decoder.layer_norm")
    if not clusters:
        name = words if m.tie_word_embeddings else "decoder.output_projection"
        return (x @ weight(f"{name}.weight").T).log_softmax(-1)
    softmax = "decoder.adaptive_softmax"
    own = weight(f"{softmax}.head.word_proj.weight"), weight(f"{softmax}.head.class_proj.weight")
    head = (x @ torch.cat(own).T).log_softmax(-1)
    found = [head[:, : clusters[0].size]]
    for i in range(len(clusters) - 1):
        of_tail = x @ weight(f"{softmax}.tail.{i}.0.weight")
        logits = of_tail @ weight(f"{softmax}.tail.{i}.2.weight").T
        found.append(head[:, clusters[0].size + i, None] + logits.log_softmax(-1))
    return torch.cat(found, dim=1)
