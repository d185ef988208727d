"""Read the weights of a Hugging Face folder, one tensor at a time, whatever its files are.

All names and shapes are compared with those of the stock class before a value is read. Files are
safetensors, or torch's, which are loaded without running anything that they contain.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ConfigError

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
