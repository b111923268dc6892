"""A synchronous English-German grammar: one derivation, two sentences, gold word alignment.

Each rule builds both sides at once:

    clause -> subject verb object            | subject verb object            (verb second)
    that-clause -> that subject verb object  | , dass subject object verb     (verb final)
    fronted -> adverb subject verb           | adverb verb subject            (inversion)
    past -> subject verbed object            | subject hat object participle  (the bracket)
    noun phrase -> the noun who clause       | der Nomen , der clause ,       (agreement)

Clauses nest (relative clauses on subject, object and place; that-clauses; because, if, although)
and coordinate, down a budget of words, so that any length from 3 to 60 can be asked for. The target
is a function of the source: attachment is restricted until no sentence has two readings that German
tells apart. The vocabulary is closed: about 300 English and 500 German forms.

Every German token has at least one possible link and at most one sure one, so that an aligner that
links each target word once can reach an alignment error rate of 0.

References:
    Lewis and Stearns 1968, Syntax-directed transduction, JACM 15(3): synchronous derivations.
    Och and Ney 2003, A systematic comparison of statistical alignment models, CL 29(1): sure and
    possible links.
"""

from collections.abc import Sequence

from .dataset import Link, Pair
from .lexicon import (
    ADJECTIVES,
    ADVERBS,
    BE,
    CONJUNCTIONS,
    FRONTED,
    FUTURE,
    HABEN,
    MODALS,
    NAMES,
    PLACE_PREPOSITIONS,
    SEIN,
    SUBORDINATORS,
    VERBS,
    WAR,
    WAS,
    Case,
    Verb,
)
from .phrases import NounPhrases, Phrase, Subject, Token


class Derivation(NounPhrases):
    """One sentence pair in the making, by the rules for clauses and sentences."""

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
        """A clause, its German finite verb where ``order`` says.

        Args:
            budget: Words wanted, subject included.
            order: ``second``, ``inverted`` (before the subject) or ``final``.
            verb: The verb, if it is fixed already.
            gap: The verb's one object is missing: it is the relative pronoun before the clause.
            subject: The subject, if it is fixed already (the relative pronoun).
            kinds: Kind of that subject.
            tense: present, past, future, modal, or None for any.
        """
        tense = tense or self.pick(
            ("present", "present", "present", "past", "past", "modal", "future")
        )
        adverb = budget >= 4 and self.chance() < 0.25
        modal = self.pick(MODALS) if tense == "modal" else FUTURE if tense == "future" else None
        left = budget - 1 - adverb - (len(modal[0]) if modal else 0) - (subject is not None)
        if verb is None:
            verb = self.choose_verb(left - (subject is None), kinds)
        if verb is None:
            return self.copula(budget, order, subject, kinds, adverb=adverb, past=tense == "past")

        place = None
        if left >= 7 - 2 * (verb.frame == "i") and verb.frame != "c" and self.chance() < 0.4:
            place = 3 + int(self.chance() * min(4, left - 6 + 1)) if left > 6 else 3
            left -= place
        slots = (subject is None) + (
            len(verb.frame) if not gap and verb.frame in ("a", "d", "da") else 0
        )
        clausal = verb.frame == "c"
        if clausal:
            own = 0 if subject else min(3, 1 + int(self.chance() * 3), left - 4)
            sizes = [own] if subject is None else []
            left -= own
        else:
            sizes = self.split(left, slots)
        if subject is None:
            subject = self.noun_phrase(max(1, sizes.pop(0)), "n", kinds or verb.subjects)
        agreement = subject[2]

        main, finite, rest = self.verb_group(verb, tense, agreement, modal)
        middle_adverb = self.both(*self.pick(ADVERBS)) if adverb else ([], [])
        light, heavy, objects = [], [], []
        relatives = self.relatives
        if not gap and verb.frame in ("a", "d", "da"):
            # the dative comes first in both languages
            cases: tuple[Case, ...] = ("d", "a") if verb.frame == "da" else (verb.frame,)
            for case in cases:
                kind = "p" if verb.frame == "da" and case == "d" else verb.objects
                size = max(2 if verb.frame == "da" else 1, sizes.pop(0))
                e, g, _ = self.noun_phrase(size, case, kind)
                objects += e
                if len(e) == 1 and self.words[e[0]] not in NAMES:
                    light += g
                else:
                    heavy += g
        # behind a relative clause the place would be read as a part of it
        place = place if self.relatives == relatives else None
        where = self.prepositional(PLACE_PREPOSITIONS, place) if place else ([], [])
        extra = self.subordinate("that", "dass", max(3, left)) if clausal else ([], [])

        auxiliary, full = main
        adverb_first = (
            middle_adverb[0] + auxiliary if tense == "modal" and len(auxiliary) > 1 else None
        )
        verbs = (adverb_first or auxiliary + middle_adverb[0]) + full
        english = subject[0] + verbs + objects + where[0] + extra[0]
        middle = light + middle_adverb[1] + heavy + where[1]
        return english, self.arrange(order, subject[1], finite, middle, rest, verb) + extra[1]

    def choose_verb(self, room: int, kinds: str) -> Verb | None:
        """A verb that fits ``room`` words after subject and verb; None stands for the copula.

        No that-clause inside a relative clause: ", and that ..." behind it would have two readings.
        """
        draw = self.chance()
        if (draw < 0.12 and room >= 1) or kinds in ("t", "l"):
            return None
        living = kinds in ("", "p")
        if room >= 5 and draw < 0.35 and living and not self.depth:
            return self.pick(VERBS["c"])
        if room >= 5 and draw < 0.5 and living:
            return self.pick(VERBS["da"])
        if room < 1 or (room >= 3 and draw > 0.9):
            return self.pick(VERBS["i"])
        frame = "d" if self.chance() < 0.25 else "a"
        choices = VERBS[frame] if living else [v for v in VERBS[frame] if "a" in v.subjects]
        return self.pick(choices)

    def split(self, budget: int, parts: int) -> list[int]:
        """``budget`` words over 0 to 3 phrases, each at least 1 where it can."""
        sizes = []
        for left in range(parts, 0, -1):
            size = budget if left == 1 else 1 + int(self.chance() * (budget - left + 1))
            sizes.append(max(1, size))
            budget -= sizes[-1]
        return sizes

    def verb_group(self, verb: Verb, tense: str, agreement: str, modal) -> tuple:
        """English (auxiliaries, verb), German finite token, German tokens of the right bracket."""
        third = agreement == "3s"
        if modal:
            auxiliary = [self.word(w) for w in modal[third]]
            full = self.word(verb.english[0])
            finite = (modal[2][agreement], auxiliary[0], ())
            rest = [(verb.infinitive, full, tuple(auxiliary[1:]))]
            return (auxiliary, [full]), finite, rest
        if tense == "past":
            full = self.word(verb.english[2])
            have = SEIN if verb.auxiliary == "sein" else HABEN
            return ([], [full]), (have[agreement], None, (full,)), [(verb.participle, full, ())]
        full = self.word(verb.english[third])
        rest = [(verb.particle, None, (full,))] if verb.particle else []
        return ([], [full]), (verb.german[agreement], full, ()), rest

    def copula(
        self,
        budget: int,
        order: str,
        subject: Subject | None,
        kinds: str,
        *,
        adverb: bool,
        past: bool,
    ) -> Phrase:
        """Subject, form of be, predicative adjective (never inflected)."""
        kind = kinds or self.pick(("p", "p", "a", "t", "l"))
        if subject is None:
            subject = self.noun_phrase(max(1, budget - 2 - adverb), "n", kind)
        be, war = (WAS, WAR) if past else (BE, SEIN)
        verb, finite = self.both(be[subject[2]], war[subject[2]])
        more = self.both(*self.pick(ADVERBS)) if adverb else ([], [])
        adjective = self.both(*self.pick(ADJECTIVES[kind]))
        english = subject[0] + verb + more[0] + adjective[0]
        return english, self.arrange(order, subject[1], finite[0], more[1] + adjective[1], [], None)

    def arrange(self, order, subject, finite, middle, rest, verb) -> list[Token]:
        """German word order; the particle of a separable verb rejoins it at the clause's end."""
        if order == "second":
            return [*subject, finite, *middle, *rest]
        if order == "inverted":
            return [finite, *subject, *middle, *rest]
        if verb is not None and verb.particle and rest and rest[0][0] == verb.particle:
            return [*subject, *middle, (verb.particle + finite[0], *finite[1:])]
        return [*subject, *middle, *rest, finite]

    def subordinate(self, english: str, german: str, budget: int) -> Phrase:
        """Comma, subordinator and verb-final clause; long that-clauses coordinate."""
        joint = self.word(english)
        start = [(",", None, (joint,)), (german, joint, ())]
        if english == "that" and budget >= 9 and self.chance() < 0.5:
            first = self.share(budget - 3, 3)
            e, g = self.clause(first, "final")
            conjunction = self.both("and", "und")
            again = self.both("that", "dass")
            e2, g2 = self.clause(budget - 3 - first, "final")
            return [joint, *e, *conjunction[0], *again[0], *e2], start + g + conjunction[1] + again[
                1
            ] + g2
        e, g = self.clause(budget - 1, "final")
        return [joint, *e], start + g

    def main(self, budget: int) -> Phrase:
        """A main clause, with a subordinate clause before or behind it or a fronted adverb."""
        draw = self.chance()
        if budget >= 8 and (draw < 0.35 or budget > 16):
            first = self.share(budget - 2, 3)
            word, german = self.pick(SUBORDINATORS)
            if self.chance() < 0.5:
                e, g = self.clause(first, "second")
                e2, g2 = self.subordinate(word, german, budget - first)
                return e + e2, g + g2
            e, g = self.subordinate(word, german, first + 1)
            comma = self.both(",", ",")
            e2, g2 = self.clause(budget - first - 2, "inverted")
            return e + comma[0] + e2, g[1:] + comma[1] + g2
        if budget >= 3 and draw > 0.8:
            tense = self.pick(tuple(FRONTED))
            adverb = self.both(*self.pick(FRONTED[tense]))
            e, g = self.clause(budget - 1, "inverted", tense=tense)
            return adverb[0] + e, adverb[1] + g
        return self.clause(budget, "second")

    def sentence(self, budget: int) -> Phrase:
        """Main clauses, coordinated by ", and" and ", but", and a full stop."""
        budget -= 1
        english, german = [], []
        while budget > 22 or (budget >= 9 and self.chance() < 0.3):
            first = 3 + int(self.chance() * min(14, budget - 7))
            e, g = self.main(first)
            comma = self.both(",", ",")
            conjunction = self.both(*self.pick(CONJUNCTIONS))
            english += e + comma[0] + conjunction[0]
            german += g + comma[1] + conjunction[1]
            budget = max(3, budget - len(e) - 2)
        e, g = self.main(budget)
        stop = self.both(".", ".")
        return english + e + stop[0], german + g + stop[1]

    def source(self, english: Sequence[int]) -> str:
        """The English text."""
        words = self.words
        return " ".join([words[new] for new in english])


def link(source: str, english: Sequence[int], german: Sequence[Token]) -> Pair:
    """The finished pair: neighbouring commas merged, none before a full stop, links numbered."""
    tokens: list[Token] = []
    for token in german:
        if token[0] in ",." and tokens and tokens[-1][0] == ",":
            previous = tokens.pop()
            if token[0] == ",":
                sure = token[1] if token[1] is not None else previous[1]
                token = (",", sure, previous[2] + token[2])
        tokens.append(token)
    place = {new: position for position, new in enumerate(english)}
    sure_links: list[Link] = []
    possible_links: list[Link] = []
    for position, (_, sure, possible) in enumerate(tokens):
        if sure is not None:
            new_link = (place[sure], position)
            sure_links.append(new_link)
            possible_links.append(new_link)
        for new in possible:
            possible_links.append((place[new], position))
    target = " ".join([token[0] for token in tokens])
    return Pair(source, target, tuple(sure_links), tuple(possible_links))
