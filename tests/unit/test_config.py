"""Check what a config refuses and in which words, what it derives, and its parameter counts."""

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from pretrain.config import (
    ConfigError,
    RunConfig,
    dump_config,
    load_config,
    num_parameters,
)
from pretrain.config.load import check_overrides, overridden, section_keys, section_models

BASE = """
[run]
directory = "runs/test"
[model]
num_layers = 25
hidden_size = 96
num_attention_heads = 12
[batch]
micro_batch_size = 2
global_batch_size = 16
[data]
directory = "data"
source = "shakespeare"
sequence_length = 64
vocab_size = 1000
[optimizer]
learning_rate = 1e-3
[train]
num_steps = 100
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    return path


def message(path, *overrides, world_size: int | None = None) -> str:
    """Return the message with which a config is refused."""
    with pytest.raises(ConfigError) as refused:
        config = load_config(path, overrides)
        if world_size is not None:
            config.layout(world_size)
    return str(refused.value)


# ---- refusals: (overrides, key and value, part of the reason and remedy) -------------------------
REFUSALS = [
    (
        ["model.embedding_scale=big"],
        "model.embedding_scale = 'big'",
        "input should be 'auto' or a finite number greater than 0 (got str)",
    ),
    (
        ["model.embedding_scale=inf"],
        "model.embedding_scale = inf",
        "input should be 'auto' or a finite number greater than 0 (got float)",
    ),
    (
        ["optimizer.position_learning_rate_mult=0"],
        "optimizer.position_learning_rate_mult = 0",
        "input should be greater than 0",
    ),
    (
        ["data.per_document_attention=true", "model.attention_backend=folded"],
        "data.per_document_attention = true",
        'model.attention_backend = "folded" has no mask by document. Set model.attention_backend = '
        '"auto" or "triton", or remove the key',
    ),
    (
        ["model.adaptive_cutoffs=[100,50]"],
        "model.adaptive_cutoffs = [100, 50]",
        "Choose rising numbers below 1000, or remove the key",
    ),
    (
        ["model.adaptive_cutoffs=[100,1000]"],
        "model.adaptive_cutoffs = [100, 1000]",
        "Choose rising numbers below 1000, or remove the key",
    ),
    (["model.adaptive_cutoffs=[]"], "model.adaptive_cutoffs = []", "remove the key"),
    (["model.adaptive_cutoffs=[0,9]"], "model.adaptive_cutoffs", "greater than 0"),
    (
        ["model.adaptive_cutoffs=[9,99]", "model.adaptive_factor=10"],
        "model.adaptive_factor = 10",
        "leaves no channel of model.hidden_size = 96 to the last of 2 tails. Lower it",
    ),
    (
        ["model.adaptive_dropout=0.2"],
        "model.adaptive_dropout = 0.2",
        "Remove the key, or set model.adaptive_cutoffs",
    ),
    (
        ["optimizer.name=nag", "optimizer.learning_rate=20.0"],
        "optimizer.weight_decay = 0.1",
        "Choose less than 0.05",
    ),
    (
        ["optimizer.momentum=0.9"],
        "optimizer.momentum = 0.9",
        "has the keys adam_beta1, adam_beta2, adam_eps and not this one. Remove it, or set "
        'optimizer.name = "nag"',
    ),
    (
        ["optimizer.name=nag", "optimizer.adam_beta2=0.99"],
        "optimizer.adam_beta2 = 0.99",
        'has the keys momentum and not this one. Remove it, or set optimizer.name = "adamw"',
    ),
    (
        ["schedule.lr_warmup_steps=0", "schedule.lr_warmup_init=1e-7"],
        "schedule.lr_warmup_init = 1e-07",
        "there is no warm-up. Remove the key",
    ),
    (
        ["schedule.lr_warmup_steps=2", "schedule.lr_warmup_init=5"],
        "schedule.lr_warmup_init = 5.0",
        "Choose 0.001 or less",
    ),
    (
        ["model.adaptive_cutoffs=[9,99]", "parallel.tensor_model_parallel_size=2"],
        "parallel.tensor_model_parallel_size = 2",
        "Set parallel.tensor_model_parallel_size = 1; data parallelism and parallel.zero_stage",
    ),
    (
        ["model.adaptive_cutoffs=[9,99]", "parallel.pipeline_model_parallel_size=2"],
        "parallel.pipeline_model_parallel_size = 2",
        "Set parallel.pipeline_model_parallel_size = 1",
    ),
    (
        ["data.tokenizer=words", "data.per_document_attention=true"],
        "data.per_document_attention = true",
        "Remove the key, or use another tokenizer",
    ),
    (
        ["train.spike_policy=skip", "parallel.zero_stage=2"],
        "train.spike_policy = skip",
        'Choose "rollback" or "stop", or set parallel.zero_stage = 1',
    ),
    (
        ["model.hidden_size=100"],
        "model.hidden_size = 100",
        "not divisible by model.num_attention_heads = 12. Choose a multiple of 12",
    ),
    (
        ["model.num_query_groups=5"],
        "model.num_query_groups = 5",
        "does not divide model.num_attention_heads = 12. Choose a divisor of 12",
    ),
    (
        ["model.hidden_size=36", "position.method=rotary"],
        "model.hidden_size = 36",
        "a head has 3 channels. Choose a hidden_size that gives each head an even width",
    ),
    (
        ["model.hidden_size=9", "model.num_attention_heads=3", "position.method=sinusoidal"],
        "model.hidden_size = 9",
        "Choose an even number",
    ),
    (
        ["position.method=rotary", "position.rotary_percent=0.1"],
        "position.rotary_percent = 0.1",
        "rotates 0 of a head's 8 channels, and rotary positions rotate pairs of them. Choose",
    ),
    (
        ["position.rotary_percent=0.5"],
        "position.rotary_percent = 0.5",
        'position.method = "alibi" has the keys slopes, trainable_slopes and not this one. Remove',
    ),
    (
        ["position.trainable_slopes=true", "position.method=rotary"],
        "position.trainable_slopes = True",
        "has the keys rotary_base, rotary_percent and not this one. Remove it, or set position.m",
    ),
    (
        ["position.method=t5", "position.relative_attention_max_distance=16"],
        "position.relative_attention_max_distance = 16",
        "Choose a larger distance, or fewer position.relative_attention_num_buckets",
    ),
    (
        ["position.method=learned", "position.max_position_embeddings=32"],
        "position.max_position_embeddings = 32",
        "less than data.sequence_length = 64. Set 64 or more, or remove the key",
    ),
    (
        ["parallel.tensor_model_parallel_size=8"],
        "model.num_attention_heads = 12",
        "Choose a tensor-parallel size",
    ),
    (
        ["parallel.tensor_model_parallel_size=4", "model.num_query_groups=6"],
        "model.num_query_groups = 6",
        "not divisible by parallel.tensor_model_parallel_size = 4",
    ),
    (
        ["parallel.tensor_model_parallel_size=4", "model.ffn_hidden_size=98"],
        "model.ffn_hidden_size = 98",
        "not divisible by parallel.tensor_model_parallel_size = 4",
    ),
    (
        ["parallel.tensor_model_parallel_size=3", "model.make_vocab_size_divisible_by=10"],
        "model.make_vocab_size_divisible_by = 10",
        "padded vocabulary of 1000 is not divisible",
    ),
    (
        ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=2"],
        "parallel.zero_stage = 2",
        "does not work with pipeline stages",
    ),
    (
        ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=3"],
        "parallel.zero_stage = 3",
        "Set parallel.zero_stage = 1, or parallel.pipeline_model_parallel_size = 1",
    ),
    (
        ["parallel.sequence_parallel=true"],
        "parallel.sequence_parallel = true",
        "Remove the key, or raise parallel.tensor_model_parallel_size",
    ),
    (
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "data.sequence_length=65",
        ],
        "data.sequence_length = 65",
        "not divisible by the 2 ranks of sequence parallelism. Choose a multiple of 2",
    ),
    (
        ["parallel.virtual_pipeline_model_parallel_size=2"],
        "parallel.virtual_pipeline_model_parallel_size = 2",
        "the interleaved schedule needs more than one pipeline stage. Remove the key",
    ),
    (
        [
            "parallel.pipeline_model_parallel_size=8",
            "parallel.virtual_pipeline_model_parallel_size=4",
        ],
        "model.num_layers = 25",
        "fewer than the 32 pipeline chunks. Lower parallel.pipeline_model_parallel_size",
    ),
    (
        ["schedule.lr_warmup_steps=100"],
        "schedule.lr_warmup_steps = 100",
        "the warm-up would not end within train.num_steps = 100. Choose less than 100",
    ),
    (
        ["schedule.min_learning_rate=0.01"],
        "schedule.min_learning_rate = 0.01",
        "above the peak, optimizer.learning_rate = 0.001. Lower it",
    ),
    (
        ["schedule.lr_decay_style=warmup_stable_decay"],
        "schedule.lr_wsd_decay_steps = 0",
        "needs steps to decay in. Choose 1 to 100, the steps after the warm-up",
    ),
    (
        ["schedule.lr_wsd_decay_steps=10"],
        "schedule.lr_wsd_decay_steps = 10",
        'schedule.lr_decay_style = "cosine" does not use it. Remove the key',
    ),
    (["evaluation.lengths=[64, 0]"], "evaluation.lengths = 0", "Choose 1 or more"),
    (
        ["position.method=learned", "evaluation.lengths=[64, 65]"],
        "evaluation.lengths = 65",
        "the learned position table holds 64 positions. Choose a shorter length",
    ),
    (
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "evaluation.lengths=[67]",
        ],
        "evaluation.lengths = 67",
        "not divisible by the 2 ranks",
    ),
    (
        ["evaluation.stride=65"],
        "evaluation.stride = 65",
        "longer than the shortest window of 64 tokens, so that windows would leave tokens out. "
        "Choose 64 or less",
    ),
    (
        ["data.tokens_per_shard=2048"],
        "data.tokens_per_shard = 2048",
        "less than one block of data.tokens_per_block = 65536. Choose 65536 or more",
    ),
    (
        ["parallel.world_size=3", "parallel.tensor_model_parallel_size=2"],
        "= 2",
        "does not divide the 3 processes",
    ),
]


@pytest.mark.parametrize(("overrides", "subject", "remedy"), REFUSALS, ids=[r[1] for r in REFUSALS])
def test_what_cannot_work_is_refused_with_a_remedy(path, overrides, subject, remedy):
    text = message(path, *overrides)
    assert text.startswith(f"{path}: ") and subject in text and remedy in text


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (
            ["parallel.tensor_model_parallel_size=2"],
            3,
            "does not divide the 3 processes. Start a multiple of 2 processes, or lower one",
        ),
        (
            [],
            3,
            "batch.global_batch_size = 16: not divisible by batch.micro_batch_size = 2 x 3 "
            "data-parallel ranks. Choose a multiple of 6, such as 12 or 18, or 2 processes",
        ),
        (
            ["batch.micro_batch_size=16", "batch.global_batch_size=32"],
            8,
            "Choose a multiple of 128, such as 128, or batch.micro_batch_size = 4, or 2 processes",
        ),
        (
            ["parallel.tensor_model_parallel_size=2", "batch.micro_batch_size=3"],
            16,
            "Choose a multiple of 24, such as 24, or batch.micro_batch_size = 2",
        ),
        (
            [
                "parallel.pipeline_model_parallel_size=3",
                "parallel.virtual_pipeline_model_parallel_size=2",
            ],
            3,
            "gives 8 micro batches on each data-parallel rank, and the interleaved schedule needs "
            "a multiple of the 3 pipeline stages. Choose a multiple of 6, or remove",
        ),
        (
            ["parallel.world_size=4"],
            2,
            "started with 2 processes. Start 4, or change the plan with --set parallel.world",
        ),
    ],
)
def test_processes_that_cannot_share_the_run_are_refused(path, overrides, world_size, expected):
    assert expected in message(path, *overrides, world_size=world_size)


@pytest.mark.parametrize("batch", [1, 6, 16, 30, 64, 97])
def test_every_batch_that_a_refusal_names_works(path, batch):
    """Whatever of the three is followed, the run can start."""
    named = 0
    for micro, tensor, world in itertools.product((1, 2, 3, 4, 16), (1, 2), (1, 2, 6, 8, 16)):
        given = [f"batch.global_batch_size={batch}", f"batch.micro_batch_size={micro}"]
        given.append(f"parallel.tensor_model_parallel_size={tensor}")
        if world % tensor:
            continue
        try:
            load_config(path, given).layout(world)
            continue
        except ConfigError as refused:
            remedy = str(refused).partition("Choose ")[2]
        for size in re.findall(r"\d+", remedy.partition("such as ")[2].partition(", ")[0]):
            load_config(path, [*given, f"batch.global_batch_size={size}"]).layout(world)
        for size in re.findall(r"micro_batch_size = (\d+)", remedy):
            load_config(path, [*given, f"batch.micro_batch_size={size}"]).layout(world)
            named += 1
        for count in re.findall(r"(\d+) process", remedy):
            load_config(path, given).layout(int(count))
            named += 1
    assert named or batch in (1, 97)


def test_every_refusal_is_said_at_once(path):
    lines = message(path, "model.num_query_groups=5", "evaluation.stride=65").splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{path}: ") for line in lines)


# ---- broken files and overrides ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.num_layer=4", "model.num_layer: no such key, did you mean model.num_layers?"),
        ("model.global_batch_size=4", "did you mean batch.global_batch_size?"),
        ("modle.num_layers=4", "modle: no such key, did you mean model?"),
        ("model.zzz=1", "model.zzz: no such key; [model] has num_layers,"),
        (
            "model.num_layers=four",
            "model.num_layers = 'four': input should be a valid integer (got str)",
        ),
        (
            "model.num_layers=4.0",
            "model.num_layers = 4.0: input should be a valid integer (got float)",
        ),
        ("model.num_layers=0", "model.num_layers = 0: input should be greater than 0"),
        ("model.use_bias=1", "model.use_bias = 1: input should be a valid boolean (got int)"),
        ("model.hidden_dropout=1.0", "model.hidden_dropout = 1.0: input should be less than 1"),
        (
            "position.method=abili",
            "position.method = 'abili': input should be 'alibi', 'learned'",
        ),
        ("parallel.zero_stage=4", "parallel.zero_stage = 4: input should be 1, 2 or 3"),
        ("evaluation.lengths=[]", "evaluation.lengths"),
        ("train.num_steps=", "train.num_steps: missing, and it has no default. Set it in"),
        ("num_steps=4", "--set num_steps=4: expected section.key=value"),
        ("train.num_steps", "--set train.num_steps: expected section.key=value"),
        ("train.=4", "expected section.key=value"),
    ],
)
def test_wrong_keys_types_and_overrides_are_explained(path, override, expected):
    assert expected in message(path, override)


# ---- reading and writing -------------------------------------------------------------------------
def test_dump_reads_back_as_the_same_run(path, tmp_path):
    overrides = [
        "model.num_query_groups=4",
        "position.method=t5",
        "evaluation.lengths=[64, 96]",
        "checkpoint.keep=2",
        'data.source="jsonl"',
        'data.paths=["a/*.jsonl", "b \\"c\\".jsonl"]',
        "run.directory=runs/ü",
    ]
    config = load_config(path, overrides)
    copy = tmp_path / "resolved.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config
    assert dump_config(load_config(copy)) == dump_config(config)


def test_overrides_take_toml_values_and_plain_words_and_the_last_wins(path):
    overrides = [
        "run.directory=runs/a=b",
        "train.num_steps=7",
        "train.num_steps=8",
        "optimizer.clip_grad=2",
    ]
    config = load_config(path, [*overrides, "evaluation.max_tokens=5", "evaluation.max_tokens="])
    assert (config.run.directory, config.train.num_steps, config.optimizer.clip_grad) == (
        "runs/a=b",
        8,
        2.0,
    )
    assert config.evaluation.max_tokens is None


def test_a_config_cannot_be_changed(path):
    config = load_config(path)
    with pytest.raises(ValueError, match="frozen"):
        config.train.num_steps = 5  # type: ignore[misc]


# ---- derived values ------------------------------------------------------------------------------
def test_derived_values(path):
    config = load_config(path)
    assert (config.head_dim, config.num_query_groups, config.ffn_hidden_size) == (8, 12, 384)
    assert config.padded_vocab_size == 1024
    assert load_config(path, ["data.vocab_size=1024"]).padded_vocab_size == 1024
    assert config.tokens_per_step == 1024
    assert config.evaluation_lengths == (64, 128, 256, 512, 1024)
    assert config.evaluation_stride == 64
    learned = load_config(path, ["position.method=learned", "position.max_position_embeddings=300"])
    assert learned.evaluation_lengths == (64, 128, 256)
    assert learned.position.table_end(learned) == 300
    assert load_config(path, ["position.method=learned"]).evaluation_lengths == (64,)


def test_layout(path):
    layout = load_config(
        path, ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
    ).layout(8)
    assert (layout.world_size, layout.tensor, layout.pipeline, layout.virtual, layout.data) == (
        8,
        2,
        2,
        1,
        2,
    )
    assert layout.num_microbatches == 4  # 16 sequences / (2 data-parallel ranks x 2 at once)


@pytest.mark.parametrize(
    ("pipeline", "virtual", "expected"),
    [
        (1, None, [25]),
        (2, None, [13, 12]),
        (4, None, [6, 7, 6, 6]),
        (8, None, [3, 4, 3, 3, 3, 3, 3, 3]),
        (2, 2, [6, 7, 6, 6]),
        (4, 2, [3, 4, 3, 3, 3, 3, 3, 3]),
        (2, 8, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]),
        (8, 3, [1, 2, *[1] * 22]),
    ],
)
def test_layers_of_each_chunk(path, pipeline, virtual, expected):
    overrides = [f"parallel.pipeline_model_parallel_size={pipeline}"]
    overrides += [f"parallel.virtual_pipeline_model_parallel_size={virtual}"] if virtual else []
    chunks = load_config(path, overrides).layers_per_chunk
    assert chunks == expected and sum(chunks) == 25


def test_what_does_not_divide_spares_the_last_chunk(path):
    for layers in range(8, 16):
        chunks = load_config(
            path, [f"model.num_layers={layers}", "parallel.pipeline_model_parallel_size=8"]
        ).layers_per_chunk
        assert (
            sum(chunks) == layers and max(chunks) - min(chunks) <= 1 and chunks[-1] == min(chunks)
        )


# ---- parameter counts ----------------------------------------------------------------------------
def shapes(config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its global name, written out by hand."""
    m, p = config.model, config.position
    heads, hidden, ffn = (
        m.num_attention_heads,
        m.hidden_size,
        m.ffn_hidden_size or 4 * m.hidden_size,
    )
    groups, width = m.num_query_groups or heads, hidden // heads
    vocab = (
        math.ceil(config.data.vocab_size / m.make_vocab_size_divisible_by)
        * m.make_vocab_size_divisible_by
    )
    result = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "decoder.final_layernorm.weight": (hidden,),
    }
    if m.adaptive_cutoffs:
        result = {"decoder.final_layernorm.weight": (hidden,), **adaptive_shapes(config, vocab)}
    if m.embedding_layernorm:
        result["embedding.word_embeddings_layernorm.weight"] = (hidden,)
    for i in range(m.num_layers):
        layer = f"decoder.layers.{i}"
        result |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attention.linear_qkv.weight": ((heads + 2 * groups) * width, hidden),
            f"{layer}.self_attention.linear_proj.weight": (hidden, heads * width),
            f"{layer}.pre_mlp_layernorm.weight": (hidden,),
            f"{layer}.mlp.linear_fc1.weight": (ffn, hidden),
            f"{layer}.mlp.linear_fc2.weight": (hidden, ffn),
        }
    if m.use_bias:
        biased = [name for name in result if "layernorm" in name or "embedding" not in name]
        result |= {name.replace(".weight", ".bias"): result[name][:1] for name in biased}
    if not m.tie_word_embeddings and not m.adaptive_cutoffs:
        result["output_layer.weight"] = (vocab, hidden)
    if p.method == "learned":
        result["embedding.position_embeddings.weight"] = (
            p.max_position_embeddings or config.data.sequence_length,
            hidden,
        )
    if p.method == "t5":
        result["position.relative_attention_bias"] = (heads, p.relative_attention_num_buckets)
    if getattr(p, "trainable_slopes", False):
        result["position.slopes"] = (heads,)
    return result


def adaptive_shapes(config, vocab) -> dict[str, tuple[int, ...]]:
    """Return the shapes of fairseq's AdaptiveInput, and of an AdaptiveSoftmax."""
    m, result = config.model, {}
    first = [0, *m.adaptive_cutoffs]
    for i, (start, end) in enumerate(zip(first, [*m.adaptive_cutoffs, vocab])):
        words = end - start, m.hidden_size // m.adaptive_factor**i
        projection = m.hidden_size, words[1]
        result[f"embedding.word_embeddings.embedding_{i}"] = words
        result[f"embedding.word_embeddings.projection_{i}"] = projection
        if not m.tie_word_embeddings:
            result[f"output_layer.embedding_{i}"] = words
            result |= {f"output_layer.projection_{i}": projection} if i else {}
    return result | {"output_layer.tails": (len(m.adaptive_cutoffs), m.hidden_size)}


VARIANTS = [
    [],
    ["model.use_bias=true"],
    ["model.tie_word_embeddings=false"],
    ["model.num_query_groups=4", "model.ffn_hidden_size=200"],
    ["position.method=learned", "position.max_position_embeddings=100"],
    ["position.method=t5"],
    ["position.trainable_slopes=true"],
    ["position.method=sinusoidal"],
    ["model.embedding_layernorm=true"],
    ["position.method=rotary", "position.rotary_percent=0.25", "model.parallel_residual=true"],
]
ADAPTIVE = [
    ["model.adaptive_cutoffs=[20,100]"],
    ["model.adaptive_cutoffs=[100]", "model.adaptive_factor=3", "model.tie_word_embeddings=false"],
]


@pytest.mark.parametrize("overrides", VARIANTS + ADAPTIVE, ids=str)
def test_parameter_count_equals_the_sum_over_all_tensors(path, overrides):
    config = load_config(path, overrides)
    assert num_parameters(config) == sum(math.prod(shape) for shape in shapes(config).values())


def test_reading_a_config_does_not_import_torch():
    code = "import sys, pretrain.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- --set: what is typed is what is trained -----------------------------------------------------
def literal_words() -> list[tuple[str, Any]]:
    """Every (key, value) of a Literal in the schema, also where other types are allowed as well."""

    def values(annotation: Any) -> Iterator[Any]:
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)
        elif get_origin(annotation) is not tuple:
            for part in get_args(annotation):
                yield from values(part)

    return [
        (f"{section}.{name}", value)
        for section in RunConfig.model_fields
        for model in section_models(section)
        for name, key in model.model_fields.items()
        for value in values(key.annotation)
    ]


def test_the_literals_of_the_schema_are_found():
    words = literal_words()
    assert ("position.method", "none") in words and ("model.embedding_scale", "auto") in words
    assert ("parallel.zero_stage", 3) in words and ("train.fusion", "on") in words
    assert len(words) > 40


@pytest.mark.parametrize(("key", "value"), literal_words(), ids=str)
def test_the_bare_word_of_a_literal_is_that_value(key, value):
    section, name = key.split(".")
    # Another value of the key stands in the file.
    others = [other for k, other in literal_words() if k == key and other != value]
    file = {section: {name: others[0]}} if others else {}
    # A number in quotes is a text, and refused.
    quoted = ['"{}"', "'{}'"] if isinstance(value, str) else []
    for spelling in ["{}", " {} ", "{}\n", *quoted]:
        found = overridden(file, [f"{key}={spelling.format(value)}"])[section][name]
        assert found == value and type(found) is type(value)


def test_none_is_a_method_and_not_the_default(path):
    assert load_config(path, ["position.method=none"]).position.method == "none"
    path.write_text(BASE + '[position]\nmethod = "rotary"\n')
    assert load_config(path, ["position.method=none"]).position.method == "none"
    assert load_config(path, ["position.method="]).position.method == "alibi"


@pytest.mark.parametrize(
    "spelling", ["position.method=", " position . method = ", "position.method=\n"]
)
def test_nothing_after_the_sign_removes_the_key(path, spelling):
    path.write_text(BASE + '[position]\nmethod = "rotary"\n')
    assert load_config(path, [spelling]).position.method == "alibi"


def test_a_text_keeps_what_looks_like_a_number_or_a_date(path):
    for word in ("2024", "2024-01-01", "true", "1e3", "[1]", "a#b", "none", "nan"):
        config = load_config(path, [f"logging.wandb_project= {word} "])
        assert config.logging.wandb_project == word


ODD = """none null auto 1 -1 1.0 1e400 inf nan true True '3' [] [1] [[1]] ['a'] {a=1} {} 2024-01-01
a=b $ ~ é # 0x10 1, 9007199254740991 9007199254740991.0"""
NASTY = [*ODD.split(), "", "9" * 400, "9" * 5000, "[" * 2000, "\udcff", "\0", " "]


def test_whatever_is_set_is_a_config_that_reads_back_or_a_refusal(path, tmp_path):
    copy, before, kept = tmp_path / "resolved.toml", load_config(path), 0
    for section, names in section_keys().items():
        for name, odd in itertools.product(names, NASTY):
            try:
                config = load_config(path, [f"{section}.{name}={odd}"])
            except ConfigError:
                continue
            if config == before:
                continue
            copy.write_text(dump_config(config))
            assert load_config(copy) == config, (section, name, odd)
            kept += 1
    assert kept > 200


def test_a_key_that_is_given_twice_is_refused():
    check_overrides(["train.num_steps=7", "train.precision=bf16"])
    with pytest.raises(
        ConfigError, match=r"--set train.num_steps=8: train.num_steps is given twice"
    ):
        check_overrides(["train . num_steps=7", "train.precision=bf16", "train.num_steps=8"])


# ---- ~ and $VARIABLE in paths --------------------------------------------------------------------
CORPORA = """
[data.corpora.own]
paths = ["$CORPUS/*.txt", "~/more.txt", "s3://bucket/$OWNER/*.txt"]
"""


def test_paths_are_expanded_when_a_config_is_read_and_stay_so(path, tmp_path, monkeypatch):
    for name, value in {"HOME": "/home/me", "SCRATCH": "/scratch/me", "CORPUS": "a b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OWNER", "me")
    overrides = [
        "run.directory=${SCRATCH}/runs",
        "data.directory=~/data",
        "data.source=",
        "data.tokenizer=~/$CORPUS/t.model",
        'data.validation_paths=["$SCRATCH/held $(out).txt", "~"]',
        "checkpoint.upload_to=s3://bucket/$OWNER",
        "data.cache_directory=$TMPDIR/shards",
    ]
    path.write_text(BASE + CORPORA)
    config = load_config(path, overrides)
    assert config.run.directory == "/scratch/me/runs" and config.data.directory == "/home/me/data"
    assert config.data.tokenizer == "/home/me/a b/t.model"
    assert config.data.validation_paths == ("/scratch/me/held $(out).txt", "/home/me")
    assert config.checkpoint.upload_to == "s3://bucket/me"
    assert config.data.corpora["own"].paths == (
        "a b/*.txt",
        "/home/me/more.txt",
        "s3://bucket/me/*.txt",
    )
    # Each process expands this one for itself.
    assert config.data.cache_directory == "$TMPDIR/shards"
    # What a run records is read elsewhere, with other values and without any.
    for name in ("HOME", "SCRATCH", "CORPUS", "OWNER"):
        monkeypatch.setenv(name, "/elsewhere")
    copy = tmp_path / "resolved.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


# ---- how the file is stored ----------------------------------------------------------------------
@pytest.mark.parametrize(
    "encoded",
    [
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r").encode(),
    ],
    ids=["mark", "mark and CRLF", "CR"],
)
def test_a_file_that_another_editor_stored_is_the_same_config(path, encoded):
    expected = load_config(path)
    path.write_bytes(encoded(path.read_text()))
    assert load_config(path) == expected
    above = path.with_name("above.toml")
    above.write_bytes(encoded(f'base = "{path.name}"\n[run]\nseed = 77\n'))
    assert load_config(above).run.seed == 77


# ---- data.vocab_size -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tokenizer, least", [("", 260), ("words", 5), ("dict.txt", 2), ("tokenizer.json", 2)]
)
def test_each_tokenizer_has_a_least_vocabulary(path, tokenizer, least):
    def load(size):
        return load_config(path, [f"data.tokenizer={tokenizer}", f"data.vocab_size={size}"])

    assert load(least).data.vocab_size == least
    with pytest.raises(ConfigError, match=rf"data\.vocab_size = {least - 1}: .*{least}"):
        load(least - 1)
