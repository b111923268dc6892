"""A Linen model some of whose attentions are not as it would make them.

A Linen module makes its parts anew in every call, each as its options say. What a part is to be
instead is therefore kept with the whole, and given to the part while it is set up.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from attention_jax.cache import KVCache
from attention_jax.linen.attention import MultiHeadAttention

Model = TypeVar("Model", bound=nn.Module)
Fields = tuple[tuple[str, Any], ...]


class _Changed:
    """What a model's class is joined with: `changed` holds fields of its parts by path."""

    changed: tuple[tuple[str, Fields], ...]

    def apply(self, *args: Any, **options: Any) -> Any:
        """As the model's."""
        with _setting(self.changed):
            return super().apply(*args, **options)  # type: ignore[misc]

    def init_with_output(self, *args: Any, **options: Any) -> Any:
        """As the model's; `init` comes here too."""
        with _setting(self.changed):
            return super().init_with_output(*args, **options)  # type: ignore[misc]

    def bind(self, *args: Any, **options: Any) -> Any:
        """Refused: a bound module sets its parts up when nobody looks."""
        raise NotImplementedError(f"{type(self).__name__}.bind: call apply(variables, ...) instead")


class _Caching(_Changed):
    """The same of a model that makes its caches itself."""

    def new_cache(self, *args: Any, **options: Any) -> Any:
        """As the model's, with room for the heads that are there."""
        made = super().new_cache(*args, **options)  # type: ignore[misc]
        fields = {path: dict(x) for path, x in self.changed}

        def fitting(cache: Any, layers: str) -> Any:
            own = [
                x for path, x in fields.items() if f"/{path}".endswith(f"/{layers}/self_attention")
            ]
            if not isinstance(cache, KVCache) or not own:
                return cache
            heads = own[0]["num_kv_heads"]
            key, value = (
                jnp.zeros((*x.shape[:-2], heads, x.shape[-1]), x.dtype)
                for x in (cache.key, cache.value)
            )
            return dataclasses.replace(cache, key=key, value=value)

        if isinstance(made, tuple):
            return tuple(fitting(cache, f"layers_{i}") for i, cache in enumerate(made))
        return fitting(made, "layers")


def _setting(changed: tuple[tuple[str, Fields], ...]) -> Any:
    by_path = dict(changed)

    def fill(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if context.method_name == "setup" and isinstance(module, MultiHeadAttention):
            for name, value in by_path.get("/".join(module.path), ()):
                object.__setattr__(
                    module, name, value
                )  # frozen for others, once it is written down
        return call(*args, **options)

    return nn.intercept_methods(fill)


def _changed_class(original: type) -> Any:
    """The joined class, made once and kept by the original class alone."""
    if "_changed_class" in vars(original):
        return vars(original)["_changed_class"]
    body = {
        "__annotations__": {"changed": tuple},
        "changed": (),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    joined = _Caching if hasattr(original, "new_cache") else _Changed
    changed = type(original)(original.__name__, (joined, original), body, kw_only=True)
    original._changed_class = changed  # type: ignore[attr-defined]
    return changed


def with_fields(model: Model, fields: Mapping[str, Mapping[str, Any]]) -> Model:
    """The model, with other fields in some of its attentions, by path; "" is the model itself."""
    fields = dict(fields)
    own = fields.pop("", {})
    if not fields:
        return model.clone(**own) if own else model
    before: dict[str, dict[str, Any]] = {path: dict(x) for path, x in getattr(model, "changed", ())}
    after = {**before, **{path: {**before.get(path, {}), **x} for path, x in fields.items()}}
    changed = tuple((path, tuple(x.items())) for path, x in after.items())
    if isinstance(model, _Changed):
        return model.clone(changed=changed)
    names = (f.name for f in dataclasses.fields(model) if f.init and f.name != "parent")
    options = {name: getattr(model, name) for name in names}
    return _changed_class(type(model))(**options, parent=None, changed=changed)


def attention_at(model: nn.Module, path: str, name: str) -> MultiHeadAttention:
    """The attention at a path, as it was written down.

    Raises:
        ValueError: there is none, or it is made in the middle of a call and not in `setup`.
    """
    found: Any = model
    if path:
        with _setting(getattr(model, "changed", ())):
            found = nn.Module.bind(model, {})
            for step in path.split("/"):
                found = None if found is None else _part(found, step)
            if isinstance(found, MultiHeadAttention):
                _part(found, "")  # sets it up, and with that its fields
                found = found.clone(parent=None)
    if not isinstance(found, MultiHeadAttention):
        raise ValueError(
            f"{name}: {path!r} leads to no MultiHeadAttention that a setup makes; one that is made "
            "in a compact method is pruned by itself"
        )
    return found


def _part(module: nn.Module, name: str) -> Any:
    """The part of that name, or None."""
    getattr(module, "_not_there", None)  # which a module looks for by setting itself up
    own = {key: x for key, x in vars(module).items() if key != "parent"}
    parts = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, nn.Module))
    return next((x for x in parts if isinstance(x, nn.Module) and x.name == name), None)
