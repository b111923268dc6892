"""A synchronous English-German grammar: one derivation, two sentences, gold word alignment.

    clause    subject verb object           | subject verb object            (verb second)
              that subject verb object      | , dass subject object verb     (verb final)
              today subject verb            | heute verb subject             (inversion)
              subject verbed object         | subject hat object participle  (sentence bracket)
    noun      the noun who verb             | der Nomen , der verb ,         (relative clause)

The rules are a probabilistic context-free grammar on the English side. `sentence` samples it given
the number of English words, from the inside probabilities P(symbol yields n words), and is a
function of its arguments alone. The target is a function of the source: the rules leave out the
attachments that English does not mark and German does. Each German word has a possible link and at
most one sure one, so an alignment error of 0 can be reached.

References:
    Lewis and Stearns 1968, Syntax-directed transduction, JACM 15(3): synchronous derivations.
    Och and Ney 2003, A systematic comparison of statistical alignment models, CL 29(1): sure and
    possible links.
"""

import functools
import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Link = tuple[int, int]
Split = str  # train, valid or test
Token = tuple[str, tuple[int, ...], tuple[int, ...]]  # form, sure and only possible positions
Bucket = tuple[int, int]

BUCKETS: tuple[Bucket, ...] = ((3, 5), (6, 10), (11, 15), (16, 20), (21, 25), (26, 40), (41, 60))
# Share of the training sentences by length. The last two buckets are longer than any of them.
TRAIN_SHARES = {(3, 5): 0.15, (6, 10): 0.30, (11, 15): 0.27, (16, 20): 0.18, (21, 25): 0.10}
LONGEST_TRAINED = 25
SIZES: dict[Split, int] = {"train": 20_000, "valid": 500, "test": 100 * len(BUCKETS)}
_HELD_OUT_SEED = 20_140_901  # valid and test are the same for all seeds

# symbol, weight, English | German, its components divided by a slash. "1b": component b of English
# item 1 (a is the default); "dass=1": a word with a sure link to item 1; ",~1": a possible link.
# Components of a clause: second, inverted, final; of a verb phrase: finite verb, middle, right
# bracket, right bracket with the finite verb. c: case, g: gender, k: living or thing; d: how deep
# clauses may nest, e: d - 1.
_RULES = """
S 1                M .                             | 0 .=1
M 3                K                               | 0
M 2                K , CONJ M                      | 0 ,=1 2 3
K 6                C.2                             | 0
K 2                FRONT C.2                       | 0 1b
K 2                C.2 SUB C.2                     | 0 ,~1 1 2c
K 2                SUB C.2 , C.2                   | 0 1c ,=2 3b
C.{d} 1            NP.l.n.{d} VP.{d}               | 0 1a 1b 1c / 1a 0 1b 1c / 0 1b 1d
VP.{d} 4           X.{d}                           | 0a / 0b / 0c / 0d
VP.{d} 1           ADV X.{d}                       | 1a / 0 1b / 1c / 1d
X.{d} 3            V.i                             | 0a / / 0b / 0c
X.{d} 2            V.i PP                          | 0a / 1 / 0b / 0c
X.{d} 8            V.a NP.{k}.a.{d}                | 0a / 1 / 0b / 0c
X.{d} 2            V.a NP.{k}.a.0 PP               | 0a / 1 2 / 0b / 0c
X.{d} 3            V.d NP.l.d.{d}                  | 0a / 1 / 0b / 0c
X.{d} 3            V.da NP.l.d.0 NP.t.a.{d}        | 0a / 1 2 / 0b / 0c
X.{d} 3            V.c that C.{e}                  | 0a / / 0b ,~1 dass=1 2c / 0c ,~1 dass=1 2c
X.{d} 1            is ADJ                          | ist=0 / 1 / / ist=0
X.{d} 1            was ADJ                         | war=0 / 1 / / war=0
PP 1               PREP DET.d{g} NOUN.p.{g}        | 0 1 2
NP.{k}.{c}.{d} 6   DET.{c}{g} NOUN.{k}.{g}         | 0 1
NP.{k}.{c}.{d} 4   DET.{c}{g} ADJ.{c}{g} NOUN.{k}.{g}            | 0 1 2
NP.l.{c}.{d} 3     NAME                            | 0
NP.l.{c}.{d} 3     PRONOUN.{c}                     | 0
NP.l.{c}.{d} 2     DET.{c}{g} NOUN.l.{g} who VP.{e}              | 0 1 ,~2 {who}=2 3b 3d ,~2
NP.{k}.{c}.{d} 1   DET.{c}{g} NOUN.{k}.{g} that NP.l.n.{e} V.a   | 0 1 ,~2 {whom}=2 3 4c ,~2
"""
# symbol English:German ...
_WORDS = """
NAME Anna:Anna Peter:Peter Maria:Maria Thomas:Thomas Julia:Julia Paul:Paul
PRONOUN.n he:er she:sie
PRONOUN.a him:ihn her:sie
PRONOUN.d him:ihm her:ihr
ADV often:oft never:nie always:immer sometimes:manchmal rarely:selten
FRONT today:heute perhaps:vielleicht there:dort here:hier soon:bald
SUB because:weil if:wenn although:obwohl before:bevor while:während
CONJ and:und but:aber
PREP in:in behind:hinter beside:neben near:bei
ADJ old:alt small:klein big:groß beautiful:schön strange:seltsam loud:laut young:jung new:neu
ADJ clever:klug cheap:billig heavy:schwer red:rot green:grün black:schwarz
NOUN.l.m man:Mann teacher:Lehrer doctor:Arzt friend:Freund brother:Bruder uncle:Onkel dog:Hund
NOUN.l.m fox:Fuchs bird:Vogel
NOUN.l.f woman:Frau queen:Königin sister:Schwester aunt:Tante cat:Katze cow:Kuh mouse:Maus
NOUN.l.n child:Kind girl:Mädchen horse:Pferd pig:Schwein sheep:Schaf
NOUN.t.m letter:Brief chair:Stuhl key:Schlüssel coat:Mantel apple:Apfel cake:Kuchen
NOUN.t.f lamp:Lampe clock:Uhr bottle:Flasche newspaper:Zeitung
NOUN.t.n book:Buch picture:Bild bicycle:Fahrrad knife:Messer
NOUN.p.m garden:Garten forest:Wald
NOUN.p.f city:Stadt school:Schule kitchen:Küche street:Straße church:Kirche
NOUN.p.n house:Haus castle:Schloss village:Dorf room:Zimmer
"""
_DEFINITE = {"nm": "der", "nf": "die", "nn": "das", "am": "den", "af": "die", "an": "das"}
_DEFINITE |= {"dm": "dem", "df": "der", "dn": "dem"}  # case and gender; relative pronouns as well
_ENDINGS = {"der": "er", "die": "e", "das": "es", "den": "en", "dem": "em"}
_MODALS = {"must": "muss", "can": "kann", "will": "wird", "should": "soll"}
# Frame (i none, a accusative, d dative, c that-clause): base, third person and past; German finite
# form, infinitive, participle (with ist+ if that is its auxiliary), particle if it is separable.
_VERBS = """
i sleep sleeps slept schläft schlafen geschlafen; work works worked arbeitet arbeiten gearbeitet
i laugh laughs laughed lacht lachen gelacht; sing sings sang singt singen gesungen
i wait waits waited wartet warten gewartet; dance dances danced tanzt tanzen getanzt
i arrive arrives arrived kommt ankommen ist+angekommen an
i depart departs departed fährt abfahren ist+abgefahren ab
a see sees saw sieht sehen gesehen; find finds found findet finden gefunden
a love loves loved liebt lieben geliebt; buy buys bought kauft kaufen gekauft
a carry carries carried trägt tragen getragen; paint paints painted malt malen gemalt
a need needs needed braucht brauchen gebraucht; call calls called ruft anrufen angerufen an
a invite invites invited lädt einladen eingeladen ein
a forget forgets forgot vergisst vergessen vergessen
d help helps helped hilft helfen geholfen; thank thanks thanked dankt danken gedankt
d follow follows followed folgt folgen ist+gefolgt
d answer answers answered antwortet antworten geantwortet
da give gives gave gibt geben gegeben; show shows showed zeigt zeigen gezeigt
da send sends sent schickt schicken geschickt; lend lends lent leiht leihen geliehen
c say says said sagt sagen gesagt; believe believes believed glaubt glauben geglaubt
c hope hopes hoped hofft hoffen gehofft; claim claims claimed behauptet behaupten behauptet
"""


class Pair(NamedTuple):
    """A sentence in two languages.

    Attributes:
        source: the source text; where the unit is a word, its tokens are joined by one blank.
        target: the target text, likewise.
        alignment: sure links ``(source token, target token)``, from 0; None where none are known.
        possible: links that do not count as wrong, the sure ones included; None as above.
    """

    source: str
    target: str
    alignment: tuple[Link, ...] | None = None
    possible: tuple[Link, ...] | None = None


class _Rule(NamedTuple):
    weight: float
    english: tuple[str, ...]
    german: tuple[tuple[tuple[str, str, int], ...], ...]  # form, mark or component, English item


def _piece(text: str) -> tuple[str, str, int]:
    found = re.fullmatch(r"(?:(\S+)([=~]))?(\d)([a-d]?)", text)
    assert found is not None, text
    form, mark, item, component = found.groups("")
    return form, mark or component or "a", int(item)


def _rule(weight: float, text: str) -> _Rule:
    english, german = text.split("|")
    components = (tuple(map(_piece, part.split())) for part in german.split("/"))
    return _Rule(weight, tuple(english.split()), tuple(components))


def _verb(entry: str) -> Iterator[_Rule]:
    """Yield present, past and modal forms; in German finite verb, bracket, bracket with finite."""
    base, third, past, finite, infinitive, participle, *particle = entry.split()
    auxiliary, _, participle = participle.rpartition("+")
    have, part = auxiliary or "hat", "".join(particle)
    yield _rule(3, f"{third} | {finite}=0 / {part and part + '~0'} / {part}{finite}=0")
    yield _rule(2, f"{past} | {have}~0 / {participle}=0 / {participle}=0 {have}~0")
    for modal, verb in _MODALS.items():
        yield _rule(0.5, f"{modal} {base} | {verb}=0 / {infinitive}=1 / {infinitive}=1 {verb}=0")


@functools.cache
def _grammar() -> Mapping[str, list[_Rule]]:
    """Return the rules of each symbol, their weights summing to 1."""
    rules: dict[str, dict[str, _Rule]] = {}  # by their text: expanding repeats some

    def add(symbol: str, weight: float, text: str) -> None:
        rules.setdefault(symbol, {})[text] = _rule(weight, text)

    for line in _RULES.strip().splitlines():
        for k, c, g, d in itertools.product("lt", "nad", "mfn", range("{e}" in line, 3)):
            forms = {"who": _DEFINITE["n" + g], "whom": _DEFINITE["a" + g]}
            symbol, weight, text = line.format(k=k, c=c, g=g, d=d, e=d - 1, **forms).split(None, 2)
            add(symbol, float(weight), text)
    for symbol, *words in map(str.split, _WORDS.strip().splitlines()):
        for word, german in (pair.split(":") for pair in words):
            add(symbol, 1, f"{word} | {german}=0")
            for key, article in _DEFINITE.items() if symbol == "ADJ" else ():
                ending = "e" if article in ("die", "das") or key == "nm" else "en"
                add(f"ADJ.{key}", 1, f"{word} | {german}{ending}=0")
    for key, article in _DEFINITE.items():
        forms = {"the": article, "this": "dies", "every": "jed"}
        for word, stem in forms.items():
            add(f"DET.{key}", 1, f"{word} | {stem}{_ENDINGS[article] * (word != 'the')}=0")
    grammar = {symbol: list(by_text.values()) for symbol, by_text in rules.items()}
    for frame, entries in (line.split(None, 1) for line in _VERBS.strip().splitlines()):
        grammar.setdefault(f"V.{frame}", []).extend(r for e in entries.split(";") for r in _verb(e))
    for choices in grammar.values():
        total = sum(rule.weight for rule in choices)
        choices[:] = [rule._replace(weight=rule.weight / total) for rule in choices]
    return grammar


@functools.cache
def _inside(items: tuple[str, ...], words: int) -> float:
    """Return the probability that a sequence of symbols and words yields ``words`` words."""
    first, *rest = items
    if rest:
        return max(_lengths(items, words)[1], default=0.0)
    return _expansions(first, words)[1][-1] if first in _grammar() else float(words == 1)


@functools.cache
def _lengths(items: tuple[str, ...], words: int) -> tuple[list[int], list[float]]:
    """Return the lengths that the first of two or more items can have, cumulative weights."""
    rests = ((n, _inside(items[1:], words - n)) for n in range(1, words - len(items) + 2))
    found = [(n, _inside(items[:1], n) * rest) for n, rest in rests if rest]
    return [n for n, _ in found], [*itertools.accumulate(weight for _, weight in found)]


@functools.cache
def _expansions(symbol: str, words: int) -> tuple[list[_Rule], list[float]]:
    """Return the rules of a symbol that yields ``words`` words, with cumulative weights."""
    rules = _grammar()[symbol]
    return rules, [*itertools.accumulate(r.weight * _inside(r.english, words) for r in rules)]


def _derive(symbol: str, words: int, rng: random.Random, english: list[str]) -> list[list[Token]]:
    """Append a derivation's English words to ``english`` and return its German components."""
    rules, weights = _expansions(symbol, words)
    (rule,) = rng.choices(rules, cum_weights=weights)
    starts, children = [], []
    for at, item in enumerate(rule.english):
        length = words
        if at + 1 < len(rule.english):
            lengths, weights = _lengths(rule.english[at:], words)
            (length,) = rng.choices(lengths, cum_weights=weights)
        words -= length
        starts.append(len(english))
        children.append(_derive(item, length, rng, english) if item in _grammar() else [])
        if not children[-1]:
            english.append(item)
    german: list[list[Token]] = [[] for _ in rule.german]
    for tokens, pieces in zip(german, rule.german, strict=True):
        for form, mark, item in pieces:
            if not form:
                tokens += children[item]["abcd".index(mark)]
            else:
                link = (starts[item],)
                tokens.append((form, link, ()) if mark == "=" else (form, (), link))
    return german


def sentence(seed: int, index: int, low: int, high: int) -> Pair:
    """Return sentence number ``index`` of a seed, of ``low`` to ``high`` English words.

    All lengths are equally likely; marks count as words.

    Example:
        >>> sentence(0, 1, 3, 9) == sentence(0, 1, 3, 9)
        True
    """
    if not 3 <= low <= high:
        raise ValueError(f"low {low} and high {high} must satisfy 3 <= low <= high")
    rng = random.Random(f"{seed} {index} {low} {high}")
    english: list[str] = []
    (german,) = _derive("S", rng.randint(low, high), rng, english)
    tokens: list[Token] = []
    for form, sure, possible in german:  # neighbouring commas are one, and none precedes a stop
        if tokens and tokens[-1][0] == "," and form in ",.":
            _, before, others = tokens.pop()
            if form == ",":
                sure, possible = before + sure, others + possible
        tokens.append((form, sure, possible))
    links = [(s, t) for t, token in enumerate(tokens) for s in token[1]]
    others = [(s, t) for t, token in enumerate(tokens) for s in token[2]]
    target = " ".join(token[0] for token in tokens)
    return Pair(" ".join(english), target, tuple(links), (*links, *others))


def split_of(source: str) -> Split:
    """Return the split of a sentence, by its hash alone: a tenth each are test and valid.

    Example:
        >>> split_of("Anna sleeps .") == split_of("Anna sleeps .")
        True
    """
    digest = hashlib.blake2b(source.encode(), digest_size=4).digest()
    tenth = int.from_bytes(digest, "big") * 10 >> 32
    return "test" if tenth == 0 else "valid" if tenth == 1 else "train"


def sentences(seed: int, low: int, high: int, split: Split | None = None) -> Iterator[Pair]:
    """Yield different sentences of ``low`` to ``high`` words, of one split or of all.

    It ends after 20,000 in a row that are of another split or known: few are as short as 3 words.
    """
    seen: set[str] = set()
    last = 0
    for index in itertools.count():
        pair = sentence(seed, index, low, high)
        if pair.source not in seen and split in (None, split_of(pair.source)):
            last = index
            seen.add(pair.source)
            yield pair
        elif index - last > 20_000:
            return


@functools.cache
def _held_out(split: Split, size: int) -> tuple[Pair, ...]:
    """Return valid or test, which do not depend on a run's seed: made once in a process."""
    shares = TRAIN_SHARES if split == "valid" else dict.fromkeys(BUCKETS, 1 / len(BUCKETS))
    return _drawn(_HELD_OUT_SEED, split, size, shares)


def _drawn(seed: int, split: Split, size: int, shares: Mapping[Bucket, float]) -> tuple[Pair, ...]:
    pairs: list[Pair] = []
    for number, ((low, high), share) in enumerate(shares.items(), 1):
        count = int(size * share) if number < len(shares) else size - len(pairs)
        # Sentences longer than any of training are test sentences, whatever their hash.
        kind = split if low <= LONGEST_TRAINED else None
        pairs += itertools.islice(sentences(seed, low, high, kind), count)
    random.Random(seed).shuffle(pairs)
    return tuple(pairs)


def splits(seed: int, sizes: Mapping[Split, int | None]) -> dict[Split, tuple[Pair, ...]]:
    """Return train, valid and test sentences; the seed decides the training sentences alone.

    A sentence's split is its hash's, so no run trains on a sentence that any run tests on. The test
    sentences are spread evenly over `BUCKETS`, to see what a model does beyond its lengths.
    """
    counts = {split: sizes.get(split) or size for split, size in SIZES.items()}
    train = _drawn(seed, "train", counts["train"], TRAIN_SHARES)
    held_out = {split: _held_out(split, counts[split]) for split in ("valid", "test")}
    return {"train": train, **held_out}
