"""Key/value cache for texts that pass through a layer in pieces; drops only what cannot matter.

With slopes, a key matters less the farther back it is. Each key head therefore keeps its own part
of the text:

    on the device    the last SPARE x w tokens, where w is the farthest that any query so far could
                     see by the running bound of `pretrain.kernels.reach`
    on the host      the tokens before these, up to the certificate of the head's weights
                     (`pretrain.model.reach`)
    nowhere          earlier tokens, which cannot matter in any text

Before the queries of a piece attend, the running bound is computed for them. It needs the largest
norms of keys and values up to each tile, including dropped keys. If a query could see a key on the
host, the host's keys first return to the device. Each of the two bounds may leave out weights of a
row that sum to less than 2^-24. With a slope of 0 the certificate is infinite, and no key is
dropped.
"""

# Shape suffixes: S tokens, B batch, H query heads, G key heads, D width of a head, T tiles.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.kernels.reach import FLOOR_TILE, longest_so_far, row_norms, tiles_left_out

TILE = 128
"""Number of keys that are kept or dropped together."""
SPARE = 2
"""The device keeps this many times the farthest reach of any query so far. With 1, every query that
reaches farther than all queries before it would need keys from the host."""

Attend = Callable[[Tensor, Tensor, Tensor, slice], Tensor]
"""Attention of some heads: (queries [S, B, H, D]; keys and values [keys, B, G, D], of which the
last belong to the queries' tokens; the heads, as a slice of this rank's) -> [S, B, H, D]."""


class Kept(NamedTuple):
    """Bytes that a cache holds, and how often keys returned from the host."""

    device: int
    host: int
    fetches: int


class KeyCache:
    """The keys and values of one layer, for the heads of this tensor-parallel rank.

    Args:
        reaches: Certificate of each key head, in tokens.
    """

    def __init__(self, reaches: Sequence[float]) -> None:
        self.parts = [_Part(group, reach) for group, reach in enumerate(reaches)]

    def attend(
        self,
        q_SBHD: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        slopes: Tensor,
        scale: float,
        attend: Attend,
    ) -> Tensor:
        """Add the next tokens' keys and values, and return the attention output of their queries.

        Args:
            q_SBHD: Queries of the next tokens, [S, B, H, D].
            k_SBGD: Their keys, [S, B, G, D].
            v_SBGD: Their values, [S, B, G, D].
            slopes: [H], fp32.
            scale: Factor of the products q k^T.
            attend: Computes attention.

        Returns:
            [S, B, H, D].
        """
        shared = q_SBHD.shape[2] // k_SBGD.shape[2]
        outs = []
        for part in self.parts:
            heads, group = (slice(part.group * n, (part.group + 1) * n) for n in (shared, 1))
            q = q_SBHD[:, :, heads]
            part.append(torch.stack([k_SBGD[:, :, group], v_SBGD[:, :, group]]))
            keys, values = part.since(part.look_back(q, slopes[heads], scale))
            outs.append(attend(q, keys, values, heads))
            part.forget()
        return torch.cat(outs, dim=2)

    def kept(self) -> Kept:
        """Return what is held now."""
        return Kept(*map(sum, zip(*(part.kept() for part in self.parts))))


class _Part:
    """Keys and values of a key head: the last ones in a buffer, others on the host.

    Args:
        group: The key head, among those of the rank.
        reach: Certificate in tokens.
    """

    def __init__(self, group: int, reach: float) -> None:
        self.group, self.reach = group, reach
        self.total = 0
        """Number of tokens so far."""
        self.window = 0
        """Farthest distance that any query so far could see."""
        self.buffer: Tensor | None = None
        """Keys and values, [2, capacity, B, 1, D]; `self.used` is the slice in use."""
        self.used = slice(0, 0)
        self.host: deque[Tensor] = deque()
        """Keys and values before those in the buffer, [2, tokens, B, 1, D] each."""
        self.longest: tuple[Tensor, Tensor] | None = None
        """Largest norms of keys and values up to the end of each tile, [B, 1, T]."""
        self.origin = self.fetches = 0
        """Position of the first key that is kept, where the first tile begins; fetches so far."""

    @property
    def begin(self) -> int:
        """Position of the first key in the buffer."""
        return self.total - (self.used.stop - self.used.start)

    def since(self, first: int) -> Tensor:
        """Return keys and values in the buffer from position `first` on, [2, S, B, 1, D]."""
        assert self.buffer is not None
        start = self.used.start + max(first - self.begin, 0)
        return self.buffer[:, start : self.used.stop]

    def append(self, new: Tensor) -> None:
        """Add keys and values [2, S, B, 1, D]."""
        count = new.shape[1]
        if self.buffer is None:
            self._move([], new.new_empty(2, 0, *new.shape[2:]), count)
        elif self.used.stop + count > self.buffer.shape[1]:
            self._move([], self.since(0), count)
        assert self.buffer is not None
        self.buffer[:, self.used.stop : self.used.stop + count] = new
        self.used = slice(self.used.start, self.used.stop + count)
        self.total += count

    def _move(self, before: Sequence[Tensor], rows: Tensor, count: int) -> None:
        """Move rows into a new buffer, after those of `before`, with room for `count` more."""
        live = rows.shape[1] + sum(x.shape[1] for x in before)
        # A quarter of spare room, so that a growing text copies only a few rows per token.
        buffer = rows.new_empty(2, live + count + live // 4 + TILE, *rows.shape[2:])
        torch.cat([*(x.to(rows.device) for x in before), rows], dim=1, out=buffer[:, :live])
        self.buffer, self.used = buffer, slice(0, live)

    def look_back(self, q_SBHD: Tensor, slopes: Tensor, scale: float) -> int:
        """Return the first position that these queries could see, and bring its keys here."""
        self._measure()
        if self.longest is None:
            return 0
        count = len(q_SBHD)
        keys, values = self.since(self.total - count - FLOOR_TILE)
        left_out = tiles_left_out(
            q_SBHD,
            keys,
            (row_norms(keys[-count:]), row_norms(values[-count:])),
            self.longest,
            slopes,
            scale,
            TILE,
            self.total,
            gradients=False,
            first=self.origin,
        )
        first = self.origin + left_out.amin(dim=(0, 1)) * TILE
        position = torch.arange(self.total - count, self.total, device=first.device)
        found: int
        found, window = torch.stack([first.amin(), (position - first).amax()]).tolist()
        self.window = max(self.window, window)
        back: list[Tensor] = []
        while self.host and found < self.begin - sum(x.shape[1] for x in back):
            back.insert(0, self.host.pop())
        if back:
            self._move(back, self.since(0), 0)
            self.fetches += 1
        return found

    def _measure(self) -> None:
        """Compute the norms of newly completed tiles."""
        done = self.origin + (0 if self.longest is None else self.longest[0].shape[2] * TILE)
        count = (self.total - done) // TILE * TILE
        if count == 0:
            return
        keys, values = (longest_so_far(row_norms(x[:count]), TILE) for x in self.since(done))
        if self.longest is not None:
            keys, values = (
                torch.cat([old, new.maximum(old[..., -1:])], dim=2)
                for old, new in zip(self.longest, (keys, values))
            )
        self.longest = keys, values

    def forget(self) -> None:
        """Move keys that no query so far could see to the host; drop those that none ever can."""
        if self.longest is None:
            return
        keep = min(SPARE * self.window, self.reach)
        count = int(max(self.total - keep, 0)) // TILE * TILE - self.begin
        if count > 0:
            self.host.append(self.since(0)[:, :count].to("cpu", copy=True))
            self.used = slice(self.used.start + count, self.used.stop)
        rows = self.since(0)
        assert self.buffer is not None
        if self.buffer.shape[1] > 2 * (rows.shape[1] + TILE):
            self._move([], rows, 0)
        oldest = int(max(self.total - self.reach, 0))
        first = self.begin - sum(x.shape[1] for x in self.host)
        while self.host and first + self.host[0].shape[1] <= oldest:
            first += self.host.popleft().shape[1]
        keys, values = (x[..., (first - self.origin) // TILE :] for x in self.longest)
        self.longest = (keys, values) if keys.shape[2] else None
        self.origin = first

    def kept(self) -> Kept:
        """Return what is held now."""
        device = [x for x in (self.buffer, *(self.longest or ())) if x is not None]
        host = sum(x.nbytes for x in self.host)
        return Kept(sum(x.nbytes for x in device), host, self.fetches)
