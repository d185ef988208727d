"""A position method of one's own is one class: every command knows it, as a user meets them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from pretrain import __main__ as cli
from pretrain.config import RunConfig, load_config
from pretrain.config.errors import ConfigError, Refusal
from pretrain.model.gpt import build_model
from pretrain.plan.memory import Activations, attention_backend
from pretrain.positions.base import METHODS, PositionMethod, Rope
from pretrain.topology import initialize
from tests.conftest import tiny_config
from tests.end_to_end import commands
from tests.end_to_end.commands import Done, explained, losses, metrics, sets


class Toy(PositionMethod):
    """Rotates queries and keys and lets them fade, as xPos, and learns a bias for each head."""

    method: Literal["toy"] = "toy"

    toy_base: float = Field(default=1000.0, gt=1)
    """Base of the frequencies."""

    bias = "slopes"

    def result_name(self, config: RunConfig) -> str:
        return f"toy_{self.toy_base:g}"

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        if config.head_dim % 2:
            why = f"toys turn pairs of channels, and a head has {config.head_dim}"
            yield Refusal("model.hidden_size", config.model.hidden_size, why, "Be even")

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        return {"position.toy_slopes": (config.model.num_attention_heads,)}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        return {"position.toy_slopes": torch.linspace(0.5, 0.01, config.model.num_attention_heads)}

    def queries_and_keys(
        self, config: RunConfig, query: Tensor, key: Tensor, first: int, length: int
    ) -> tuple[Tensor, Tensor]:
        last = first + len(key)
        return self._turned(query, last - len(query), 1.0), self._turned(key, first, -1.0)

    def _turned(self, x: Tensor, first: int, sign: float) -> Tensor:
        half = x.shape[-1] // 2
        kind = {"dtype": torch.float64, "device": x.device}
        place = torch.arange(first, first + len(x), **kind)[:, None, None, None]
        share = torch.arange(half, **kind) / half
        angle, fade = place * self.toy_base**-share, (0.99 + 0.01 * share) ** (sign * place)
        a, b = x[..., :half], x[..., half:]
        turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
        return (torch.cat(turned, dim=-1) * torch.cat([fade, fade], dim=-1)).to(x.dtype)

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        return {"slopes": own["toy_slopes"].float()}

    def rotated_channels(self, config: RunConfig) -> int:
        return config.head_dim

    @property
    def no_class(self) -> str:
        return "no class both turns heads and biases them"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """Other tests of this process list the methods that there are."""
    METHODS["toy"] = Toy
    yield
    del METHODS["toy"]


def main() -> None:
    """Run a command in a process that imports this module for it, and with it the toy."""
    METHODS["toy"] = Toy
    cli.main()


del METHODS["toy"]
PROGRAM = [sys.executable, "-c", f"from {__name__} import main; main()"]


def pretrain(*arguments: object, world_size: int = 1) -> Done:
    """Run `pretrain` on some ranks; return how rank 0 ended, after all did so well."""
    with TemporaryDirectory() as folder:
        rendezvous = {"WORLD_SIZE": str(world_size), "PRETRAIN_RENDEZVOUS": folder}
        places = [{"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(world_size)]
        environments = [rendezvous | place for place in places] if world_size > 1 else [{}]
        done = commands.ranks(arguments, environments, program=PROGRAM)
    assert world_size == 1 or all(each.code == 0 for each in done), done
    return done[0]


def succeeds(*arguments: object) -> Done:
    """Run `pretrain`, which knows the toy; the test fails if the command does."""
    return commands.succeeded(pretrain(*arguments))


# Dropout's masks belong to a layout.
SETTINGS = ["position.method=toy", "model.hidden_dropout=0", "model.attention_dropout=0"]
SETTINGS += ["logging.interval_steps=1"]
FOUR = ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
FOUR += ["parallel.sequence_parallel=true", "train.num_steps=4", "train.profile_steps=[2,3]"]


@pytest.fixture(scope="module")
def toy(workspace: Path, config: Path) -> Path:
    """A run of the toy: four steps as tp2 x pp2 with sequence parallelism, four on two ranks."""
    run = workspace / "runs/toy"
    words = ["train", config, *sets(f"run.directory={run}", *SETTINGS)]
    pretrain(*words, *sets(*FOUR), world_size=4)
    pretrain(*words, world_size=2)
    return run


def test_it_trains_and_resumes_in_another_layout(toy, workspace, config):
    """The losses are those of one process, whose sums are in another order."""
    whole = workspace / "runs/toy-whole"
    succeeds("train", config, *sets(f"run.directory={whole}", *SETTINGS))
    assert len(losses(toy)) == 8
    assert losses(toy) == pytest.approx(losses(whole), rel=1e-5)
    # Evaluated beyond the training length, too.
    for a, b in zip(metrics(toy), metrics(whole), strict=True):
        assert a.get("evaluation") == b.get("evaluation") or "evaluation" in a
    profile = list((toy / "profile").iterdir())
    assert [path.name for path in profile] == ["step-00000002-00000003.rank0.json.gz"]


def test_it_is_evaluated(toy):
    done = succeeds("evaluate", toy, "--lengths", "32,128", "--max-tokens", "1024")
    # By the name of its results, under which other bases are other methods.
    assert re.search(r"\btoy_1000 .*\b128\b", done.out), done.out


def test_it_is_planned(toy):
    words = ["--gpus", "4", "--gpu-type", "h200", *sets("train.precision=bf16")]
    assert ", toy, " in succeeds("plan", toy / "config.toml", *words).out
    config = load_config(toy / "config.toml", ["train.precision=bf16"])
    assert attention_backend(config, is_modern=True) == "triton"

    # It keeps what ALiBi keeps and, as rotary positions, turned queries and keys with their angles.
    def kept(method):
        changed = [f"position.method={method}", "train.precision=bf16"]
        return Activations(load_config(toy / "config.toml", changed), is_modern=True).whole_layer()

    assert kept("toy") - kept("alibi") == kept("rotary") - kept("none") > 0


def test_it_is_refused_for_export_in_its_own_words(toy, tmp_path):
    said = "position.method = toy: no class both turns heads and biases them."
    explained(pretrain("export", toy, tmp_path / "out"), 2, said)
    done = pretrain("config", toy / "config.toml")
    assert done.code == 0 and f"none: {said}" in done.out
    assert re.search(r'\nmethod = "toy".*\ntoy_base = 1000.0\b', done.out)


def test_its_keys_and_rules_are_its_own(config):
    odd = ["model.hidden_size=36", "model.num_attention_heads=4"]
    for method, settings, said in (
        ("toy", ["position.toy_base=1"], "position.toy_base = 1: input should be greater than 1"),
        ("t5", ["position.toy_base=7"], 'set position.method = "toy"'),
        ("toy", odd, "model.hidden_size = 36: toys turn pairs of channels"),
    ):
        given = sets(f"position.method={method}", *settings)
        explained(pretrain("config", config, *given), 2, said)


def test_nothing_that_it_says_of_embeddings_and_initial_values_is_ignored(monkeypatch):
    config, ids = tiny_config(position={"method": "toy"}), torch.arange(32)[None]
    initialize(config)
    monkeypatch.setattr(Toy, "embedded", lambda _, c, at: at[..., None].expand(1, -1, 96))
    embedding = build_model(config)[0].eval().embedding
    expected = embedding.word_embeddings(ids) + ids[..., None]
    assert torch.equal(embedding(ids, ids), expected.transpose(0, 1))
    monkeypatch.setattr(Toy, "embedded", PositionMethod.embedded)
    own = Rope(10_000.0, 0.5, lambda channels: torch.arange(channels / 2))
    monkeypatch.setattr(Toy, "rope", lambda _: own)
    assert build_model(config)[0].rotary_pos_emb.inv_freq.tolist() == [0, 1, 2]
    for name, size, said in (
        ("toy_slope", 8, "Toy.initial_values: position.toy_slope is not among its `tensors`: pos"),
        ("toy_slopes", 9, ".toy_slopes has the shape (9,), and in `tensors` the shape (8,)"),
    ):
        given = {f"position.{name}": torch.ones(size)}
        monkeypatch.setattr(Toy, "initial_values", lambda *_, given=given: given)
        with pytest.raises(ConfigError, match=re.escape(said)):
            build_model(config)


def test_a_study_whose_runs_would_not_know_it_is_refused(config, tmp_path):
    keys = f'directory = "{tmp_path}/s"\nconfig = "{config}"\ntraining_lengths = [32]'
    (tmp_path / "a.toml").write_text(f'title = "T"\n{keys}\nmethods = ["toy"]')
    explained(pretrain("study", tmp_path / "a.toml"), 2, "a study trains with `python -m pretrain`")
