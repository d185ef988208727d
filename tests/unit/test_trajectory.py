"""Which keys may change between two starts of a run."""

from __future__ import annotations

import pytest

from pretrain.checkpoint.manifest import Change, TrainerState, changes_of, trained_tokens
from pretrain.config import load_config
from pretrain.config.load import section_keys
from pretrain.config.schema import Effect
from pretrain.config.trajectory import data_differences, differences, effect_of, settings_hash
from pretrain.evaluation.records import read_records
from pretrain.rundir.files import read_json
from tests.changed import ROOT
from tests.conftest import tiny_config

DEMO = ROOT / "configs/demo.toml"
RECORDS = sorted(ROOT.glob("docs/results/**/records/*/record.json"))
KEYS = [f"{section}.{name}" for section, names in section_keys().items() for name in names]


CONSTANT = "schedule.lr_decay_style=constant"
FIXED = ("model.num_layers", "model.final_layernorm", "optimizer.name", "data.vocab_size")


def test_the_classes_are_those_that_the_documentation_promises():
    changes_training = {
        "run.seed",
        "model.hidden_dropout",
        "model.attention_dropout",
        "parallel.gradient_reduce_dtype",
        "batch.global_batch_size",
        "data.sequence_length",
        "data.per_document_attention",
        "train.precision",
        *(key for key in KEYS if key.startswith(("optimizer.", "schedule."))),
        "model.activation_dropout",
    } - {"optimizer.initial_loss_scale_power", "optimizer.name", "schedule.lr_end_step"}
    sections = ("checkpoint.", "evaluation.", "logging.")
    free = {"batch.micro_batch_size", "run.directory", "data.num_workers"}
    free |= {key for key in KEYS if key.startswith(sections)}
    assert {effect_of(key) for key in changes_training} == {Effect.TRAJECTORY}
    assert {effect_of(key) for key in free} == {Effect.FREE}
    assert {effect_of(key) for key in FIXED} == {Effect.FIXED}
    stds = {"model.init_method_std", "model.embedding_init_method_std"}
    outcome = {"train.num_steps", "schedule.lr_end_step"} | stds
    assert {key for key in KEYS if effect_of(key) is Effect.OUTCOME} == outcome
    assert {effect_of(key) for key in ("data.directory", "data.tokenizer")} == {Effect.CONTENT}


def test_another_tokenizer_stands_for_the_tokens_that_it_made():
    before = {"training": "a", "validation": "b", "tokenizer": "t"}
    after = {"training": "c", "validation": "d", "tokenizer": "u"}
    [found] = data_differences(before, after, "data")
    assert (found.key, found.before, found.after) == ("data.tokenizer", "t", "u")
    # A checkpoint that records no data is not compared.
    assert data_differences({}, after, "data") == []


def test_the_tokens_of_a_run_whose_length_and_batch_were_changed():
    config = tiny_config(data={"sequence_length": 64}, batch={"global_batch_size": 4})
    state = TrainerState(step=10, consumed_samples=3 * 8 + 5 * 4 + 2 * 4)
    changes = (
        Change(3, "batch.global_batch_size", 8, 4, 24),
        Change(3, "optimizer.learning_rate", 1.0, 2.0, 24),
        Change(8, "data.sequence_length", 32, 64, 44),
    )
    assert trained_tokens(config, state, changes) == {32: (3 * 8 + 5 * 4) * 32, 64: 2 * 4 * 64}
    assert trained_tokens(config, state, ()) == {64: state.consumed_samples * 64}


def test_settings_are_one_for_runs_that_differ_in_their_seed_alone():
    def found(*overrides, training="a"):
        return settings_hash(load_config(DEMO, list(overrides)), training)

    own = found()
    free = ("run.seed=5", "run.directory=elsewhere", "logging.wandb=disabled")
    assert all(found(each) == own for each in free)
    others = (
        "optimizer.learning_rate=1e-4",
        "model.num_layers=3",
        "model.embedding_init_method_std=0.5",
        "train.num_steps=700",
        "batch.global_batch_size=64",
        "position.method=rotary",
    )
    assert len({own, found(training="b"), *map(found, others)}) == 2 + len(others)


@pytest.mark.parametrize("key", ["run.seed=1", "schedule.lr_end_step=600", CONSTANT])
def test_more_steps_are_a_change_where_the_rates_so_far_were_planned_for_fewer(key):
    before, after = (load_config(DEMO, [key, f"train.num_steps={n}"]) for n in (300, 600))
    change = Change(300, "schedule.lr_end_step", 300, 600, 2400)
    found = changes_of([], before, after, TrainerState(300, 2400))
    assert found == ((change,) if key == "run.seed=1" else ())


@pytest.mark.parametrize(
    ("keys", "counts"),
    [
        (["position.method=t5"], True),
        (["position.method=alibi", "position.trainable_slopes=true"], True),
        (["position.method=alibi"], False),
        # Its table is an embedding, and is trained as one.
        (["position.method=learned", "position.max_position_embeddings=2048"], False),
    ],
)
def test_a_rate_of_what_a_method_does_not_learn_is_none(keys, counts):
    plain, fast = (
        load_config(DEMO, [*keys, f"optimizer.position_learning_rate_mult={mult}"])
        for mult in (1, 10)
    )
    assert fast.position_learning_rate_mult == (10 if counts else 1)
    assert bool(differences(plain, fast)) == counts
    assert (settings_hash(plain, None) != settings_hash(fast, None)) == counts


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.parent.name)
def test_committed_results_have_the_hash_of_their_settings(record):
    """It fails where a new key has another default than what trained before, or a default changed:
    rename the key then, or older runs would count as runs of other settings.
    """
    config = load_config(record.with_name("config.toml"))
    settings = settings_hash(config, read_json(record)["data"]["training"])
    assert {r["settings"] for r in read_records(record.with_name("curve.json"))} == {settings[:12]}
