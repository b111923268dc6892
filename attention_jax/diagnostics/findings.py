"""What a doctor writes down."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """One trouble: what is seen, the numbers, what it comes from and what to change.

    Attributes:
        name: the trouble's name: "too_even", "collapsed", "no_scale", "double_scale",
            "entropy_collapse", "not_finite", "near_overflow", "dead_heads", "duplicate_heads",
            "mask_hides_all", "look_ahead", "padding_attended" or "long_sequence_decay".
        where: the attention's path.
        symptom: what is seen.
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
        """Five lines for a person."""
        return "\n".join(
            [
                f"{self.name}  in  {self.where}",
                f"  symptom   {self.symptom}",
                f"  evidence  {self.evidence}",
                f"  cause     {self.cause}",
                f"  remedy    {self.remedy}",
            ]
        )


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which the attentions ran; false where there are none.

    Attributes:
        findings: the findings.
        examined: how many attentions were looked at.
        left_out: what could not be told, and what it would take.
    """

    findings: tuple[Finding, ...]
    examined: int
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The findings' names, each once."""
        return tuple(dict.fromkeys(finding.name for finding in self.findings))

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        """The findings one below the other, and what was not examined."""
        count = len(self.findings)
        what = f"{count} finding{'s' * (count > 1)}" if count else "nothing found"
        head = f"{what} in {self.examined} attention{'s' * (self.examined != 1)}"
        notes = [f"not examined: {note}" for note in self.left_out]
        return "\n\n".join([head, *map(str, self.findings), *notes])
