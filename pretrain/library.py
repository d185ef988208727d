"""What `import pretrain` offers: train, evaluate, export and import models, and the attention.

Each function does what the command of its name does, in this process, and returns what the command
prints. Under torchrun or srun every process calls it: they share the work of train and evaluate,
and the first one does that of the others. torch is imported when a function is first called, or
`attention` first named. A function that computes with a model sets torch's default dtype to fp32
and its precision of fp32 products to "highest", and destroys a process group that the caller has
made.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# RunFailed is for `import pretrain`.
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, RunFailed  # noqa: F401
from pretrain.config import load_config as _load_config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TrainResult:
    """The end of a call of `train`: where the run stands, and why it stopped there."""

    directory: Path
    """The run's directory, RUN in docs/run_directory.md."""
    step: int
    """The step of the newest checkpoint; 0 without one."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    exit_code: int
    """0: finished. 75: a signal asked for a save and another start. 80: for a save and the end."""

    @property
    def is_finished(self) -> bool:
        """True if the run has taken train.num_steps steps."""
        return self.exit_code == 0

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of RUN/metrics.jsonl: one a step, one an evaluation and length."""
        from pretrain.rundir.metrics import read_metrics
        from pretrain.rundir.paths import RunPaths

        return list(read_metrics(RunPaths(self.directory).metrics))


def load_config(path: str | Path, settings: Mapping[str, Any] | Sequence[str] = ()) -> RunConfig:
    """Load, complete and check the config of a run.

    Args:
        path: A TOML file.
        settings: Keys to set, as {"train.num_steps": 100} or ["train.num_steps=100"].

    Raises:
        ConfigError: The file, a key or a value is wrong; the message names it and the remedy.
    """
    return _load_config(Path(path), _overrides(settings))


def build_data(config: RunConfig, workers: int = 1) -> None:
    """Train the tokenizer and write the token shards, unless they are there already.

    Args:
        config: The run's config; its [data] says from what and where to.
        workers: Processes. Their number does not change what is built.

    Raises:
        ConfigError: The corpus or its description is wrong.
    """
    from pretrain import topology
    from pretrain.data.build import build

    topology.on_first(lambda: build(config, workers))


def train(config: RunConfig, resume: str = "auto", allowed: Collection[str] = ()) -> TrainResult:
    """Train a run, or resume it, until train.num_steps.

    Args:
        config: The run.
        resume: "auto" for its newest checkpoint, or step 0 without one; "none" for step 0; else
            the path of a run or checkpoint, or a URL of a store.
        allowed: Keys that may differ from the checkpoint's although they change training.

    In the main thread, SIGTERM and SIGUSR1, which Slurm sends before a time limit, ask for a save
    and the return of this call.

    Raises:
        ConfigError: The input is wrong; nothing has been written then.
        RunFailed: The run cannot go on, for example because its gradients are not finite.
    """
    from pretrain import topology
    from pretrain.rundir.checkpoints import complete_checkpoints
    from pretrain.training.loop import train as run
    from pretrain.training.reporter import Requests

    requests = Requests()
    with requests.heard():
        code = run(config, resume, requests, allowed)
    topology.finish()
    newest = next(iter(reversed(complete_checkpoints(config.directory))), None)
    step = int(newest.name.removeprefix("step-")) if newest is not None else 0
    return TrainResult(config.directory, step, newest, code)


def evaluate(
    source: str | Path,
    *,
    lengths: int | Sequence[int] | None = None,
    protocols: str | Sequence[str] = ("nonoverlapping", "sliding"),
    stride: int | None = None,
    max_tokens: int | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    text: str | Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Measure perplexity at several lengths, of a run or of anyone's Hugging Face model.

    Args:
        source: Directory of a run or checkpoint, or a Hugging Face folder, such as
            `model.save_pretrained(folder)` and its tokenizer's make.
        lengths: One or several window lengths in tokens; None for those of the run's config.
        protocols: "nonoverlapping", "sliding" or both. Every token is scored once by each.
        stride: Tokens from one sliding window to the next; None for the shortest length.
        max_tokens: Score at most so many tokens; None for all.
        settings: Keys to set in a run's config for the evaluation, such as data.directory.
        text: One or several text files to score in place of the validation split.

    Returns:
        One record for each protocol and length: protocol, stride, length, tokens, loss_nats,
        perplexity, the ends loss_low, loss_high of a 95 % interval over blocks of text, and
        what else `pretrain evaluate --out` writes.

    Raises:
        ConfigError: The source is none of these, or the text is shorter than a length.
    """
    from pretrain.evaluation.command import evaluate_sources

    given = ",".join(map(str, _listed(lengths))) if lengths is not None else None
    request = EvaluationRequest.parse(given, ",".join(_listed(protocols)), stride, max_tokens)
    chosen = _overrides(settings)
    return evaluate_sources([Path(source)], request, chosen, None, text=_listed(text))


def export_model(
    source: str | Path,
    directory: str | Path,
    *,
    max_length: int | None = None,
    programs: str | Sequence[str] = (),
    settings: Mapping[str, Any] | Sequence[str] = (),
) -> Path:
    """Write a run's newest checkpoint, or a checkpoint, as a Hugging Face folder.

    The folder is compared with the trained model on the validation text before it gets its name.

    Args:
        source: Directory of a run or checkpoint.
        directory: The folder to write.
        max_length: Longest sequence that it accepts, in tokens; None for 16 training lengths.
        programs: What else to export for, as --for: vllm, llama.cpp.
        settings: Keys of [export], or data.directory where the data set was moved.

    Returns:
        The folder.

    Raises:
        ConfigError: No transformers class can hold the model, or the checkpoint is damaged.
        RunFailed: The exported model computes something else.
    """
    from pretrain import topology
    from pretrain.huggingface.export import export_source

    source, directory, given = Path(source), Path(directory), _overrides(settings)
    wanted = _listed(programs)
    topology.on_first(
        lambda: export_source(source, directory, max_length, overrides=given, programs=wanted)
    )
    return directory


def import_model(
    folder: str | Path, directory: str | Path, settings: Mapping[str, Any] | Sequence[str] = ()
) -> RunConfig:
    """Make a run of a Hugging Face folder, to go on training it or to evaluate it.

    Args:
        folder: Folder with config.json and the weights.
        directory: Directory of the run to make.
        settings: Keys to set in its config.

    Returns:
        The run's config.

    Raises:
        ConfigError: The folder is damaged, or our model cannot hold its model.
        RunFailed: Our model computes something else.
    """
    from pretrain import topology
    from pretrain.huggingface.import_model import import_folder
    from pretrain.rundir.paths import RunPaths

    topology.on_first(lambda: import_folder(Path(folder), Path(directory), _overrides(settings)))
    return _load_config(RunPaths(Path(directory)).config)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "BHSD",
    slopes: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax(scale * q k^T + bias) v with ALiBi's bias, T5's, or none.

    The bias of head h for a query at position i and a key at j is -slopes[h] * |i - j|. It is
    computed in fp32, inside the kernel where there is one. The queries are the last positions of
    the keys. `pretrain.kernels.dispatch.attention` has more arguments. On a CPU, a call with a bias
    and more than 256 queries has one backward pass, and no transforms of torch.func.

    Args:
        q: Queries, [B, H, S, D] as in torch's scaled_dot_product_attention.
        k: Keys, [B, G, T, D], where G divides H.
        v: Values, [B, G, T, D].
        layout: "BHSD", or "SBHD" for [S, B, H, D] as Megatron has it, which needs no copy.
        slopes: [H], fp32; may need a gradient. After a change through `slopes.data`, which torch
            does not record, pass a new tensor.
        relative_attention_bias: T5's table, [H, num_buckets].
        causal: Apply a causal mask.
        scale: Factor of q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.
        backend: "auto", or the name of one backend, which then serves or raises.

    Returns:
        The output in the layout of q, in its dtype.

    Raises:
        ValueError: The arguments do not fit each other.
    """
    from pretrain.kernels.dispatch import attention as dispatched

    if layout not in ("BHSD", "SBHD"):
        raise ValueError(f"layout = {layout!r}: there are BHSD and SBHD")
    is_torch = layout == "BHSD"
    out = dispatched(
        *(x.permute(2, 0, 1, 3) if is_torch else x for x in (q, k, v)),
        slopes=slopes,
        relative_attention_bias=relative_attention_bias,
        causal=causal,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
    )
    return out.permute(1, 2, 0, 3) if is_torch else out


def _listed(values: Any) -> Sequence[Any]:
    """Return values as a sequence, and one value as a sequence of one."""
    return [values] if isinstance(values, (str, int)) else values


def _overrides(settings: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return settings as the words of --set."""
    if not isinstance(settings, Mapping):
        return list(settings)
    # JSON with TOML's sign in tables is TOML, too. `tolist` gives Python's values of NumPy's.
    form = json.JSONEncoder(
        ensure_ascii=False,
        separators=(", ", " = "),
        default=lambda x: getattr(x, "tolist", x.__str__)(),
    )
    return [
        f"{key}={value if isinstance(value, str) else form.encode(value)}"
        for key, value in ((key, "" if value is None else value) for key, value in settings.items())
    ]
