"""Ages, comparisons, fair shares, ratios, percentages and rectangles.

Owns these families' sentences and the list of their templates.
"""
# ruff: noqa: SIM905 - word lists read better as one string

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from anabranch.demo import lexicon
from anabranch.demo.draw import Draw, Template
from anabranch.demo.working import Unfit

# -- ages and comparisons: a first value, each next one told from the one before -----------

LINKS = ("more", "less", "fold", "part")
CHAINS = [
    chain
    for length in (1, 2, 3)
    for chain in itertools.product(LINKS, repeat=length)
    if chain.count("part") <= 1 and chain.count("fold") <= 2
]
AGE_TEXT = {
    "first": ("{P} is {a} years old.", "{P} is {a}.", "The age of {P} is {a}."),
    "more": ("{Q} is {a} years older than {P}.",),
    "less": ("{Q} is {a} years younger than {P}.",),
    "fold": ("{Q} is {times} as old as {P}.",),
    "part": ("{Q} is {part} as old as {P}.",),
    "last": ("How old is {Q}?", "What is the age of {Q}?"),
    "sum": ("What is the sum of their ages?", "How old are they all together?"),
    "later": ("How old will {Q} be in {a} years?",),
    "before": ("How old was {Q} {a} years ago?",),
}
COUNT_TEXT = {
    "first": ("{P} has {a} {x}.", "{P} finds {a} {x}.", "There are {a} {x} on {P}'s table."),
    "more": ("{Q} has {a} more {x} than {P}.", "{Q} has {a} more than {P}."),
    "less": ("{Q} has {a} fewer {x} than {P}.", "{Q} has {a} fewer than {P}."),
    "fold": ("{Q} has {times} as many {x} as {P}.", "{Q} has {times} as many as {P}."),
    "part": ("{Q} has {part} as many {x} as {P}.",),
    "last": ("How many {x} does {Q} have?",),
    "sum": ("How many {x} do they have in all?", "How many {x} do they have together?"),
    "later": ("Then {Q} gets {a} more {x}. How many {x} does {Q} have now?",),
    "before": ("Then {Q} gives away {a} {x}. How many {x} does {Q} have now?",),
    "share": ("They put all the {x} together and divide them into {k} equal groups. "
              "How many {x} are in each group?",),
    "sell": ("{Q} sells all of {Q}'s {x} for ${k} each. How much money does {Q} get?",),
}  # fmt: skip


def _chain(
    text: Mapping[str, Sequence[str]], links: Sequence[str], end: str, adults: bool, d: Draw
) -> int:
    keys = "ABCD"[: len(links) + 1]
    d.people(*keys)
    d.words["x"] = d.pick(lexicon.THINGS)
    value = d.n(4, 48) if adults else d.amount()
    d.words["P"] = d.words["A"]
    d.say(text["first"], a=value)
    values = [value]
    for link, key in zip(links, keys[1:], strict=True):
        d.words["Q"] = d.words[key]
        values.append(_link(d, text[link], link, values[-1], 20 if adults else d.high))
        d.words["P"] = d.words[key]
    if adults and max(values) > 99:
        raise Unfit
    return _chain_end(d, text[end], end, values, 20 if adults else d.high)


def _link(d: Draw, sentences: Sequence[str], link: str, value: int, most: int) -> int:
    name = d.words["Q"]
    if link == "more":
        a = d.n(2, most)
        d.say(sentences, a=a)
        return d.add(name, value, a)
    if link == "less":
        a = d.n(2, min(most, value - 1))
        d.say(sentences, a=a)
        return d.sub(name, value, a)
    if link == "fold":
        k = d.n(2, 6)
        d.say(sentences, times=lexicon.TIMES[k])
        return d.mul(name, value, k)
    k = d.divisor(value, 2, 5)
    d.say(sentences, part=lexicon.PARTS[k])
    return d.div(name, value, k)


def _chain_end(
    d: Draw, sentences: Sequence[str], end: str, values: Sequence[int], most: int
) -> int:
    if end == "last":
        d.say(sentences)
        return values[-1]
    if end in ("sum", "share"):
        total = d.total("all", values)
        if end == "sum":
            d.say(sentences)
            return total
        k = d.divisor(total)
        d.say(sentences, k=k)
        return d.div("each", total, k)
    if end == "sell":
        k = d.n(2, 12)
        d.say(sentences, k=k)
        return d.mul("money", values[-1], k)
    a = d.n(2, most) if end == "later" else d.n(2, min(most, values[-1] - 1))
    d.say(sentences, a=a)
    if end == "later":
        return d.add("then", values[-1], a)
    return d.sub("then", values[-1], a)


# -- fair shares ---------------------------------------------------------------------------

SHARE_STARTS = ("packs", "packs+", "two", "two-")
SHARE_ENDS = ("each", "gain", "lose", "few", "price")
SHARE_TEXT = {
    "each": ("How many {x} does each get?", "How many {x} does each of them have?"),
    "gain": ("Then {F}, one of them, finds {c} more. How many {x} does {F} have now?",
             "{F} is one of them and gets {c} more {x}. How many {x} does {F} have now?"),
    "lose": ("Then {F}, one of them, loses {c}. How many {x} does {F} have left?",
             "{F} is one of them and gives away {c} {x}. How many {x} does {F} have left?"),
    "few": ("How many {x} do {c} of them have together?",),
    "price": ("Each sells all of them for ${c} a piece. How much money does each get?",),
}  # fmt: skip


def _share(start: str, end: str, d: Draw) -> int:
    d.people("N", "F")
    d.words.update(x=d.pick(lexicon.THINGS), packs=d.pick(lexicon.PACKS))
    if start.startswith("packs"):
        a, b = d.n(2, 12), d.n(3, 40)
        d.say(("{N} has {a} {packs} of {b} {x} each.",
               "There are {a} {packs} with {b} {x} in each."),
              a=a, b=b)  # fmt: skip
        total = d.mul("total", a, b)
    else:
        a, b = d.amount(), d.amount()
        d.say(("{N} brings {a} {x} and {F} brings {b} {x}.", "{N} has {a} {x} and {F} has {b}."),
              a=a, b=b)  # fmt: skip
        total = d.add("total", a, b)
    if start == "packs+":
        c = d.n(2, d.high)
        d.say(("There are {c} more {x} in a drawer.", "{F} adds {c} {x}."), c=c)
        total = d.add("total", total, c)
    if start == "two-":
        c = d.below(total)
        d.say(("{c} {x} are set aside.", "{c} of the {x} are lost."), c=c)
        total = d.sub("left", total, c)
    k = d.divisor(total)
    d.say(("The {x} are divided equally among {k} children.",
           "{k} friends share the {x} equally."), k=k)  # fmt: skip
    each = d.div("each", total, k)
    if end == "each":
        d.say(SHARE_TEXT[end])
        return each
    c = d.n(2, {"gain": 60, "lose": each - 1, "few": k - 1, "price": 12}[end])
    d.say(SHARE_TEXT[end], c=c)
    if end in ("few", "price"):
        return d.mul("money" if end == "price" else "together", each, c)
    return d.add("now", each, c) if end == "gain" else d.sub("left", each, c)


# -- ratios --------------------------------------------------------------------------------

COLORS = "red blue green yellow white black brown pink".split()
RATIO_ENDS = ("first", "second", "difference", "first-price", "second-less")
RATIO_TEXT = {
    "first": ("How many are {C}?", "How many {C} {x} are there?"),
    "second": ("How many are {D}?", "How many {D} {x} are there?"),
    "difference": ("How many more {C} {x} than {D} {x} are there?",),
    "first-price": ("The {C} {x} are sold for ${c} each. How much money is that?",),
    "second-less": ("{c} of the {D} {x} are given to {N}. How many {D} {x} are left?",),
}


def _ratio(end: str, d: Draw) -> int:
    d.people("N")
    first, second = d.rng.sample(COLORS, 2)
    d.words.update(x=d.pick(lexicon.THINGS), C=first, D=second)
    a, b = d.n(2, 7), d.n(1, 5)
    unit = 2 + int(d.rng.random() * (60 if d.high > 99 else 20))
    total = d.given((a + b) * unit)
    d.say(("For every {a} {C} {x} there are {b} {D} {x}.",
           "The {C} and {D} {x} are in the ratio {a} to {b}."), a=a, b=b)  # fmt: skip
    d.say(("There are {t} {x} in all.", "Together there are {t} {x}."), t=total)
    groups = d.div("groups", total, d.add("parts", a, b))
    if end == "difference":
        d.say(RATIO_TEXT[end])
        return d.mul(first, groups, d.sub("more", a, b))
    mine = d.mul(first, groups, a) if end.startswith("first") else d.mul(second, groups, b)
    if end in ("first", "second"):
        d.say(RATIO_TEXT[end])
        return mine
    c = d.n(2, 12 if end == "first-price" else mine - 1)
    d.say(RATIO_TEXT[end], c=c)
    return d.mul("money", mine, c) if end == "first-price" else d.sub("left", mine, c)


# -- percentages ---------------------------------------------------------------------------

PERCENT_STARTS = ("given", "groups", "sum")
PERCENT_ENDS = ("part", "rest", "rest-less", "part-more", "part-price", "raise")
PERCENT_TEXT = {
    "part": ("How many of them {do}?", "How many {x} {do}?"),
    "rest": ("How many of them do not?", "How many {x} do not?"),
    "rest-less": ("Of the others {c} go home. How many of the others stay?",),
    "part-more": ("Then {c} more join these. How many of them {do} now?",),
    "part-price": ("Each of these pays ${c}. How much money do they pay?",),
    "raise": ("Next year the number of {x} grows by the same {p}%. How many {x} are there then?",),
}  # fmt: skip
CROWDS = "students children guests visitors workers players members".split()
HABITS = "walk,swim,sing,dance,wear glasses,have a dog,like tea,play chess,ride a bike".split(",")


def _percent(start: str, end: str, d: Draw) -> int:
    d.people("N")
    d.words.update(x=d.pick(CROWDS), do=d.pick(HABITS))
    if start == "given":
        total = d.given(10 * (1 + int(d.rng.random() * 60)))
        d.say(("There are {a} {x}.", "A club has {a} {x}.", "A school has {a} {x}."), a=total)
    elif start == "groups":
        a, b = d.n(2, 12), d.n(5, 60)
        d.say(("There are {a} groups of {b} {x} each.",
               "A club has {a} groups with {b} {x} in each."),
              a=a, b=b)  # fmt: skip
        total = d.mul("total", a, b)
    else:
        a, b = d.n(10, 300), d.n(10, 300)
        d.say(("There are {a} {x} in one room and {b} in another.",
               "{a} {x} come by bus and {b} by train."),
              a=a, b=b)  # fmt: skip
        total = d.add("total", a, b)
    rate = d.rate(total)
    d.say(("{p}% of the {x} {do}.", "Of these {p}% {do}."), p=rate)
    part = d.percent(f"{rate}%", rate, total)
    if end in ("part", "raise"):
        d.say(PERCENT_TEXT[end], p=rate)
        return part if end == "part" else d.add("then", total, part)
    if end.startswith("rest"):
        rest = d.sub("others", total, part)
        if end == "rest":
            d.say(PERCENT_TEXT[end])
            return rest
        c = d.n(2, min(rest - 1, 60))
        d.say(PERCENT_TEXT[end], c=c)
        return d.sub("stay", rest, c)
    c = d.n(2, 12 if end == "part-price" else 60)
    d.say(PERCENT_TEXT[end], c=c)
    return d.mul("money", part, c) if end == "part-price" else d.add("now", part, c)


# -- rectangles and rows -------------------------------------------------------------------

SHAPES = ("area", "around", "rows")
SHAPE_ENDS = ("plain", "less", "price", "twice", "plus", "less-price")
PLACES = "garden field yard room floor park playground".split()


def _shape(shape: str, end: str, d: Draw) -> int:
    d.people("N")
    place = d.pick(PLACES)
    a, b = d.n(3, 90 if d.high > 99 else 30), d.n(2, 12 if d.high < 999 else 60)
    if shape == "rows":
        d.say(("A hall has {a} rows of {b} seats.",
               "There are {a} rows with {b} seats each in a hall."),
              a=a, b=b)  # fmt: skip
        size, thing, unit = d.mul("seats", a, b), "seats", "seats"
    else:
        d.say(("A {place} is {a} meters long and {b} meters wide.",
               "{N} has a {place} of {a} meters by {b} meters."),
              place=place, a=a, b=b)  # fmt: skip
        unit = "square meters" if shape == "area" else "meters"
        thing = "square meters" if shape == "area" else "meters of fence around it"
        size = d.mul("area", a, b) if shape == "area" else d.mul("around", d.add("sides", a, b), 2)
    d.words.update(thing=thing, unit=unit)
    if end == "plain":
        d.say(("How many {thing} does it have?",))
        return size
    if end.startswith("less"):
        c = d.n(2, min(size - 1, 400))
        d.say(("{c} {unit} are taken.",), c=c)
        size = d.sub("left", size, c)
    elif end == "plus":
        c = d.n(2, 400)
        d.say(("{N} adds {c} {unit}.",), c=c)
        size = d.add("now", size, c)
    if end.endswith("price"):
        c = d.n(2, 12)
        d.say(("Each of the {unit} costs ${c}. How much do they cost in all?",
               "{N} pays ${c} for each of the {unit}. How much is that in all?"), c=c)  # fmt: skip
        return d.mul("money", size, c)
    if end == "twice":
        k = d.n(2, 9)
        d.say(("How many {unit} do {k} of them have in all?",), k=k)
        return d.mul("all", size, k)
    d.say(("How many {unit} is that?", "How many {unit} are there then?"))
    return size


def templates() -> list[Template]:
    """All templates of these families with 2 to 6 operations, in a fixed order."""
    found: list[Template] = []
    for name, text, adults in (("ages", AGE_TEXT, True), ("compare", COUNT_TEXT, False)):
        ends = [key for key in text if key not in ("first", *LINKS)]
        for links, end in itertools.product(CHAINS, ends):
            cost = len(links) + {"last": 0, "sum": len(links), "share": len(links) + 1}.get(end, 1)
            build = partial(_chain, text, links, end, adults)
            found.append(Template(f"{name}/{'-'.join(links)}/{end}", cost, build))
    for start, end in itertools.product(SHARE_STARTS, SHARE_ENDS):
        cost = 2 + (start in ("packs+", "two-")) + (end != "each")
        found.append(Template(f"share/{start}/{end}", cost, partial(_share, start, end)))
    for end in RATIO_ENDS:
        cost = 3 + (end not in ("first", "second"))
        found.append(Template(f"ratio/{end}", cost, partial(_ratio, end)))
    for start, end in itertools.product(PERCENT_STARTS, PERCENT_ENDS):
        cost = (start != "given") + 2 + (end != "part") + (end == "rest-less")
        found.append(Template(f"percent/{start}/{end}", cost, partial(_percent, start, end)))
    for shape, end in itertools.product(SHAPES, SHAPE_ENDS):
        cost = 1 + (shape == "around") + (end != "plain") + (end == "less-price")
        found.append(Template(f"shape/{shape}/{end}", cost, partial(_shape, shape, end)))
    return [template for template in found if 2 <= template.operations <= 6]
