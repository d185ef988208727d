"""Run `pretrain reach`: how far back each head of a model can see, in a table and a figure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from tqdm import tqdm

import pretrain.topology
from pretrain import platform
from pretrain.checkpoint.load import load_weights
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, writing
from pretrain.data.stream import TokenStream
from pretrain.evaluation.command import evaluation_config, open_validation
from pretrain.evaluation.figures import FORMATS, Frame, Line, draw
from pretrain.evaluation.records import Table, Value, as_json, length_label
from pretrain.evaluation.report import write_files
from pretrain.evaluation.windows import NONOVERLAPPING
from pretrain.kernels.context import share_of_ring
from pretrain.model.gpt import build_model
from pretrain.model.reach import Seen, certificates, check_reach, seen, slopes_of
from pretrain.rundir.checkpoints import find_checkpoint, hold

CERTIFICATE, RUNNING, MEASURED = "certificate", "running bound", "measured"
LINEAR = (
    "At lengths beyond the last column, a further token costs the same. Only the certificate\n"
    "holds for every text; it stands in where a head sees all of a window"
)
MULTIPLES = (2, 16, 128)
"""Lengths at which the share of work is shown, in training lengths."""
LONG_MULTIPLES = (16, 128, 1024)
"""Lengths at which the bytes of keys and values are shown, in training lengths."""
RANKS = 8
"""Context ranks between which keys travel in that table."""
WINDOWS = 2
"""Number of windows of the text that are examined, evenly spread over it."""


@dataclass(frozen=True)
class Reach:
    """Reaches of every head, fp64 [layers, H] each, in tokens."""

    config: RunConfig
    slopes: Tensor
    """What each layer's heads have."""
    certificate: Tensor
    """For any text."""
    seen: Seen | None
    """Reaches on a text; None without a text."""
    length: int
    """Tokens of each window of that text."""
    windows: int
    """Number of windows."""

    def bounds(self) -> dict[str, Tensor]:
        """Return distances at which attention can be cut, [layers, H], by kind of bound."""
        found = {CERTIFICATE: self.certificate}
        if self.seen is not None:
            for name, reach in ((RUNNING, self.seen.farthest), (MEASURED, self.seen.measured)):
                # A head that sees all of a window may see farther in a longer one.
                known = torch.where(reach < self.length - 1, reach, torch.inf)
                found[name] = known.minimum(self.certificate)
        return found

    def share(self, reach: Tensor, length: int) -> float:
        """Return the share of all pairs of query and key that lie within their head's reach.

        Args:
            reach: Distances, [layers, H].
            length: Tokens of a sequence.
        """
        # A query has keys at distances 0 .. near, up to the end of the sequence.
        near = reach.floor().clamp(max=length - 1)
        one_side = (near + 1) * length - near * (near + 1) / 2
        both = 2 * one_side - length
        pairs = length**2 if self.config.is_masked else length * (length + 1) / 2
        return float(((both if self.config.is_masked else one_side) / pairs).mean())

    def describe(self) -> str:
        """Return the tables."""
        trained = self.config.data.sequence_length
        header = ["layer", "head", "slope", CERTIFICATE]
        columns = [self.certificate]
        if self.seen is not None:
            header += [RUNNING, "on average", MEASURED]
            columns += list(self.seen)
        rows = [
            [str(layer), str(head), f"{float(slope):.4g}"]
            + [_tokens(float(column[layer, head])) for column in columns]
            for layer in range(len(self.certificate))
            for head, slope in enumerate(self.slopes[layer])
        ]
        title = "Distance in tokens beyond which the keys of a row weigh less than 2^-24 together"
        text = "" if self.seen is None else f"\n{self._on_text()}"
        work = Table(
            "Share of the pairs of query and key that are within it",
            ["by", *(length_label(n * trained, trained) for n in MULTIPLES), "linear from"],
            [
                [name]
                + [f"{self.share(reach, n * trained):.1%}" for n in MULTIPLES]
                + [_tokens(float(reach.max()))]
                for name, reach in self.bounds().items()
            ],
            names=1,
        )
        parts = [Table(title, header, rows, names=2).plain() + text, f"{work.plain()}\n{LINEAR}"]
        if not self.config.is_masked:
            parts.append(self._bytes().plain())
        return "\n\n".join(parts)

    @property
    def element_size(self) -> int:
        """Bytes of a number of a key."""
        return platform.DTYPES[self.config.train.precision].itemsize

    def cache_bytes(self, reach: Tensor, length: int) -> float:
        """Return the bytes of the keys and values that later queries can need.

        Args:
            reach: Distances, [layers, H].
            length: Tokens of the text so far.
        """
        # Heads that share keys need as many as the head that sees farthest.
        groups = reach.view(len(reach), self.config.num_query_groups, -1).amax(2)
        rows = (groups.floor() + 1).clamp(max=length).sum()
        return float(rows) * 2 * self.config.head_dim * self.element_size

    def _bytes(self) -> Table:
        """Return the table of what generation keeps and context parallelism sends, by length."""
        config, every = self.config, torch.full_like(self.certificate, torch.inf)
        trained, bounds = config.data.sequence_length, self.bounds()
        bounds.pop(MEASURED, None)

        def sent(reach: Tensor, length: int) -> str:
            groups = reach.view(len(reach), config.num_query_groups, -1).amax(2).tolist()
            rows = RANKS, length // RANKS, config.head_dim, self.element_size
            shares = [share_of_ring(layer, *rows) for layer in groups]
            return f"{sum(shares) / len(shares):.1%}"

        rows = [
            [length_label(length, trained), f"{self.cache_bytes(every, length) / 1e6:,.1f}"]
            + [f"{self.cache_bytes(reach, length) / 1e6:,.1f}" for reach in bounds.values()]
            + [sent(reach, length) for reach in bounds.values()]
            for length in (n * trained for n in LONG_MULTIPLES)
            if length % RANKS == 0
        ]
        caches = [f"keep: {name}" for name in bounds]
        halos = [f"send: {name}" for name in bounds]
        title = (
            f"Keys and values: MB to keep; bytes between {RANKS} context ranks, as % of a ring's"
        )
        return Table(title, ["length", "keep: all", *caches, *halos], rows, names=1)

    def _on_text(self) -> str:
        many = f"{self.windows} window{'s' if self.windows > 1 else ''}"
        return (
            f"{CERTIFICATE}: for every text. {RUNNING}, {MEASURED}: on {many} of "
            f"{self.length:,} tokens,\nwhere {self.length - 1:,} means all of a window, or more"
        )

    def to_json(self) -> str:
        """Return everything as JSON, with null for an infinite distance."""
        trained, bounds = self.config.data.sequence_length, self.bounds()
        lengths = [n * trained for n in MULTIPLES]
        caches = {"all": torch.full_like(self.certificate, torch.inf), **bounds}
        shares = {
            name: {str(n): self.share(reach, n) for n in lengths} for name, reach in bounds.items()
        }
        values = {
            "train_length": trained,
            "precision": self.config.train.precision,
            "two_sided": self.config.is_masked,
            "windows": self.windows,
            "length": self.length,
            "slopes": self.slopes.tolist(),
            "certificate": self.certificate.tolist(),
            "seen": self.seen and {k: x.tolist() for k, x in self.seen._asdict().items()},
            "share": shares,
            "cache_bytes": {
                name: {str(n * trained): self.cache_bytes(x, n * trained) for n in LONG_MULTIPLES}
                for name, x in caches.items()
            },
            "linear_from": {name: float(reach.max()) for name, reach in bounds.items()},
        }
        return json.dumps(as_json(values), indent=1) + "\n"

    def figure(self) -> dict[str, bytes]:
        """Return the figure by format: distance against slope, a panel for each kind."""
        is_shown = self.slopes > 0
        steep = self.slopes[is_shown].log2().neg().tolist()
        kinds = {CERTIFICATE: self.certificate}
        if self.seen is not None:
            kinds |= {RUNNING: self.seen.farthest, MEASURED: self.seen.measured}
        lines = [
            Line(
                name[:1].upper() + name[1:],
                f"{self.config.position.method}, layer {layer}",
                (1 / self.slopes[layer][is_shown[layer]]).tolist(),
                [Value(max(1.0, x), math.nan, math.nan) for x in row[is_shown[layer]].tolist()],
            )
            for name, reach in kinds.items()
            for layer, row in enumerate(reach)
        ]
        ends = math.floor(min(steep, default=0)), math.ceil(max(steep, default=0))
        ticks = {2.0**n: f"1/{2**n}" if n > 0 else str(2**-n) for n in range(ends[0], ends[1] + 1)}
        labels = "Slope of the head", "Reach: keys beyond weigh less than 2^-24 (tokens)"
        return draw(lines, Frame(*labels, ticks, columns=len(kinds)))


def _tokens(distance: float) -> str:
    """Return a distance as readable text."""
    return f"{distance:,.0f}" if math.isfinite(distance) else "no end"


def reach_of_source(
    source: Path,
    overrides: list[str],
    *,
    name: Path,
    with_text: bool,
    length: int,
    plot: Path | None = None,
    out: Path | None = None,
) -> Reach:
    """Compute how far each head of a model sees, print it, and write it if asked to.

    Args:
        source: Directory of a run, whose newest checkpoint is taken, or of a checkpoint.
        overrides: `section.key=value` settings.
        name: The user's name for the source.
        with_text: Also examine the validation split of data.directory.
        length: Largest number of tokens of a window of the text.
        plot: Figure to write.
        out: JSON file to write.

    Raises:
        ConfigError: The model has no limited reach, or a source, file or setting cannot be used.
    """
    if plot is not None and plot.suffix[1:] not in FORMATS:
        raise ConfigError(f"--plot {plot}: give it a name that ends in .{' or .'.join(FORMATS)}")
    checkpoint = open_checkpoint(find_checkpoint(source))
    config = evaluation_config(checkpoint, _NOTHING, overrides)
    check_reach(config)
    stream = open_validation(checkpoint, config) if with_text else None
    with hold(checkpoint.path):
        pretrain.topology.initialize(config)
        (chunk,) = build_model(config)
        load_weights(checkpoint, [chunk])
    found = _measure(config, chunk.eval(), stream, length)
    pretrain.topology.finish()
    step = checkpoint.trainer_state.step
    print(f"{name}: step {step}, in {config.train.precision}\n{found.describe()}")
    files: dict[Path, str | bytes] = {}
    if out is not None:
        files[out] = found.to_json()
    if plot is not None:
        files[plot] = found.figure()[plot.suffix[1:]]
    for path, content in files.items():
        with writing(path):
            write_files(path.parent, {path.name: content})
    return found


_NOTHING = EvaluationRequest(None, (NONOVERLAPPING,), None, None)
"""A request without windows to evaluate."""


def _measure(config: RunConfig, chunk: GPTModel, stream: TokenStream | None, length: int) -> Reach:
    """Return the certificates of a model, and its reaches on a text."""
    slopes, layers, windows = slopes_of(chunk), config.model.num_layers, []
    length = 0 if stream is None else min(length, len(stream))
    count = 0 if stream is None else min(WINDOWS, len(stream) // length)
    device = next(chunk.parameters()).device
    # disable=None: tqdm shows the bar on a terminal and nothing in a log file.
    with tqdm(total=(1 + count) * layers, desc="layers", leave=False, disable=None) as bar:
        certificate = certificates(config, chunk, 2**63, bar.update)
        for number in range(count):
            assert stream is not None
            start = number * ((len(stream) - length) // max(1, count - 1))
            ids = torch.from_numpy(stream.read(start, length)).to(device)
            windows.append(seen(config, chunk, ids, bar.update))
    if not windows:
        return Reach(config, slopes, certificate, None, 0, 0)
    farthest, mean, measured = (torch.stack(each) for each in zip(*windows))
    on_text = Seen(farthest.amax(0), mean.mean(0), measured.amax(0))
    return Reach(config, slopes, certificate, on_text, length, count)
