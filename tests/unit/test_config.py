"""Check how a config is read, what it refuses, what it derives, and which files are shipped."""

import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pretrain.cli.commands import app
from pretrain.config import ConfigError, dump_config, load_config
from pretrain.config.load import section_keys, shipped

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/demo.toml"

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
CP2 = "parallel.context_parallel_size=2"
SP2 = f"{TP2} parallel.sequence_parallel=true"
CUTOFFS = "model.adaptive_cutoffs=[9,99]"
DOCUMENTS = "data.per_document_attention=true"
ROTARY = "position.method=rotary"
T5 = "position.method=t5"
LEARNED = "position.method=learned"
WSD = "schedule.lr_decay_style=warmup_stable_decay"
HYBRID = "position.method=hybrid"
TWO_ROTATIONS = 'position.layers=[{method="rotary"},{method="rotary",rotary_percent=0.5}]'
REFUSALS = [
    (f"{DOCUMENTS} model.attention_backend=folded", "data.per_document_attention = true"),
    (f"{DOCUMENTS} data.tokenizer=words", "data.per_document_attention = true"),
    (f"{DOCUMENTS} train.objective=masked", "looks both ways"),
    (f"train.objective=masked {T5} position.relative_attention_num_buckets=3", "Choose 4 or more"),
    ("position.method=none position.rotary_base=9", "has no keys. Remove it"),
    (f"{CUTOFFS} train.objective=masked", "model.adaptive_cutoffs = [9, 99]: works from left"),
    ('train.objective=masked evaluation.protocols=["sliding"]', "evaluation.protocols = "),
    ("model.adaptive_cutoffs=[100,50]", "[100, 50]: not the rising first ids"),
    ("model.adaptive_cutoffs=[100,1000]", "Choose rising numbers below 1000"),
    (f"{CUTOFFS} model.adaptive_factor=10", "model.adaptive_factor = 10: leaves no channel of"),
    (f"{CUTOFFS} {TP2}", "parallel.tensor_model_parallel_size = 2: every rank needs all"),
    (f"{CUTOFFS} {PP2}", "parallel.pipeline_model_parallel_size = 2: every rank needs all"),
    ("optimizer.name=nag optimizer.learning_rate=20.0", "optimizer.weight_decay = 0.1"),
    ("optimizer.name=nag optimizer.adam_beta2=0.9", "has the keys momentum and not this one"),
    ("schedule.lr_warmup_steps=2 schedule.lr_warmup_init=5", "= 5.0: above the peak"),
    (f"train.fusion=layers {TP2}", "train.fusion = layers: tensor ranks"),
    ("train.fp8=true", 'train.fp8 = true: with train.fusion = "auto" its casts'),
    ("train.spike_policy=skip parallel.zero_stage=2", "train.spike_policy = skip: at ZeRO 2"),
    ("model.num_query_groups=5", "= 5: does not divide model.num_attention_heads = 12"),
    (f"model.hidden_size=36 {ROTARY}", "model.hidden_size = 36: pairs of channels are rotated"),
    (f"model.kv_channels=9 {ROTARY}", "model.kv_channels = 9: pairs of channels are rotated"),
    (
        "model.hidden_size=9 model.num_attention_heads=3 position.method=sinusoidal",
        "model.hidden_size = 9",
    ),
    (f"{ROTARY} position.rotary_percent=0.1", "rotates 0 of a head's 8 channels"),
    ("position.slopes=[0.5,0.25]", "lists 2, and model.num_attention_heads = 12. Give 12"),
    (f"position.slopes=[{'1,' * 11}-0.1]", "from 0 to 100 for each head"),
    (f"position.slopes=[{'1,' * 11}nan]", "from 0 to 100"),
    ("position.slopes={first=0.5}", "or a table {first = 0.5, last = 0.00390625}"),
    ("position.slopes_right=published", "no token sees one that follows"),
    ("position.rotary_percent=0.5", "has the keys slopes, trainable_slopes, slopes_right and"),
    (
        f"position.trainable_slopes=true {ROTARY}",
        "has the keys rotary_base, rotary_percent, rotary_scaling and",
    ),
    (f"{ROTARY} position.rotary_scaling={{type='ntk'}}", "rotary_scaling.ntk.factor: missing"),
    (
        f"{ROTARY} position.rotary_scaling={{type='llama3',factor=2,low_freq_factor=4,"
        "high_freq_factor=4,original_max_position_embeddings=8}",
        "high_freq_factor = 4.0: not above low_freq_factor = 4.0",
    ),
    (
        "position.method=xpos train.objective=masked",
        "method = xpos: the scores of later keys would",
    ),
    (
        f'{HYBRID} position.layers=[{{method="learned"}}]',
        "layers[0].method = learned: cannot differ between layers",
    ),
    (f'{HYBRID} position.layers=[{{method="xpos"}}] evaluation.lengths=[99999]', "positions end"),
    (f"{HYBRID} position.layers=[]", "lists 0 methods, and model.num_layers = 25. List 1 to 25"),
    (
        f'{HYBRID} position.layers=[{{method="alibi",slopes=[1]}}]',
        "position.layers[0].slopes = [1.0]",
    ),
    (f"{HYBRID} {TWO_ROTATIONS}", "has rotations of several kinds, and Megatron computes one"),
    (
        "position.method=t5 position.relative_attention_max_distance=16",
        "position.relative_attention_max_distance = 16",
    ),
    (f"{LEARNED} position.max_position_embeddings=32", "data.sequence_length = 64: learned pos"),
    ("position.method=xpos position.xpos_scale_base=0.4", "data.sequence_length = 64: xpos pos"),
    ("parallel.tensor_model_parallel_size=8", "model.num_attention_heads = 12: not divisible"),
    (f"{TP4} model.num_query_groups=6", "model.num_query_groups = 6: not divisible by parallel"),
    (f"{TP4} model.ffn_hidden_size=98", "model.ffn_hidden_size = 98: not divisible by parallel."),
    (
        "parallel.tensor_model_parallel_size=3 model.make_vocab_size_divisible_by=10",
        "data.vocab_size, padded, = 1000: not divisible by parallel.tensor_model_parallel_size = 3",
    ),
    ("recovery.repeat_interval_steps=9 recovery.replay=false", "repeat_interval_steps = 9: a step"),
    ("recovery.repeat_interval_steps=9 parallel.zero_stage=2", "_steps = 9: at ZeRO 2 gradients"),
    (f"{PP2} parallel.zero_stage=3", "parallel.zero_stage = 3: ZeRO 3 does not work with pipeline"),
    ("parallel.zero_stage=2 parallel.gradient_reduce_dtype=bf16", "gradient_reduce_dtype = bf16"),
    (
        "parallel.zero_stage=3 train.recompute_granularity=full position.method=t5",
        "train.recompute_granularity = full: at ZeRO 3",
    ),
    ("parallel.gradient_reduce_dtype=fp16", "parallel.gradient_reduce_dtype = fp16: gradients of"),
    ("parallel.sequence_parallel=true", "parallel.sequence_parallel = true: there is one tensor"),
    (f"{SP2} evaluation.lengths=[67]", "evaluation.lengths = 67: not divisible by the 2 ranks"),
    (f"{CP2} evaluation.lengths=[65]", "65: not divisible by parallel.context_parallel_size = 2"),
    (f"{CP2} {SP2} evaluation.lengths=[66]", "size = 2 x the 2 ranks of sequence parallelism"),
    (f"{CP2} train.objective=masked", "parallel.context_parallel_size = 2: a rank reads the parts"),
    (f"{CP2} {TP2} parallel.world_size=6", "x parallel.context_parallel_size = 4: does not divide"),
    ("parallel.virtual_pipeline_model_parallel_size=2", "needs more than one pipeline stage"),
    ("parallel.pipeline_model_parallel_size=26", "= 25: fewer than the 26 pipeline chunks"),
    ("schedule.lr_warmup_steps=100", "schedule.lr_warmup_steps = 100: the warm-up would not end"),
    ("train.profile_steps=[3,2]", "train.profile_steps = [3, 2]: not the first and the last"),
    ("train.profile_steps=[99,101]", "a run of train.num_steps = 100"),
    ("schedule.min_learning_rate=0.01", "0.01: above the peak, optimizer.learning_rate = 0.001"),
    (WSD, "schedule.lr_wsd_decay_steps = 0: schedule.lr_decay_style"),
    (f"{WSD} schedule.lr_wsd_decay_steps=101", "schedule.lr_wsd_decay_steps = 101"),
    (f"{LEARNED} evaluation.lengths=[64,65]", "65: learned positions end at 64"),
    ("evaluation.stride=65", "evaluation.stride = 65: longer than the shortest window of 64"),
    ("data.tokens_per_shard=2048", "data.tokens_per_shard = 2048: less than one block"),
    ("data.vocab_size=259", "data.vocab_size = 259: less than what every vocabulary"),
    ("data.tokenizer=words data.vocab_size=4", "Choose 5 or more"),
    (f"parallel.world_size=3 {TP2}", "does not divide the 3 processes"),
    # Keys, types and malformed settings.
    ("model.zzz=1", "model.zzz: no such key; there are model.num_layers, "),
    ("foo.zzz=", "foo.zzz: no such key; there are run, "),
    ("run.seed=9007199254740992", "run.seed = 9007199254740992: above 2^53 - 1"),
    ("evaluation.lengths=[9007199254740992]", "above 2^53 - 1"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSALS, ids=[r[0] for r in REFUSALS])
def test_what_cannot_work_is_refused(path, overrides, says):
    assert says in message(path, *overrides.split())


# ---- phases --------------------------------------------------------------------------------------
def phases(*tables: str) -> str:
    return BASE + "".join(f"[[phases]]\n{table}\n" for table in tables)


PHASES = [
    (("steps = 9", "model.hidden_size = 48"), "2: model.hidden_size = 48: is the same in all"),
    (("steps = 9", "data.vocab_size = 500"), "2: data.vocab_size = 500: is the same in all phases"),
    (("steps = 9", "parallel.zero_stage = 2"), "2: parallel.zero_stage = 2: is the same in all"),
    (("steps = 9", 'run.directory = "b"'), "Set it in [run]"),
    (("steps = 9", "phases = [{steps = 2}]"), "2: phases = [{'steps': 2}]: is the same in all"),
    (("steps = 9", "batch.rampup_batch_size = [2, 2, 9]"), "Set it in [batch]"),
    (("steps = 9", "data.sequence_lenght = 9"), "did you mean data.sequence_length?"),
    (
        ("steps = 9", "schedule.lr_warmup_steps = 91"),
        "2: schedule.lr_warmup_steps = 91: the warm-up",
    ),
    (("steps = 9\ntokens = 9", ""), "phase 1: steps = 9, tokens = 9: a phase has one of them"),
    (("steps = 100", ""), "2: the phase would begin after step 100 and end with step 100,"),
    (("steps = 9", "steps = 90"), "2: the phase would begin after step 9 and end with step 99"),
    (("steps = 9", "data.corpora.a.weight = 1.0"), "in all phases of a run. Set it in [data.corp"),
]


@pytest.mark.parametrize(("tables", "says"), PHASES, ids=[row[1] for row in PHASES])
def test_a_phase_that_cannot_work_is_refused_by_its_number(path, tables, says):
    path.write_text(phases(*tables))
    assert says in message(path) and str(path) in message(path)


def test_a_table_of_positions_has_one_size_in_all_phases(path):
    path.write_text(phases("steps = 2", "data.sequence_length = 32"))
    key = "position.max_position_embeddings"
    assert f"{key}: follows data.sequence_length" in message(path, "position.method=learned")
    assert load_config(path, ["position.method=learned", f"{key}=64"]).parts
    # Sizes of a method that another phase begins stand in that phase alone.
    cope, size = 'position.method = "cope"', "\nposition.cope_positions = 32"
    path.write_text(phases("steps = 2", cope + size))
    assert load_config(path).parts[1].config.position.cope_positions == 32
    path.write_text(phases("steps = 2\n" + cope, cope + size))
    assert "2: position.cope_positions = 32: is the same in all phases" in message(path)
    assert "Set it in the phase that begins cope" in message(path)


def test_a_phase_inherits_what_those_before_it_change(path):
    """Steps of tokens under a ramp-up, by hand; the layout of each phase is checked."""
    ramp = "batch.rampup_batch_size=[8,4,24]"  # 8 samples until 12 are consumed, then 12 until 24
    path.write_text(
        phases(
            "steps = 2\ndata.sequence_length = 32",
            "tokens = 1000\nschedule.lr_warmup_steps = 3\noptimizer.clip_grad = inf",
            'data.sequence_length = 64\nposition.method = "rotary"',
        )
    )
    config = load_config(path, [ramp])
    assert [(p.first, p.end, p.tokens) for p in config.parts] == [
        (0, 2, 16 * 32),
        (2, 5, (12 + 16 + 16) * 32),
        (5, 100, 95 * 16 * 64),
    ]
    assert config.planned_tokens == sum(phase.tokens for phase in config.parts)
    assert [config.phase_after(step).number for step in (0, 1, 2, 4, 5, 99, 100)] == [
        *(1, 1, 2, 2, 3, 3, 3)
    ]
    first, second, third = (phase.config for phase in config.parts)
    assert (first.evaluation_lengths[0], third.evaluation_lengths[0]) == (32, 64)
    assert (second.position.method, third.position.method) == ("alibi", "rotary")
    schedules = [(c.schedule.lr_begin_step, c.lr_end_step) for c in (first, second, third)]
    assert schedules == [(0, 100), (2, 100), (2, 100)]
    assert load_config(path, [ramp, "train.num_steps=99"]).parts[2].end == 99
    path.write_text(phases("steps = 9", "batch.micro_batch_size = 8"))
    assert "phase 2: batch.global_batch_size = 16" in message(path, world_size=4)
    copy = path.with_name("resolved.toml")
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (
            "parallel.pipeline_model_parallel_size=3 "
            "parallel.virtual_pipeline_model_parallel_size=2",
            3,
            "3 pipeline stages of the interleaved schedule. Choose a multiple of 6,",
        ),
        ("parallel.world_size=4", 2, "started with 2 processes. Start 4, or change the plan"),
    ],
)
def test_processes_that_cannot_share_the_run_are_refused(path, overrides, world_size, expected):
    assert expected in message(path, *overrides.split(), world_size=world_size)


# ---- reading and writing -------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("pipeline", "virtual", "expected"),
    [
        (1, None, [25]),
        (2, None, [13, 12]),
        (8, None, [3, 4, 3, 3, 3, 3, 3, 3]),
        (2, 2, [6, 7, 6, 6]),
        (2, 8, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]),
        (8, 3, [1, 2, *[1] * 22]),
    ],
)
def test_layers_of_each_chunk(path, pipeline, virtual, expected):
    overrides = [f"parallel.pipeline_model_parallel_size={pipeline}"]
    overrides += [f"parallel.virtual_pipeline_model_parallel_size={virtual}"] if virtual else []
    chunks = load_config(path, overrides).layers_per_chunk
    assert chunks == expected and sum(chunks) == 25


# ---- --set: what is typed is what is trained -----------------------------------------------------


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
NASTY = [*ODD.split(), "", "9" * 400, "9" * 5000, "[" * 2000, " "]


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


# ---- ~ and $VARIABLE in paths --------------------------------------------------------------------
CORPORA = """
[data.corpora.own]
paths = ["$CORPUS/*.txt", "~/more.txt", "s3://bucket/$OWNER/*.txt"]
"""


def test_set_reaches_into_a_table(path):
    path.write_text(BASE + CORPORA.replace("$", "").replace("~", ""))
    keys = ["data.source=", "data.corpora.own=", "data.corpora.web.text_field=2024"]
    config = load_config(path, [*keys, 'data.corpora.web.paths=["a.jsonl", "b"]'])
    assert {name: corpus.paths for name, corpus in config.data.corpora.items()} == {
        "web": ("a.jsonl", "b")
    }
    assert config.data.corpora["web"].text_field == "2024"
    assert "data.corpora.web.pahts: no such key" in message(path, "data.corpora.web.pahts=")
    assert "pahts" in message(path, "data.source=", "data.corpora.web.pahts=[]")
    remedy = """--set data.corpora.own.paths='["text/*.txt"]'"""
    assert remedy in message(path, "data.source=", 'data.paths=["a"]')


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
    # What a run records is read elsewhere, with other values and without any.
    for name in ("HOME", "SCRATCH", "CORPUS", "OWNER"):
        monkeypatch.setenv(name, "/elsewhere")
    copy = tmp_path / "resolved.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


# ---- base = "other.toml" -------------------------------------------------------------------------
def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_file_nearest_to_the_top_wins(tmp_path):
    write(tmp_path / "a/base.toml", DEMO.read_text())
    middle = 'base = "../base.toml"\n[train]\nnum_steps = 99\n[model]\nnum_layers = 7\n[data]\n'
    write(tmp_path / "a/b/middle.toml", middle)
    path = write(tmp_path / "a/b/mine.toml", 'base = "middle.toml"\n[model]\nnum_layers = 8\n')
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    # A base is looked for from the folder of the file that names it.
    for name in (path, tmp_path / "link/mine.toml"):
        config = load_config(name)
        assert (config.train.num_steps, config.model.num_layers) == (99, 8)
        assert config.data == load_config(DEMO).data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base = 3\n", "base = 3: expected the name of one config file"),
        ('base = "none.toml"\n', "none.toml: no such config file, the base of "),
        ('base = "mine.toml"\n', "mine.toml: builds on itself"),
        ('base = "link.toml"\n', "link.toml: builds on itself"),
        ('base = "$NOT_SET_ANYWHERE/a.toml"\n', "the variable NOT_SET_ANYWHERE is not set"),
        ('base = "bad.toml"\n', "bad.toml: not a readable config file, the base of"),
    ],
)
def test_what_is_no_base_is_refused(tmp_path, text, expected):
    write(tmp_path / "bad.toml", "[train\n")
    path = write(tmp_path / "mine.toml", text)
    write(tmp_path / "link.toml", 'base = "mine.toml"\n')
    said = message(path)
    assert expected in said and str(path) in said


# ---- what is shipped -----------------------------------------------------------------------------
def pretrain(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_list_has_every_file_with_a_description(monkeypatch, tmp_path, where):
    monkeypatch.chdir(ROOT if where == "root" else tmp_path)
    files = [path for group in shipped().values() for path in group]
    patterns = ("configs/**/*.toml", "slurm/site.*.toml")
    assert sorted(files) == sorted(path for each in patterns for path in ROOT.glob(each))
    said = pretrain("config", "--list")
    for title, group in shipped().items():
        assert group and title in said
    for path in files:
        description, second = path.read_text().splitlines()[:2]
        # A whole sentence: what follows the first line is a new paragraph.
        assert description.endswith(".") and len(description) <= 100 and second in ("#", "")
        shown = path.relative_to(ROOT) if where == "root" else path
        assert f"  {shown}\n      {description[2:]}\n" in f"{said}\n"
