"""Check the published runs under configs/: their values, their sources, and how they differ."""

import functools
import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest

from pretrain.config import (
    ConfigError,
    RunConfig,
    dump_config,
    load_config,
    num_parameters,
    parse_config,
)
from pretrain.config.load import section_fields, shipped
from pretrain.study.runs import load_study_file, resolve

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072)
FAMILIES = {
    "cc100_roberta": (("alibi", "sinusoidal"), (512, 1024, 2048)),
    "cc100_roberta/h100": (("alibi", "sinusoidal"), (512, 1024, 2048)),
    "cc100_roberta/equal_time": (("sinusoidal",), (1024, 2048)),
    "wikitext103": (("alibi", "sinusoidal", "rotary", "t5"), LENGTHS),
    "bookcorpus": (("alibi", "sinusoidal"), (512, 3072)),
}
"""Folder -> the position methods and the training lengths of its runs."""
OF_A_STUDY = ("wikitext103", "bookcorpus")
"""Families whose runs a study file makes of one config."""
RUNS = {
    f"{family}/{method}_{length}": (family, method, length)
    for family, (methods, lengths) in FAMILIES.items()
    for method, length in itertools.product(methods, lengths)
}

# Beside the number of sequences: what follows the training length so that a step keeps its tokens
# (the micro batch), or so that evaluations go to 16 times that length.
FOLLOWS_LENGTH = {
    "cc100_roberta": {"batch.micro_batch_size", "evaluation.lengths"},
    "cc100_roberta/h100": {"batch.micro_batch_size", "evaluation.lengths"},
    "cc100_roberta/equal_time": {"batch.micro_batch_size", "evaluation.lengths", "train.num_steps"},
    "wikitext103": {"batch.micro_batch_size"},
    "bookcorpus": {"batch.micro_batch_size"},
}


# Press, Smith, Lewis (arXiv 2108.12409), section 4.2; what is not of one run alone.
CC100 = {
    "model.num_layers": 25,
    "model.hidden_size": 2048,
    "model.num_attention_heads": 16,
    "model.ffn_hidden_size": 8192,
    "position.trainable_slopes": False,
    "parallel.world_size": 128,
    "train.num_steps": 50_000,
    "evaluation.max_tokens": 649_000,
}
# Section 2.1 and table 5; the README of the authors' repository (train.py ... --arch
# transformer_lm_wiki103 --max-update 286000 --lr 1.0 --lr-scheduler cosine --lr-period-updates
# 270000 --warmup-updates 16000 --warmup-init-lr 1e-07 --optimizer nag --min-lr 0.0001 --clip-norm
# 0.1 --seed 1 --fp16); transformer_lm_baevski_wiki103 in transformer_lm.py and the defaults of
# fairseq/optim/nag.py there.
WIKITEXT103 = {
    "run.seed": 1,
    "model.num_layers": 16,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 8,
    "model.ffn_hidden_size": 4096,
    "model.hidden_act": "relu",
    "model.use_bias": True,
    "model.tie_word_embeddings": True,
    "model.adaptive_cutoffs": [20_000, 60_000],
    "model.adaptive_factor": 4,
    "model.adaptive_dropout": 0.2,
    "model.hidden_dropout": 0.3,
    "model.attention_dropout": 0.1,
    "model.activation_dropout": 0.1,
    "model.final_layernorm": False,
    "model.embedding_scale": "auto",
    "position.trainable_slopes": False,
    "position.sinusoidal_table": "fairseq",
    "data.tokenizer": "words",
    "optimizer.name": "nag",
    "optimizer.learning_rate": 1.0,
    "optimizer.momentum": 0.99,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad": 0.1,
    "schedule.lr_decay_style": "cosine",
    "schedule.lr_warmup_steps": 16_000,
    "schedule.lr_warmup_init": 1e-7,
    "schedule.min_learning_rate": 1e-4,
    "train.num_steps": 286_000,
    "train.precision": "fp16",
    "evaluation.lengths": list(LENGTHS),
}
# Appendix A.3.
BOOKCORPUS = {"model.tie_word_embeddings": True, "position.trainable_slopes": False}
PAPER = {
    "cc100_roberta": CC100,
    "cc100_roberta/h100": CC100,
    # Table 11 stops them earlier.
    "cc100_roberta/equal_time": CC100 | {"schedule.lr_end_step": 50_000, "train.num_steps": ANY},
    "wikitext103": WIKITEXT103,
    "bookcorpus": BOOKCORPUS,
}


def path_of(run: str) -> Path:
    """The file of a run; of a family that a study makes, the one that it makes all of."""
    family, _, _ = RUNS[run]
    return CONFIGS / (f"{family}/alibi_512.toml" if family in OF_A_STUDY else f"{run}.toml")


@functools.cache
def studied(family: str) -> dict[str, RunConfig]:
    path = CONFIGS / f"studies/{family}.toml"
    runs = resolve(path, load_study_file(path)).runs
    return {f"{family}/{run.method}_{run.train_length}": run.config for run in runs}


@functools.cache
def config_of(run: str) -> RunConfig:
    family, _, _ = RUNS[run]
    return studied(family)[run] if family in OF_A_STUDY else load_config(path_of(run))


def leaves(table: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of everything in a table that is no table with keys."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@functools.cache
def values(run: str) -> dict[str, object]:
    """Every value of a resolved run by its dotted key; of other position methods the defaults."""
    fields = section_fields("position").items()
    others = {f"position.{key}": field.default for key, field in fields}
    return others | dict(leaves(tomllib.loads(dump_config(config_of(run)))))


# ---- every file ----------------------------------------------------------------------------------
RUN_FILES, BASE_FILES, *_ = shipped().values()


def test_the_families_hold_what_is_listed_here():
    assert {*RUN_FILES} - {*CONFIGS.glob("*.toml")} == {path_of(run) for run in RUNS}
    for family in OF_A_STUDY:
        assert list(studied(family)) and set(studied(family)) == {
            r for r in RUNS if r.startswith(family)
        }


def test_every_shipped_config_resolves_and_a_base_is_no_run():
    for path in BASE_FILES:
        with pytest.raises(ConfigError, match=r"run\.directory: missing"):
            load_config(path)
    for path in RUN_FILES:
        config = load_config(path)
        config.layout(config.parallel.world_size or 2)
        assert parse_config(tomllib.loads(dump_config(config)), "again") == config


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_what_its_name_says(run):
    _, method, length = RUNS[run]
    config = config_of(run)
    assert (config.position.method, config.data.sequence_length) == (method, length)
    family, name = run.rpartition("/")[::2]
    of_study = f"runs/{family}/study/runs/{name.replace('_', '-')}-s{config.run.seed}"
    assert config.run.directory == (of_study if family in OF_A_STUDY else f"runs/{run}")
    # The paper's tables: at the training length, and beyond it.
    assert length in config.evaluation_lengths
    # A family shares its data set and its project.
    assert config.data.directory == f"runs/{run.split('/')[0]}/data"
    assert config.logging.wandb_project == run.split("/")[0]


# ---- siblings ------------------------------------------------------------------------------------
def differing(a: str, b: str) -> set[str]:
    first, second = values(a), values(b)
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


@pytest.mark.parametrize("family", FAMILIES)
def test_siblings_differ_in_what_their_names_say_alone(family):
    """All pairs of a family: in the method, in the length and what follows it, in the directory."""
    siblings = [run for run, (of, _, _) in RUNS.items() if of == family]
    follows = FOLLOWS_LENGTH[family]
    for a, b in itertools.combinations(siblings, 2):
        expected = {"run.directory"}
        (_, method_a, length_a), (_, method_b, length_b) = RUNS[a], RUNS[b]
        if method_a != method_b:
            expected.add("position.method")
        if length_a != length_b:
            expected |= {"data.sequence_length", "batch.global_batch_size"}
        found = differing(a, b)
        may = follows if length_a != length_b else set()
        assert expected <= found <= expected | may, (a, b)
    assert len({config_of(run).tokens_per_step for run in siblings}) == 1


@pytest.mark.parametrize("run", [run for run, (family, _, _) in RUNS.items() if "h100" in family])
def test_the_overlay_for_newer_gpus_changes_precision_and_micro_batch_alone(run):
    other = run.replace("/h100", "")
    assert differing(run, other) == {"run.directory", "train.precision", "batch.micro_batch_size"}
    assert values(run)["train.precision"] == "bf16" and values(other)["train.precision"] == "fp16"


def test_micro_batches_hold_equally_many_tokens():
    for run, (family, _, length) in RUNS.items():
        tokens = config_of(run).batch.micro_batch_size * length
        most = {"cc100_roberta/h100": 8192}.get(family, 2048 if "cc100" in family else 3072)
        # 3072 is no multiple of 2048.
        assert tokens == (2048 if (most, length) == (3072, 2048) else most), run


# ---- the paper's numbers -------------------------------------------------------------------------
def test_tokens_and_epochs_are_the_papers():
    for run, (family, _, _) in RUNS.items():
        config = config_of(run)
        if "cc100" in family:
            # One epoch of 461 GB in 50,000 updates at 2.1M tokens (BASE Layers): 105B tokens.
            assert config.tokens_per_step == pytest.approx(2.1e6, rel=0.01)
            whole = config.schedule.lr_end_step or config.train.num_steps
            assert whole * config.tokens_per_step == pytest.approx(105e9, rel=0.01)
        else:
            # --max-tokens 9216 on 8 GPUs; for 3072, --max-tokens 3072 --update-freq 3 on 8 GPUs.
            assert config.tokens_per_step == 8 * 9216 == 8 * 3072 * 3
        if family == "wikitext103":
            # 103,227,021 tokens of WikiText-103, 205 epochs.
            assert config.planned_tokens / 103_227_021 == pytest.approx(205, rel=0.005)


# What fairseq prints for transformer_lm_wiki103 (examples/layerdrop/README.md: num. model params).
FAIRSEQ_WIKI103 = 246_933_504


@pytest.mark.parametrize("run", [run for run in RUNS if "wikitext103" in run])
def test_the_word_level_models_have_the_parameters_of_fairseqs(run):
    """The paper's 247M, exactly."""
    biases = 8 * 32 if RUNS[run][1] == "t5" else 0
    assert num_parameters(config_of(run)) == FAIRSEQ_WIKI103 + biases


@pytest.mark.parametrize("run", [run for run in RUNS if "bookcorpus" in run])
def test_the_books_models_are_the_word_level_ones_with_one_embedding(run):
    """Appendix A.3: the adaptive embedding and softmax are replaced by one tied matrix."""
    layers = 16 * (4 * 1024**2 + 2 * 1024 * 4096 + (4 * 1024 + 4096 + 1024) + 4 * 1024) + 2 * 1024
    config = config_of(run)
    assert num_parameters(config) == layers + config.padded_vocab_size * 1024
    assert 28_500 <= config.data.vocab_size < 29_500


def test_runs_of_equal_time_are_stopped_where_the_paper_stopped_them():
    """And the study of them is ALiBi at half of their lengths, and they."""
    path = CONFIGS / "studies/cc100_roberta_equal_time.toml"
    runs = resolve(path, load_study_file(path)).runs
    assert [run.config.train.num_steps for run in runs] == [50_000, 50_000, 46_700, 44_200]
    lengths = [("alibi", 512), ("alibi", 1024), ("sinusoidal", 1024), ("sinusoidal", 2048)]
    assert [(run.method, run.train_length) for run in runs] == lengths


@pytest.mark.parametrize("run", RUNS)
def test_the_values_are_the_papers(run):
    found = values(run)
    assert {key: found[key] for key in PAPER[RUNS[run][0]]} == PAPER[RUNS[run][0]]
