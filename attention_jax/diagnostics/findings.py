"""The result of `diagnose`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem that a rule found.

    Attributes:
        name: "too_even", "collapsed", "no_scale", "double_scale", "entropy_collapse", "not_finite",
            "near_overflow", "dead_heads", "duplicate_heads", "mask_hides_all", "look_ahead",
            "padding_attended" or "long_sequence_decay".
        where: path of the attention.
        symptom: the observation.
        evidence: the numbers, in words.
        cause: the likely cause.
        remedy: what to change, with the exact argument.
        numbers: the numbers by name.
    """

    name: str
    where: str
    symptom: str
    evidence: str
    cause: str
    remedy: str
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """The finding in five lines."""
        parts = ("symptom", "evidence", "cause", "remedy")
        lines = [f"  {part:9} {getattr(self, part)}" for part in parts]
        return "\n".join([f"{self.name}  in  {self.where}", *lines])


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings of `diagnose`, in the order in which the attentions ran; false without any.

    Attributes:
        findings: the findings.
        examined: number of attentions examined.
        left_out: what could not be examined, and the option that it needs.
    """

    findings: tuple[Finding, ...]
    examined: int
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the findings, without duplicates."""
        return tuple(dict.fromkeys(finding.name for finding in self.findings))

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        """The findings, and what was not examined."""
        count = len(self.findings)
        what = f"{count} finding{'s' * (count > 1)}" if count else "nothing found"
        head = f"{what} in {self.examined} attention{'s' * (self.examined != 1)}"
        notes = [f"not examined: {note}" for note in self.left_out]
        return "\n\n".join([head, *map(str, self.findings), *notes])
