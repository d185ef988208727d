"""Test tokenizer.json files: what they say of chat and sentences is not done to documents."""

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pretrain.config import ConfigError
from pretrain.data.tokenizer import find_tokenizer, load_tokenizer, train_tokenizer
from pretrain.huggingface.folder import check_same_ids, fast_tokenizer

TEXT = [
    "the quick brown fox jumps over the lazy dog, isn't it?",
    "To be, or not to be: that is the question",
    "</s> <s> <|endoftext|> <pad> /s endoftext | a 1234567890 é 漢字",
] * 30
NAMES = "</s> <s>a<|endoftext|>b <pad></s><unk></s>"


def stock_tokenizer(path: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def gpt2() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def llama2() -> tokenizers.Tokenizer:
    """BPE with byte pieces and no pre-tokenizer, as transformers converts Llama 2's model."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    # Short lines, because without a pre-tokenizer each is one word.
    tokenizer.train_from_iterator([w for line in TEXT for w in line.split(" ")], trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = settings["added_tokens"][:3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def metaspace(model: str) -> tokenizers.Tokenizer:
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    if model == "bpe":
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    else:
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS = {"gpt2": gpt2, "llama2": llama2, "metaspace": lambda: metaspace("bpe")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """kind -> tokenizer.json with everything in it that is not for documents."""
    found = {}
    for kind, make in KINDS.items():
        tokenizer = make()
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=50)
        found[kind] = tmp_path_factory.mktemp(kind) / "tokenizer.json"
        tokenizer.save(str(found[kind]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys_and_nothing_is_added_cut_off_or_padded(kind, saved):
    tokenizer, stock = load_tokenizer(saved[kind]), stock_tokenizer(saved[kind])
    assert tokenizer.file_name == "tokenizer.json"
    name = "<|endoftext|>" if kind == "gpt2" else "</s>"
    assert tokenizer.eos_id == stock.token_to_id(name)
    assert tokenizer.vocab_size == max(stock.get_vocab().values()) + 1
    for text in ["To be, or not", "", " ", "  a  b ", *TEXT[:2]]:
        ids = tokenizer.encode(text)
        assert ids.tolist() == stock.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == stock.decode(ids.tolist())
        if kind in ("gpt2", "llama2"):
            assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_tokens_name_in_a_text_is_text(kind, saved):
    """A web page may hold </s>; its tokens must not end the document, and decode to the page."""
    tokenizer = load_tokenizer(saved[kind])
    stock = stock_tokenizer(saved[kind])
    control = {t for t in stock.get_added_tokens_decoder() if stock.id_to_token(t) != "<unk>"}
    for text in (NAMES, "x</s>y", "</s>"):
        ids = tokenizer.encode(text)
        assert not control & set(ids.tolist()), text
        assert "</s>" in tokenizer.decode(ids)
        if kind in ("gpt2", "llama2"):
            assert tokenizer.decode(ids) == text


def test_an_end_of_document_that_is_not_marked_as_special(saved, tmp_path):
    """Neither an added token without the mark nor a word of the vocabulary is found in a text."""
    settings = json.loads(saved["gpt2"].read_text())
    for tokens in ([dict(settings["added_tokens"][0], special=False)], []):
        (tmp_path / "t.json").write_text(json.dumps(settings | {"added_tokens": tokens}))
        tokenizer = load_tokenizer(tmp_path / "t.json")
        assert tokenizer.eos_id == 0 and 0 not in tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.decode([*tokenizer.encode("a<|endoftext|>b"), 0]) == "a<|endoftext|>b"


def test_a_special_token_ends_documents_before_a_plain_one_of_another_name(saved, tmp_path):
    """As in a vocabulary that was taken over from a model with another end of document."""
    settings = json.loads(saved["gpt2"].read_text())
    settings["model"]["vocab"]["</s>"] = 700
    settings["added_tokens"] = [dict(settings["added_tokens"][0], id=700, content="</s>")]
    (tmp_path / "t.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path / "t.json").eos_id == 700


def test_the_vocabulary_reaches_to_the_highest_id(saved, tmp_path):
    """Ids may have holes, and an embedding has a row for each id below the highest."""
    settings = json.loads(saved["gpt2"].read_text())
    settings["model"]["vocab"]["far"] = 700
    (tmp_path / "t.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path / "t.json").vocab_size == 701


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_tokenizer_gives_the_same_ids(kind, split, saved, tmp_path):
    from transformers import AutoTokenizer

    tokenizer, stock = load_tokenizer(saved[kind]), stock_tokenizer(saved[kind])
    tokenizer.check_exportable()
    fast_tokenizer(tokenizer, max_length=64).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    check_same_ids(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(
        tmp_path, local_files_only=True, split_special_tokens=split
    )
    assert theirs.bos_token_id == theirs.eos_token_id == tokenizer.eos_id
    # Llama 2's and GPT-2's files have none, and EOS pads.
    padding = 3 if kind == "metaspace" else tokenizer.eos_id
    assert theirs.pad_token_id == padding
    generator = random.Random(0)
    names = ["</s>", "<s>", "<|endoftext|>", "<pad>", "<unk>"]
    for count in range(150):
        text = "".join(generator.choices("abcdeth  \n\té漢🙂'19.,<>|/", k=30))
        if count >= 100:
            text = "".join(generator.choices([*names, "the fox ", " be", "é"], k=6))
        # The library itself finds a file's special tokens, unless the run's tokenizer hides them.
        ids = tokenizer.encode(text).tolist()
        if not split:
            ids = stock.encode(text, add_special_tokens=False).ids
        assert theirs(text)["input_ids"] == ids, repr(text)


def test_a_model_with_a_dummy_prefix_is_exported_with_the_same_ids(tmp_path):
    """SentencePiece's own default puts a space before each text; so do Llama's models."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=str(tmp_path / "own"), model_type="bpe",
        vocab_size=340, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=True, minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "own.model")
    tokenizer.check_exportable()
    fast_tokenizer(tokenizer, max_length=64).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text('{"model_type": "gpt_neox"}')
    check_same_ids(tokenizer, tmp_path / "hf")
    stock = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "own.model"))
    converted, generator = tokenizer.to_hugging_face(), random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices("abcdeth  \n\té漢🙂'19.,<>|/", k=generator.randint(0, 30)))
        ids = stock.encode(text)
        assert converted.encode(text).ids == tokenizer.encode(text).tolist() == ids, repr(text)
        assert converted.decode(ids) == tokenizer.decode(ids) == text


# ---- bad input -----------------------------------------------------------------------------------


def test_a_model_that_leaves_out_letters_is_refused(tmp_path):
    """BPE without an unknown token: the library returns nothing for what it does not know."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(["only plain letters"], trainer)
    tokenizer.save(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match=r"has no token for all that a corpus may hold \(\xe9\)"):
        load_tokenizer(tmp_path / "t.json")


def test_a_model_in_which_a_text_can_spell_a_special_token_is_refused(tmp_path):
    metaspace("unigram").save(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match="<s> in a text would become the special token"):
        load_tokenizer(tmp_path / "t.json")


BAD = {
    "cut.json": b'{"version": "1.0", "model": {"type": "BPE", "vo',
    "list.json": b"[1, 2]",
    "deeper.json": b'{"model":' * 100_000,
    "merges.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}',
    "text.model": b"plain text",
    "pickle.model": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_tokenizer_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(ConfigError, match=f"{name}: (not a|has no token)"):
        load_tokenizer(tmp_path / name)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.model: missing, and so are tokenizer\.json"):
        find_tokenizer(tmp_path)


def test_a_flipped_bit_in_a_sentencepiece_model_is_refused_or_harmless(tmp_path):
    """Among others it makes pieces that are not UTF-8."""
    generator, path = random.Random(1), tmp_path / "t.model"
    content = train_tokenizer(TEXT, 330)
    refused = 0
    for number in range(80):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged[: generator.randrange(len(content)) if number % 5 == 0 else None])
        try:
            tokenizer = load_tokenizer(path)
            tokenizer.check_exportable()
        except ConfigError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert max(tokenizer.encode("To be </s>\n")) < tokenizer.vocab_size
    assert refused > 8
