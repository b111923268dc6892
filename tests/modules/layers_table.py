"""Every public layer with its main options, made the same way in both flavours."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax import traverse_util

import attention_jax as aj
from tests.modules.flavours import MODULES as FLAVOURS

X, MEMORY = jnp.zeros((2, 5, 8)), jnp.zeros((2, 3, 8))
WIDE = jnp.zeros((2, 3, 6))
IDS = jnp.zeros((2, 5), jnp.int32)


def score_factory(num_heads: int, depth: int, source: Any) -> aj.scores.Score:
    """A score whose array is drawn from whatever the flavour passes as its random source."""
    key = source.params() if hasattr(source, "params") else source
    return aj.scores.general(jax.random.normal(key, (num_heads, depth, depth)))


def cases(al: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """For each case a layer's constructor with all arguments but `rngs`, and its inputs."""
    of = functools.partial
    heads = of(al.MultiHeadAttention, 4, 8)
    sizes, one = (2, 8, 16), (1, 2, 8, 16)
    table = {
        "plain": (heads, (X,)),
        "grouped": (of(heads, 16, 6, num_kv_heads=2, in_kv_features=6, value_features=12), None),
        "no bias": (of(heads, use_bias=False, normalize_qk=True, dropout_rate=0.1), (X,)),
        "fused": (of(heads, fused_qkv=True, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), (X,)),
        "masked": (of(heads, mask=jnp.ones((5, 5), bool)), (X,)),
        "object": (of(heads, score=aj.scores.cosine(jnp.ones(4))), (X,)),
        "biased": (of(heads, positions=aj.positions.alibi(4)), (X,)),
        "factory": (of(heads, score=score_factory), (X,)),
    }
    for name in ("dot", "scaled_dot", "general", "additive", "concat", "cosine"):
        table[name] = (of(heads, score=name), (X,))
    for name in ("rotary", "alibi", "relative_bias", "shaw"):
        table[name] = (of(heads, positions=name), (X,))
    for recipe in (
        al.additive(3, shared=True),
        al.general(shared=True),
        al.concat(3),
        al.learned_scale(),
        al.learned_scale(al.cosine(), per="layer"),
        al.entropy_scale(1.0, "additive"),
        al.log_length(train_length=9, learn=True),
        al.relative_bias(8),
        al.shaw(2),
    ):
        option = "positions" if type(recipe).__name__ in ("RelativeBias", "Shaw") else "score"
        table[repr(recipe)] = (of(heads, **{option: recipe}), (X,))
    table = {f"MultiHeadAttention {name}": case for name, case in table.items()}
    grouped = table["MultiHeadAttention grouped"][0]
    table["MultiHeadAttention grouped"] = (grouped, (X, WIDE))
    families = {
        "LinearAttention": {},
        "LowRankAttention": {"length": 7, "rank": 3},
        "LowRankAttention shared": {"length": 7, "rank": 3, "share_projections": True},
        "NystromAttention": {},
        "MemoryCompressedAttention": {},
        "MemoryCompressedAttention mean": {"convolution": False},
        "LSHAttention": {"normalize_qk": True},
        "RoutedAttention": {"positions": "rotary"},
    }
    for name, options in families.items():
        table[name] = (of(getattr(al, name.split()[0]), 4, 8, **options), (X,))
    graph, pooling = of(al.GraphAttention, 8, 3, 2), of(al.AttentionPooling, 8, 3, 2)
    layer, decoder = of(al.TransformerEncoderLayer, *sizes), of(al.TransformerDecoderLayer, *sizes)
    lm, model = of(al.TransformerLM, *one, 11), of(al.Transformer, *one, 11, 11)
    table |= {
        "AdditiveAttention": (of(al.AdditiveAttention, 8, 6, 3), (X, WIDE)),
        "MeanAttention": (of(al.MeanAttention, 8), (X, X)),
        "MeanAttention narrow": (of(al.MeanAttention, 8, 6, use_bias=False), (X, WIDE)),
        "AttentionPooling": (pooling, (X,)),
        "AttentionPooling additive": (of(pooling, score="additive", use_bias=False), (X,)),
        "AttentionPooling gated": (of(pooling, score="gated"), (X,)),
        "GraphAttention": (graph, (X,)),
        "GraphAttention mean": (of(graph, join="mean"), (X,)),
        "GraphAttention no bias": (of(graph, use_bias=False, dropout_rate=0.1), (X,)),
        "FeedForward": (of(al.FeedForward, 8, 16), (X,)),
        "FeedForward no bias": (of(al.FeedForward, 8, 16, use_bias=False), (X,)),
        "TransformerEncoderLayer": (layer, (X,)),
        "TransformerEncoderLayer options": (
            of(
                layer, norm="pre", score="additive", positions="shaw", num_kv_heads=1,
                normalize_qk=True, value_features=4, dropout_rate=0.1, use_bias=False,
            ),
            (X,),
        ),
        "TransformerEncoderLayer linear": (of(layer, attention=al.LinearAttention), (X,)),
        "TransformerDecoderLayer": (decoder, (X, MEMORY)),
        "TransformerDecoderLayer mean": (of(decoder, cross_attention="mean"), (X, MEMORY)),
        "TransformerDecoderLayer options": (
            of(decoder, norm="pre", score="cosine", cross_score="additive", num_kv_heads=1),
            (X, MEMORY),
        ),
        "TransformerEncoder": (of(al.TransformerEncoder, 2, *sizes, norm="pre"), (X,)),
        "TransformerEncoder scanned": (
            of(al.TransformerEncoder, 2, *sizes, scan_layers=True, dropout_rate=0.1), (X,),
        ),
        "TransformerDecoder": (of(al.TransformerDecoder, 2, *sizes), (X, MEMORY)),
        "TransformerDecoder scanned": (
            of(al.TransformerDecoder, 2, *sizes, scan_layers=True, norm="pre", remat=True),
            (X, MEMORY),
        ),
        "Transformer": (model, (IDS, IDS)),
        "Transformer options": (
            of(
                model, tie_output=False, share_embedding=True, positions="learned", max_length=6,
                dropout_rate=0.1,
            ),
            (IDS, IDS),
        ),
        "TransformerLM": (lm, (IDS,)),
        "TransformerLM options": (
            of(lm, tie_output=False, positions="learned", max_length=6, norm="post"), (IDS,),
        ),
        "TransformerLM scanned": (
            of(lm, scan_layers=True, positions="relative_bias", score="cosine"), (IDS,),
        ),
    }  # fmt: skip
    return table


def variables(flavour: str, name: str) -> dict[str, Any]:
    """Every variable of a new layer: its collection and path, and its shape and dtype."""
    make, inputs = cases(FLAVOURS[flavour])[name]
    if flavour == "linen":
        return _linen(make(), inputs)
    return _nnx(make)


def cache_variables(flavour: str) -> dict[str, Any]:
    """Those of an attention that keeps its own cache."""
    al = FLAVOURS[flavour]
    if flavour == "linen":
        return _linen(al.MultiHeadAttention(4, 8, decode=True), (X,))

    def make(rngs: Any) -> Any:
        layer = al.MultiHeadAttention(4, 8, decode=True, rngs=rngs)
        layer.init_cache(X.shape)
        return layer

    return _nnx(make)


def _linen(module: flax_linen.Module, inputs: Any) -> dict[str, Any]:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    init = functools.partial(module.init, deterministic=True)
    if type(module).__name__ in ("MeanAttention", "FeedForward"):
        init = module.init
    found: Mapping[str, Any] = jax.eval_shape(init, keys, *inputs)
    return {"/".join(path): leaf for path, leaf in traverse_util.flatten_dict(found).items()}


def _nnx(make: Callable[..., Any]) -> dict[str, Any]:
    made = flax_nnx.eval_shape(lambda: make(rngs=flax_nnx.Rngs(0)))
    found = {}
    for path, leaf in flax_nnx.to_flat_state(flax_nnx.state(made)):
        kind = getattr(leaf, "type", type(leaf)).__name__
        found["/".join([kind, *map(str, path)])] = leaf
    return found


def described(found: Mapping[str, Any]) -> list[str]:
    """The variables, one line for each module, sorted; float32 goes without saying."""
    modules: dict[str, list[str]] = {}
    for path, leaf in sorted(found.items()):
        module, _, name = path.rpartition("/")
        dtype = "" if leaf.dtype == jnp.float32 else f" {leaf.dtype}"
        modules.setdefault(module, []).append(f"{name} {list(leaf.shape)}{dtype}".replace(" ", ""))
    return [f"{module}: {' '.join(names)}" for module, names in modules.items()]
