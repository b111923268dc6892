"""Noun phrases of the English-German grammar: agreement, coordination, relative clauses.

Every rule takes a budget of English words and returns both sides. The English side is a list of
word ids, the German side a list of tokens that name the ids they translate; ids become positions
when the sentence is finished.
"""

import abc
from collections.abc import Callable, Sequence

from .lexicon import (
    ADJECTIVES,
    CONTRACTIONS,
    DETERMINERS,
    NAMES,
    NOUN_PREPOSITIONS,
    NOUNS,
    PRONOUNS,
    RELATIVE,
    THE,
    VERBS,
    Case,
    Determiner,
    Noun,
    Verb,
)

# A German token: its form, the id of its sure source word or None, ids of other possible ones. The
# English side is a list of ids; ids index Derivation.words and become positions at the very end.
Token = tuple[str, int | None, tuple[int, ...]]
Phrase = tuple[list[int], list[Token]]
Subject = tuple[list[int], list[Token], str]  # with the verb form it asks for


def _frames(objects: str) -> dict[str, tuple[Verb, ...]]:
    """Verbs with one object, by the kind of object they take."""
    return {k: tuple(v for f in "ad" for v in VERBS[f] if k in v.objects) for k in objects}


_VERBS_BY_OBJECT = _frames("patl")
_SINGULAR = tuple(d for d in DETERMINERS if d.english[0])
_PLURAL = tuple(d for d in DETERMINERS if d.english[1])
_SUBJECT_PRONOUNS = (PRONOUNS[0], *PRONOUNS)  # "I" twice, so that its verb forms are not too rare
_OBJECT_PRONOUNS = {True: PRONOUNS[2:], False: PRONOUNS[-1:]}  # by whether persons may be meant


class NounPhrases(abc.ABC):
    """One sentence pair in the making: its words so far and the rules for noun phrases.

    Args:
        chance: The source of randomness, uniform in [0, 1).
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self.chance = chance
        self.words: list[str] = []
        self.depth = 0  # of the relative clause being built
        self.relatives = 0  # relative clauses begun so far

    def pick(self, choices: Sequence):
        """One of ``choices``, each equally likely."""
        return choices[int(self.chance() * len(choices))]

    def share(self, budget: int, low: int) -> int:
        """A part of ``budget`` that is at least ``low`` and leaves at least ``low``."""
        return low + int(self.chance() * max(1, budget - 2 * low + 1))

    def word(self, form: str) -> int:
        """A new English word, by id."""
        self.words.append(form)
        return len(self.words) - 1

    def both(self, english: str, german: str) -> Phrase:
        """A word on both sides, surely linked."""
        new = self.word(english)
        return [new], [(german, new, ())]

    def noun_phrase(self, budget: int, case: Case, kinds: str, *, simple: bool = False) -> Subject:
        """A noun phrase of about ``budget`` words; ``simple``: no coordination inside.

        A relative clause follows its noun directly, the left side of a coordination is short, and
        what stands under a preposition never coordinates: so no attachment is ambiguous. Relative
        clauses nest twice.
        """
        if budget >= 5 and not simple and "p" in kinds and self.chance() < 0.3:
            left = self.short_phrase(2 + (self.chance() < 0.4), case, kinds, pronouns=False)
            conjunction = self.both("and", "und")
            right = self.noun_phrase(budget - len(left[0]) - 1, case, kinds, simple=True)
            english = left[0] + conjunction[0] + right[0]
            return english, left[1] + conjunction[1] + right[1], "p"
        if budget < 4:
            return self.short_phrase(budget, case, kinds)
        room = budget - 2
        clause = self.depth < 2 and (self.chance() < 0.6 or room > 6)
        adjectives = int(room > 2 and self.chance() < 0.3) if clause else min(2, max(0, room - 3))
        if not clause and room == 2:
            return self.counted(THE, self.pick(NOUNS[self.pick(kinds)]), case, adjectives=2)
        noun = self.pick(NOUNS[self.pick(kinds)])
        english, german, agreement = self.counted(None, noun, case, adjectives=adjectives)
        gender = "p" if agreement == "p" else noun.gender
        attach = self.relative_clause if clause else self.attribute
        more = attach(budget - len(english), noun, gender)
        return english + more[0], german + more[1], agreement

    def short_phrase(
        self, budget: int, case: Case, kinds: str, *, pronouns: bool = True
    ) -> Subject:
        """A pronoun or a name (1 word), or a determiner, an adjective or two, and a noun."""
        if budget >= 2:
            noun = self.pick(NOUNS[self.pick(kinds)])
            return self.counted(None, noun, case, adjectives=min(2, budget - 2))
        if "p" in kinds and (not pronouns or self.chance() < 0.5):
            name = self.pick(NAMES)
            english, german = self.both(name, name)
            return english, german, "3s"
        chosen = self.pick(_SUBJECT_PRONOUNS if case == "n" else _OBJECT_PRONOUNS["p" in kinds])
        english, german = self.both(chosen.english[case != "n"], chosen.german[case])
        return english, german, chosen.agreement

    def counted(
        self, determiner: Determiner | None, noun: Noun, case: Case, *, adjectives: int
    ) -> Subject:
        """Determiner, adjectives and noun, agreeing in gender, number and case."""
        plural = self.chance() < 0.3
        if determiner is None:
            determiner = THE if self.chance() < 0.4 else self.pick(_PLURAL if plural else _SINGULAR)
        if case == "g" and determiner.endings is None:
            determiner = THE
        gender = "p" if plural else noun.gender
        chosen = [self.pick(ADJECTIVES[noun.kind]) for _ in range(adjectives)]
        following = chosen[0][0] if chosen else noun.english[plural]
        article = determiner.english[plural]
        if article == "a" and following[0] in "aeiou":
            article = "an"
        english, german = self.both(article, determiner.form(case, gender))
        for word, stem in chosen:
            e, g = self.both(word, stem + determiner.adjective[case, gender])
            english += e
            german += g
        e, g = self.both(noun.english[plural], noun.form(case, plural))
        return english + e, german + g, "p" if plural else "3s"

    def attribute(self, budget: int, noun: Noun, gender: str) -> Phrase:
        """What follows a noun: of + genitive, or a prepositional phrase, 3 words or more."""
        if self.chance() < 0.4:
            of = self.word("of")
            e, g, _ = self.noun_phrase(max(2, budget - 1), "g", "p", simple=True)
            form, sure, possible = g[0]
            return [of, *e], [(form, sure, (of, *possible)), *g[1:]]
        return self.prepositional(NOUN_PREPOSITIONS, budget)

    def prepositional(self, choices: Sequence, budget: int) -> Phrase:
        """Preposition and noun phrase; in dem and von dem become im and vom."""
        word, german, case, kinds = self.pick(choices)
        preposition = self.word(word)
        e, g, _ = self.noun_phrase(max(2, budget - 1), case, kinds, simple=True)
        merged = CONTRACTIONS.get((german, g[0][0]))
        if merged and g[0][1] is not None:
            return [preposition, *e], [(merged, preposition, (g[0][1],)), *g[1:]]
        return [preposition, *e], [(german, preposition, ()), *g]

    def relative_clause(self, budget: int, noun: Noun, gender: str) -> Phrase:
        """A clause about the noun: as its subject, its object, or in the place it names."""
        kinds = noun.kind
        draw = self.chance()
        self.depth += 1
        self.relatives += 1
        if kinds == "l" and budget >= 4 and draw < 0.5:
            preposition, pronoun = self.word("in"), self.word("which")
            head = [preposition, pronoun]
            start = [("in", preposition, ()), (RELATIVE["d", gender], pronoun, ())]
            e, g = self.clause(budget - 2, "final")
        elif kinds in "tl" or (budget >= 3 and draw < 0.4):
            pronoun = self.word("that")
            verb = self.pick(_VERBS_BY_OBJECT[kinds])
            head, start = [pronoun], [(RELATIVE[verb.frame, gender], pronoun, ())]
            e, g = self.clause(budget - 1, "final", verb=verb, gap=True)
        else:
            pronoun = self.word("who" if kinds == "p" else "that")
            head = [pronoun]
            start = []
            token = (RELATIVE["n", gender], pronoun, ())
            agreement = "p" if gender == "p" else "3s"
            e, g = self.clause(budget, "final", subject=([], [token], agreement), kinds=kinds)
        self.depth -= 1
        return head + e, [(",", None, (pronoun,)), *start, *g, (",", None, (pronoun,))]

    @abc.abstractmethod
    def clause(
        self,
        budget: int,
        order: str,
        *,
        verb: Verb | None = None,
        gap: bool = False,
        subject: Subject | None = None,
        kinds: str = "",
        tense: str | None = None,
    ) -> Phrase:
        """A clause; the rules are in ``derivation.py``."""
