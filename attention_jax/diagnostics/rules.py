"""The rules of `diagnose`, one row each: a condition, and the texts of its finding."""

from typing import Any, NamedTuple

from attention_jax.diagnostics import conditions as c
from attention_jax.diagnostics.findings import Finding


class Rule(NamedTuple):
    """A row of the table; texts are formatted with the numbers of the condition.

    Attributes:
        name: name of the finding.
        subject: what the condition examines.
        condition: `condition(data)` is the numbers of a finding, or None.
        symptom: the observation.
        evidence: the numbers, in words.
        cause: the likely cause.
        remedy: what to change.
        group: only the first finding of a group is reported.
    """

    name: str
    subject: str
    condition: c.Condition
    symptom: str
    evidence: str
    cause: str
    remedy: str
    group: str = ""


def examine(path: str, data: Any, *subjects: str) -> list[Finding]:
    """The findings of the rules for some subjects in the same data."""
    findings: list[Finding] = []
    groups: set[str] = set()
    for rule in RULES:
        if rule.subject not in subjects or rule.group in groups:
            continue
        if (numbers := rule.condition(data)) is None:
            continue
        where, facts = numbers.pop("_where", path), getattr(data, "facts", None)
        texts = {
            part: getattr(rule, part).format(path=where, facts=facts, **numbers)
            for part in ("symptom", "evidence", "cause", "remedy")
        }
        shown = {name: x for name, x in numbers.items() if not name.startswith("_")}
        findings.append(Finding(rule.name, where, **texts, numbers=shown))
        if rule.name == "not_finite":  # the other statistics are not finite either
            break
        groups |= {rule.group} - {""}
    return findings


def _is_even(x: dict[str, Any], least: float) -> bool:
    return x["_least_relative_entropy"] >= least


def _is_scaled_before(x: dict[str, Any]) -> bool:
    """Whether queries are smaller than keys by about √H, with a score that has a scale."""
    ratio = x["query"] * x["_root"] / max(x["key"], 1e-30)
    return x["scale"] is not None and x["_root"] >= 4 and 0.5 < ratio < 2


def _is_saturated(x: dict[str, Any]) -> bool:
    flat = x["logit_range"] > c.SATURATED and x["jacobian_norm"] < c.FROZEN
    return flat and x["_least_largest_weight"] > c.SHARP


# fmt: off
RULES = (
    Rule("not_finite", "attention", c.not_finite,
         "NaN or infinity",
         "non-finite positions: {_counted}; dtype {dtype}",
         "{_cause}",
         "{_remedy}", "finite"),
    Rule("near_overflow", "attention", c.near_overflow,
         "the {_name} is close to the largest number of {dtype}",
         "{_name} up to {largest:.4g}; the largest {dtype} is {_end:.4g}",
         "activations grow without bound: no normalisation before the layer, or a learning rate "
         "that is too high",
         "{_remedy}", "finite"),
    Rule("mask_hides_all", "attention", c.empty_rows,
         "queries without visible keys: their output is 0",
         "{rows} of {_total} rows; mask {facts.mask}",
         "a mask with True and False swapped, or two masks that leave nothing visible together",
         "mask=: True where a query may attend; compare mask.to_array(T, S) with the intended one"),
    Rule("look_ahead", "causal attention", c.leak("ahead_share"),
         "queries attend to keys at later positions: training copies what it should predict",
         "{ahead_share:.3f} of the weight is on later positions; mask {facts.mask}",
         "no causal mask, or a mask without a causal part",
         "mask=masks.causal(), combined with other masks by &"),
    Rule("padding_attended", "attention", c.leak("padding_share"),
         "queries attend to padding",
         "{padding_share:.3f} of the weight is on padding; mask {facts.mask}",
         "no padding mask, or one for another axis",
         "mask=masks.padding(key_lengths), or source_mask=tokens != pad of Transformer"),
    Rule("double_scale", "attention",
         c.sharpness(lambda x: x["_relative_scale"] < 0.5 and _is_even(x, c.FLAT)),
         "every query weighs all visible keys alike: the attention is an average",
         "entropy {relative_entropy:.4f} of ln n, range of logits {logit_range:.3g}; scale "
         "{scale:.4g}, 1/√H is {_inverse:.4g}",
         "the scores are divided by √H = {_root:.3g} once too often, or scaled far below 1/√H",
         'leave the scale to the score: score="scaled_dot", or scores.scaled_dot()', "even"),
    Rule("double_scale", "attention",
         c.sharpness(lambda x: _is_scaled_before(x) and _is_even(x, c.FLAT)),
         "every query weighs all visible keys alike: the attention is an average",
         "entropy {relative_entropy:.4f} of ln n, range of logits {logit_range:.3g}; queries up to "
         "{query:.3g}, keys up to {key:.3g}, √H is {_root:.3g}",
         "queries are smaller than keys by about √H: they seem to be scaled before the score, and "
         "again by it",
         'scale once: pass queries unscaled, or score="dot" with scaled queries', "even"),
    Rule("too_even", "attention", c.sharpness(lambda x: _is_even(x, c.EVEN)),
         "every query weighs all visible keys alike: the attention is an average",
         "entropy {relative_entropy:.4f} of ln n, range of logits {logit_range:.3g}; {facts.score}",
         "queries and keys are too small to distinguish keys (initialisation, weight decay), or "
         "the temperature is too high",
         "a learned scale: score=attention_jax.nnx.cosine(10.0), a larger kernel_init=, or a lower "
         "tau= of scores.temperature", "even"),
    Rule("no_scale", "attention",
         c.sharpness(lambda x: x["_relative_scale"] >= 2 and x["relative_entropy"] < c.UNSCALED),
         "the softmax saturates: weights near 0 and 1 have little gradient",
         "entropy {relative_entropy:.3f} of ln n, largest weight {largest_weight:.3f}, range of "
         "logits {logit_range:.3g}, Jacobian {jacobian_norm:.3g}; scale {scale:.4g}, 1/√H is "
         "{_inverse:.4g}",
         "dot products of depth H = {facts.depth} are not divided by √H = {_root:.3g}",
         'score="scaled_dot", or scores.scaled_dot() in place of {facts.score}', "sharp"),
    Rule("collapsed", "attention", c.sharpness(_is_saturated),
         "each query's weights have collapsed on one key: no gradient passes the softmax",
         "largest weight {largest_weight:.4f}, entropy {relative_entropy:.2g} of ln n, range of "
         "logits {logit_range:.3g}, Jacobian {jacobian_norm:.2g}; {facts.score}",
         "queries and keys are too large (learning rate, initialisation), or there is no scale",
         "normalize_qk=True, or score=scores.soft_cap(scores.scaled_dot(), 50.0); a smaller "
         "kernel_init= or learning rate", "sharp"),
    Rule("collapsed", "attention", c.one_key,
         "all queries attend to one and the same key, in {_heads}",
         "largest weight {_largest:.3f}, standard deviation of the mean key {_moved:.2g} of S, "
         "weight on the first key {_first:.3f}",
         "with most weight on the first key an attention sink: unused heads attend to the first "
         "token; else keys or logits that grow without bound",
         "normalize_qk=True, or score=scores.soft_cap(scores.scaled_dot(), 50.0); a lower learning "
         "rate or a longer warm-up", "sharp"),
    Rule("dead_heads", "attention", c.dead,
         "the output of {_heads} is close to 0",
         "output norm {_norm:.3g}, of the median head {_median:.3g}",
         "values, or the head's slice of the output projection, decayed to 0 or started there",
         "nnx.prune_heads(model, {{{path!r}: {heads}}}), or initialise them again"),
    Rule("duplicate_heads", "attention", c.duplicates,
         "heads {_pairs} have the same weights",
         "{_evidence}",
         "heads that were initialised alike, or more heads than the task needs",
         "nnx.merge_similar_heads, or fewer heads: num_heads={_left}"),
    Rule("not_finite", "gradients", c.bad_gradients,
         "gradients that are not finite",
         "{_n} parameters, {_sum} entries, among them {path}",
         "a loss or an activation that overflows, or a division by 0, in the backward pass",
         "optax.apply_if_finite around the optimiser; a larger dtype; jax_debug_nans"),
    Rule("long_sequence_decay", "lengths", c.diluted,
         "attention that is focused on short inputs is diluted on long ones",
         "entropy {short:.2f} of ln n for rows with up to {_few} visible keys, {long:.2f} for rows "
         "with {_many} and more",
         "logits that do not grow with the number of keys",
         "score=scores.log_length(scores.scaled_dot(), 1.0), or a bounded number of visible keys: "
         "masks.window(left, 0)"),
    Rule("not_finite", "history", c.broken,
         "training broke at step {step}",
         "first at step {step}: {_shown}",
         "the steps before it: compare entropy, logits and gradient norms there",
         "resume before it with a lower learning rate, optax.clip_by_global_norm(1.0), or "
         "normalize_qk=True"),
    Rule("entropy_collapse", "training", c.collapse,
         "entropy collapses while logits grow: attention saturates on single keys",
         "entropy {before:.3g} at first, {after:.3g} at last, below a tenth from step {step}; "
         "largest logit {_low:.3g} at first, {_high:.3g} at last",
         "query and key weights grow without bound, commonly by a learning rate that is too high",
         "normalize_qk=True, score=scores.soft_cap(scores.scaled_dot(), 30.0), warm-up, or "
         "diagnostics.entropy_regularizer in the loss"),
)
# fmt: on
