"""Define every key of a run's config, one pydantic model per TOML section.

This file is the reference of the keys. The docstring below a field says what the key does, its
unit, what its default means and when to change it. Names are Megatron's and Hugging Face's.
Other sections stand beside this file: the model's in `model_schema`, the data's in `data_schema`,
[export] in `export_schema`. `pretrain.config.run` puts them together.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from pretrain.config.section import Section


class RunSection(Section):
    """[run]: where the run lives, and its seed."""

    directory: str = Field(min_length=1)
    """Directory of the run, relative to where the command is started: config.toml, metrics.jsonl,
    checkpoints/, attempts/ and logs/. Two runs never share one. Here and in the paths of [data], ~
    and $VARIABLE are expanded when the config is read, and recorded as what they stood for then."""

    seed: int = Field(default=1234, ge=0)
    """Seed of the initial weights, the order of the data and the dropout masks. Two runs that
    differ in the seed alone show how much of a difference is noise."""


class ParallelSection(Section):
    """[parallel]: how processes share the model.

    The data-parallel size is what remains of the processes. The layout may change between two
    starts of a run: checkpoints do not depend on it.
    """

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """Ranks that split every layer. Raise it when the model does not fit on one GPU, up to the GPUs
    of a node: it communicates in every layer."""

    pipeline_model_parallel_size: int = Field(default=1, gt=0)
    """Stages that split the layers among them. Raise it when a node's GPUs do not hold the model;
    needs many micro batches a step to keep the stages busy, and zero_stage = 1."""

    virtual_pipeline_model_parallel_size: int | None = Field(default=None, gt=1)
    """Chunks of layers on each pipeline stage (Megatron's interleaved schedule). Stages idle less
    and communicate more. Default: one chunk, the 1F1B schedule."""

    sequence_parallel: bool = False
    """Also split LayerNorms, dropout and their activations over the tensor-parallel ranks, along
    the sequence. Saves memory; needs a tensor-parallel size above 1 that divides the sequence
    length."""

    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO over data-parallel ranks: 1 shards the optimizer state, 2 also the gradients,
    3 also the weights. Each saves memory and communicates more; 2 and 3 do not work with pipeline
    stages."""

    gradient_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which gradients travel between the nodes of the data-parallel ranks, or between
    the ranks of a single node; they are added up in fp32 in any case. bf16 and fp16 halve the
    traffic of a slow network, and round the sum of each node once. Need zero_stage = 1, and fp16
    needs train.precision = "fp16", whose loss is scaled."""

    world_size: int | None = Field(default=None, gt=0)
    """Number of processes (one per GPU) that the run is planned for; a start with another number is
    refused. Default: any number that the layout and the batch allow."""


class BatchSection(Section):
    """[batch]: sequences in a step."""

    micro_batch_size: int = Field(gt=0)
    """Sequences that pass through the model at once on a data-parallel rank. As many as memory
    allows."""

    global_batch_size: int = Field(gt=0)
    """Sequences in an optimizer step, over all data-parallel ranks; a multiple of micro_batch_size
    x the data-parallel size. The quotient is the number of micro batches, whose gradients are
    accumulated."""

    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = Field(
        default=None, strict=False
    )
    """[start, increment, samples]: begin with steps of `start` sequences, and add `increment` at
    equal distances, so that global_batch_size is reached after `samples` sequences, as in Megatron.
    The learning rate still follows the steps. Default: global_batch_size from the first step."""


class OptimizerSection(Section):
    """[optimizer]: AdamW, or Nesterov's accelerated gradient."""

    name: Literal["adamw", "nag"] = "adamw"
    """adamw: AdamW. nag: fairseq's Nesterov's accelerated gradient, SGD with a momentum that looks
    ahead; its learning rates are about a thousand times those of AdamW, as of 1.0 for WikiText-103
    with clip_grad = 0.1. It keeps one moment instead of two."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate, which [schedule] warms up to and decays from."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """adamw: decay per step of the running mean of the gradients."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """adamw: decay per step of the running mean of the squared gradients. Large models often use
    0.95; Adam's own default of 0.999 averages over more steps."""

    adam_eps: float = Field(default=1e-8, gt=0)
    """adamw: added to the square root of the second moment, so that an update with tiny gradients
    stays small."""

    momentum: float = Field(default=0.99, gt=0, lt=1)
    """nag: decay of the sum of the gradients. The default is fairseq's."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices. Biases, LayerNorms and slopes are never decayed."""

    clip_grad: float = Field(default=1.0, ge=0, allow_inf_nan=True)
    """Largest global gradient norm (L2), beyond which gradients are scaled down; 0 turns clipping
    off, and so does inf."""

    position_learning_rate_mult: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate of the position method's own parameters: T5's table of biases, or
    trainable slopes. A learned position table is an embedding and is trained as one. T5's own
    optimizer and some libraries move the table several times as fast as AdamW does; in short
    trainings of ours a factor of 10 made its entries larger and the model no better."""

    initial_loss_scale_power: int = Field(default=16, ge=0)
    """fp16: the dynamic loss scale starts at 2 to this power. Lower it when a run begins with many
    skipped steps."""


class ScheduleSection(Section):
    """[schedule]: the learning rate over the steps.

    As in Megatron, Hugging Face and fairseq, an update takes the rate of the number of updates done
    before it: the first one that of 0, the last one that of train.num_steps - 1.
    """

    lr_decay_style: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "cosine"
    """How the rate falls from its peak towards min_learning_rate: along a line, along half a cosine
    wave, not at all, or only over the last lr_wsd_decay_steps along a line."""

    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from lr_warmup_init, the rate of the first step, to the peak, the
    rate of the step after them. 0 starts at the peak."""

    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate at which the warm-up begins (fairseq: --warmup-init-lr)."""

    lr_wsd_decay_steps: int = Field(default=0, ge=0)
    """warmup_stable_decay: steps of the final decay. Set it for that style, and for no other."""

    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate that the decay ends at when all steps are done. The last step is one before it,
    so that it still learns when this is 0."""


class TrainSection(Section):
    """[train]: length, precision, recomputation, fused operations, and checks of its health."""

    num_steps: int = Field(gt=0)
    """Optimizer steps of the whole run, including those of earlier attempts. It may be raised
    later; schedules that decay until the last step are then another schedule."""

    objective: Literal["next_token", "masked"] = "next_token"
    """What the model learns to predict. next_token: each token, from those before it. masked: as in
    RoBERTa, 15 % of the tokens of a sample are chosen, of which 80 % are replaced by a mask and
    10 % by a random token; the loss is that of the chosen tokens, attention looks both ways, and
    ALiBi's bias is symmetric, -slope |i - j|. The mask is a row of the embedding behind those of
    data.vocab_size. Such a model generates no text and exports to no class, and its perplexities
    are of masked tokens."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of weights, activations and gradients. Master weights and Adam moments are fp32
    in any case. bf16 suits GPUs from the A100 on, fp16 older ones such as the V100; fp16 needs a
    GPU."""

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, the attention core, or
    every layer. Saves memory and costs time, about a third more per step for full."""

    fusion: Literal["auto", "on", "off"] = "auto"
    """Fused operations beside attention: bias with GELU and bias with dropout and residual in one
    kernel each (torch.compile), the loss without a second copy of the logits, weight gradients
    added in fp32 by the matrix product itself. auto: on a GPU. off: plain operations, to compare
    with or to rule them out; an adaptive softmax then computes the probabilities of all words. on:
    on a CPU too, where compiling costs tens of seconds at every start and needs a C++ compiler."""

    consistency_interval_steps: int = Field(default=500, ge=0)
    """Steps from one check of the ranks' health to the next: that masters and moments are finite,
    and weights equal wherever several ranks hold the same. It is also done before every save; 0
    does it only then. A check costs less than half a step."""

    profile_steps: tuple[PositiveInt, PositiveInt] | None = Field(default=None, strict=False)
    """[first, last]: steps (the first step is 1) that torch's profiler records on rank 0. Writes a
    trace to RUN/profile, which https://ui.perfetto.dev opens, and on a GPU a snapshot of its
    memory, for https://pytorch.org/memory_viz. Recorded steps are slower, and a trace of many is
    large: two or three say enough. Losses do not change. Default: none."""

    spike_policy: Literal["none", "skip", "rollback", "stop"] = "none"
    """What follows a step whose loss or gradient norm is a spike. none: nothing. skip: its update
    is left out and training goes on, as OLMo does; needs zero_stage = 1. rollback: the run goes
    back to its newest checkpoint and on with the data that follows the spike, as PaLM's authors
    did. stop: the run fails, and nothing after the spike is saved."""

    spike_threshold: float = Field(default=6.0, gt=0, allow_inf_nan=False)
    """Standard deviations above the mean of the last spike_window_steps steps from which on a loss
    or a gradient norm is a spike. OLMo's value; lower it to catch smaller ones."""

    spike_window_steps: int = Field(default=128, ge=2)
    """Steps by which a step is judged. Until half of them have been seen, and at least 20 (or all,
    if there are fewer), no step is a spike."""

    spike_max_rollbacks: int = Field(default=3, gt=0)
    """rollback: times in a row that the run goes back to one checkpoint; after that it fails."""


class CheckpointSection(Section):
    """[checkpoint]: when to save, and how many checkpoints to keep."""

    interval_steps: int = Field(default=1000, gt=0)
    """Steps from one checkpoint to the next. The last step is always saved, and so is a run that is
    asked to stop."""

    asynchronous: bool = True
    """Write beside training, from a copy of the optimizer's state in host memory. false stops
    training until a checkpoint is written, and needs no memory for the copy."""

    keep: int | None = Field(default=None, gt=0)
    """Number of newest checkpoints to keep; older ones are deleted. Default: all are kept."""

    keep_every: int | None = Field(default=None, gt=0)
    """Also keep those whose step is a multiple of this, for good. It has a meaning only beside
    checkpoint.keep."""

    keep_best: int = Field(default=0, ge=0)
    """Also keep this many with the lowest validation loss at data.sequence_length, of those that
    were evaluated while training. It has a meaning only beside checkpoint.keep."""

    upload_to: str | None = None
    """URL, such as s3://bucket/prefix, to which each checkpoint is uploaded beside training. A run
    that is started in an empty run.directory goes on from there. One URL holds one run. Any
    protocol of fsspec works; most need a package of their own (s3fs, gcsfs). Credentials come from
    where that package looks for them, never from the URL."""


class EvaluationSection(Section):
    """[evaluation]: perplexity by length, in the training loop and in `pretrain evaluate`."""

    interval_steps: int | None = Field(default=None, gt=0)
    """Steps from one evaluation in the training loop to the next. The last step is always
    evaluated. Default: 1000, where max_time_share allows; an interval that is set is kept, unless
    max_time_share is set too."""

    max_time_share: float | None = Field(default=None, gt=0, le=1)
    """The most time that evaluations in the training loop may take, as a share of the time of its
    steps: 0.02 is 2 %. Both are measured. An evaluation that would exceed it is left out, the log
    says so, and the next one is due interval_steps later. Every evaluation scores the same tokens,
    so that curves stay comparable. The last step is evaluated in any case. Default: 0.02, or no
    bound if interval_steps is set."""

    lengths: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """Window lengths in tokens. None may be longer than the text that is scored. Default: 1, 2, 4,
    8 and 16 times data.sequence_length, as far as the text and, for position.method = "learned",
    the table reach."""

    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping",), min_length=1, strict=False
    )
    """Protocols of the evaluations in the training loop. Sliding windows overlap, so every scored
    token has much context, and cost length / stride times as much. `pretrain evaluate` has an
    option of its own and runs both."""

    stride: int | None = Field(default=None, gt=0)
    """sliding: tokens from one window to the next, and predictions of each window that are scored.
    Default: the shortest of the lengths."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of the validation stream that an evaluation in the training loop scores. Default:
    all of them. `pretrain evaluate` and the launcher's evaluation jobs do not read it; they score
    all, or what their --max-tokens says."""

    tokens_per_batch: int = Field(default=8_192, gt=0)
    """Tokens in one forward pass of a rank, at whatever window length (at least one window). Lower
    it when an evaluation runs out of memory."""


class RecoverySection(Section):
    """[recovery]: what the launcher does when training hangs or fails."""

    hang_seconds: float = Field(default=900, gt=0, allow_inf_nan=False)
    """Seconds without a finished training step, or a finished forward pass of an evaluation, after
    which the processes are ended and started again. Must exceed two of the slowest steps, because a
    step is reported while the next one runs."""

    startup_seconds: float = Field(default=1800, gt=0, allow_inf_nan=False)
    """The same limit for each of starting, loading a checkpoint and saving one, as a whole."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts after failures in a row without a new checkpoint between them. After one failure
    more the launcher gives up; 0 never restarts."""

    spare_nodes: int = Field(default=0, ge=0)
    """Nodes that a Slurm job holds beside those that train. When a node fails, a spare one takes
    its place at once, and the job does not go back to the queue."""

    preflight_seconds: float = Field(default=30, ge=0, allow_inf_nan=False)
    """The longest time for checking the nodes of a Slurm job before its ranks start; 0 leaves the
    check out."""


class LoggingSection(Section):
    """[logging]: where metrics go besides RUN/metrics.jsonl, which always has every step."""

    interval_steps: int = Field(default=10, gt=0)
    """Steps from one printed line to the next; the first step of a start is printed, too."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases. offline: write to RUN/wandb, which `wandb sync RUN/wandb/offline-run-*`
    sends later. online: send while training; needs WANDB_API_KEY or `wandb login`. disabled: write
    nothing. Without the package wandb nothing is written, and the run trains on."""

    wandb_project: str = "pretrain"
    """Project that the run appears under in Weights & Biases."""

    tensorboard: bool = True
    """Write TensorBoard event files to RUN/tensorboard, which `tensorboard --logdir` shows."""
