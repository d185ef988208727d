"""Saving beside training: the same bytes as saving in between, and no failure goes unnoticed."""

from __future__ import annotations

import pytest

from pretrain.checkpoint.listing import verify_checkpoint
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.rundir.checkpoints import checkpoint_step, complete_checkpoints
from tests.conftest import mark_torture, tiny_config
from tests.distributed import saving_tasks as tasks

LAYOUTS = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "zero2": (2, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def _config(directory, data, parallel=None, interval=1, **checkpoint):
    return tiny_config(
        run={"directory": str(directory)},
        data={"directory": str(data)},
        parallel=parallel or {},
        train={"num_steps": 5},
        checkpoint={"interval_steps": interval, **checkpoint},
        evaluation={"interval_steps": 100, "max_tokens": 64},
    )


@pytest.mark.parametrize(
    ("layout", "precision"),
    mark_torture(
        [(layout, precision) for layout in LAYOUTS for precision in ("fp32", "bf16")],
        {("dp2", "fp32"), ("zero3", "bf16")},
    ),
)
def test_the_same_bytes_as_without_training_beside(pools, tiny_data, tmp_path, layout, precision):
    """Every step is saved, and every copy begins only after the next step has."""
    processes, parallel = LAYOUTS[layout]

    def run(name, **options):
        config = _config(tmp_path / name, tiny_data, parallel, asynchronous=name != "between")
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"precision": precision})}
        )
        return pools(processes).run(tasks.digests_of_saves, config, **options)[0]

    between = run("between")
    beside = run("beside", late=True)
    assert between.pop("overlap") == 0 and beside.pop("overlap") == 4
    assert len(between) == 5 * processes
    assert beside == between


def test_a_state_that_changes_while_it_is_copied_is_found_by_the_test_above(
    pools, tiny_data, tmp_path
):
    config = _config(tmp_path / "run", tiny_data)
    good = pools(1).run(tasks.digests_of_saves, _config(tmp_path / "good", tiny_data))[0]
    bad = pools(1).run(tasks.digests_of_saves, config, late=True, protect=False)[0]
    assert {k: v for k, v in bad.items() if k != "overlap"} != {
        k: v for k, v in good.items() if k != "overlap"
    }


@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        ("killed", 0, "the process that writes checkpoints"),
        ("killed", 1, "the process that writes checkpoints"),
        ("disk", 1, "cannot be written (No such file or directory"),
        ("nan", 1, "not finite"),
    ],
)
def test_a_failure_beside_training_ends_all_ranks_soon(
    pools, tiny_data, tmp_path, how, rank, words
):
    """The save after step 2 fails; no rank gets to the save after step 4, nor to the end."""
    config = _config(tmp_path / "run", tiny_data, interval=2)
    results = pools(2).run(tasks.train_with_a_bad_writer, config, how, rank)
    assert all(words in result["error"] for result in results), results
    assert {result["error"] for result in results} == {results[0]["error"]}
    found = complete_checkpoints(tmp_path / "run")
    assert [checkpoint_step(path.name) for path in found] == [2]
    assert verify_checkpoint(found[0])[0] == []
    # No hidden directory is left: a disk that is full gets its room back.
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    assert pools(2).run(tasks.nothing_of_the_writers_is_left) == [0, 0]


def test_signals_to_all_processes_of_a_job_do_not_end_a_write(pools, tiny_data, tmp_path):
    config = _config(tmp_path / "run", tiny_data)
    results = pools(2).run(tasks.train_with_a_bad_writer, config, "signals", 0)
    assert [result["error"] for result in results] == ["", ""]
    assert len(complete_checkpoints(tmp_path / "run")) == 5


def test_without_memory_for_the_copy_training_waits(pools, tiny_data, tmp_path):
    good = pools(2).run(tasks.digests_of_saves, _config(tmp_path / "good", tiny_data))[0]
    less = pools(2).run(tasks.digests_with_little_memory, _config(tmp_path / "less", tiny_data))[0]
    assert less.pop("overlap") == 0 and good.pop("overlap") is not None
    assert less == good


def test_a_save_that_training_waits_for_is_published_before_training_goes_on(
    pools, tiny_data, tmp_path
):
    """One rank without memory for the copy is enough: none of them goes on."""
    config = _config(tmp_path / "run", tiny_data)
    assert pools(2).run(tasks.published_before_the_next_save, config)[0] == [0, 1, 2, 3, 4]


def test_each_checkpoint_names_the_one_before(pools, tiny_data, tmp_path):
    pools(1).run(tasks.digests_of_saves, _config(tmp_path / "run", tiny_data))
    lineages = [open_checkpoint(path).lineage for path in complete_checkpoints(tmp_path / "run")]
    assert [lineage.parent for lineage in lineages] == [None, *(x.id for x in lineages[:-1])]
    assert len({lineage.id for lineage in lineages}) == 5
    assert len({lineage.branches for lineage in lineages}) == 1
