"""Neither the compiler nor wandb or TensorBoard is loaded by a process that does not use it."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from pretrain.startup import compile_when_called

COSTLY = ("torch._inductor", "torch._dynamo.convert_frame", "tensorboard", "transformers", "wandb")


def test_a_rank_starts_without_the_compiler_and_has_what_was_withheld_afterwards(tmp_path):
    """The number of modules is 2,371 with torch 2.13, and was 3,860.

    An optimizer is made without it, too. A Transformer Engine or an APEX that cannot be loaded does
    no harm.
    """
    for name in ("transformer_engine", "apex"):
        (tmp_path / f"{name}.py").write_text("raise OSError('libcudnn.so.9')")
    show = "\nimport json, sys; print(json.dumps(list(sys.modules)))\n"
    own = "assert torch.compile.__module__ == 'torch'; "
    code = (
        f"import sys; sys.path.insert(1, {str(tmp_path)!r})\n"
        "import pretrain.kernels.dispatch, pretrain.training.loop; import torch\n"
        "from pretrain.optim import optimizers, zero\n"
        "weights = torch.nn.Parameter(torch.ones(2))\n"
        "groups = [{'params': [weights], 'weight_decay': 0.0}]\n"
        "made = zero.FlatOptimizer(optimizers.AdamW(learning_rate=1.0), groups)\n"
        f"assert made.param_groups[0]['params'] == [weights]; {own}{show}"
        f"import wandb; from deepspeed.runtime.zero.muon import original_muon; {own}{show}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # DeepSpeed prints lines of its own in between.
    lines = [line for line in done.stdout.splitlines() if line.startswith('["sys"')]
    loaded, after = (set(json.loads(line)) for line in lines)
    assert "pretrain.startup" in loaded and not loaded & set(COSTLY)
    assert len(loaded) < 2_600
    assert "wandb" in after and "torch._inductor.compile_fx" not in after


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
