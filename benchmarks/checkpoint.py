"""Time saves and loads of a run's state beside torch.distributed.checkpoint's, on one process.

    python -W ignore -m benchmarks.checkpoint FOLDER [ROUNDS [KEY.PATH=VALUE ...]]

All move the same tensors of the demo's model. Ours also digests every byte, and with
checkpoint.asynchronous training stands still only while the state is copied. Before a load the
files are dropped from the page cache. Everything is removed again.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.data_reading import drop
from benchmarks.gpu_day.results import markdown
from benchmarks.turns import Way, rounds, summary, timed
from pretrain.bench.timing import TrainingStep
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import Origin, TrainerState, open_checkpoint
from pretrain.checkpoint.save import Saver
from pretrain.config import load_config
from pretrain.rundir.checkpoints import Branch, checkpoint_directory, new_id
from pretrain.topology import finish, initialize


def main() -> None:
    """Let saves and loads take turns, and print their times."""
    place = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    config = load_config("configs/demo.toml", [f"run.directory={place / 'ours'}", *sys.argv[3:]])
    step = TrainingStep(config, initialize(config))
    # So that the moments are not zeros.
    step.take()
    fragments = step.optimizer.state().fragments
    tensors = {
        f"{kind}/{each.named.name}/{each.start}": flat
        for each in fragments
        for kind, flat in each.tensors.items()
    }
    origin = Origin(branches=(Branch(new_id(), 0),))

    def saver(asynchronous: bool) -> Saver:
        section = config.checkpoint.model_copy(update={"asynchronous": asynchronous})
        chosen = config.model_copy(update={"checkpoint": section})
        return Saver(chosen, step.topology, step.optimizer, config)

    def save(by: Saver) -> None:
        shutil.rmtree(place / "ours", ignore_errors=True)
        by.begin(TrainerState(1, 0), origin)
        by.finish()

    def load() -> None:
        load_checkpoint(open_checkpoint(checkpoint_directory(place / "ours", 1)), step.optimizer)

    def beside() -> None:
        """Take a step while a save runs, which waits for the copy of the state alone."""
        background.finish()
        shutil.rmtree(place / "ours", ignore_errors=True)
        background.begin(TrainerState(1, 0), origin)
        step.take()

    def cold(action: Callable[[], object]) -> Way:
        return lambda: (drop(place), timed(action)())[1]

    plain, background = saver(False), saver(True)
    ways = {
        "save": timed(lambda: save(plain)),
        "load": cold(load),
        "torch: save": timed(lambda: state_dict_saver.save(tensors, checkpoint_id=place / "dcp")),
        "torch: load": cold(lambda: state_dict_loader.load(tensors, checkpoint_id=place / "dcp")),
        "a step": timed(step.take),
        "a step, and the start of a save beside training": timed(beside),
    }
    size = sum(each.numel() * each.element_size() for each in tensors.values())
    found = summary(list(rounds(ways, int(sys.argv[2]) if len(sys.argv) > 2 else 5)))
    print(f"{size / 1e9:.2f} GB of state\n\n{markdown(found)}")
    background.close()
    finish()
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
