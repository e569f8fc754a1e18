"""Chains of events on one stock: somebody has things, things come and go, a question follows.

Owns the scenarios' sentences and the sampling of event sequences into templates.
"""
# ruff: noqa: SIM905 - word lists read better as one string

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from anabranch.demo import lexicon
from anabranch.demo.draw import Draw, Template

Sentences = Sequence[str]


@dataclass(frozen=True)
class Scenario:
    """Sentences of one setting. {x} is the thing counted, {N} the actor, {F} another person."""

    name: str
    things: Sequence[str]
    opening: Sentences
    events: Mapping[str, Sentences]
    now: Sentences
    asks: Mapping[str, Sentences] = field(default_factory=dict)
    templates: int = 44


OPERATIONS = {
    "gain": 1, "lose": 1, "packs": 2, "unpacks": 2, "grow": 1, "part": 2, "percent": 2,
    "now": 0, "share": 1, "boxes": 1, "sell": 1, "need": 1, "compare": 1,
}  # fmt: skip
ONCE = {"grow", "part", "percent"}

COMMON_ASKS = {
    "share": (
        "{He} shares all the {x} equally among {k} friends. How many {x} does each friend get?",
        "The {x} are then divided equally among {k} children. How many {x} does each child get?",
    ),
    "boxes": (
        "{N} packs all the {x} into boxes of {k}. How many boxes are needed?",
        "All the {x} are put into boxes that hold {k} {x} each. How many boxes does {N} fill?",
    ),
    "sell": (
        "{He} sells all the {x} for ${k} each. How much money does {N} get?",
        "{N} then sells every one of the {x} at ${k} each. How many dollars does {he} earn?",
    ),
    "need": (
        "{N} wants to have {t} {x}. How many more does {he} need?",
        "How many more {x} does {N} need to have {t} {x}?",
    ),
    "compare": (
        "{G} has {t} {x}. How many more {x} does {N} have than {G}?",
        "If {G} has {t} {x}, how many more {x} does {N} have than {G}?",
    ),
}

SCENARIOS = (
    Scenario(
        "collection",
        lexicon.THINGS,
        ("{N} has {a} {x}.", "{N} owns {a} {x}.", "{N} collects {x} and has {a} of them."),
        {
            "gain": (
                "{He} finds {a} more {x}.",
                "{F} gives {him} {a} {x}.",
                "{N} buys {a} more {x}.",
                "Then {he} gets {a} more {x} from {F}.",
            ),
            "lose": (
                "{He} gives {a} {x} to {F}.",
                "{N} loses {a} {x}.",
                "Then {he} sells {a} of the {x}.",
                "{He} gives away {a} {x}.",
            ),
            "packs": (
                "{He} buys {a} {packs} of {b} {x} each.",
                "{N} gets {a} {packs} with {b} {x} in each.",
                "{F} brings {a} {packs} that hold {b} {x} each.",
            ),
            "unpacks": (
                "{He} gives {b} {x} to each of {a} friends.",
                "{a} friends get {b} {x} each from {N}.",
                "{N} fills {a} {packs} with {b} {x} each and gives them away.",
            ),
            "grow": ("Then the number of {x} {grows}.", "Over the year {his} collection {grows}."),
            "part": (
                "{He} gives {part} of the {x} to {F}.",
                "{N} loses {part} of {his} {x}.",
                "Then {he} sells {part} of the {x}.",
            ),
            "percent": (
                "{p}% of the {x} are broken, so {he} throws them away.",
                "{N} gives {p}% of the {x} to {F}.",
            ),
        },
        ("How many {x} does {N} have now?", "How many {x} are left in the end?",
         "How many {x} does {he} have in the end?"),
        COMMON_ASKS,
        90,
    ),
    Scenario(
        "shop",
        lexicon.GOODS,
        ("A shop has {a} {x}.", "There are {a} {x} in a shop.",
         "A store starts the day with {a} {x}."),
        {
            "gain": ("{a} more {x} are delivered.", "A truck brings {a} more {x}.",
                     "The shop buys {a} {x}."),
            "lose": ("The shop sells {a} {x}.", "Customers buy {a} {x}.", "{a} {x} are sold."),
            "packs": (
                "The shop gets {a} {packs} of {b} {x} each.",
                "A truck brings {a} {packs} with {b} {x} in each.",
            ),
            "unpacks": (
                "{a} customers buy {b} {x} each.",
                "The shop sells {a} {packs} of {b} {x} each.",
            ),
            "part": ("Then {part} of the {x} are sold.", "The shop sells {part} of the {x}."),
            "percent": (
                "{p}% of the {x} are damaged and thrown away.",
                "Customers buy {p}% of the {x}.",
            ),
        },
        ("How many {x} does the shop have now?", "How many {x} are left in the shop?"),
        {
            "boxes": (
                "The {x} are packed into boxes of {k}. How many boxes are there?",
                "The {x} are put on shelves, {k} on each. How many shelves are needed?",
            ),
            "sell": (
                "The rest are sold for ${k} each. How much money does the shop get for them?",
                "All these {x} are then sold at ${k} each. How many dollars does the shop earn?",
            ),
        },
        64,
    ),
    Scenario(
        "farm",
        "apples pears plums lemons oranges pumpkins melons eggs carrots onions potatoes".split(),
        ("{N} picks {a} {x}.", "A farmer named {N} has {a} {x}.", "On Monday {N} gathers {a} {x}."),
        {
            "gain": ("{He} picks {a} more {x}.", "The next day {he} gathers {a} {x}.",
                     "{F} brings {a} more {x}."),
            "lose": ("{He} sells {a} {x} at the market.", "{N} gives {a} {x} to {F}.",
                     "The family eats {a} {x}."),
            "packs": ("{He} fills {a} {packs} more, each with {b} {x}.",
                      "{F} brings {a} {packs} of {b} {x} each."),
            "unpacks": ("{He} sells {a} {packs} of {b} {x} each.",
                        "{a} neighbors get {b} {x} each."),
            "part": ("{He} sells {part} of the {x}.", "{N} gives {part} of the {x} to {F}."),
            "percent": ("{p}% of the {x} are bad and thrown away.",
                        "{He} sells {p}% of the {x} at the market."),
        },
        ("How many {x} does {N} have now?", "How many {x} are left?"),
        COMMON_ASKS,
        64,
    ),
    Scenario(
        "library",
        "books comics magazines maps films".split(),
        ("A library has {a} {x}.", "There are {a} {x} in the library.",
         "A small library owns {a} {x}."),
        {
            "gain": ("{a} {x} are returned.", "The library buys {a} new {x}.",
                     "{N} gives {a} {x} to the library."),
            "lose": ("Readers borrow {a} {x}.", "{a} {x} are lent out.",
                     "The library gives away {a} old {x}."),
            "packs": ("The library gets {a} boxes of {b} {x} each.",
                      "{a} people bring back {b} {x} each."),
            "unpacks": ("{a} students borrow {b} {x} each.",
                        "The library sends {b} {x} to each of {a} schools."),
            "part": ("Then {part} of the {x} are lent out.", "Readers borrow {part} of the {x}."),
            "grow": ("Over the years the number of {x} {grows}.",),
        },
        ("How many {x} does the library have now?", "How many {x} are left in the library?"),
        {"boxes": ("The {x} are put on shelves, {k} on each. How many shelves are needed?",
                   "The {x} are packed into boxes of {k}. How many boxes are there?")},
    ),
    Scenario(
        "ride",
        ("people",),
        ("There are {a} people on a {v}.", "A {v} starts with {a} people on it.",
         "A {v} carries {a} people."),
        {
            "gain": ("At the next stop {a} more people get on.", "Then {a} people get on.",
                     "{a} more people get on."),
            "lose": ("Then {a} people get off.", "At the next stop {a} people get off.",
                     "{a} people leave the {v}."),
            "packs": ("Then {a} families of {b} people each get on.",
                      "{a} groups with {b} people in each get on."),
            "unpacks": ("Then {a} families of {b} people each get off.",
                        "At {a} stops {b} people get off each time."),
            "part": ("At the next stop {part} of the people get off.",
                     "Then {part} of the people leave."),
        },
        ("How many people are on the {v} now?", "How many people are left on the {v}?"),
        {"sell": ("Each of them pays ${k} for a ticket. How much money do they pay in all?",
                  "A ticket costs ${k} for each person. How many dollars do they pay?"),
         "share": ("They all move into {k} smaller cars, the same number in each. "
                   "How many people are in each car?",)},
    ),
    Scenario(
        "money",
        ("dollars",),
        ("{N} has ${a}.", "{N} has saved ${a}.", "There are ${a} in {N}'s purse."),
        {
            "gain": ("{He} earns ${a} more.", "{F} gives {him} ${a}.", "{N} gets ${a} as a gift."),
            "lose": ("{He} spends ${a} on a {single}.", "{N} pays ${a} for a {single}.",
                     "{He} gives ${a} to {F}."),
            "packs": ("{He} saves ${b} each week for {a} weeks.",
                      "{N} works for {a} hours and earns ${b} per hour.",
                      "{He} gets ${b} from each of {a} neighbors."),
            "unpacks": ("{He} buys {a} {goods} at ${b} each.",
                        "{N} pays for {a} {goods} that cost ${b} each."),
            "part": ("{He} spends {part} of the money.", "{N} gives {part} of the money to {F}."),
            "percent": ("{He} spends {p}% of the money on a {single}.",
                        "{N} gives {p}% of the money away."),
            "grow": ("Then {his} money {grows}.",),
        },
        ("How much money does {N} have now?", "How many dollars are left?",
         "How much money does {he} have in the end?"),
        {
            "share": ("{He} shares the money equally among {k} children. How many dollars "
                      "does each get?",),
            "need": ("{N} wants to buy a {single} for ${t}. How many more dollars does {he} need?",
                     "How much more money does {N} need to have ${t}?"),
            "boxes": ("With the money {he} buys tickets at ${k} each. How many tickets can "
                      "{N} buy?",),
            "compare": ("{G} has ${t}. How many more dollars does {N} have than {G}?",),
        },
        80,
    ),
    Scenario(
        "bakery",
        "cakes cookies rolls pies buns muffins loaves tarts".split(),
        ("A baker makes {a} {x}.", "{N} bakes {a} {x}.", "A bakery has {a} {x} in the morning."),
        {
            "gain": ("{a} more {x} are baked.", "Then {N} bakes {a} more {x}."),
            "lose": ("{a} {x} are sold.", "Customers buy {a} {x}.", "{a} {x} are eaten."),
            "packs": ("Then {a} trays of {b} {x} each are baked.",
                      "{N} bakes {a} more trays with {b} {x} on each."),
            "unpacks": ("{a} customers buy {b} {x} each.", "{a} boxes of {b} {x} each are sold."),
            "part": ("Then {part} of the {x} are sold.", "Customers buy {part} of the {x}."),
            "percent": ("{p}% of the {x} are burnt and thrown away.", "{p}% of the {x} are sold."),
        },
        ("How many {x} are left?", "How many {x} are there now?"),
        {"boxes": COMMON_ASKS["boxes"],
         "sell": ("The rest are sold for ${k} each. How much money does the bakery get for them?",),
         "share": ("The rest are divided equally among {k} shops. How many {x} does each "
                   "shop get?",)},
    ),
    Scenario(
        "game",
        ("points",),
        ("{N} has {a} points in a game.", "In a game {N} starts with {a} points.",
         "{N} scores {a} points in the first round."),
        {
            "gain": ("{He} scores {a} more points.", "Then {N} wins {a} points."),
            "lose": ("{He} loses {a} points.", "Then {N} loses {a} points in one round."),
            "packs": ("{He} wins {a} rounds and gets {b} points for each.",
                      "{N} scores {b} points in each of {a} rounds."),
            "unpacks": ("{He} makes {a} mistakes and loses {b} points for each.",
                        "{N} loses {b} points in each of {a} rounds."),
            "grow": ("Then {his} score {grows}.", "A bonus card {grows} the points."),
            "part": ("{He} loses {part} of {his} points.",),
        },
        ("How many points does {N} have now?", "How many points does {he} have in the end?"),
        {"need": ("{N} needs {t} points to win. How many more points does {he} need?",
                  "How many more points does {N} need to have {t} points?"),
         "compare": ("{G} has {t} points. How many more points does {N} have than {G}?",)},
    ),
    Scenario(
        "tank",
        ("liters",),
        ("A tank holds {a} liters of water.", "There are {a} liters of water in a tank.",
         "A pool starts with {a} liters of water."),
        {
            "gain": ("Rain adds {a} liters.", "{N} pours in {a} more liters."),
            "lose": ("{N} takes out {a} liters.", "{a} liters are used in the garden.",
                     "{a} liters leak out."),
            "packs": ("A pump adds {b} liters per hour for {a} hours.",
                      "{N} pours in {a} buckets of {b} liters each."),
            "unpacks": ("{N} fills {a} buckets with {b} liters each.",
                        "It loses {b} liters each hour for {a} hours."),
            "part": ("Then {part} of the water is used.", "{N} uses {part} of the water."),
            "percent": ("{p}% of the water is used in the garden.", "{p}% of the water leaks out."),
        },
        ("How many liters of water are left?", "How many liters are in it now?"),
        {"boxes": ("The water is put into bottles of {k} liters. How many bottles are filled?",),
         "need": ("It can hold {t} liters. How many more liters are needed to fill it?",)},
    ),
    # The two below are never trained: they exist in the held-out split alone.
    Scenario(
        "zoo",
        "birds fish turtles ducks parrots frogs".split(),
        ("A zoo has {a} {x}.", "There are {a} {x} in a zoo."),
        {
            "gain": ("{a} more {x} are brought.", "The zoo buys {a} {x}."),
            "lose": ("The zoo sells {a} {x}.", "{a} {x} are given to {N}."),
            "packs": ("The zoo gets {a} boxes of {b} {x} each.",
                      "A truck brings {a} crates with {b} {x} in each."),
            "unpacks": ("The zoo sends {b} {x} to each of {a} farms.",),
            "part": ("The zoo sells {part} of the {x}.",),
            "grow": ("Over the years the number of {x} {grows}.",),
        },
        ("How many {x} does the zoo have now?", "How many {x} are left in the zoo?"),
        {"boxes": ("The {x} are put into cages, {k} in each. How many cages are needed?",)},
        24,
    ),
    Scenario(
        "class",
        "pencils crayons erasers rulers papers".split(),
        ("A class has {a} {x}.", "There are {a} {x} in a class."),
        {
            "gain": ("The teacher buys {a} {x}.", "{F} brings {a} more {x}."),
            "lose": ("{N} takes {a} {x}.", "{a} {x} are lost."),
            "packs": ("The teacher gets {a} boxes of {b} {x} each.",),
            "unpacks": ("{a} students get {b} {x} each.",),
            "part": ("Then {part} of the {x} are used.",),
            "percent": ("{p}% of the {x} are broken and thrown away.",),
        },
        ("How many {x} does the class have now?", "How many {x} are left in the class?"),
        {"share": ("The {x} are then divided equally among {k} students. How many {x} does "
                   "each student get?",)},
        24,
    ),
)  # fmt: skip
NEVER_TRAINED = frozenset({"zoo", "class"})


def templates() -> list[Template]:
    """All templates of this family, in a fixed order."""
    return [
        Template(f"{scenario.name}/{'-'.join(events)}/{ask}", _cost(events, ask),
                 partial(_build, scenario, events, ask))
        for scenario in SCENARIOS
        for events, ask in _sequences(scenario)
    ]  # fmt: skip


def _cost(events: Sequence[str], ask: str) -> int:
    return sum(OPERATIONS[event] for event in (*events, ask))


def _sequences(scenario: Scenario) -> list[tuple[tuple[str, ...], str]]:
    """Event sequences of 1 to 4 events with a question, 2 to 6 operations, sampled by name."""
    rng = random.Random(scenario.name)
    kinds, asks = sorted(scenario.events), ["now", "now", *sorted(scenario.asks)]
    chosen: dict[tuple[tuple[str, ...], str], None] = {}
    while len(chosen) < scenario.templates:
        events = tuple(rng.choice(kinds) for _ in range(rng.choices((1, 2, 3, 4), (2, 5, 5, 2))[0]))
        ask = rng.choice(asks)
        once = sum(event in ONCE for event in events)
        if once <= 1 and 2 <= _cost(events, ask) <= 6:
            chosen[events, ask] = None
    return list(chosen)


def _build(scenario: Scenario, events: tuple[str, ...], ask: str, d: Draw) -> int:
    d.people("N", "F", "G")
    d.words.update(
        x=d.pick(scenario.things), v=d.pick(lexicon.VEHICLES), packs=d.pick(lexicon.PACKS),
        goods=d.pick(lexicon.GOODS), single=d.pick(lexicon.SINGLE_GOODS),
    )  # fmt: skip
    have = d.amount()
    d.say(scenario.opening, a=have)
    for event in events:
        have = _event(d, event, scenario.events[event], have)
    return _ask(d, scenario, ask, have)


def _event(d: Draw, event: str, sentences: Sentences, have: int) -> int:
    """Says one event and works out the stock after it."""
    if event in ("gain", "lose"):
        a = d.amount() if event == "gain" else d.below(have)
        d.say(sentences, a=a)
        return d.add("now", have, a) if event == "gain" else d.sub("left", have, a)
    if event in ("packs", "unpacks"):
        a = d.n(2, 12)
        b = d.n(2, 60 if d.high > 99 else 15)
        d.say(sentences, a=a, b=b)
        moved = d.mul("in" if event == "packs" else "out", a, b)
        return d.add("now", have, moved) if event == "packs" else d.sub("left", have, moved)
    if event == "grow":
        k = d.given(d.pick((2, 3)))
        d.say(sentences, grows=lexicon.GROWS[k])
        return d.mul("now", have, k)
    if event == "part":
        k = d.divisor(have, 2, 5)
        d.say(sentences, part=lexicon.PARTS[k])
        return d.sub("left", have, d.div("part", have, k))
    assert event == "percent", event
    rate = d.rate(have)
    d.say(sentences, p=rate)
    return d.sub("left", have, d.percent(f"{rate}%", rate, have))


def _ask(d: Draw, scenario: Scenario, ask: str, have: int) -> int:
    """Says the question and works out its answer."""
    if ask == "now":
        d.say(scenario.now)
        return have
    sentences = scenario.asks[ask]
    if ask in ("share", "boxes"):
        k = d.divisor(have)
        d.say(sentences, k=k)
        return d.div("each" if ask == "share" else "boxes", have, k)
    if ask == "sell":
        k = d.n(2, 12)
        d.say(sentences, k=k)
        return d.mul("money", have, k)
    if ask == "need":
        goal = d.given(have + 1 + int(d.rng.random() * d.high))
        d.say(sentences, t=goal)
        return d.sub("need", goal, have)
    assert ask == "compare", ask
    other = d.below(have)
    d.say(sentences, t=other)
    return d.sub("more", have, other)
