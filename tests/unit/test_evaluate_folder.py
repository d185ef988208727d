"""`pretrain evaluate` of Hugging Face folders: transformers' own losses, beside those of runs."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import BertConfig, BertLMHeadModel, GPTJConfig, GPTJForCausalLM

from pretrain.config import ConfigError, EvaluationRequest
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.evaluation.command import evaluate_sources
from pretrain.evaluation.tasks import evaluate_tasks
from pretrain.huggingface.import_model import import_folder
from tests.unit.test_import import llama

TEXT = "To be, or not to be: that is the question. \N{SNOWMAN}\n" * 40
GPTJ = GPTJConfig(vocab_size=300, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
BERT = BertConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture
def folder(request, tmp_path):
    """The folder of a model, with a tokenizer of bytes and some merges, and a text beside it."""
    made = tokenizers.Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    torch.manual_seed(1)
    request.param().save_pretrained(tmp_path / "hf")
    made.save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "text").write_text(TEXT)
    return tmp_path / "hf"


def evaluated(*sources: Any, lengths: str, settings: Any = (), **more: Any) -> Any:
    request = EvaluationRequest.parse(lengths, more.pop("protocols", "nonoverlapping"), 8, None)
    return evaluate_sources(list(sources), request, list(settings), None, **more)


@pytest.mark.parametrize("folder", [lambda: llama(vocab_size=300)], indirect=True)
def test_a_folder_stands_beside_the_run_that_is_made_of_it(folder, tmp_path, tiny_data):
    import_folder(folder, tmp_path / "run")
    asked = {"lengths": "16,64", "protocols": "nonoverlapping,sliding", "short_context": 8}
    found = evaluated(tmp_path / "run", folder, text=[str(tmp_path / "text")], **asked)
    for ours, theirs in zip(found[:4], found[4:], strict=True):
        for key in ("loss_nats", "loss_low", "loss_high", "bits_per_byte"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-6)
        same = ("method", "train_length", "tokenizer", "validation", "text", "parameters", "bytes")
        assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}
    assert (found[4]["method"], found[4]["train_length"]) == ("rotary", 32)
    found = evaluate_tasks([folder], "induction", "80", 4, [f"data.directory={tiny_data}"], None)
    assert {r["method"] for r in found} == {"rotary"} and {r["n"] for r in found} == {4}


@pytest.mark.parametrize("folder", [lambda: GPTJForCausalLM(GPTJ)], indirect=True)
def test_a_class_without_a_table_reads_a_splits_text_by_its_own_tokenizer(folder, tiny_data):
    data, stream = f"data.directory={tiny_data}", TokenStream(tiny_data / "validation")
    [whole] = evaluated(folder, lengths="64", settings=[data])
    assert whole["bytes"] == stream.manifest.text_bytes and whole["tokens"] != len(stream)
    assert (whole["method"], whole["train_length"]) == ("unknown (gptj)", 64)
    asked = {"protocols": "nonoverlapping,sliding", "settings": [data, "evaluation.max_tokens=128"]}
    found, slid = evaluated(folder, lengths="64", **asked)
    model = GPTJForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    text = load_tokenizer(stream.tokenizer_path).decode(stream.read(0, 400))
    ids = torch.tensor([tokenizer.eos_id, *tokenizer.encode(text)][:129])
    windows = [ids[start : start + 65] for start in range(0, 65, 8)]
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(w[None, :-1]).logits[0], w[1:], reduction="none").double()
            for w in windows
        ]
    of_whole = (losses[0].sum() + losses[-1].sum()).item()
    assert found["loss_nats"] == pytest.approx(of_whole / 128, rel=1e-6)
    # The first window is scored whole, and of each further one the stride, 8 tokens.
    by_stride = (losses[0].sum() + sum(each[-8:].sum() for each in losses[1:])).item()
    assert slid["loss_nats"] == pytest.approx(by_stride / 128, rel=1e-6)
    with pytest.raises(ConfigError, match=r"length 128: .*hf does not compute .*out of bounds"):
        evaluated(folder, lengths="128", settings=[data])


@pytest.mark.parametrize("folder", [lambda: GPTJForCausalLM(GPTJ)], indirect=True)
def test_text_that_a_tokenizer_drops_has_no_bytes(folder, tmp_path):
    file = str(folder / "tokenizer.json")
    changed = tokenizers.Tokenizer.from_file(file)
    changed.normalizer = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    changed.save(file)
    (tmp_path / "text").write_text("to  be\n\n" * 100)
    [whole] = evaluated(folder, lengths="16", text=[str(tmp_path / "text")])
    assert whole["bytes"] == len("to be " * 100)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "folder", [lambda: llama(vocab_size=300, rope_parameters=DYNAMIC)], indirect=True
)
def test_dynamic_rotary_positions_are_those_of_each_length(folder, tmp_path):
    text = [str(tmp_path / "text")]
    [alone] = evaluated(folder, lengths="64", text=text)
    assert evaluated(folder, lengths="64,256", text=text)[0]["loss_nats"] == alone["loss_nats"]


@pytest.mark.parametrize(
    "folder",
    [lambda: llama(vocab_size=300, rope_parameters=DYNAMIC | {"rope_type": "linear"})],
    indirect=True,
)
def test_scaled_rotary_positions_have_their_name(folder, tmp_path):
    [found] = evaluated(folder, lengths="64", text=[str(tmp_path / "text")])
    assert found["method"] == "rotary_scaled"


@pytest.mark.parametrize("folder", [lambda: BertLMHeadModel(BERT)], indirect=True)
def test_an_encoder_has_no_perplexity(folder, tmp_path):
    with pytest.raises(ConfigError, match="depends on the tokens after it"):
        evaluated(folder, lengths="16", text=[str(tmp_path / "text")])


@pytest.mark.parametrize("folder", [lambda: llama(vocab_size=300)], indirect=True)
def test_what_is_wrong_with_a_folder_is_one_line(folder, tmp_path):
    text = [str(tmp_path / "text")]
    for damaged, settings, given, says in (
        (None, (), (), "hf, completed by --text and --set: data.directory: missing"),
        (None, ["model.num_layers=3"], text, "--set model.num_layers: .*pretrain import"),
        ("model.safetensors", (), text, "hf: transformers cannot load the weights: "),
        ("tokenizer.json", (), text, "hf: has no tokenizer.json and no tokenizer.model"),
    ):
        (folder / damaged).unlink() if damaged else None
        with pytest.raises(ConfigError, match=f"^[^\n]*{says}[^\n]*$"):
            evaluated(folder, lengths="16", settings=settings, text=given)
