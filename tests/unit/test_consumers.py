"""What an export is in other programs: each loads what it was written, and is held to our model.

The oracle of the weights is tests/reference/dense_gpt.py, of the tokens SentencePiece and
tokenizers; the programs are the published ones.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer

from pretrain.config import ConfigError
from pretrain.data.tokenizer import load_tokenizer
from pretrain.huggingface.classes import CLASSES, class_of
from pretrain.huggingface.consumers import CONSUMERS, Export, Loaded, Proof, chosen, prove
from pretrain.huggingface.folder import special_ids, to_huggingface
from pretrain.huggingface.parity import compare
from tests.conftest import mark_torture, tiny_config
from tests.reference.dense_gpt import DenseGPT, make_config
from tests.unit.test_export import MODELS, ORIGINAL, SLOPES, random_ids, state_of, tokenizer_path

__all__ = ["tokenizer_path"]

LENGTH = 64
"""The training length of the models; 16 times that is compared too."""
CASES = MODELS | {
    "bloom_norm": ("BloomForCausalLM", make_config("alibi", embedding_layernorm=True)),
    # MPT-7B-StoryWriter's.
    "mpt_story": (
        "MptSlopesForCausalLM",
        make_config(
            "alibi",
            use_bias=False,
            hidden_act="gelu",
            position_slopes={"bias_max": 16},
            clip_qkv=0.5,
        ),
    ),
    "mpt_epsilon": (
        "MptForCausalLM",
        make_config("alibi", use_bias=False, hidden_act="gelu", layernorm_epsilon=1e-3),
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory, tokenizer_path):
    """Return a function: (program, model, tokenizer's file, checked) -> (Export, its folder)."""
    folders = {}

    def write(program, name, tokenizer=tokenizer_path, check=True) -> tuple[Export, Path]:
        pytest.importorskip(CONSUMERS[program].reader)
        config, consumer = (CASES | SLOPES)[name][1], CONSUMERS[program]
        tokenizer, state = load_tokenizer(tokenizer), state_of(config)
        length = config.position.table_end(config) or 16 * LENGTH
        if (name, tokenizer.path) not in folders:
            folders[name, tokenizer.path] = tmp_path_factory.mktemp("export") / name
            to_huggingface(
                config, state, tokenizer.path, folders[name, tokenizer.path], max_length=length
            )
        folder, special = folders[name, tokenizer.path], special_ids(tokenizer)
        export = Export(config, state, class_of(config), folder, tokenizer, special, length)
        if check:
            consumer.check(config, export.target, tokenizer)
        if not (folder / program).exists():
            (folder / program).mkdir()
            consumer.write(export, folder / program)
        return export, folder / program

    return write


def proof(program: str, export: Export) -> Proof:
    dense = DenseGPT(export.config).load_global_state(export.state).requires_grad_(False)
    lengths = sorted({LENGTH, export.max_length})
    return prove(CONSUMERS[program], export, dense, [random_ids(1, n) for n in lengths])


OFTEN = {
    *[("mpt_story",), ("bloom12",), ("opt",), ("opt_untied",)],
    *[("gpt2",), ("neox_parallel",), ("llama_yarn",), ("qwen3",)],
}
"""The models of `make test`; the others are of the same kinds."""


@pytest.mark.parametrize(("name",), mark_torture([(name,) for name in CASES], OFTEN))
def test_llama_cpp_computes_the_model_at_1_and_16_lengths_or_is_refused(name, written):
    program, config = "llama.cpp", CASES[name][1]
    if reasons := list(CONSUMERS[program].reasons(config, class_of(config))):
        keys = {reason.partition(" = ")[0] for reason in reasons}
        assert keys <= {"model.hidden_act", "position.rotary_scaling"}
        with pytest.raises(ConfigError, match=re.escape(f"--for {program}: {reasons[0]}")):
            written(program, name)
        # The refusal is right, and the comparison sees it.
        found = proof(program, written(program, name, check=False)[0])
        assert not found.passed and "DIFFERS" in found.says, found
        return
    found = proof(program, written(program, name)[0])
    print(found)
    assert found.passed and "proven in" in found.says, found


def test_what_a_program_has_not_is_refused_in_words():
    said = {
        name: [r for each in CONSUMERS.values() for r in each.reasons(config, class_of(config))]
        for name, (_, config) in (CASES | SLOPES).items()
    }
    assert said["mpt12"] == said["opt"] == said["neox"] == said["qwen3"] == []
    assert [reason.rpartition(": ")[2] for reason in said["llama_geglu"]] == [
        *["its LlamaForCausalLM computes SiLU"] * 2
    ]
    assert said["mpt_range"][0] == "it has no MptSlopesForCausalLM"
    assert said["mpt_range"][1].endswith("it computes slopes that end at 2^-bias_max")
    assert said["bloom12"] == [
        "model.hidden_act = gelu_pytorch_tanh: its Bloom computes exact GELU, not the tanh one"
    ]
    assert said["mpt16"] == [
        "model.layernorm_epsilon = 1e-06: its MPT has 1e-05, not 1e-06",
        "model.tie_word_embeddings = False: its MPT has no output layer of its own",
    ]
    with pytest.raises(ConfigError, match="--for ollama: unknown"):
        chosen(["vllm", "ollama"])
    names = ["llama.cpp", "transformers", "vllm", "llama.cpp"]
    assert [each.name for each in chosen(names)] == ["llama.cpp", "vllm"]


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_logits_decide_since_they_bound_the_perplexity(share):
    """The worst case: the target moves one way and every other token the other way."""
    ours = torch.zeros(1, 16, 2000).index_fill(2, torch.tensor([1]), 20.0)
    theirs = ours + share * 2.0**-10 * 20.0
    theirs[..., 0] -= 2 * share * 2.0**-10 * 20.0
    ids = torch.zeros(1, 16, dtype=torch.long)
    row = compare(lambda _: ours, lambda _: theirs, ids, 16, rounding=2.0**-10)
    assert row.perplexity > 1e8 and row.passed == (share < 1)
    assert math.log1p(row.difference) == pytest.approx(2 * share * 2.0**-10 * 20.0, rel=1e-3)


# ---- tokenizers ----------------------------------------------------------------------------------
def byte_level(path: Path, **changes: object) -> Path:
    """A tokenizer.json like GPT-2's."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    path.write_text(json.dumps(json.loads(made.to_str()) | changes))
    return path


def odd_texts(names: list[str]) -> list[str]:
    """300 texts of words, spaces, bytes, names of special tokens and any of unicode's planes."""
    draw = random.Random(7)
    parts = [
        " ",
        "  ",
        "\n",
        "\t",
        "the",
        "The def",
        "'s",
        "12 345",
        "▁",
        "<",
        ">",
        "/s",
        "é",
        "e\u0301",
    ]
    parts += ["\x00", "\x7f", "\ufeff", "\u200b", "京都", "🙂", "👩\u200d👧", "Ж", *names, *names]
    planes = [(0x20, 0x7E), (0xA0, 0x2FF), (0x370, 0xFFF), (0x3040, 0x9FFF), (0x1F300, 0x1FAFF)]
    parts += [chr(draw.randint(*plane)) for plane in planes for _ in range(20)]
    return ["", *("".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(300))]


@pytest.mark.parametrize("kind", ["pieces", "prefix", "bytes"])
def test_texts_have_the_ids_of_the_run(kind, written, tokenizer_path, tmp_path):
    """With names of special tokens as text, as in the run's data, and as tokens, as in a chat."""
    path = tokenizer_path
    if kind == "prefix":
        import sentencepiece.sentencepiece_model_pb2 as pb2

        proto = pb2.ModelProto.FromString(path.read_bytes())
        proto.normalizer_spec.add_dummy_prefix = True
        path = tmp_path / "prefix.model"
        path.write_bytes(proto.SerializeToString())
    elif kind == "bytes":
        path = byte_level(tmp_path / "tokenizer.json")
        made = tokenizers.Tokenizer.from_file(str(path))
        # Runs overlap, and are cut alike. The last one names a row without a token.
        odd = ["   ", "  ", "the", "[PAD510]"]
        made.add_tokens([AddedToken(name, normalized=False) for name in odd])
        made.save(str(path))
    export, folder = written("llama.cpp", "mpt12", path)
    loaded: Loaded = CONSUMERS["llama.cpp"].load(export, folder)
    tokenizer = load_tokenizer(path)
    stock = AutoTokenizer.from_pretrained(
        export.folder, config=AutoConfig.for_model("mpt"), local_files_only=True
    )
    for text in odd_texts([str(stock.eos_token), "<s>", "<unk>", "[PAD501]"]):
        assert loaded.encode(text, False) == tokenizer.encode(text).tolist(), repr(text)
        assert loaded.encode(text, True) == stock(text)["input_ids"], repr(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "NFC"}}, "split texts differently from this tokenizer"),
        ({"ignore_merges": True}, "model.ignore_merges is set"),
        ({"<mask>": {"lstrip": True}}, "'<mask>' has lstrip"),
        ({"king": {"single_word": True}}, "'king' has single_word"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(changes, reason, tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    settings = json.loads(path.read_text())
    for part in (settings, settings["model"]):
        part |= {key: changes[key] for key in changes if key in part}
    made = tokenizers.Tokenizer.from_str(json.dumps(settings))
    made.add_tokens(
        [AddedToken(k, **v) for k, v in changes.items() if k not in ("normalizer", "ignore_merges")]
    )
    made.save(str(path))
    [found] = CONSUMERS["llama.cpp"].vocabulary_reasons(load_tokenizer(path))
    assert reason in found and "SentencePiece's BPE and GPT-2's" in found


def test_generation_in_llama_cpp_ends_at_the_runs_eos(written):
    """The file names it, and the program adds nothing to a text."""
    pytest.importorskip("cyllama")
    from cyllama.llama import llama_cpp

    export, folder = written("llama.cpp", "mpt12")
    llama_cpp.disable_logging()
    model = llama_cpp.LlamaModel(str(folder / "model.gguf"), llama_cpp.LlamaModelParams())
    vocabulary = model.get_vocab()
    found = vocabulary.token_bos(), vocabulary.token_eos(), vocabulary.token_pad()
    assert found == tuple(export.special.values()) == (2, 2, 2)
    assert vocabulary.is_eog(2) and not vocabulary.is_eog(1)
    assert not vocabulary.get_add_bos() and not vocabulary.get_add_eos()
    assert vocabulary.n_vocab == export.config.padded_vocab_size


# ---- what other readers of transformers' folder look for -----------------------------------------
ROPE = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 1.0, **ORIGINAL}


def test_the_folder_has_the_spellings_that_older_readers_know(written):
    for name, keys in {
        "mpt12": {"architectures": ["MPTForCausalLM"]},
        "neox_parallel": {"rotary_pct": 0.25, "rotary_emb_base": 10_000},
        "llama_yarn": {"rope_theta": 5e5, "rope_scaling": ROPE},
        "bloom12": {"neutralised_embedding_layernorm": True},
    }.items():
        settings = json.loads((written("llama.cpp", name)[0].folder / "config.json").read_text())
        assert {key: settings[key] for key in keys} == keys
    ntk = {"method": "rotary", "rotary_scaling": {"type": "ntk", "factor": 4.0}}
    marks = CLASSES["gpt_neox"].marks(tiny_config(position=ntk))
    # 96 channels in 8 heads.
    assert marks == {"rotary_emb_base": pytest.approx(1e4 * 4 ** (12 / 10)), "rotary_pct": 1.0}
    plain = json.loads((written("llama.cpp", "bloom_norm")[0].folder / "config.json").read_text())
    assert "neutralised_embedding_layernorm" not in plain
