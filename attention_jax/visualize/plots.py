"""Figures of attention: grids of heads, one head, entropies, block maps and alignments.

Each function returns a `matplotlib.figure.Figure` and uses neither pyplot nor global settings. The
tint is a root of the weight, so that small weights remain visible; the colour bar shows the scale.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from attention_jax._core.checks import as_array, check_floating
from attention_jax.masks.block_map import BlockMap
from attention_jax.visualize.canvas import (
    INK,
    MARK,
    SOFT,
    draw_map,
    frame,
    new_figure,
    set_text,
    ticks,
    weight_bar,
)
from attention_jax.visualize.layers import (
    Example,
    Tokens,
    Words,
    check_weights,
    entropy,
    labels,
    layer_labels,
    read_example,
    read_layers,
)

if TYPE_CHECKING:
    import matplotlib.figure

_NUMBERED = 12  # largest number of tokens on an axis for numbers in the cells
_LABELLED = 16  # and for tokens on the axes of a grid
_KINDS = (("skipped", "#e9ecf0"), ("partial", "#e69f00"), ("full", "#0072b2"))


def heads_grid(
    weights: Any, tokens: Tokens = None, key_tokens: Tokens = None, *, example: Example = None
) -> "matplotlib.figure.Figure":
    """A grid of all heads: one row for each layer, or the heads of one layer.

        w(t, s) = softmax_s( logits(t, s) ),  t down, s across

    Args:
        weights: `[N, T, S]` of one layer, `[L, N, T, S]` of several, or a list or mapping of
            layers, each `[*B, N, T, S]`; a `Capture` made with `weights=True` is such a mapping.
        tokens: T labels of the queries, or a mapping from patterns of layer names; by default
            their indices. Up to 16 are drawn.
        key_tokens: S labels of the keys; by default `tokens` if T = S.
        example: index of the example to draw, for weights with batch axes.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: weights that are not floating arrays, tokens that are not a list of strings.
        ValueError: shapes and tokens that do not match; numbers not finite or outside [0, 1].

    Example:
        >>> figure = heads_grid(np.full((2, 4, 3, 3), 1 / 3), ["the", "cat", "sat"])
        >>> len(figure.axes)  # eight heads and the colour bar
        9
    """
    layers = read_layers("weights", weights, example)
    words = [layer_labels(layer, tokens, key_tokens) for layer in layers]
    most = max(len(x) for _, x in layers)
    widest = max(x.shape[-1] for _, x in layers)
    across = min(most, 4) if len(layers) == 1 else most
    down = -(-most // across) if len(layers) == 1 else len(layers)
    figure = new_figure(1.1 + 1.5 * across, 0.6 + 1.5 * down)
    image = None
    for row, ((name, x), (queries, keys)) in enumerate(zip(layers, words, strict=True)):
        for n, plane in enumerate(x):
            cell = (n if len(layers) == 1 else row * across + n) + 1
            axes = figure.add_subplot(down, across, cell)
            image = draw_map(axes, plane, widest)
            first, last = (cell - 1) % across == 0, cell > across * (down - 1)
            below = keys if last and len(keys) <= _LABELLED else None
            beside = queries if first and len(queries) <= _LABELLED else None
            ticks(axes, below, beside, size=6)
            if row == 0 or len(layers) == 1:
                set_text(axes.set_title, f"head {n}", size=8)
            if first:
                set_text(axes.set_ylabel, name if len(layers) > 1 else "queries", size=8, fold=18)
            if last:
                set_text(axes.set_xlabel, "keys", size=8)
    weight_bar(figure, image)
    return figure


def head_map(
    weights: Any,
    tokens: Words | None = None,
    key_tokens: Words | None = None,
    *,
    title: str | None = None,
) -> "matplotlib.figure.Figure":
    """The weights of one head, with tokens on both axes and numbers in the cells of small maps.

        w(t, s) = softmax_s( logits(t, s) ),  t down, s across

    Args:
        weights: `[T, S]`.
        tokens: T labels of the queries; by default their indices.
        key_tokens: S labels of the keys; by default `tokens` if T = S.
        title: the title.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: weights that are not a floating array, tokens that are not a list of strings.
        ValueError: shapes and tokens that do not match; numbers not finite or outside [0, 1].

    Example:
        >>> figure = head_map(np.eye(3), ["the", "cat", "sat"])
        >>> [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
        ['the', 'cat', 'sat']
    """
    x = _plane("weights", weights)
    T, S = x.shape
    if key_tokens is None and tokens is not None and T != S:
        raise ValueError(f"there are T = {T} queries and S = {S} keys: give key_tokens too")
    queries = labels("tokens", tokens, "T", T)
    keys = labels("key_tokens", tokens if key_tokens is None else key_tokens, "S", S)
    figure = new_figure(1.9 + _side(S), 1.2 + _side(T))
    axes = figure.add_subplot()
    image = draw_map(axes, x, S)
    ticks(axes, keys, queries, size=8 if max(T, S) <= 24 else 6.5)
    if max(T, S) <= _NUMBERED:
        _numbers(axes, image, x)
    _name_axes(axes, "keys", "queries", title)
    weight_bar(figure, image)
    return figure


def entropy_grid(values: Any, *, example: Example = None) -> "matplotlib.figure.Figure":
    """The mean entropy of every head, layers down and heads across.

        H(l, n) = mean_t( −Σ_s w(t, s) ln w(t, s) )   in nats

    0 is the entropy of weights on one key, ln S that of uniform weights. Empty rows are left out.

    Args:
        values: weights, as in `heads_grid`; or entropies `[L, N]`, or a list or mapping of layers,
            each `[N]`: `[x.per_head("entropy") for x in found.values()]` of a `Capture`.
        example: index of the example, for weights with batch axes.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: not a floating array.
        ValueError: shapes that do not match; numbers that are neither weights nor entropies.

    Example:
        >>> figure = entropy_grid(np.full((2, 4, 3, 3), 1 / 3))
        >>> [text.get_text() for text in figure.axes[0].texts][:2]
        ['1.10', '1.10']
    """
    rows, most = _entropies(values, example)
    across = max(map(len, rows.values()))
    table = np.full((len(rows), across), np.nan)
    for i, row in enumerate(rows.values()):
        table[i, : len(row)] = row
    figure = new_figure(2.2 + 0.5 * across, 1.1 + 0.36 * len(rows))
    axes = figure.add_subplot()
    image = axes.imshow(table, cmap="Oranges", vmin=0, vmax=most, aspect="auto")
    frame(axes)
    ticks(axes, [str(n) for n in range(across)], list(rows), size=8, upright=True)
    _numbers(axes, image, table)
    _name_axes(axes, "head", None, "Mean entropy")
    bar = figure.colorbar(image, ax=axes, aspect=24, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7, colors=SOFT)
    set_text(bar.set_label, "nats", size=8, color=SOFT)
    return figure


def block_map(blocks: BlockMap | Any, *, example: Example = None) -> "matplotlib.figure.Figure":
    """A block map: which blocks of the [T, S] plane a kernel skips.

        kind(i, j) = 0 skipped, 1 partial, 2 full;   queries down, keys across

    Args:
        blocks: the result of `mask.block_map(T, S, size)`, or its kinds, integers `[..., nT, nS]`.
        example: index into the axes before nT, if there are any.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: neither a block map nor an integer array.
        ValueError: wrong shapes or kinds, a map without blocks.

    Example:
        >>> import attention_jax as aj
        >>> figure = block_map(aj.masks.causal().block_map(256, 256, 64))
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['6 skipped', '4 partial', '6 full']
    """
    mapped = isinstance(blocks, BlockMap)
    kinds = np.asarray(as_array("blocks", blocks.kinds if mapped else blocks))
    if not np.issubdtype(kinds.dtype, np.integer):
        raise TypeError(f"blocks must be a block map or integers, got dtype {kinds.dtype.name}")
    kinds = _one_plane(kinds, example)
    T, S = (blocks.T, blocks.S) if mapped else kinds.shape
    sizes = blocks.block_size if mapped else (1, 1)
    down, across = (
        np.minimum(np.arange(n + 1) * size, length)
        for n, size, length in zip(kinds.shape, sizes, (T, S), strict=True)
    )
    wide, tall = (4.2, 4.2 * min(max(T / S, 0.3), 2.0)) if S >= T / 2 else (2.6, 5.2)
    figure = new_figure(wide, tall + 0.6)
    axes = figure.add_subplot()
    colours = [colour for _, colour in _KINDS]
    shades = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])
    axes.pcolormesh(
        across, down, shades[kinds], edgecolors="white",
        linewidth=0.5 if max(kinds.shape) <= 64 else 0,
    )  # fmt: skip
    axes.set_xlim(0, S)
    axes.set_ylim(T, 0)
    frame(axes)
    unit = "" if mapped else ", in blocks"
    visited = int((kinds > 0).sum())
    title = f"{visited} of {kinds.size} blocks visited ({visited / kinds.size:.1%})"
    _name_axes(axes, f"keys{unit}", f"queries{unit}", title)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    for i, (name, colour) in enumerate(_KINDS):
        axes.bar(0, 0, color=colour, label=f"{int((kinds == i).sum())} {name}")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def alignment(
    weights: Any,
    source: Words,
    target: Words,
    gold: Annotated[Any, Iterable[tuple[int, int]]] = (),
) -> "matplotlib.figure.Figure":
    """Alignments of target and source words, with gold links framed.

        w(t, s) = weight on source word s for target word t

    Args:
        weights: `[T, S]`, or a mapping from titles to such arrays, drawn side by side.
        source: S source words, the horizontal axis.
        target: T target words, the vertical axis.
        gold: links to frame, pairs (target index, source index) in the order of the axes of
            `weights`: for a boolean array `[T, S]` of links, `np.argwhere(array)`.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: weights that are not floating arrays, words that are not a list of strings.
        ValueError: shapes, words and links that do not match; numbers not finite or outside
            [0, 1].

    Example:
        >>> figure = alignment(np.eye(2), ["la", "mer"], ["the", "sea"], gold=[(0, 0), (1, 1)])
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['the', 'sea']

    References:
        Bahdanau, Cho, Bengio 2015, "Neural Machine Translation by Jointly Learning to Align and
        Translate", arXiv:1409.0473, Figure 3.
    """
    panels = weights if isinstance(weights, Mapping) else {"": weights}
    if not panels:
        raise ValueError("weights has no map")
    maps = {str(title): _plane("weights", x) for title, x in panels.items()}
    links = [(int(t), int(s)) for t, s in gold]
    for x in maps.values():
        T, S = x.shape
        across, down = labels("source", source, "S", S), labels("target", target, "T", T)
        for t, s in links:
            if not (0 <= t < T and 0 <= s < S):
                raise ValueError(
                    f"gold link {(t, s)} must be (target, source) within T = {T}, S = {S}"
                )
    columns = min(len(maps), 3)
    rows = math.ceil(len(maps) / columns)
    figure = new_figure(1.0 + columns * (0.9 + _side(S)), rows * (1.1 + _side(T)))
    image = None
    for i, (title, x) in enumerate(maps.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        image = draw_map(axes, x, S)
        ticks(axes, across, down, size=8 if max(T, S) <= 24 else 6.5)
        _name_axes(axes, "source", "target", title)
        for t, s in links:
            axes.plot(
                [s - 0.5, s + 0.5, s + 0.5, s - 0.5, s - 0.5],
                [t - 0.5, t - 0.5, t + 0.5, t + 0.5, t - 0.5],
                color=MARK, linewidth=1.3, clip_on=False, zorder=3, label="gold",
            )  # fmt: skip
    weight_bar(figure, image)
    if links:
        frame = figure.axes[0].lines[:1]
        figure.legend(frame, ["gold"], loc="outside lower right", frameon=False, fontsize=8)
    return figure


def _plane(name: str, x: Any) -> np.ndarray:
    as_array(name, x)
    check_floating(name, x)
    if x.ndim != 2:
        raise ValueError(f"{name} must be [T, S], got {list(x.shape)}: pick an example and a head")
    plane = np.asarray(x).astype(np.float32)
    check_weights(name, plane)
    return plane


def _one_plane(kinds: np.ndarray, example: Example) -> np.ndarray:
    lead = kinds.shape[:-2]
    if kinds.ndim < 2 or 0 in kinds.shape:
        raise ValueError(f"blocks must be [..., nT, nS] with a block, got {list(kinds.shape)}")
    if example is None and any(size != 1 for size in lead):
        raise ValueError(f"blocks has axes {list(lead)} in front: choose one, example=...")
    at = read_example(example) or (0,) * len(lead)
    if len(at) != len(lead) or any(not -n <= i < n for i, n in zip(at, lead, strict=True)):
        raise ValueError(f"example {example} is not an index into the axes {list(lead)} of blocks")
    kinds = kinds[at]
    if kinds.min() < 0 or kinds.max() > 2:
        raise ValueError(f"blocks must be 0, 1 or 2, got {kinds.min()} to {kinds.max()}")
    return kinds


def _entropies(values: Any, example: Example) -> tuple[dict[str, np.ndarray], float]:
    """Rows of entropies by layer, and the upper end of the scale."""
    rows = values
    if not isinstance(values, (Mapping, list, tuple)):
        rows = list(as_array("values", values)) if values.ndim == 2 else None
    if rows is not None and not isinstance(rows, Mapping):
        rows = {f"layer {i}": row for i, row in enumerate(rows)}
    if rows and all(getattr(row, "ndim", None) == 1 for row in rows.values()):
        if example is not None:
            raise ValueError("example picks weights: entropies have no batch axes")
        for name, row in rows.items():
            check_floating(f"values of {name!r}", row)
        found = {str(name): np.asarray(row).astype(np.float32) for name, row in rows.items()}
        if not all(row.size and not (row < 0).any() for row in found.values()):
            raise ValueError("values must be entropies, 0 or more, of one head at least")
        most = max([float(row[np.isfinite(row)].max(initial=0)) for row in found.values()])
        return found, most or 1.0
    layers = read_layers("values", values, example)
    most = max(math.log(max(layer.weights.shape[-1], 2)) for layer in layers)
    return {layer.name: entropy(layer.weights)[0] for layer in layers}, most


def _numbers(axes: Any, image: Any, table: np.ndarray) -> None:
    """Writes the numbers into the cells."""
    for (i, j), value in np.ndenumerate(table):
        if np.isfinite(value):
            colour = "white" if image.norm(value) > 0.6 else INK
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)


def _name_axes(axes: Any, across: str, down: str | None, title: str | None) -> None:
    set_text(axes.set_xlabel, across, size=8.5, color=SOFT)
    if down:
        set_text(axes.set_ylabel, down, size=8.5, color=SOFT)
    if title:
        set_text(axes.set_title, title, size=9.5, loc="left", weight="bold", color=INK)


def _side(count: int) -> float:
    """Inches for a number of tokens."""
    return min(max(0.34 * count, 1.6), 8.0)
