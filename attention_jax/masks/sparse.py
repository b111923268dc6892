"""Global tokens, block-local windows, and the published sparse patterns composed of simpler masks.

    longformer     (dilated) window | global tokens
    bigbird        block-local window | global blocks | random blocks
    sparse_strided, sparse_fixed     the two patterns of the Sparse Transformer

References:
    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509.
    Beltagy, Peters, Cohan 2020, "Longformer", arXiv:2004.05150.
    Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062.
"""

from typing import Annotated, Any

import numpy as np

from attention_jax._core.checks import check_count
from attention_jax._core.numerics import is_concrete
from attention_jax._core.pytrees import pytree, static
from attention_jax.masks.mask import Interval, Mask, Verdict, View
from attention_jax.masks.patterns import block_diagonal, causal, window
from attention_jax.masks.random_blocks import random
from attention_jax.masks.strides import dilated, strided, summary_tokens

Tokens = Annotated[Any, "an int, or ints"]


@pytree
class GlobalTokens(Mask):
    """Pairs with a global query or a global key; `runs` are the tokens as [start, stop) ranges."""

    runs: tuple[tuple[int, int], ...] = static()

    def __repr__(self) -> str:
        if len(self.runs) == 1 and self.runs[0][0] == 0:
            return f"global_tokens({self.runs[0][1]})"
        return f"global_tokens({[p for run in self.runs for p in range(*run)]})"

    def _runs(self, positions: Any) -> tuple[Any, Any, Any]:
        """Positions `[..., 1]`, starts and stops `[..., runs]`."""
        pairs = np.array(self.runs, np.int32).reshape(-1, 2)
        pairs = pairs.reshape((1,) * positions.ndim + pairs.shape)
        return positions[..., None], pairs[..., 0], pairs[..., 1]

    def _is_global(self, positions: Any) -> Any:
        at, starts, stops = self._runs(positions)
        return ((starts <= at) & (at < stops)).any(-1)

    def interval(self) -> Interval:
        """No bound, unless there are no global tokens."""
        return Interval(None, None) if self.runs else Interval(0, 0)

    def allowed(self, view: View) -> Any:
        """The query or the key is a global token."""
        return self._is_global(view.query_positions) | self._is_global(view.key_positions)

    def decide(self, low: View, high: View) -> Verdict:
        """Not empty if either range intersects a run; full if either lies within one."""
        some = every = np.False_
        for first, last in (
            (low.query_positions, high.query_positions),
            (low.key_positions, high.key_positions),
        ):
            first, starts, stops = self._runs(first)
            last = last[..., None]
            some = some | ((starts <= last) & (first < stops)).any(-1)
            every = every | ((starts <= first) & (last < stops)).any(-1)
        return Verdict(some, every)


@pytree
class BlockLocal(Mask):
    """Blocks of `size` positions, at most `blocks // 2` blocks apart."""

    size: int = static()
    blocks: int = static()

    def __repr__(self) -> str:
        return f"block_local({self.size}, {self.blocks})"

    def interval(self) -> Interval:
        """The largest distance between positions of two visible blocks."""
        reach = (self.blocks // 2 + 1) * self.size - 1
        return Interval(reach, reach)

    def allowed(self, view: View) -> Any:
        """`|query position // size - key position // size| <= blocks // 2`."""
        distance = view.key_positions // self.size - view.query_positions // self.size
        return abs(distance) <= self.blocks // 2

    def decide(self, low: View, high: View) -> Verdict:
        """From the smallest and largest distance in blocks."""
        half, size = self.blocks // 2, self.size
        least = low.key_positions // size - high.query_positions // size
        greatest = high.key_positions // size - low.query_positions // size
        return Verdict((least <= half) & (greatest >= -half), (least >= -half) & (greatest <= half))


def global_tokens(tokens: Tokens) -> Mask:
    """Global tokens: they attend to every key and are visible to every query.

    A pair is visible if its query or its key is one of `tokens`. Combine with a pattern by `|`.

    Args:
        tokens: an int n for the positions 0..n-1, or the positions: ints, known at trace time.

    Returns:
        A mask object.

    Raises:
        TypeError: traced or non-integer positions. For tokens that differ between examples use
            `from_array(is_global[:, None, :, None] | is_global[:, None, None, :])`.

    Example:
        >>> global_tokens([1]).to_array(3, 3).astype(int).tolist()
        [[0, 1, 0], [1, 1, 1], [0, 1, 0]]

    References:
        Beltagy et al. 2020, arXiv:2004.05150, §3.1, "Global Attention"; Zaheer et al. 2020,
        arXiv:2007.14062, §2, BigBird-ITC.
    """
    if isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool):
        count = check_count("tokens", tokens)
        return GlobalTokens(((0, count),) if count else ())
    if not is_concrete(tokens):
        raise TypeError(
            "tokens must be known at trace time; for tokens that differ between examples use "
            "from_array(is_global[:, None, :, None] | is_global[:, None, None, :])"
        )
    array = np.asarray(tokens)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"tokens must be integers, got dtype {array.dtype.name}")
    if array.ndim != 1:
        raise ValueError(f"tokens must be an int or a list of ints, got shape {list(array.shape)}")
    if array.size and array.min() < 0:
        raise ValueError(f"tokens are positions, at least 0, got {array.min()}")
    runs: list[tuple[int, int]] = []
    for token in map(int, np.unique(array)):
        if runs and runs[-1][1] == token:
            runs[-1] = (runs[-1][0], token + 1)
        else:
            runs.append((token, token + 1))
    return GlobalTokens(tuple(runs))


def block_local(size: int, blocks: int) -> Mask:
    """Block-local window: `|p // size - s // size| <= blocks // 2`.

    Args:
        size: positions in a block, at least 1.
        blocks: `blocks // 2` blocks on each side, and the query's own; 1 is `block_diagonal(size)`.

    Returns:
        A mask object.

    References:
        Zaheer et al. 2020, arXiv:2007.14062, appendix D, "blockified" window.
    """
    return BlockLocal(check_count("size", size, 1), check_count("blocks", blocks, 1))


def longformer(size: int, tokens: Tokens, dilation: int = 1) -> Mask:
    """Longformer pattern: `dilated(size, dilation) | global_tokens(tokens)`.

    Args:
        size: w in the paper: `size // 2` keys on each side.
        tokens: the global tokens: an int n for the first n, or their positions.
        dilation: d in the paper, the dilation of the window.

    Returns:
        A mask object.

    References:
        Beltagy et al. 2020, arXiv:2004.05150, §3.1.
    """
    return dilated(size, dilation) | global_tokens(tokens)


def bigbird(
    key: Any,
    length: int,
    block_size: int = 64,
    *,
    local_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    num_heads: int | None = None,
) -> Mask:
    """BigBird pattern: a block-local window, global blocks and random blocks.

        block_local(b, w) | global_tokens(g · b) | random(key, length, b, r)

    Args:
        key: a PRNG key for the random blocks, as in `random`.
        length: number of positions.
        block_size: b in the paper.
        local_blocks: w, blocks in the window, centred on the query's own.
        global_blocks: g, number of global blocks at the start, as in the paper's internal
            construction (ITC); the authors' code uses the first and the last block instead.
        random_blocks: r, random key blocks per query block.
        num_heads: N for different random blocks in each head; None shares them.

    Returns:
        A mask object.

    References:
        Zaheer et al. 2020, arXiv:2007.14062, §2 and appendix D.
    """
    nearby = block_local(block_size, local_blocks)
    everywhere = global_tokens(check_count("global_blocks", global_blocks) * block_size)
    if check_count("random_blocks", random_blocks) == 0:
        return nearby | everywhere
    return nearby | everywhere | random(key, length, block_size, random_blocks, num_heads)


def sparse_strided(stride: int) -> Mask:
    """Sparse Transformer's strided pattern: the last `stride` keys, and every stride-th key.

        causal() & (window(stride, 0) | strided(stride))

    The union of both factors ("merged heads" in the paper); to assign them to different heads, use
    the factors. With `stride` near √T, information from any key reaches any later query in two
    layers.

    Args:
        stride: l in the paper, at least 1.

    Returns:
        A mask object.

    References:
        Child et al. 2019, arXiv:1904.10509, §4.3, "strided attention", and eq. 6.
    """
    return causal() & (window(stride, 0) | strided(stride))


def sparse_fixed(size: int, count: int = 1) -> Mask:
    """Sparse Transformer's fixed pattern: the query's own run, and the end of every run.

        causal() & (block_diagonal(size) | summary_tokens(size, count))

    Args:
        size: l in the paper.
        count: c in the paper, summary tokens at the end of each run.

    Returns:
        A mask object.

    References:
        Child et al. 2019, arXiv:1904.10509, §4.3, "fixed attention".
    """
    return causal() & (block_diagonal(size) | summary_tokens(size, count))
