"""Exported models in transformers, compared with the dense reference: logits, 16 bit, generation.

Also the tokenizer, refusals, the folder that is written, and what `pretrain config` says of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM, BloomForCausalLM, MptForCausalLM

from pretrain.cli.commands import tokenizer_obstacles
from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.data.tokenizer import PROBES
from pretrain.huggingface import folder
from pretrain.huggingface.consumers import describe_export
from pretrain.huggingface.export import _curve, checked_length
from pretrain.huggingface.folder import curve_table, to_huggingface
from pretrain.huggingface.parity import check_parity
from pretrain.positions import alibi
from tests.conftest import tiny_config
from tests.reference.dense_gpt import DenseGPT, alibi_slopes, make_config, random_state

ORIGINAL = {"original_max_position_embeddings": 64}
STEPS = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 2.0, **ORIGINAL}


def block(**changes: Any) -> RunConfig:
    """Return the config of a model of Llama's block."""
    own = {"normalization": "rmsnorm", "gated_linear_unit": True, "hidden_act": "silu"}
    own |= {"use_bias": False, "ffn_hidden_size": 80, "layernorm_epsilon": 1e-6}
    return make_config("rotary", **own | changes)


LLAMA = "LlamaForCausalLM"
MODELS = {
    "bloom12": ("BloomForCausalLM", make_config("alibi")),
    "bloom_untied": ("BloomForCausalLM", make_config("alibi", tie_word_embeddings=False)),
    "bloom_no_bias": ("BloomForCausalLM", make_config("alibi", use_bias=False, num_query_groups=3)),
    "mpt12": ("MptForCausalLM", make_config("alibi", use_bias=False, hidden_act="gelu")),
    "mpt16": (
        "MptForCausalLM",
        make_config(
            "alibi",
            hidden_size=64,
            num_attention_heads=16,
            num_query_groups=4,
            use_bias=False,
            hidden_act="gelu",
            tie_word_embeddings=False,
            layernorm_epsilon=1e-6,
        ),
    ),
    "opt": ("OPTForCausalLM", make_config("sinusoidal", ffn_hidden_size=80, num_query_groups=6)),
    "opt_untied": (
        "OPTForCausalLM",
        make_config("sinusoidal", hidden_act="relu", use_bias=False, tie_word_embeddings=False),
    ),
    "opt_learned": ("OPTForCausalLM", make_config("learned", hidden_act="relu")),
    "gpt2": (
        "GPT2LMHeadModel",
        make_config("learned", layernorm_epsilon=1e-6, ffn_hidden_size=80, num_query_groups=4),
    ),
    "gpt2_sinusoidal": (
        "GPT2LMHeadModel",
        make_config("sinusoidal", layernorm_epsilon=1e-6, use_bias=False, hidden_act="gelu"),
    ),
    # The factor stands behind the LayerNorm.
    "bloom_norm_scaled": (
        "BloomForCausalLM",
        make_config("alibi", embedding_layernorm=True, embedding_scale=3.0),
    ),
    "neox_parallel": (
        "GPTNeoXForCausalLM",
        make_config(
            "rotary",
            hidden_size=96,
            position_rotary_percent=0.25,
            parallel_residual=True,
            tie_word_embeddings=False,
        ),
    ),
    "neox": ("GPTNeoXForCausalLM", make_config("rotary")),
    "neox_untied": (
        "GPTNeoXForCausalLM",
        make_config(
            "rotary",
            position_rotary_base=500.0,
            position_rotary_scaling={"type": "linear", "factor": 4.0},
            hidden_act="relu",
            ffn_hidden_size=80,
            tie_word_embeddings=False,
            use_bias=False,
            num_query_groups=1,
        ),
    ),
    "llama": (LLAMA, block(num_query_groups=4, kv_channels=6, position_rotary_scaling=STEPS)),
    "llama_geglu": (
        LLAMA,
        block(
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=False,
            position_rotary_scaling={"type": "ntk", "factor": 4.0},
        ),
    ),
    "llama_yarn": (LLAMA, block(position_rotary_base=5e5, position_rotary_scaling=YARN)),
    "llama_qkv_bias": (LLAMA, block(add_qkv_bias=True, num_query_groups=6)),
    "qwen3": (
        "Qwen3ForCausalLM",
        block(qk_layernorm=True, kv_channels=8, num_query_groups=2, tie_word_embeddings=False),
    ),
}
MPT = {"use_bias": False, "hidden_act": "gelu"}
RANGE = {"first": 0.9, "last": 0.001}
SLOPES = {
    "mpt_range": ("MptSlopesForCausalLM", make_config("alibi", **MPT, position_slopes=RANGE)),
    "mpt_trained": (
        "MptSlopesForCausalLM",
        make_config("alibi", **MPT, position_trainable_slopes=True, num_query_groups=4),
    ),
    "bloom_trained": (
        "BloomSlopesForCausalLM",
        make_config("alibi", position_trainable_slopes=True, position_slopes=RANGE),
    ),
}
"""Slopes that no stock class computes: a class in the folder does."""
TRAINED = torch.tensor([0.7, -0.002, 1.3, 0.0, *torch.logspace(-1, -3, 8).tolist()])
"""Where training may lead: also above 1, to 0 and below."""
MAX_LENGTH = 2048


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    """A SentencePiece model with the settings of `pretrain data build`, on text in every Python."""
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer")


def train_tokenizer(prefix: Path, **changes: object) -> Path:
    settings = {
        "model_type": "bpe",
        "vocab_size": 500,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "minloglevel": 2,
    } | changes
    text = prefix.with_suffix(".txt")
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(prefix), **settings)
    return prefix.with_suffix(".model")


def state_of(config: RunConfig) -> dict[str, torch.Tensor]:
    state = random_state(config, seed=5)
    if "position.slopes" in state:
        state["position.slopes"] = TRAINED.clone()
    return state


@pytest.fixture(scope="session")
def exported(tmp_path_factory, tokenizer_path):
    """Return a function: name -> (dense model, folder, class returned), each exported once."""
    made = {}

    def export(name):
        if name not in made:
            config = (MODELS | SLOPES)[name][1]
            state = state_of(config)
            folder = tmp_path_factory.mktemp("export") / name
            class_name = to_huggingface(
                config, state, tokenizer_path, folder, max_length=MAX_LENGTH
            )
            dense = DenseGPT(config).load_global_state(state).requires_grad_(False)
            made[name] = (dense, folder, class_name)
        return made[name]

    return export


def stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@pytest.fixture
def trusted(tmp_path, monkeypatch):
    """Return a function that loads a folder with its own code, as a user would."""
    import transformers.dynamic_module_utils as modules

    # transformers copies the code to this folder in the user's cache.
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Another test's package of the same name would hide this one's.
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=True, local_files_only=True
        )
        # The folder's code, not the package's.
        assert not type(model).__module__.startswith(("pretrain.", "transformers.models"))
        return model.eval()

    return load


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_within_and_beyond_the_training_length(name, exported):
    dense, folder, class_name = exported(name)
    assert class_name == MODELS[name][0] == type(stock(folder)).__name__
    lengths = (64, 256, 1024) if name in ("bloom12", "mpt12", "opt") else (64, 256)
    if name in ("opt_learned", "gpt2"):
        # The position table ends there.
        lengths = (64,)
    report = check_parity(dense, folder, [random_ids(1, length) for length in lengths])
    print(report.format())
    assert report.passed, report.format()
    # vLLM's default_loader takes every *.safetensors (else *.bin, *.pt) for weights.
    taken = [p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt")]
    assert taken == ["model.safetensors"]


OWN_CODE = ("mpt_trained", "bloom_trained")


@pytest.mark.parametrize(("name", "own"), [("opt", False), *((name, True) for name in OWN_CODE)])
def test_greedy_generation_with_the_cache(name, own, exported, trusted):
    """Greedy tokens equal those of full forward passes of the dense model, beyond 64 tokens."""
    dense, folder, _ = exported(name)
    model, ids = (trusted if own else stock)(folder), random_ids(2, 56, seed=3)
    # Random weights may generate an EOS, at which generation must not stop.
    model.generation_config.eos_token_id = None
    got = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, use_cache=True
    )
    for _ in range(16):
        ids = torch.cat([ids, dense(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got, ids)


@pytest.mark.parametrize("name", OWN_CODE)
def test_padding_cache_and_batches_of_the_class_in_the_folder(name, exported, trusted):
    """Left padding in a batch of two lengths gives the logits of each row alone, with a cache."""
    dense, folder, _ = exported(name)
    model = trusted(folder)
    rows = random_ids(1, 100, seed=1), random_ids(1, 70, seed=2)
    ids = torch.full((2, 100), 2)
    ids[0], ids[1, 30:] = rows[0], rows[1]
    mask = (torch.arange(100) >= torch.tensor([[0], [30]])).long()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits.float()
        first = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=True)
        rest = model(ids[:, 90:], attention_mask=mask, past_key_values=first.past_key_values)
        unmasked = model(rows[0][:, :90], use_cache=True)
        last = model(rows[0][:, 90:], past_key_values=unmasked.past_key_values)
        words = {"max_new_tokens": 4, "do_sample": False}
        static = model.generate(
            rows[0], cache_implementation="static", disable_compile=True, **words
        )
        assert torch.equal(static, model.generate(rows[0], **words))
    expected = dense(rows[0])[0], dense(rows[1])[0]
    for got, want in (
        (whole[0], expected[0]),
        (whole[1, 30:], expected[1]),
        (rest.logits[0], expected[0][90:]),
        (rest.logits[1], expected[1][60:]),
        (last.logits[0], expected[0][90:]),
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


def test_a_changed_weight_or_setting_fails_the_parity_check(exported, tmp_path):
    """The check must see another activation, another epsilon and another order of the block."""
    dense, folder, _ = exported("neox")
    settings = json.loads((folder / "config.json").read_text())
    for key, value in (
        ("hidden_act", "gelu"),
        ("layer_norm_eps", 3e-5),
        ("use_parallel_residual", True),
    ):
        wrong = tmp_path / key
        wrong.mkdir()
        (wrong / "model.safetensors").symlink_to(folder / "model.safetensors")
        (wrong / "config.json").write_text(json.dumps(settings | {key: value}))
        report = check_parity(dense, wrong, [random_ids(4, 64)])
        assert not report.passed and "DIFFERS" in report.format(), (key, report.format())
    report = check_parity(lambda ids: dense(ids) * math.nan, folder, [random_ids(1, 64)])
    assert not report.passed


def test_slopes_of_any_number_of_heads():
    """Both classes compute our slopes for 1 to 40 heads, so no number of heads is refused."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads in range(1, 41):
        token = torch.ones(1, 2, dtype=torch.long)
        bloom = build_alibi_tensor(token, heads, torch.float32)[:, 0, 1]
        mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
        for ours in (alibi.alibi_slopes(heads), alibi_slopes(heads).float()):
            for theirs in (bloom, mpt):
                # Powers of two computed in fp32: a few roundings of 2^-24.
                torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=0)


REFUSED = {
    "position.method = t5: .*T5.*alibi": make_config("t5"),
    "position.method = none: .*rotary": make_config("none"),
    "ffn_hidden_size = 80: Bloom.* = 192": make_config("alibi", ffn_hidden_size=80),
    "hidden_act = gelu: Bloom.*use_bias = false .Mpt": make_config("alibi", hidden_act="gelu"),
    "hidden_act = relu: Bloom": make_config("alibi", hidden_act="relu", use_bias=False),
    "embedding_layernorm = True: GPTNeoX": make_config("rotary", embedding_layernorm=True),
    "final_layernorm = False: GPTNeoX": make_config("rotary", final_layernorm=False),
    "parallel_residual = True: in Bloom": make_config("alibi", parallel_residual=True),
    r"adaptive_cutoffs = \[100, 200\]": make_config("alibi", adaptive_cutoffs=[100, 200]),
    "clip_qkv = 0.5: OPT": make_config("sinusoidal", clip_qkv=0.5),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_anything_is_written(message, tmp_path, tokenizer_path):
    config = REFUSED[message]
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        to_huggingface(
            config, random_state(config, 0), tokenizer_path, tmp_path / "hf", max_length=256
        )
    assert list(tmp_path.iterdir()) == []


def test_the_folder(tmp_path, tokenizer_path):
    """Ids and dtype; what is there already is refused."""
    from safetensors import safe_open
    from transformers import AutoTokenizer, GenerationConfig

    config, out = make_config("alibi"), tmp_path / "deeper" / "hf"
    to_huggingface(config, random_state(config, 2), tokenizer_path, out, max_length=256)
    assert [p.name for p in out.parent.iterdir()] == ["hf"]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118
    settings = json.loads((out / "config.json").read_text())
    assert settings["vocab_size"] == config.padded_vocab_size == 512
    generation = GenerationConfig.from_pretrained(out)
    # What training put between documents; SentencePiece's <s> occurred nowhere in it.
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (2, 2, 2)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert settings[key] == 2
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert set(tokenizer("some text")) == {"input_ids", "attention_mask"}
    assert tokenizer.padding_side == "left"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 2)
    assert load_config(out / "pretrain.toml") == config
    # Whoever may read one file may read all.
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    content = {path: path.read_bytes() for path in (*out.iterdir(), *other.iterdir())}
    for there in (out, other):
        with pytest.raises(ConfigError, match=f"{there}: already exists and is not an empty"):
            to_huggingface(config, random_state(config, 0), tokenizer_path, there, max_length=256)
    assert {path: path.read_bytes() for path in (*out.iterdir(), *other.iterdir())} == content


@pytest.mark.parametrize(("name", "split"), [("bloom12", False), ("neox", True)])
def test_tokenizer_gives_identical_ids_and_text(name, split, exported, tokenizer_path):
    """AutoTokenizer equals SentencePiece on several hundred odd strings, for each class.

    By default </s> and <unk> in a text are the tokens of these names, and all else has the ids of
    before; with split_special_tokens they are text.
    """
    from transformers import AutoTokenizer

    ours = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    theirs = AutoTokenizer.from_pretrained(
        exported(name)[1], local_files_only=True, split_special_tokens=split
    )
    assert theirs.vocab_size == len(theirs) == ours.vocab_size()
    generator = random.Random(0)
    alphabets = [
        "abcdefghijklmnopqrstuvwxyz  ",
        " \t\n\r",
        "0123456789.,- ",
        "héß漢字かな한국🙂🇩🇪👩‍👩‍👧\u200d\u0301",
        "aaaab  ",
        "".join(map(chr, range(0, 256))),
        "<s></s><unk><0x0A>▁ ",
    ]
    pieces = [ours.id_to_piece(i) for i in range(ours.vocab_size())]
    texts = [*PROBES, Path(argparse.__file__).read_text(encoding="utf-8")[:20_000]]
    for _ in range(100):
        texts += [
            "".join(generator.choices(alphabet, k=generator.randint(1, 40)))
            for alphabet in alphabets
        ]
        texts += ["".join(generator.choices(pieces, k=12)).replace("▁", " ")]
        texts += ["".join(generator.choices(["</s>", "<unk>", "<s>", " a b", "é "], k=5))]
    literal = re.compile("(</s>|<unk>)")
    assert sum(bool(literal.search(text)) for text in texts) > 30
    for text in texts:
        parts = [text] if split else literal.split(text)
        found = [
            [ours.piece_to_id(p)] if literal.fullmatch(p) and not split else ours.encode(p)
            for p in parts
        ]
        ids = list(itertools.chain(*found))
        assert theirs(text)["input_ids"] == ids, repr(text)
        if split or len(parts) == 1:
            assert theirs.decode(ids) == ours.decode(ids), repr(text)


def test_large_weights_are_divided_as_transformers_divides_them(tmp_path, monkeypatch, exported):
    dense, whole, _ = exported("neox_untied")
    config = MODELS["neox_untied"][1]
    monkeypatch.setattr(folder, "SHARD_BYTES", 100_000)
    tokenizer = whole / "tokenizer.model"
    to_huggingface(config, state_of(config), tokenizer, tmp_path / "hf", max_length=MAX_LENGTH)
    stock(whole).save_pretrained(tmp_path / "stock", max_shard_size=100_000)
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        for name in ("hf", "stock")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    names = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    assert names == set(ours["weight_map"].values()) and len(names) > 3
    assert check_parity(dense, tmp_path / "hf", [random_ids(1, 64)]).passed


LENGTH_KEYS = (
    "n_positions",
    "max_position_embeddings",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
)
"""Where programs look for a model's longest sequence: lm-eval, vLLM and others."""


@pytest.mark.parametrize("name", ["bloom12", "mpt12", "opt", "gpt2_sinusoidal", "neox", "llama"])
def test_no_program_finds_a_shorter_limit(name, exported):
    """A class without such a key would be cut off at a default of 2,048 or less."""
    from transformers import AutoConfig, AutoTokenizer

    folder = exported(name)[1]
    settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    found = {key: getattr(settings, key) for key in LENGTH_KEYS if hasattr(settings, key)}
    assert set(found.values()) == {MAX_LENGTH} and "max_position_embeddings" in found, found
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.model_max_length == MAX_LENGTH


def test_the_card_takes_whole_evaluations_of_its_own_step(tmp_path):
    """Of a run that was killed, with half a line at its end; and never of another checkpoint."""
    record = {"evaluation": True, "protocol": "sliding", "length": 32, "stride": 16, "tokens": 4096}
    lines = [{"step": s, **record, "loss_nats": 5.5, "perplexity": 100.0 + s} for s in (4, 8)]
    for key in ("protocol", "stride", "length", "tokens", "perplexity"):
        lines.append({k: v for k, v in lines[0].items() if k != key} | {"seed": 7})
    text = "".join(json.dumps(line) + "\n" for line in [{"step": 4, "loss_nats": 5.0}, *lines])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "lo')
    for line in lines[:2]:
        checkpoint = tmp_path / f"checkpoints/step-0000000{line['step']}"
        found = _curve(tiny_config(), checkpoint)
        assert found[0] == {"method": "alibi", "checkpoint": str(checkpoint), **line}
        assert f"| 32 | {line['perplexity']:.2f} | 4,096 |" in curve_table(found)
        assert [each["perplexity"] for each in found] == [line["perplexity"]]
    assert _curve(tiny_config(), tmp_path / "checkpoints/step-00000006") == []
    assert _curve(tiny_config(), tmp_path / "copies/step-00000004") == []


@torch.no_grad()
def error(model: Any, dense: DenseGPT, ids: torch.Tensor) -> float:
    """Return the root mean square of the logits' errors, in units of that of the logits."""
    expected = dense(ids)
    return ((model(ids).logits.float() - expected).norm() / expected.norm()).item()


# ---- 16 bit --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["mpt12", "opt", "neox", "bloom12", "gpt2_sinusoidal", "llama", "qwen3"]
)
def test_all_classes_but_bloom_survive_16_bit(name, exported):
    """At 8 training lengths. bf16 rounds to 2^-9, fp16 to 2^-12, a dozen times in two layers."""
    dense, folder, _ = exported(name)
    for dtype, rounding in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
        off = error(stock(folder, dtype), dense, random_ids(1, 512)) / rounding
        assert off > 20 if name == "bloom12" else off < 6, dtype


def test_the_comparison_measures_16_bit(exported):
    """In every format, with the perplexities that transformers gives."""
    dense, folder, _ = exported("mpt12")
    ids = [random_ids(2, 64), random_ids(1, 512)]
    report = check_parity(dense, folder, ids, precisions=("bf16", "fp16"))
    ways = [(row.precision, row.length) for row in report.rows]
    assert ways == [(p, n) for p in ("fp32", "bf16", "fp16") for n in (64, 512)]
    assert report.passed and report.verdicts() == ["fp32: yes", "bf16: yes", "fp16: yes"]
    with torch.no_grad():
        loss = stock(folder, torch.bfloat16)(ids[1], labels=ids[1]).loss.float().exp().item()
    assert report.rows[3].perplexity == report.rows[1].perplexity
    assert report.rows[3].exported_perplexity == pytest.approx(loss, rel=1e-5)


# ---- lengths -------------------------------------------------------------------------------------
def test_an_export_reaches_16_training_lengths():
    """MPT and OPT end at max_length, whatever lengths the run evaluates."""
    short = tiny_config(evaluation={"lengths": [32]})
    assert checked_length(short, None) == 16 * 32
    assert checked_length(tiny_config(evaluation={"lengths": [32, 4096]}), None) == 4096
    assert checked_length(short, 100_000) == 100_000
    learned = tiny_config(position={"method": "learned"}, evaluation={"lengths": [32]})
    assert checked_length(learned, None) == 32
    for config, length, message in (
        (short, 31, "--max-length 31: shorter than data.sequence_length = 32"),
        (learned, 64, "--max-length 64: the trained table of positions has 32 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            checked_length(config, length)


# ---- before training -----------------------------------------------------------------------------
def test_pretrain_config_says_that_a_class_of_that_name_does_not_hold_the_run():
    [row] = describe_export(load_config("configs/demo.toml", ["export.model_type=gpt2"]))
    assert row.startswith(
        "none: export.model_type = gpt2: no class of that name holds position.method = alibi. "
        "Choose one of bloom, mpt, bloom_slopes, mpt_slopes, or leave it out"
    )
    imported = ["export.model_type=mpt", "position.slopes={factor=0.5}"]
    [*_, row] = describe_export(load_config("configs/demo.toml", imported))
    assert row.endswith("Remove it by --set export.model_type=")


def test_pretrain_config_says_that_a_tokenizer_cannot_be_exported(tmp_path):
    """Known before training, and a reason as good as one of the model's."""
    path = train_tokenizer(tmp_path / "unigram", model_type="unigram")
    overrides = [f"data.tokenizer={path}", "data.vocab_size=500", "position.method=t5"]
    config = load_config("configs/demo.toml", overrides)
    rows = list(describe_export(config, tokenizer_obstacles(config)))
    assert len(rows) == 2 and "none: position.method = t5" in rows[0]
    assert f"none: {path}: a Hugging Face tokenizer would not give the same ids" in rows[1]
    assert tokenizer_obstacles(load_config("configs/demo.toml")) == []


# ---- slopes that no stock class computes ---------------------------------------------------------
STOCK = {"mpt": (MptForCausalLM, "n_heads"), "bloom": (BloomForCausalLM, "n_head")}
"""The stock class that has the weights of a folder, and the setting that it refuses."""


@pytest.mark.parametrize("name", SLOPES)
def test_logits_equal_the_dense_reference_at_every_length(name, exported, trusted):
    dense, folder, class_name = exported(name)
    model = trusted(folder)
    assert class_name == SLOPES[name][0] == type(model).__name__
    for length in (64, 512):
        ids = random_ids(1, length)
        with torch.no_grad():
            # fp32 sums of 64 to 512 terms; logits are below 3.
            torch.testing.assert_close(model(ids).logits, dense(ids), rtol=0, atol=1e-4)
    # The comparison that every export makes.
    report = check_parity(dense, folder, [random_ids(1, 256)], precisions=("bf16",))
    assert report.passed and f"{class_name} computes the same function" in report.format()
    assert report.rows[1].passed or name.startswith("bloom"), report.format()


@pytest.mark.parametrize("name", ["mpt_range", "bloom_trained"])
def test_stock_loaders_refuse_the_folder(name, exported, monkeypatch):
    """They would compute the slopes of another model, and say nothing."""
    _, folder, _ = exported(name)
    # At a terminal, transformers asks.
    monkeypatch.setattr("builtins.input", lambda _: "n")
    for kind in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            kind.from_pretrained(folder, local_files_only=True)
    # By name, the class that has these weights.
    stock, setting = STOCK[name.partition("_")[0]]
    with pytest.raises(StrictDataclassFieldValidationError, match=setting):
        stock.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("name", OWN_CODE)
def test_a_folder_that_was_saved_again_is_refused_and_loads_too(name, exported, trusted, tmp_path):
    """Someone who trains on with transformers saves the same slopes under the same guard."""
    dense, folder, _ = exported(name)
    trusted(folder).save_pretrained(tmp_path / "again")
    settings = json.loads((tmp_path / "again/config.json").read_text())
    assert settings["slopes"] == TRAINED.tolist()
    again = trusted(tmp_path / "again")
    ids = random_ids(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, dense(ids), rtol=0, atol=5e-5)
    stock, setting = STOCK[name.partition("_")[0]]
    # The number of heads: transformers 4 does not check types, and its attention divides by it.
    assert settings[setting] is None
    with pytest.raises(StrictDataclassFieldValidationError, match=setting):
        stock.from_pretrained(tmp_path / "again", local_files_only=True)
