"""Imported models, compared with stock transformers; round trips of our exports; broken folders.

The stock models have random weights and the settings of published families. Their size is small,
and all that matters to the import is as published: Bloom with its embedding LayerNorm, MPT-7B
without biases, OPT with learned positions, Pythia with parallel residuals and partial rotation.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, EvaluationRequest, RunFailed, load_config, num_parameters
from pretrain.data.shards import MODEL
from pretrain.data.tokenizer import load_tokenizer
from pretrain.evaluation.command import evaluate_sources
from pretrain.huggingface import export
from pretrain.huggingface.base import StackQkv, same_bits
from pretrain.huggingface.export import export_source, recorded_logits
from pretrain.huggingface.folder import MARKER, ORIGINALS, to_huggingface
from pretrain.huggingface.import_model import import_folder
from pretrain.rundir.checkpoints import find_checkpoint
from tests.conftest import mark_torture
from tests.reference.dense_gpt import make_config, random_state
from tests.unit.test_export import MODELS, SLOPES, state_of, tokenizer_path

__all__ = ["tokenizer_path"]

LENGTH = 32
"""Training length of the models below, except where one needs another."""


def model(model_type: str, **settings: Any) -> Any:
    """A model with its class's own defaults but for the sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(model_type, **{"vocab_size": 512} | sizes | settings)
    return AutoModelForCausalLM.from_config(config)


bloom = partial(model, "bloom", num_attention_heads=12, seq_length=LENGTH)
mpt = partial(model, "mpt", num_attention_heads=6, max_seq_len=128)
opt = partial(model, "opt", ffn_dim=96, max_position_embeddings=64)
gpt2 = partial(model, "gpt2", max_position_embeddings=64)
gpt_neox = partial(
    model,
    "gpt_neox",
    hidden_size=64,
    intermediate_size=128,
    max_position_embeddings=LENGTH,
    use_parallel_residual=True,
    rotary_pct=0.25,
)
# Today's block.
block = partial(model, num_key_value_heads=2, intermediate_size=80, max_position_embeddings=LENGTH)
llama, qwen2, qwen3 = (partial(block, each) for each in ("llama", "qwen2", "qwen3"))
mistral = partial(block, "mistral", sliding_window=None)
# As Llama 3.2 and Qwen 2.5 with YaRN have them, but for the lengths.
STEPS = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=STEPS | {"original_max_position_embeddings": 16},
    ),
    "mistral": lambda: mistral(head_dim=16, rope_theta=1e6),
    "qwen2": lambda: qwen2(rope_scaling=YARN, rms_norm_eps=1e-5),
    "qwen3": lambda: qwen3(head_dim=16, rope_scaling={"type": "linear", "factor": 2.0}),
    "bloom": bloom,
    "bloom_untied": lambda: bloom(tie_word_embeddings=False),
    "mpt": mpt,
    # As in MPT-7B-StoryWriter; a third of queries, keys and values is clipped here.
    "mpt_storywriter": lambda: mpt(attn_config={"alibi_bias_max": 16, "clip_qkv": 0.35}),
    "opt": opt,
    "gpt2": gpt2,
    "pythia": gpt_neox,
    "neox_20b_activation": lambda: gpt_neox(hidden_act="gelu_fast", rotary_emb_base=500),
}


def randomise(model: Any) -> Any:
    """Make every weight matter: biases are created as zeros and norms as ones."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Callable[[str], tuple[Any, Path, Path]]:
    """Return a function: name -> (stock model, its folder, the run), each imported once."""
    made: dict[str, tuple[Any, Path, Path]] = {}

    def get(name: str) -> tuple[Any, Path, Path]:
        if name not in made:
            root = tmp_path_factory.mktemp("import")
            model = randomise(FAMILIES[name]())
            folder = saved(model, root / "hf")
            import_folder(folder, root / "run")
            made[name] = model, folder, root / "run"
        return made[name]

    return get


def masters(run: Path) -> dict[str, torch.Tensor]:
    return load_global_state(open_checkpoint(find_checkpoint(run)))


# ---- what is published ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_family_is_imported(name, imported, capsys):
    """import_folder compares logits itself; here, that it holds every parameter, and a run."""
    model, _, run = imported(name)
    config = load_config(run / "config.toml")
    assert config == open_checkpoint(find_checkpoint(run)).config
    assert config.directory == run and config.padded_vocab_size == 512
    distinct = {p.data_ptr(): p.numel() for p in model.parameters()}
    padding = 2 * 48 if name == "opt" else 0
    assert num_parameters(config) == sum(distinct.values()) - padding
    checkpoint = open_checkpoint(find_checkpoint(run))
    assert (checkpoint.trainer_state.step, checkpoint.trainer_state.consumed_samples) == (0, 0)
    assert checkpoint.adam_steps == 0 and find_checkpoint(run).name == "step-00000000"


PUBLISHED = {
    "bloom": """{"apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": true,
        "model_type": "bloom", "n_embed": 48, "n_inner": null, "n_layer": 2,
        "num_attention_heads": 12, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 32,
        "skip_bias_add": true, "skip_bias_add_qkv": false, "transformers_version": "4.20.0",
        "use_cache": true, "vocab_size": 512, "architectures": ["BloomForCausalLM"]}""",
    "mpt": """{"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": true,
        "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
        "attn_type": "multihead_attention", "attn_uses_sequence_id": false, "clip_qkv": null,
        "prefix_lm": false, "qk_ln": false, "softmax_scale": null},
        "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}, "d_model": 48, "emb_pdrop": 0,
        "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"emb_init_std": null,
        "fan_mode": "fan_in", "init_std": 0.02, "name": "kaiming_normal_", "verbose": 0},
        "init_device": "cpu", "learned_pos_emb": true, "logit_scale": null, "max_seq_len": 128,
        "model_type": "mpt", "n_heads": 6, "n_layers": 2, "no_bias": true,
        "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1", "use_cache": false, "verbose": 0, "vocab_size": 512}""",
    "llama": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 12,
        "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
        "intermediate_size": 80, "max_position_embeddings": 32, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 16, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 512}""",
}
"""config.json as published with bloom-560m, mpt-7b and Llama-3.2-1B, but for the sizes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_files_of_published_models_are_understood(name, imported, tmp_path):
    """Old keys, and code that comes with the folder and is not run."""
    _, folder, run = imported(name)
    shutil.copytree(folder, tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(PUBLISHED[name])
    import_folder(tmp_path / "hf", tmp_path / "run")
    found, expected = (load_config(r / "config.toml") for r in (tmp_path / "run", run))
    assert (found.model, found.position) == (expected.model, expected.position)


def test_windows_that_repeat_are_compared_once_each(imported):
    _, _, run = imported("gpt2")
    opened = open_checkpoint(find_checkpoint(run))
    rows = torch.tensor([[5, 5, 5, 5], [5, 5, 5, 5], [5, 6, 7, 8]])
    with recorded_logits(opened.config, opened, [rows], run) as logits:
        first, again, last = (logits(row[None]) for row in rows)
    assert torch.equal(first, again) and not torch.equal(first, last)


def test_an_export_that_is_another_model_does_not_appear(imported, tmp_path, monkeypatch, capsys):
    """It is compared before it gets its name, and found complete by then."""
    run = shutil.copytree(imported("mpt")[2], tmp_path / "run")
    made = tokenizers.Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, "<unk>"))
    made.save(str(tmp_path / "run/data.json"))
    right, seen = StackQkv.export, []
    wrong = lambda self, config, ours: [right(self, config, ours)[0].roll(48, 0)]  # noqa: E731
    monkeypatch.setattr(StackQkv, "export", wrong)
    tokenizer = load_tokenizer(tmp_path / "run/data.json")
    monkeypatch.setattr(export, "tokenizer_of", lambda *_: tokenizer)
    compare = export.check_parity
    look = lambda ours, folder, *_, **named: (  # noqa: E731
        seen.extend(p.name for p in folder.iterdir()),
        compare(ours, folder, *_, **named),
    )[1]
    monkeypatch.setattr(export, "check_parity", look)
    with pytest.raises(RunFailed, match="hf: not made, since it would not be the trained model"):
        export_source(run, tmp_path / "hf", max_length=128)
    assert "DIFFERS" in capsys.readouterr().out
    assert {"model.safetensors", "README.md", MARKER} <= set(seen)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


MEASURE = """
import re, sys, threading, time
from pathlib import Path
import transformers.models.mpt.modeling_mpt
from pretrain.huggingface.export import export_source
from pretrain.huggingface.import_model import import_folder

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

before = peak = anonymous()
threading.Thread(target=watch, daemon=True).start()
run = import_folder if sys.argv[1] == "import" else export_source
run(Path(sys.argv[2]), Path(sys.argv[3]))
print(1024 * (peak - before))
"""


@pytest.mark.torture
@pytest.mark.parametrize("direction", ["export", "import"])
def test_the_peak_memory_of_an_export(direction, tmp_path, tokenizer_path):
    """One model at a time, and pages of mapped files, which are not the process's own memory.

    The constant is libraries that load later, Megatron's for the most part, and the activations.
    """
    sizes = {"hidden_size": 2048, "num_attention_heads": 16}
    config = make_config("alibi", use_bias=False, hidden_act="gelu", **sizes)
    to_huggingface(config, state_of(config), tokenizer_path, tmp_path / "hf", max_length=128)
    import_folder(tmp_path / "hf", tmp_path / "run")
    given = {"export": "run", "import": "hf"}[direction]
    words = [direction, str(tmp_path / given), str(tmp_path / "out")]
    command = [sys.executable, "-c", MEASURE, *words]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    weights = (tmp_path / "hf/model.safetensors").stat().st_size
    assert int(printed.split()[-1]) < weights + 300e6


# ---- round trips ---------------------------------------------------------------------------------
# Of each class, and of each layout of its tensors; the others differ in what is computed of them.
ROUND_TRIPS = {"bloom_no_bias", "bloom_norm_scaled", "bloom_trained", "mpt16", "mpt_trained", "opt"}
ROUND_TRIPS |= {"opt_learned", "gpt2", "neox_parallel", "neox_untied", "llama", "qwen3"}
ROUND_TRIPS |= {"llama_qkv_bias", "opt_untied", "gpt2_sinusoidal"}
# Their positions are written in a form of their own.
ROUND_TRIPS |= {"mpt_range", "llama_yarn", "llama_geglu"}


@pytest.mark.parametrize(
    ("name",),
    mark_torture([(name,) for name in MODELS | SLOPES], {(name,) for name in ROUND_TRIPS}),
)
def test_export_import_export_is_bit_equal(name, tmp_path, tokenizer_path):
    """The masters come back to the last bit, and so does the export of the import."""
    config = (MODELS | SLOPES)[name][1]
    state = state_of(config)
    # What scaling and rounding might lose: subnormals, signed zeros, very large and small numbers.
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-41, 2.0**-126, 1.1e-38, -3e-33, 2.5e-30, 1e-20])
    state["embedding.word_embeddings.weight"][7, : len(odd)] = odd
    state["decoder.final_layernorm.weight"][:9] = odd
    state["decoder.layers.0.input_layernorm.weight"][:9] = odd
    to_huggingface(config, state, tokenizer_path, tmp_path / "hf", max_length=256)
    import_folder(tmp_path / "hf", tmp_path / "run")
    got = masters(tmp_path / "run")
    assert got.keys() == state.keys()
    assert all(same_bits(got[key], state[key]) for key in state)
    found = load_config(tmp_path / "run/config.toml")
    for section in ("model", "train", "schedule"):
        assert getattr(found, section) == getattr(config, section)
    assert name in MODELS or found.position == config.position
    assert found.data.tokenizer == str(tmp_path / "run" / MODEL)
    assert (tmp_path / "run" / MODEL).read_bytes() == tokenizer_path.read_bytes()
    to_huggingface(found, got, found.data.tokenizer, tmp_path / "again", max_length=256)
    first, second = (load_file(tmp_path / f / "model.safetensors") for f in ("hf", "again"))
    assert first.keys() == second.keys()
    assert all(same_bits(first[key], second[key]) for key in first)
    assert (tmp_path / "hf/config.json").read_text() == (tmp_path / "again/config.json").read_text()


def test_weights_that_were_changed_after_the_export(tmp_path, tokenizer_path):
    """They are imported as they are now, where the run's config still holds them."""
    config = MODELS["opt"][1]
    state = random_state(config, seed=5)
    to_huggingface(config, state, tokenizer_path, tmp_path / "hf", max_length=256)
    assert (tmp_path / "hf" / ORIGINALS).is_file()
    tensors = load_file(tmp_path / "hf/model.safetensors")
    name = "model.decoder.embed_tokens.weight"
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "run")
    got = masters(tmp_path / "run")["embedding.word_embeddings.weight"]
    torch.testing.assert_close(
        got, 1.5 * state["embedding.word_embeddings.weight"], rtol=1e-6, atol=0
    )
    table = "model.decoder.embed_positions.weight"
    tensors[table] = tensors[table] * 1.1
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    refused(tmp_path / "hf", tmp_path / "other")
    # Without the run's config it is an OPT like any other.
    (tmp_path / "hf" / MARKER).unlink()
    import_folder(tmp_path / "hf", tmp_path / "other")
    got = masters(tmp_path / "other")["embedding.position_embeddings.weight"]
    assert same_bits(got, tensors[table][2:].contiguous())


def refused(folder: Path, out: Path, *overrides: str) -> None:
    """Import something that transformers computes otherwise than the run's config has it."""
    with pytest.raises(RunFailed, match="does not compute what transformers computes"):
        import_folder(folder, out, overrides)
    assert not out.exists()


MAKERS = [(make,) for make in (bloom, mpt, opt, gpt2, gpt_neox, llama, mistral, qwen3)]
WORDS = ["<unk>", "</s>", *"abcdefgh", *(f"w{i}" for i in range(70))]
"""A vocabulary of fewer tokens than a SentencePiece model has at least."""


@pytest.mark.parametrize(("make",), mark_torture(MAKERS, {(bloom,), (llama,)}))
def test_the_folders_tokenizer_goes_with_the_run(make, tmp_path, capsys):
    """Import, evaluation of a text, export and import again, with no data set anywhere."""
    model = randomise(make(vocab_size=96, eos_token_id=1))
    folder = saved(model, tmp_path / "hf")
    given = tokenizers.Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, "<unk>"))
    given.pre_tokenizer = Whitespace()
    given.add_special_tokens(["<unk>", "</s>"])
    given.save(str(folder / "tokenizer.json"))
    import_folder(folder, tmp_path / "run")
    assert "--text FILE" in capsys.readouterr().out
    (tmp_path / "text").write_text(text := "a b c w1 w2 other w69 h g")
    request = EvaluationRequest.parse("10", "nonoverlapping", None, None)
    given_text = {"text": [str(tmp_path / "text")]}
    [record] = evaluate_sources([tmp_path / "run"], request, [], None, **given_text)
    ids = torch.tensor([[1, *given.encode(text).ids, 1]])
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item()
    assert record["loss_nats"] == pytest.approx(expected, rel=1e-6)
    export_source(tmp_path / "run", tmp_path / "again")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again", local_files_only=True)
    assert theirs(text)["input_ids"] == given.encode(text).ids and theirs.eos_token_id == 1
    types = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hf", "again"))
    assert len({each["model_type"] for each in types}) == 1
    import_folder(tmp_path / "again", tmp_path / "second")
    first, second = masters(tmp_path / "run"), masters(tmp_path / "second")
    assert all(same_bits(first[name], second[name]) for name in first | second)
    for run in ("run", "second"):
        config = load_config(tmp_path / run / "config.toml")
        assert config.data.tokenizer == str(tmp_path / run / "tokenizer.json")
        assert Path(config.data.tokenizer).read_bytes() == (folder / "tokenizer.json").read_bytes()
        assert (config.data.vocab_size, config.padded_vocab_size) == (len(WORDS), 96)


# ---- refusals ------------------------------------------------------------------------------------
UNSUPPORTED = {
    "post_residual": (
        lambda: bloom(apply_residual_connection_post_layernorm=True),
        "apply_residual_connection_post_layernorm = true: our residual",
    ),
    "opt_350m": (
        lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=32),
        "do_layer_norm_before = false: .*word_embed_proj_dim = 32: ",
    ),
    "bias_max": (
        lambda: mpt(attn_config={"alibi_bias_max": 101}),
        "attn_config.alibi_bias_max = 101: position.slopes has a bias_max from 1 to 100",
    ),
    "mish": (lambda: gpt_neox(hidden_act="mish"), "hidden_act = mish: our activations are gelu, "),
    "rope": (
        lambda: gpt_neox(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope_parameters = .*dynamic.*: position.rotary_scaling has linear, yarn, llama3, without",
    ),
    "mscale": (
        lambda: llama(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        "rope_parameters = .*mscale.*: position.rotary_scaling has linear",
    ),
    "window": (lambda: mistral(sliding_window=99), "sliding_window = 99: our attention reaches"),
    "windows": (
        lambda: qwen3(use_sliding_window=True, max_window_layers=1),
        "use_sliding_window = true: our attention reaches",
    ),
    "mlp_bias": (lambda: llama(mlp_bias=True), "mlp_bias = true: our model has biases everywhere"),
    "odd": (
        lambda: gpt_neox(rotary_pct=0.2),
        "position.rotary_percent = 0.2: rotates 3 of a head's 16 channels",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_our_model_cannot_compute_is_refused(name, tmp_path):
    make, message = UNSUPPORTED[name]
    folder = saved(make(), tmp_path / "hf")
    with pytest.raises(ConfigError, match=f"(?s)config.json: {message}"):
        import_folder(folder, tmp_path / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def settings(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, {"format": "pt"})

    return damage


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def malicious(folder: Path) -> None:
    """A pickle that would make a file when it is loaded the ordinary way."""
    (folder / "model.safetensors").unlink()
    torch.save({"x": _Touch(folder / "executed")}, folder / "pytorch_model.bin")


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


UP = "transformer.h.1.mlp.dense_h_to_4h.weight"
LOAD = "transformers cannot load the weights: "
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_config": (renamed("config.json", "c"), "config.json: cannot be read .*No such file"),
    "other_class": (settings(model_type="gemma"), "model_type = 'gemma': cannot be .* bloom"),
    "string": (settings(n_layer="2"), "config.json: transformers cannot read it: .*n_layer"),
    "no_weights": (renamed("model.safetensors", "w"), f"{LOAD}OSError"),
    "missing": (tensors(lambda t: t.pop(UP)), f"missing for the model .*: {UP}"),
    "nan": (tensors(lambda t: t[UP].view(-1)[5:6].fill_(math.nan)), f"{UP} holds a NaN"),
    "truncated": (truncate, f"{LOAD}SafetensorError"),
    "pickle": (malicious, f"{LOAD}UnpicklingError: Weights only load failed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_explained_and_leaves_no_run(name, imported, tmp_path):
    damage, message = DAMAGES[name]
    folder = tmp_path / "hf"
    shutil.copytree(imported("bloom")[1], folder)
    damage(folder)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        import_folder(folder, tmp_path / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert not (folder / "executed").exists()


def test_overrides_change_the_run_and_not_the_model(imported, tmp_path, capsys):
    folder = imported("bloom")[1]
    out = tmp_path / "run"
    for key, value in {
        "model.layernorm_epsilon": "0.001",
        "model.num_layers": "3",
        "model.hidden_size": "96",
        "run.directory": f"{tmp_path}/x",
    }.items():
        with pytest.raises(ConfigError, match=rf"^{key} = {value}: an import makes it"):
            import_folder(folder, out, [f"{key}={value}"])
    with pytest.raises(ConfigError, match=r"train\.steps: no such key"):
        import_folder(folder, out, ["train.steps=3"])
    overrides = ["train.num_steps=7", "data.vocab_size=400", "model.attention_dropout=0.1"]
    overrides.append("position.slopes={factor=0.5}")
    import_folder(folder, out, overrides)
    # What the folder computes is compared and saved. Training goes on with other positions.
    assert "with position.slopes = {factor = 0.5}: give `pretrain train`" in capsys.readouterr().out
    assert open_checkpoint(find_checkpoint(out)).config.position.slopes == "published"
    config = load_config(out / "config.toml")
    assert (config.train.num_steps, config.model.attention_dropout) == (7, 0.1)
    assert (config.data.vocab_size, config.padded_vocab_size) == (400, 512)
    assert config.position.slopes.factor == 0.5
