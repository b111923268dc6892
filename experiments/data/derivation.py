"""A synchronous English-German grammar: one derivation, two sentences, gold word alignment.

Each rule builds both sides at once:

    clause -> subject verb object            | subject verb object            (German: verb second)
    that-clause -> that subject verb object  | , dass subject object verb     (verb final)
    fronted -> adverb subject verb           | adverb verb subject            (inversion)
    past -> subject verbed object            | subject hat object participle  (the bracket)
    noun phrase -> the noun who clause       | der Nomen , der clause ,       (agreement: gender, case, number)

Clauses nest (relative clauses on subject, object and place; that-clauses; because, if, although ...)
and coordinate, down a budget of words, so that any length from 3 to 60 can be asked for. The target is a
function of the source: attachment is restricted until no sentence has two readings that German tells
apart. The vocabulary is closed: about 300 English and 500 German forms.

Every German token has at least one possible link and at most one sure one, so that an alignment error
rate of 0 can be reached by an aligner that links each target word once.

References:
    Lewis and Stearns 1968, Syntax-directed transduction, JACM 15(3): synchronous derivations.
    Och and Ney 2003, A systematic comparison of statistical alignment models, CL 29(1): sure and
    possible links.
"""

from collections.abc import Callable, Sequence

from .dataset import Link, Pair
from .lexicon import (
    ADJECTIVES,
    ADVERBS,
    BE,
    CONJUNCTIONS,
    CONTRACTIONS,
    DETERMINERS,
    FRONTED,
    FUTURE,
    HABEN,
    MODALS,
    NAMES,
    NOUN_PREPOSITIONS,
    NOUNS,
    PLACE_PREPOSITIONS,
    PRONOUNS,
    RELATIVE,
    SEIN,
    SUBORDINATORS,
    THE,
    VERBS,
    WAR,
    WAS,
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


class Derivation:
    """One sentence pair in the making. ``chance`` is the source of randomness, uniform in [0, 1)."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """Starts with no words."""
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

    # ---- noun phrases -------------------------------------------------------------------------

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

    def short_phrase(self, budget: int, case: Case, kinds: str, *, pronouns: bool = True) -> Subject:
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

    # ---- clauses ------------------------------------------------------------------------------

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
        """A clause whose German verb stands ``second``, ``inverted`` (before the subject) or ``final``.

        Args:
            budget: Words wanted, subject included.
            order: Where the German finite verb goes.
            verb: The verb, if it is fixed already.
            gap: The verb's one object is missing: it is the relative pronoun before the clause.
            subject: The subject, if it is fixed already (the relative pronoun).
            kinds: Kind of that subject.
            tense: present, past, future, modal, or None for any.
        """
        tense = tense or self.pick(("present", "present", "present", "past", "past", "modal", "future"))
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
        slots = (subject is None) + (len(verb.frame) if not gap and verb.frame in ("a", "d", "da") else 0)
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
            for case in sorted(verb.frame, reverse=True):  # the dative comes first in both languages
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
        adverb_first = middle_adverb[0] + auxiliary if tense == "modal" and len(auxiliary) > 1 else None
        verbs = (adverb_first or auxiliary + middle_adverb[0]) + full
        english = subject[0] + verbs + objects + where[0] + extra[0]
        middle = light + middle_adverb[1] + heavy + where[1]
        return english, self.arrange(order, subject[1], finite, middle, rest, verb) + extra[1]

    def choose_verb(self, room: int, kinds: str) -> Verb | None:
        """A verb that fits ``room`` words after subject and verb; None stands for the copula.

        No that-clause inside a relative clause: ", and that ..." behind it would have two readings.
        """
        draw = self.chance()
        if draw < 0.12 and room >= 1 or kinds in ("t", "l"):
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

    # ---- sentences ----------------------------------------------------------------------------

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
            return [joint, *e, *conjunction[0], *again[0], *e2], start + g + conjunction[1] + again[1] + g2
        e, g = self.clause(budget - 1, "final")
        return [joint, *e], start + g

    def main(self, budget: int) -> Phrase:
        """A main clause, with a subordinate clause before or behind it or a fronted adverb."""
        draw = self.chance()
        if budget >= 8 and (draw < 0.35 or budget > 16):
            first = self.share(budget - 2, 3)
            joint = self.pick(SUBORDINATORS)
            if self.chance() < 0.5:
                e, g = self.clause(first, "second")
                e2, g2 = self.subordinate(*joint, budget - first)
                return e + e2, g + g2
            e, g = self.subordinate(*joint, first + 1)
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

    def pair(self, budget: int) -> Pair:
        """A sentence of about ``budget`` words, its translation and their links."""
        english, german = self.sentence(budget)
        return finish(self.words, english, german)


def finish(words: Sequence[str], english: Sequence[int], german: Sequence[Token]) -> Pair:
    """Joins both sides: merges neighbouring German commas, drops one before a full stop, numbers the links."""
    tokens: list[Token] = []
    for token in german:
        if tokens and tokens[-1][0] == "," and token[0] in (",", "."):
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
            sure_links.append((place[sure], position))
            possible_links.append((place[sure], position))
        possible_links += [(place[new], position) for new in possible]
    source = " ".join([words[new] for new in english])
    target = " ".join([token[0] for token in tokens])
    return Pair(source, target, tuple(sure_links), tuple(possible_links))
