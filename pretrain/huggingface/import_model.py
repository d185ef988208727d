"""Run `pretrain import`: make a run's directory of a Hugging Face folder, and verify its weights.

The directory appears whole, after stock transformers and our model have computed the same, or not
at all.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.manifest import Origin, TrainerState, open_checkpoint
from pretrain.checkpoint.save import write_checkpoint
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config, num_parameters, writing
from pretrain.config.run import is_url
from pretrain.config.trajectory import TOKENIZER
from pretrain.data.manifest import MANIFEST
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.huggingface.export import compare_with_folder
from pretrain.huggingface.folder import MARKER, ORIGINALS, find_original, stock_shapes
from pretrain.huggingface.import_settings import CONFIG, Source, read_source, run_config
from pretrain.huggingface.table import EMBEDDING, SLOPES, Target, restore, same_bits
from pretrain.rundir.files import new_directory, replace_file
from pretrain.rundir.lineage import Branch, new_id
from pretrain.rundir.paths import RunPaths, check_apart, claim_version

# ---- Read the weights of a Hugging Face folder, one tensor at a time, whatever its files are ----
# All names and shapes are compared with those of the stock class before a value is read. Files are
# safetensors, or torch's, which are loaded without running anything that they contain.


FILES = ("model.safetensors", "pytorch_model.bin")
"""Where the weights are, in the order in which they are looked for; each may have an index."""
INDEX = ".index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What fp32 masters can hold exactly."""

PREFIXES = {
    "bloom": "transformer.",
    "mpt": "transformer.",
    "opt": "model.",
    "gpt_neox": "gpt_neox.",
}
"""What names lack in folders that were saved from the model without its output layer."""
RENAMED = {"gpt_neox": (r"^embed_out\.", "lm_head.")}
"""Old names (transformers/conversion_mapping.py)."""
NOT_WEIGHTS = {
    # Masks and frequencies that old versions saved (modeling_gpt_neox.py,
    # _keys_to_ignore_on_load_unexpected).
    "gpt_neox": r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
}
OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file."""

    file: Path
    name: str
    """Its name in the file."""
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class FolderWeights:
    """The weights of a folder by their names in the class's state_dict."""

    def __init__(self, folder: Path, model_type: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Open the files and compare names and shapes.

        Args:
            folder: The folder.
            model_type: The class, as in config.json.
            shapes: What the class holds, as `stock_shapes` returns it.

        Raises:
            ConfigError: A file is missing or damaged, or the tensors are not those of the class.
        """
        self.folder = folder
        self._entries: dict[str, _Entry] = {}
        for entry in _entries(folder):
            name = _canonical(entry.name, model_type, shapes)
            if name is None:
                continue
            if name in self._entries:
                raise ConfigError(
                    f"{entry.file}: {entry.name} is in the folder twice, also as "
                    f"{self._entries[name].name} in {self._entries[name].file.name}"
                )
            self._entries[name] = entry
        self._output = None if OUTPUT in shapes else self._entries.pop(OUTPUT, None)
        self._check(shapes)

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        missing = sorted(shapes.keys() - self._entries.keys())
        if missing:
            raise ConfigError(
                f"{self.folder}: {len(missing)} tensors are missing of what config.json describes, "
                f"the first is {missing[0]}. Is a file of the weights missing?"
            )
        extra = sorted(self._entries.keys() - shapes.keys())
        if extra:
            entry = self._entries[extra[0]]
            raise ConfigError(
                f"{entry.file}: {len(extra)} tensors are not of the model that config.json "
                f"describes, the first is {entry.name}"
            )
        for name, shape in shapes.items():
            entry = self._entries[name]
            if entry.shape != shape:
                raise ConfigError(
                    f"{entry.file}: {entry.name} has shape {entry.shape}, but in the model that "
                    f"config.json describes it has {shape}"
                )

    def read(self, name: str) -> Tensor:
        """Return a tensor in fp32.

        Raises:
            ConfigError: It is damaged, is of a type that fp32 cannot hold, or holds a NaN.
        """
        return _read(self._entries[name])

    def check_tied(self, embedding: str) -> None:
        """Check that an output layer that is stored although it is tied equals the embedding.

        Args:
            embedding: Name of the embedding.

        Raises:
            ConfigError: It does not, so the folder's config is wrong.
        """
        if self._output is None:
            return
        if not torch.equal(_read(self._output), self.read(embedding)):
            raise ConfigError(
                f"{self._output.file}: {self._output.name} is not the embedding, but "
                "tie_word_embeddings = true in config.json"
            )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, in fp32.

    Raises:
        ConfigError: It is damaged.
    """
    return {entry.name: _read(entry) for entry in _safetensors(path)}


def _read(entry: _Entry) -> Tensor:
    tensor = entry.read()
    if tensor.dtype not in DTYPES:
        raise ConfigError(
            f"{entry.file}: {entry.name} is of type {tensor.dtype}, which fp32 masters cannot hold"
        )
    if not torch.isfinite(tensor).all():
        raise ConfigError(f"{entry.file}: {entry.name} holds a NaN or an infinity")
    return tensor.float()


def _canonical(name: str, model_type: str, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Return the name in the class's state_dict; None for what is no weight, and is left out."""
    if model_type in RENAMED:
        name = re.sub(*RENAMED[model_type], name)
    if name not in shapes and PREFIXES[model_type] + name in shapes:
        return PREFIXES[model_type] + name
    ignored = NOT_WEIGHTS.get(model_type)
    return None if name not in shapes and ignored and re.search(ignored, name) else name


def _entries(folder: Path) -> Iterator[_Entry]:
    """Yield every tensor of the folder's weights."""
    for name in FILES:
        single, index = folder / name, folder / f"{name}{INDEX}"
        if single.exists():
            yield from _open(single)
            return
        if index.exists():
            yield from _sharded(index)
            return
    raise ConfigError(f"{folder}: has no weights: neither {' nor '.join(FILES)}, nor an index")


def _sharded(index: Path) -> Iterator[_Entry]:
    """Yield the tensors of all files that an index names."""
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(places.values()))
        # Only a file beside the index; "../" would leave the folder.
        is_valid = all(isinstance(n, str) and Path(n).name == n for n in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{index}: not an index of files in this folder")
    for name in names:
        found = set()
        for entry in _open(index.parent / name):
            found.add(entry.name)
            yield entry
        listed = {tensor for tensor, file in places.items() if file == name}
        if absent := sorted(listed - found):
            raise ConfigError(
                f"{index}: says that {absent[0]} is in {name}, but it is not. Copy the folder anew"
            )


def _open(path: Path) -> Iterator[_Entry]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, but the weights should be there")
    yield from _pickled(path) if path.suffix == ".bin" else _safetensors(path)


def _safetensors(path: Path) -> Iterator[_Entry]:
    from safetensors import SafetensorError, safe_open

    def read(name: str) -> Tensor:
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {name} cannot be read ({error})") from None
        return tensor

    try:
        file: Any = safe_open(path, "pt")
        shapes = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file ({error}). Copy it anew") from None
    for name, shape in shapes.items():
        yield _Entry(path, name, shape, functools.partial(read, name))


def _pickled(path: Path) -> Iterator[_Entry]:
    """Yield the tensors of a file that torch.save wrote. `weights_only` executes nothing of it."""
    try:
        values: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path}: torch cannot load it as weights alone ({reason}). Convert the folder to "
            "safetensors"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(v, Tensor) for v in values.values()):
        raise ConfigError(f"{path}: holds more than tensors by name")
    for name, tensor in values.items():
        yield _Entry(path, str(name), tuple(tensor.shape), functools.partial(_same, tensor))


def _same(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


MOST_LAYERS = 1000
PARITY_ROWS = 2
"""Number of random sequences that are compared at each length."""


def import_folder(folder: Path, out: Path, overrides: Sequence[str] = ()) -> None:
    """Make a run's directory of a Hugging Face folder, and print the comparison.

    Args:
        folder: Folder with config.json and the weights.
        out: Directory of the run to make. Its config.toml is a whole config, and
            checkpoints/step-00000000 holds the weights, with moments of zero.
        overrides: `section.key=value` settings for config.toml.

    Raises:
        ConfigError: The folder is damaged, our model cannot hold its model, or `out` is not empty.
        RunFailed: Our model computes something else, or `out` cannot be written.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out}: already exists and is not an empty folder. Choose another")
    check_apart(out)
    source = read_source(folder)
    config = run_config(folder, source, out, overrides)
    weights = _open_weights(folder, source)
    tokenizer = _tokenizer(folder, config)
    with writing(out), new_directory(out.absolute()) as partial:
        claim_version(partial)
        replace_file(RunPaths(partial).config, dump_config(config))
        if tokenizer is not None:
            replace_file(partial / tokenizer.file_name, tokenizer.content)
        # Not streamed: the comparison holds the whole model in any case.
        tensors = dict(_tensors(folder, source, config, weights))
        data = {TOKENIZER: tokenizer.fingerprint} if tokenizer is not None else {}
        origin = Origin(branches=(Branch(new_id(), 0),), data=data)
        state = TrainerState(0, 0)
        checkpoint = write_checkpoint(partial, config, tensors, state, origin, tokenizer)
        _check_parity(folder, out, source, checkpoint)
    print(f"{folder} -> {out} ({num_parameters(config):,} parameters)")
    print(_advice(config, out, tokenizer))


def _open_weights(folder: Path, source: Source) -> FolderWeights:
    """Open the weights, and compare their names and shapes with those of the stock class."""
    # The stock model is built to see its shapes, which takes the longer the more layers it has.
    if (layers := source.settings.num_hidden_layers) > MOST_LAYERS:
        raise ConfigError(f"{folder / CONFIG}: {layers} layers are more than {MOST_LAYERS}")
    shapes = stock_shapes(source.settings)
    weights = FolderWeights(folder, source.target.family, shapes)
    weights.check_tied(_embedding_name(source.target))
    return weights


def _tensors(
    folder: Path, source: Source, config: RunConfig, weights: FolderWeights
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors by global name.

    Args:
        folder: The Hugging Face folder.
        source: Its model.
        config: The run's config.
        weights: The folder's weights.

    Raises:
        ConfigError: A tensor is damaged, or one that only the class has is not what an export of
            this config stores.
    """
    target = source.target
    factors = target.stored_factors(config, weights.read)
    for name, tensor in target.extra(config, factors, source.max_length).items():
        if not same_bits(weights.read(name), tensor):
            raise ConfigError(
                f"{folder}: {name} is not what the export stored. Remove {folder / MARKER} to "
                "import the model as its class computes it"
            )
    if SLOPES in config.position.tensors(config):
        # Of the weights, these alone stand in config.json.
        yield SLOPES, torch.tensor(source.settings.slopes, dtype=torch.float32)
    originals = folder / ORIGINALS
    has_originals = (folder / MARKER).is_file() and originals.is_file()
    stored = read_tensors(originals) if has_originals else {}
    yield from restore(target, config, factors, weights.read, stored)


def _embedding_name(target: Target) -> str:
    """Return the class's name of the word embeddings."""
    _, *theirs = target.table[EMBEDDING.removesuffix(".weight")]
    return f"{theirs[0]}.weight"


def _check_parity(folder: Path, out: Path, source: Source, checkpoint: Path) -> None:
    """Compare our model, loaded from the checkpoint, with the stock one, and print the comparison.

    The tokens are random, because the folder's tokenizer may be one that is not known here.

    Args:
        folder: The Hugging Face folder.
        out: The run's directory, for the message.
        source: The folder's model.
        checkpoint: The checkpoint that was made of it.

    Raises:
        RunFailed: They do not compute the same.
    """
    opened = open_checkpoint(checkpoint)
    config = opened.load_config(
        # fp32, because the masters are, on the one process that this command is.
        ["train.precision=fp32"],
        {"parallel": {}, "batch": {"micro_batch_size": 1, "global_batch_size": 1}},
    )
    lengths = [config.data.sequence_length, 4 * config.data.sequence_length]
    if source.target.family in ("opt", "mpt"):
        # OPT and MPT accept no more positions than this.
        lengths = [min(length, source.max_length) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, source.settings.vocab_size, (PARITY_ROWS, length), generator=generator)
        for length in sorted(set(lengths))
    ]
    report = compare_with_folder(config, opened, folder, ids)
    report = dataclasses.replace(report, warning="DIFFERS from our model of the same weights")
    print(report.format())
    if not report.passed:
        raise RunFailed(
            f"{folder}: our model does not compute what stock transformers computes, so {out} was "
            "not made. This is a defect of the import: report it with the folder's config.json"
        )


def _tokenizer(folder: Path, config: RunConfig) -> Tokenizer | None:
    """Return the run's tokenizer that the folder carries, if it is one of our exports.

    Raises:
        ConfigError: It is not the tokenizer that the exported run's config describes.
    """
    original = find_original(folder)
    if not (folder / MARKER).is_file() or original is None:
        return None
    tokenizer = load_tokenizer(original[1])
    if tokenizer.vocab_size != config.data.vocab_size:
        raise ConfigError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} pieces, but data.vocab_size = "
            f"{config.data.vocab_size}"
        )
    return tokenizer


def _advice(config: RunConfig, out: Path, tokenizer: Tokenizer | None) -> str:
    """Return what has to be known about the data before the run is evaluated or trained on."""
    where = f"data.directory = {config.data.directory}"
    if tokenizer is None:
        return (
            f"To evaluate it or train on, {where} needs tokens of this model's own tokenizer, "
            f"which has up to {config.data.vocab_size:,} ids. `pretrain data build` can use its "
            "SentencePiece model or tokenizer.json (data.tokenizer), but this folder says nowhere "
            "which file is the model's. Tokens of another tokenizer would give meaningless numbers"
        )
    own = f"The tokenizer is {out / tokenizer.file_name}"
    if is_url(config.data.directory) or (config.data_directory / "validation" / MANIFEST).is_file():
        return f"{own}; {where} exists and is used if it fits"
    return (
        f"{own}. To evaluate the model or train on, make tokens with it: set data.paths and "
        f"data.directory, and run `pretrain data build {out}/config.toml`"
    )
