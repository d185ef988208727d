"""Check what a config refuses and in which words, what it derives, and its parameter counts."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from pretrain.config import (
    ConfigError,
    Layout,
    RunConfig,
    dump_config,
    load_config,
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


# ---- refusals: settings, and the key, its value and the reason or remedy ------------------------
TP2 = "parallel.tensor_model_parallel_size=2"
TP4 = "parallel.tensor_model_parallel_size=4"
PP2 = "parallel.pipeline_model_parallel_size=2"
SP2 = f"{TP2} parallel.sequence_parallel=true"
CUTOFFS = "model.adaptive_cutoffs=[9,99]"
DOCUMENTS = "data.per_document_attention=true"
ROTARY = "position.method=rotary"
LEARNED = "position.method=learned"
WSD = "schedule.lr_decay_style=warmup_stable_decay"
REFUSALS = [
    ("model.embedding_scale=big", "model.embedding_scale = 'big': input should be 'auto' or a fin"),
    ("model.embedding_scale=inf", "model.embedding_scale = inf: input should be 'auto' or a fin"),
    ("optimizer.position_learning_rate_mult=0", "_mult = 0: input should be greater than 0"),
    (f"{DOCUMENTS} model.attention_backend=folded", "data.per_document_attention = true"),
    (f"{DOCUMENTS} data.tokenizer=words", "data.per_document_attention = true"),
    (f"{DOCUMENTS} train.objective=masked", "data.per_document_attention = true"),
    (f"{CUTOFFS} train.objective=masked", "model.adaptive_cutoffs = [9, 99]: its rows are words"),
    ('train.objective=masked evaluation.protocols=["sliding"]', "evaluation.protocols = "),
    ("model.adaptive_cutoffs=[100,50]", "[100, 50]: not the rising first ids"),
    ("model.adaptive_cutoffs=[100,1000]", "Choose rising numbers below 1000"),
    ("model.adaptive_cutoffs=[]", "model.adaptive_cutoffs = []"),
    ("model.adaptive_cutoffs=[0,9]", "model.adaptive_cutoffs[0] = 0: input should be greater"),
    (f"{CUTOFFS} model.adaptive_factor=10", "model.adaptive_factor = 10: leaves no channel"),
    (f"{CUTOFFS} {TP2}", "parallel.tensor_model_parallel_size = 2: every rank needs all"),
    (f"{CUTOFFS} {PP2}", "parallel.pipeline_model_parallel_size = 2: every rank needs all"),
    # A key that would be ignored.
    ("model.adaptive_dropout=0.2", "= 0.2: has no meaning without model.adaptive_cutoffs"),
    ("model.adaptive_factor=3", "= 3: has no meaning without model.adaptive_cutoffs"),
    ("schedule.lr_warmup_init=1e-7", "1e-07: has no meaning without schedule.lr_warmup_steps"),
    ("schedule.lr_wsd_decay_steps=9", 'without schedule.lr_decay_style = "warmup_stable_decay"'),
    ("checkpoint.keep_every=9", "checkpoint.keep_every = 9: has no meaning without"),
    ("checkpoint.keep_best=2", "checkpoint.keep_best = 2: has no meaning without checkpoint.keep"),
    ("optimizer.name=nag optimizer.learning_rate=20.0", "optimizer.weight_decay = 0.1"),
    ("optimizer.momentum=0.9", "has the keys adam_beta1, adam_beta2, adam_eps and not this one"),
    ("optimizer.name=nag optimizer.adam_beta2=0.9", "has the keys momentum and not this one"),
    ("schedule.lr_warmup_steps=2 schedule.lr_warmup_init=5", "= 5.0: above optimizer.learning_r"),
    ("train.spike_policy=skip parallel.zero_stage=2", "train.spike_policy = skip: at ZeRO 2"),
    ("model.hidden_size=100", "= 100: not divisible by model.num_attention_heads = 12"),
    ("model.num_query_groups=5", "= 5: does not divide model.num_attention_heads = 12"),
    (f"model.hidden_size=36 {ROTARY}", "and a head has 3 channels. Choose a hidden_size"),
    (
        "model.hidden_size=9 model.num_attention_heads=3 position.method=sinusoidal",
        "model.hidden_size = 9",
    ),
    (f"{ROTARY} position.rotary_percent=0.1", "rotates 0 of a head's 8 channels"),
    ("position.rotary_percent=0.5", "has the keys slopes, trainable_slopes and not this one"),
    (
        f"position.trainable_slopes=true {ROTARY}",
        "has the keys rotary_base, rotary_percent and",
    ),
    (
        "position.method=t5 position.relative_attention_max_distance=16",
        "position.relative_attention_max_distance = 16",
    ),
    (f"{LEARNED} position.max_position_embeddings=32", "less than data.sequence_length = 64"),
    ("parallel.tensor_model_parallel_size=8", "model.num_attention_heads = 12: not divisible"),
    (f"{TP4} model.num_query_groups=6", "model.num_query_groups = 6: not divisible by parallel"),
    (f"{TP4} model.ffn_hidden_size=98", "model.ffn_hidden_size = 98: not divisible by parallel."),
    (
        "parallel.tensor_model_parallel_size=3 model.make_vocab_size_divisible_by=10",
        "padded vocabulary of 1000 is not divisible",
    ),
    (f"{PP2} parallel.zero_stage=2", "parallel.zero_stage = 2: ZeRO 2 does not work with pipeline"),
    (f"{PP2} parallel.zero_stage=3", "parallel.zero_stage = 3: ZeRO 3 does not work with pipeline"),
    ("parallel.zero_stage=2 parallel.gradient_reduce_dtype=bf16", "gradient_reduce_dtype = bf16"),
    ("parallel.gradient_reduce_dtype=fp16", "parallel.gradient_reduce_dtype = fp16: gradients of"),
    ("parallel.sequence_parallel=true", "parallel.sequence_parallel = true: there is one tensor"),
    (f"{SP2} data.sequence_length=65", "data.sequence_length = 65: not divisible by the 2 ranks"),
    (f"{SP2} evaluation.lengths=[67]", "evaluation.lengths = 67: not divisible by the 2 ranks"),
    ("parallel.virtual_pipeline_model_parallel_size=2", "needs more than one pipeline stage"),
    ("parallel.pipeline_model_parallel_size=26", "= 25: fewer than the 26 pipeline chunks"),
    ("schedule.lr_warmup_steps=100", "schedule.lr_warmup_steps = 100: the warm-up would not end"),
    ("schedule.min_learning_rate=0.01", "0.01: above the peak, optimizer.learning_rate = 0.001"),
    (WSD, "schedule.lr_wsd_decay_steps = 0: schedule.lr_decay_style"),
    (f"{WSD} schedule.lr_wsd_decay_steps=101", "schedule.lr_wsd_decay_steps = 101"),
    ("train.profile_steps=[3,2]", "train.profile_steps = [3, 2]: not the first and the last"),
    ("train.profile_steps=[3,101]", "Choose [first, last] within 1 to 100"),
    ("evaluation.lengths=[64,0]", "evaluation.lengths = 0: not a number of tokens"),
    (f"{LEARNED} evaluation.lengths=[64,65]", "65: the learned position table holds 64 positions"),
    ("evaluation.stride=65", "evaluation.stride = 65: longer than the shortest window of 64"),
    ("data.tokens_per_shard=2048", "data.tokens_per_shard = 2048: less than one block"),
    ("data.vocab_size=259", "data.vocab_size = 259: less than what every vocabulary"),
    ("data.tokenizer=words data.vocab_size=4", "Choose 5 or more"),
    (f"parallel.world_size=3 {TP2}", "does not divide the 3 processes"),
    ("train.num_steps=9007199254740992", "9007199254740992: larger than 9007199254740991"),
    # Keys, types and malformed settings.
    ("model.global_batch_size=4", "did you mean batch.global_batch_size?"),
    ("modle.num_layers=4", "modle: no such key, did you mean model?"),
    ("model.zzz=1", "model.zzz: no such key; [model] has num_layers,"),
    ("model.num_layers=4.0", "model.num_layers = 4.0: input should be a valid integer (got float)"),
    ("model.num_layers=0", "model.num_layers = 0: input should be greater than 0"),
    ("model.use_bias=1", "model.use_bias = 1: input should be a valid boolean (got int)"),
    ("model.hidden_dropout=1.0", "model.hidden_dropout = 1.0: input should be less than 1"),
    ("position.method=abili", "position.method = 'abili': input should be 'alibi', 'learned'"),
    ("parallel.zero_stage=4", "parallel.zero_stage = 4: input should be 1, 2 or 3"),
    ("train.num_steps", "--set train.num_steps: expected section.key=value"),
    ("num_steps=3", "--set num_steps=3: expected section.key=value"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSALS, ids=[r[0] for r in REFUSALS])
def test_what_cannot_work_is_refused(path, overrides, says):
    assert says in message(path, *overrides.split())


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (TP2, 3, "does not divide the 3 processes. Start a multiple of 2 processes"),
        ("", 3, "batch.global_batch_size = 16: not divisible by batch.micro_batch_size = 2 x 3"),
        (
            "parallel.pipeline_model_parallel_size=3 "
            "parallel.virtual_pipeline_model_parallel_size=2",
            3,
            "a multiple of the 3 pipeline stages. Choose a multiple of 6, or remove",
        ),
        ("parallel.world_size=4", 2, "started with 2 processes. Start 4, or change the plan"),
    ],
)
def test_processes_that_cannot_share_the_run_are_refused(path, overrides, world_size, expected):
    assert expected in message(path, *overrides.split(), world_size=world_size)


def test_every_refusal_is_said_at_once(path):
    lines = message(path, "model.num_query_groups=5", "evaluation.stride=65").splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{path}: ") for line in lines)


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
    # 16 sequences / (2 data-parallel ranks x 2 at once) are 4 micro batches.
    expected = Layout(world_size=8, tensor=2, pipeline=2, virtual=1, data=2, num_microbatches=4)
    assert layout == expected


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


@pytest.mark.parametrize(("key", "value"), literal_words(), ids=str)
def test_the_bare_word_of_a_literal_is_that_value(key, value):
    assert len(literal_words()) > 40
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
    for spelling in ("position.method=", " position . method = ", "position.method=\n"):
        assert load_config(path, [spelling]).position.method == "alibi"


def test_a_text_keeps_what_looks_like_a_number_or_a_date(path):
    for word in ("2024", "2024-01-01", "true", "1e3", "[1]", "a#b", "none", "nan"):
        config = load_config(path, [f"logging.wandb_project= {word} "])
        assert config.logging.wandb_project == word


ODD = """none null auto 1 -1 1.0 1e400 inf nan true True '3' [] [1] [[1]] ['a'] {a=1} {} 2024-01-01
a=b $ ~ é # 0x10 1, 9007199254740991 9007199254740991.0"""
NASTY = [*ODD.split(), "", "9" * 400, "9" * 5000, "0x" + "f" * 5000, "[" * 2000, "\0", " "]


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
