"""Visualisation of attention weights: figures, and an interactive HTML page.

explorer(weights, tokens).save("attention.html")     a self-contained page
heads_grid(weights, tokens).savefig("heads.png")     a `matplotlib.figure.Figure`

Weights are arrays: `[N, T, S]` of one layer, `[L, N, T, S]` of several, or a list or mapping of
layers, each `[*B, N, T, S]`. Figures need the extra `visualize`.
"""

from attention_jax.visualize.explorer import Explorer as Explorer
from attention_jax.visualize.explorer import explorer as explorer
from attention_jax.visualize.plots import alignment as alignment
from attention_jax.visualize.plots import block_map as block_map
from attention_jax.visualize.plots import entropy_grid as entropy_grid
from attention_jax.visualize.plots import head_map as head_map
from attention_jax.visualize.plots import heads_grid as heads_grid
