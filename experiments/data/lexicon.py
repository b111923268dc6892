"""Words and inflection of the English-German grammar.

The English side needs number and a little agreement; the German side gender (m, f, n), number,
case (n, a, d, g) and the three declensions of the adjective. Only the persons I, he/she/it, we and
they occur, so that a verb has three finite forms, named ``1s``, ``3s`` and ``p``.

References:
    Duden, Die Grammatik, 10th ed. 2022: declension of articles, adjectives and nouns.
"""

import dataclasses
from typing import Literal

Gender = Literal["m", "f", "n", "p"]  # p: plural, where German knows no gender
Case = Literal["n", "a", "d", "g"]
Agreement = Literal["1s", "3s", "p"]


def _table(rows: str) -> dict[tuple[str, str], str]:
    """Four rows (nominative, accusative, dative, genitive) of four columns (m, f, n, plural)."""
    table = {}
    for case, row in zip("nadg", rows.split("/"), strict=True):
        for gender, form in zip("mfnp", row.split(), strict=True):
            table[case, gender] = form.replace("-", "")
    return table


DEFINITE = _table("der die das die / den die das die / dem der dem den / des der des der")
RELATIVE = DEFINITE | {("d", "p"): "denen"}
STRONG_DETERMINER = _table("er e es e / en e es e / em er em en / es er es er")
EIN_DETERMINER = _table("- e - e / en e - e / em er em en / es er es er")
WEAK = _table("e e e en / en e e en / en en en en / en en en en")
MIXED = _table("er e es en / en e es en / en en en en / en en en en")
STRONG = _table("er e es e / en e es e / em er em en / en er en er")


@dataclasses.dataclass(frozen=True, slots=True)
class Determiner:
    """An article or its like: the English word(s), the German stem and its two endings."""

    english: tuple[str, str]  # singular, plural; "" where there is none
    german: str
    endings: dict[tuple[str, str], str] | None  # None: no inflection
    adjective: dict[tuple[str, str], str]

    def form(self, case: Case, gender: Gender) -> str:
        """The German form."""
        if self.endings is None:
            return self.german
        return self.german + self.endings[case, gender]


DETERMINERS = (
    Determiner(("the", "the"), "", DEFINITE, WEAK),
    Determiner(("a", ""), "ein", EIN_DETERMINER, MIXED),
    Determiner(("this", "these"), "dies", STRONG_DETERMINER, WEAK),
    Determiner(("every", ""), "jed", STRONG_DETERMINER, WEAK),
    Determiner(("no", "no"), "kein", EIN_DETERMINER, MIXED),
    Determiner(("my", "my"), "mein", EIN_DETERMINER, MIXED),
    Determiner(("his", "his"), "sein", EIN_DETERMINER, MIXED),
    Determiner(("her", "her"), "ihr", EIN_DETERMINER, MIXED),
    Determiner(("", "two"), "zwei", None, STRONG),
    Determiner(("", "many"), "viel", STRONG_DETERMINER, STRONG),
)
THE = DETERMINERS[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Noun:
    """A noun. ``kind`` is p (person), a (animal), t (thing) or l (place)."""

    english: tuple[str, str]  # singular, plural
    gender: Gender
    kind: str
    forms: dict[tuple[str, bool], str]  # (case, plural) -> German form

    def form(self, case: Case, plural: bool) -> str:
        """The German form."""
        return self.forms[case, plural]


def _noun(kind: str, entry: str) -> Noun:
    """Reads ``english[/plural] Singular gender Plural [Genitive]``; ``*`` is a weak masculine."""
    english, singular, gender, plural, *rest = entry.split()
    one, _, many = english.partition("/")
    genitive = rest[0] if rest else singular
    weak = genitive == "*"
    forms = {("n", False): singular, ("n", True): plural, ("a", True): plural, ("g", True): plural}
    forms["d", True] = plural if plural[-1] in "ns" else plural + "n"
    oblique = plural if weak else singular
    forms |= {("a", False): oblique, ("d", False): oblique}
    forms["g", False] = plural if weak else genitive
    return Noun((one, many or one + "s"), gender, kind, forms)  # type: ignore[arg-type]


_NOUNS = {
    "p": """man/men Mann m Männer Mannes; woman/women Frau f Frauen;
        child/children Kind n Kinder Kindes;
        teacher Lehrer m Lehrer Lehrers; student Student m Studenten *; doctor Arzt m Ärzte Arztes;
        girl Mädchen n Mädchen Mädchens; boy Junge m Jungen *; friend Freund m Freunde Freundes;
        neighbour Nachbar m Nachbarn *; queen Königin f Königinnen; sister Schwester f Schwestern;
        brother Bruder m Brüder Bruders; farmer Bauer m Bauern *; aunt Tante f Tanten""",
    "a": """dog Hund m Hunde Hundes; cat Katze f Katzen; horse Pferd n Pferde Pferdes;
        bird Vogel m Vögel Vogels; cow Kuh f Kühe; bear Bär m Bären *;
        pig Schwein n Schweine Schweines;
        mouse/mice Maus f Mäuse; fox/foxes Fuchs m Füchse Fuchses""",
    "t": """book Buch n Bücher Buches; letter Brief m Briefe Briefes; picture Bild n Bilder Bildes;
        bicycle Fahrrad n Fahrräder Fahrrades; lamp Lampe f Lampen; chair Stuhl m Stühle Stuhles;
        key Schlüssel m Schlüssel Schlüssels; clock Uhr f Uhren; bottle Flasche f Flaschen;
        coat Mantel m Mäntel Mantels; knife/knives Messer n Messer Messers;
        newspaper Zeitung f Zeitungen; apple Apfel m Äpfel Apfels; cake Kuchen m Kuchen Kuchens""",
    "l": """garden Garten m Gärten Gartens; house Haus n Häuser Hauses; city/cities Stadt f Städte;
        forest Wald m Wälder Waldes; school Schule f Schulen; kitchen Küche f Küchen;
        castle Schloss n Schlösser Schlosses; village Dorf n Dörfer Dorfes; street Straße f Straßen;
        room Zimmer n Zimmer Zimmers; church/churches Kirche f Kirchen""",
}
NOUNS = {kind: tuple(_noun(kind, e) for e in rows.split(";")) for kind, rows in _NOUNS.items()}
NAMES = ("Anna", "Peter", "Maria", "Thomas", "Julia", "Paul")


@dataclasses.dataclass(frozen=True, slots=True)
class Pronoun:
    """A personal pronoun: English and German by case, and the verb form it asks for."""

    english: tuple[str, str]  # subject, object
    german: dict[str, str]  # case -> form
    agreement: Agreement
    kinds: str


PRONOUNS = (
    Pronoun(("I", "me"), {"n": "ich", "a": "mich", "d": "mir"}, "1s", "p"),
    Pronoun(("we", "us"), {"n": "wir", "a": "uns", "d": "uns"}, "p", "p"),
    Pronoun(("he", "him"), {"n": "er", "a": "ihn", "d": "ihm"}, "3s", "p"),
    Pronoun(("she", "her"), {"n": "sie", "a": "sie", "d": "ihr"}, "3s", "p"),
    Pronoun(("they", "them"), {"n": "sie", "a": "sie", "d": "ihnen"}, "p", "p"),
    Pronoun(("it", "it"), {"n": "es", "a": "es", "d": "ihm"}, "3s", "atl"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Verb:
    """A verb with its frame: i none, a accusative, d dative, da both, c a dass-clause."""

    english: tuple[str, str, str]  # base, third person, past
    german: dict[str, str]  # agreement -> finite form, without the particle
    infinitive: str
    participle: str
    auxiliary: str  # haben or sein
    particle: str  # of a separable verb, or ""
    frame: str
    subjects: str = "pa"
    objects: str = ""


def _verb(frame: str, entry: str) -> Verb:
    """Reads ``base[/third] past first third infinitive participle`` and what may follow.

    That is ``+sein``, ``particle|`` and ``subjects>objects``, kinds of nouns each.
    """
    base, past, first, third, infinitive, participle, *rest = entry.split()
    base, _, singular = base.partition("/")
    particle = next((r[:-1] for r in rest if r.endswith("|")), "")
    subjects, _, objects = next((r for r in rest if ">" in r), "pa>").partition(">")
    german = {"1s": first, "3s": third, "p": infinitive.removeprefix(particle)}
    auxiliary = "sein" if "+sein" in rest else "haben"
    english = (base, singular or base + "s", past)
    return Verb(
        english, german, infinitive, participle, auxiliary, particle, frame, subjects, objects
    )


_VERBS = {
    "i": """sleep slept schlafe schläft schlafen geschlafen;
        work worked arbeite arbeitet arbeiten gearbeitet;
        laugh laughed lache lacht lachen gelacht; sing sang singe singt singen gesungen;
        dance danced tanze tanzt tanzen getanzt; wait waited warte wartet warten gewartet;
        disappear disappeared verschwinde verschwindet verschwinden verschwunden +sein;
        come came komme kommt kommen gekommen +sein;
        arrive arrived komme kommt ankommen angekommen +sein an|;
        depart departed fahre fährt abfahren abgefahren +sein ab|""",
    "a": """see saw sehe sieht sehen gesehen pa>patl;
        find found finde findet finden gefunden pa>patl;
        love loved liebe liebt lieben geliebt pa>patl; hear heard höre hört hören gehört pa>pa;
        know knew kenne kennt kennen gekannt p>patl; buy bought kaufe kauft kaufen gekauft p>atl;
        carry/carries carried trage trägt tragen getragen pa>at;
        paint painted male malt malen gemalt p>patl;
        visit visited besuche besucht besuchen besucht p>pl;
        need needed brauche braucht brauchen gebraucht p>pat;
        call called rufe ruft anrufen angerufen an| p>p;
        invite invited lade lädt einladen eingeladen ein| p>p;
        open opened mache macht aufmachen aufgemacht auf| p>t;
        forget forgot vergesse vergisst vergessen vergessen p>ptl""",
    "d": """help helped helfe hilft helfen geholfen pa>pa;
        thank thanked danke dankt danken gedankt p>p;
        follow followed folge folgt folgen gefolgt +sein pa>pa;
        trust trusted vertraue vertraut vertrauen vertraut p>pa;
        answer answered antworte antwortet antworten geantwortet p>p""",
    "da": """give gave gebe gibt geben gegeben p>t; show showed zeige zeigt zeigen gezeigt p>t;
        send sent schicke schickt schicken geschickt p>t;
        lend lent leihe leiht leihen geliehen p>t""",
    "c": """say said sage sagt sagen gesagt p>; believe believed glaube glaubt glauben geglaubt p>;
        know knew weiß weiß wissen gewusst p>; hope hoped hoffe hofft hoffen gehofft p>;
        claim claimed behaupte behauptet behaupten behauptet p>""",
}
VERBS = {frame: tuple(_verb(frame, e) for e in rows.split(";")) for frame, rows in _VERBS.items()}

HABEN = {"1s": "habe", "3s": "hat", "p": "haben"}
SEIN = {"1s": "bin", "3s": "ist", "p": "sind"}
WAR = {"1s": "war", "3s": "war", "p": "waren"}
BE = {"1s": "am", "3s": "is", "p": "are"}
WAS = {"1s": "was", "3s": "was", "p": "were"}

# English words (one or two), third person, German finite forms
MODALS = (
    (("must",), ("must",), {"1s": "muss", "3s": "muss", "p": "müssen"}),
    (("can",), ("can",), {"1s": "kann", "3s": "kann", "p": "können"}),
    (("want", "to"), ("wants", "to"), {"1s": "will", "3s": "will", "p": "wollen"}),
)
FUTURE = (("will",), ("will",), {"1s": "werde", "3s": "wird", "p": "werden"})


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    words = text.split()
    return tuple(zip(words[::2], words[1::2], strict=True))


_ANY_ADJECTIVE = _pairs("old alt small klein big groß beautiful schön strange seltsam loud laut")
_LIVING_ADJECTIVE = _pairs(
    "young jung clever klug friendly freundlich brave mutig happy glücklich sad traurig"
)
_DEAD_ADJECTIVE = _pairs(
    "new neu cheap billig heavy schwer red rot green grün black schwarz white weiß"
)
ADJECTIVES = {
    "p": _ANY_ADJECTIVE + _LIVING_ADJECTIVE,
    "a": _ANY_ADJECTIVE + _LIVING_ADJECTIVE + _DEAD_ADJECTIVE[-2:],
    "t": _ANY_ADJECTIVE + _DEAD_ADJECTIVE,
    "l": _ANY_ADJECTIVE + _DEAD_ADJECTIVE[:2] + _DEAD_ADJECTIVE[-1:],
}
ADVERBS = _pairs("often oft never nie always immer sometimes manchmal rarely selten")
# fronted adverbs, by the tense they go with
FRONTED = {
    "present": _pairs("now jetzt today heute perhaps vielleicht here hier"),
    "past": _pairs("yesterday gestern today heute perhaps vielleicht there dort"),
    "future": _pairs("tomorrow morgen today heute perhaps vielleicht soon bald"),
    "modal": _pairs("now jetzt today heute here hier there dort"),
}
SUBORDINATORS = _pairs("because weil if wenn although obwohl before bevor while während")
CONJUNCTIONS = _pairs("and und but aber")

# English, German, case, kinds of the noun that follows
PLACE_PREPOSITIONS = (
    ("in", "in", "d", "l"),
    ("behind", "hinter", "d", "l"),
    ("under", "unter", "d", "t"),
    ("beside", "neben", "d", "pl"),
)
NOUN_PREPOSITIONS = (
    ("with", "mit", "d", "pat"),
    ("without", "ohne", "a", "pat"),
    ("for", "für", "a", "pa"),
    ("from", "von", "d", "pl"),
)
CONTRACTIONS = {("in", "dem"): "im", ("von", "dem"): "vom"}
