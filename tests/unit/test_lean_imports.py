"""Neither the compiler nor wandb or TensorBoard is loaded by a process that does not use it."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from pretrain.startup import compile_when_called

COSTLY = ("torch._inductor", "torch._dynamo.convert_frame", "tensorboard", "transformers", "wandb")


def _imported(code: str) -> set[str]:
    """Return the names of the modules that a new process has imported after `code`."""
    shown = "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + shown], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_rank_starts_without_the_compiler():
    """The number of modules is 2,371 with torch 2.13, and was 3,860.

    An optimizer is made without it, too.
    """
    code = (
        "import pretrain.kernels.dispatch, pretrain.training.loop; import torch\n"
        "from pretrain.optim.optimizers import AdamW\n"
        "from pretrain.optim.zero import FlatOptimizer\n"
        "weights = torch.nn.Parameter(torch.ones(2))\n"
        "groups = [{'params': [weights], 'weight_decay': 0.0}]\n"
        "made = FlatOptimizer(AdamW(learning_rate=1.0), groups)\n"
        "assert made.param_groups[0]['params'] == [weights]"
    )
    loaded = _imported(code)
    assert "pretrain.startup" in loaded and not loaded & set(COSTLY)
    assert len(loaded) < 2_600


def test_what_was_withheld_is_there_afterwards():
    code = (
        "import torch; before = torch.compile; import pretrain.model.gpt; "
        "assert torch.compile is before; import wandb; "
        "from deepspeed.runtime.zero.muon import original_muon; assert torch.compile is before"
    )
    loaded = _imported(code)
    assert "wandb" in loaded and "torch._inductor.compile_fx" not in loaded


def test_a_function_is_compiled_when_it_is_called():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @compile_when_called(backend=backend, fullgraph=True)
    def double(x, *, plus=0):
        """Say what it does."""
        return 2 * x + plus

    assert not graphs and double.__doc__ == "Say what it does."
    assert [double(torch.tensor(3.0), plus=1).item() for _ in range(2)] == [7.0, 7.0]
    assert len(graphs) == 1
