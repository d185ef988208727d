"""Import checkpoints in fairseq's form: against torch's own modules, and against hostile files."""

import argparse
import enum
import itertools
import json
import math
import sys
import types

import pytest
import torch
from torch import nn

from pretrain.config import ConfigError
from pretrain.huggingface.fairseq import import_checkpoint
from pretrain.positions.alibi import alibi_slopes
from tests.end_to_end.commands import succeeds

D, HEADS, FFN, LAYERS, CUTOFFS = 32, 4, 64, 2, [24, 40]
WORDS = [f"w{i}" for i in range(60)]
VOCABULARY = len(WORDS) + 4


class Decoder(nn.Module):
    """The decoder of torch's modules, fp64."""

    def __init__(self):
        super().__init__()
        bounds = [0, *CUTOFFS, VOCABULARY]
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        self.tables = nn.ModuleList(nn.Embedding(n, D // 4**i) for i, n in enumerate(sizes))
        self.projections = nn.ModuleList(nn.Linear(D // 4**i, D, bias=False) for i in range(3))
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(D, VOCABULARY, CUTOFFS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, HEADS, FFN, 0.0, norm_first=True) for _ in range(LAYERS)
        )
        for table in self.tables:
            table.weight.data *= table.embedding_dim**-0.5
        # Tied as in fairseq: words of all clusters, and the projections of the tails.
        softmax = self.softmax
        softmax.head.weight.data[: CUTOFFS[0]] = self.tables[0].weight.data
        for i, tail in enumerate(softmax.tail, start=1):
            tail[1].weight.data = self.tables[i].weight.data
            tail[0].weight.data = self.projections[i].weight.data.T

    def forward(self, ids):
        table = torch.cat([p(t.weight) for t, p in zip(self.tables, self.projections)])
        x = math.sqrt(D) * table[ids][:, None]
        distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        mask = -alibi_slopes(HEADS).double()[:, None, None] * distance
        mask = mask.masked_fill(distance < 0, -torch.inf)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.softmax.log_prob(x[:, 0])


def fairseqs(decoder):
    """Return the weights under fairseq's names, with its buffers."""
    found = {"decoder.version": torch.tensor([3.0])}
    embed, softmax = "decoder.embed_tokens.embeddings", "decoder.adaptive_softmax"
    for i, (table, projection) in enumerate(zip(decoder.tables, decoder.projections)):
        found |= {f"{embed}.{i}.0.weight": table.weight, f"{embed}.{i}.1.weight": projection.weight}
        if i:
            found[f"{softmax}.tail.{i - 1}.0.weight"] = projection.weight
            found[f"{softmax}.tail.{i - 1}.2.weight"] = table.weight
    found[f"{softmax}.head.word_proj.weight"] = decoder.tables[0].weight
    found[f"{softmax}.head.class_proj.weight"] = decoder.softmax.head.weight[CUTOFFS[0] :]
    found[f"{softmax}.version"] = torch.tensor([1])
    for i, layer in enumerate(decoder.layers):
        at, attention = f"decoder.layers.{i}", layer.self_attn
        for kind in ("weight", "bias"):
            for n, part in zip("qkv", getattr(attention, f"in_proj_{kind}").chunk(3)):
                found[f"{at}.self_attn.{n}_proj.{kind}"] = part
            for theirs, ours in {
                "self_attn.out_proj": attention.out_proj,
                "self_attn_layer_norm": layer.norm1,
                "fc1": layer.linear1,
                "fc2": layer.linear2,
                "final_layer_norm": layer.norm2,
            }.items():
                found[f"{at}.{theirs}.{kind}"] = getattr(ours, kind)
    return {name: tensor.detach().float().clone() for name, tensor in found.items()}


SETTINGS = {
    "decoder_layers": LAYERS,
    "decoder_embed_dim": D,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_embed_dim": FFN,
    "activation_fn": "relu",
    "no_decoder_final_norm": True,
    "adaptive_softmax_cutoff": "24,40",
    "tie_adaptive_weights": True,
    "tokens_per_sample": 16,
    "decoder_normalize_before": True,
}
CONFIG = """
run.directory = "unused"
model = {num_layers = 2, hidden_size = 32, num_attention_heads = 4, ffn_hidden_size = 64, \
hidden_act = "relu", use_bias = true, adaptive_cutoffs = [24, 40], final_layernorm = false, \
make_vocab_size_divisible_by = 8}
batch = {micro_batch_size = 1, global_batch_size = 8}
data = {directory = "data", source = "text", paths = ["x.txt"], sequence_length = 16, \
tokenizer = "words", vocab_size = 64}
optimizer.learning_rate = 0.1
train.num_steps = 286
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A decoder, its checkpoint as fairseq writes it, a dictionary and a config."""
    torch.manual_seed(0)
    decoder = Decoder().double().eval()
    for parameter in decoder.parameters():
        parameter.data = parameter.data.float().double()
    constants = types.ModuleType("fairseq.constants")
    constants.Backend = enum.Enum("Backend", {"A": "a"}, module="fairseq.constants")
    monkeypatch.setitem(sys.modules, "fairseq", types.ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, "fairseq.constants", constants)
    state = {
        "args": None,
        "cfg": {"model": argparse.Namespace(**SETTINGS), "ddp": constants.Backend.A},
        "model": fairseqs(decoder),
    }
    torch.save(state, tmp_path / "checkpoint_best.pt")
    (tmp_path / "dict.txt").write_text("".join(f"{word} 5\n" for word in WORDS))
    (tmp_path / "run.toml").write_text(CONFIG)
    return decoder, state, tmp_path


def imported(folder, *overrides):
    names = ("checkpoint_best.pt", "dict.txt", "run.toml", "run")
    import_checkpoint(*(folder / name for name in names), overrides)
    return folder / "run"


def test_it_is_what_torchs_modules_compute(files):
    decoder, _, folder = files
    run = imported(folder)
    assert "286" in next((run / "checkpoints").iterdir()).name
    ids = torch.randint(4, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))
    (folder / "text.txt").write_text(" ".join(WORDS[i - 4] for i in ids.tolist()))
    out = folder / "curve.json"
    words = ["--text", folder / "text.txt", "--lengths", "41", "--protocols", "nonoverlapping"]
    succeeds("evaluate", run, *words, "--out", out)
    (found,) = json.loads(out.read_text())["records"]
    targets = torch.cat([ids, torch.tensor([2])])
    log_p = decoder(torch.cat([torch.tensor([2]), ids]))
    expected = math.exp(-log_p.gather(1, targets[:, None]).mean().item())
    assert found["perplexity"] == pytest.approx(expected, rel=1e-6)


TIED = "decoder.adaptive_softmax.tail.0.2.weight"


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(extra_state=Hostile()), "names builtins.print.*Nothing of it was"),
        (lambda s: s["cfg"]["model"].__dict__.update(decoder_layers=3), "model.num_layers = 2"),
        (lambda s: s["cfg"]["model"].__dict__.update(base_layers=1), "base_layers = 1: our layers"),
        (lambda s: s["model"].pop("decoder.layers.1.fc1.bias"), "has no tensor .*1.fc1.bias"),
        (lambda s: s["model"].update(odd=torch.ones(1)), "not the tensors of the config's.*odd"),
        (lambda s: s["model"].update({TIED: torch.ones(16, 8)}), "which our model shares with it"),
        (lambda s: s["model"]["decoder.layers.0.fc1.bias"].fill_(math.nan), "or not finite"),
        (lambda s: s.pop("model"), "cannot be read as a checkpoint of fairseq .KeyError"),
    ],
)
def test_what_is_not_that_model_is_refused(files, change, said, capsys):
    _, state, folder = files
    change(state)
    torch.save(state, folder / "checkpoint_best.pt")
    with pytest.raises(ConfigError, match=said):
        imported(folder)
    assert "executed" not in capsys.readouterr().out and not (folder / "run").exists()
