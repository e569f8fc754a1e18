"""Shopping, travel, work and time: problems made of parts and an ending.

Owns these four families' sentences and the list of their templates.
"""
# ruff: noqa: SIM905 - word lists read better as one string

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from anabranch.demo import lexicon
from anabranch.demo.draw import Draw, Template

# -- shopping: items, then discount or fee, then an ending ---------------------------------

SHOP_ITEMS = ("m", "mm", "ms", "sm", "ss", "mms", "mss", "mmm")
SHOP_CHANGES = ((), ("coupon",), ("fee",), ("percent",), ("fee", "coupon"), ("coupon", "fee"))
SHOP_ENDS = ("total", "change", "split", "left", "trips")
SHOP_END_TEXT = {
    "total": ("How much does {he} pay in all?", "How much money does {N} spend?",
              "What is the total cost?"),
    "change": ("{He} pays with ${t}. How much change does {he} get?",
               "How much change does {N} get from ${t}?"),
    "split": ("{k} friends share the cost equally. How much does each friend pay?",
              "The cost is divided equally among {k} people. How much does each pay?"),
    "left": ("How much of {his} money is left?", "How many dollars does {N} have left?"),
    "trips": ("{He} does this {k} times. How much does {he} spend in all?",
              "{N} buys the same {k} times. How much money does {he} spend?"),
}  # fmt: skip


def _shop(items: str, changes: Sequence[str], end: str, d: Draw) -> int:
    d.people("N", "F")
    purse_at = len(d.text)
    if end == "left":
        d.text.append("")
    cost = d.total("total", [_purchase(d, kind, i) for i, kind in enumerate(items)])
    for change in changes:
        cost = _price_change(d, change, cost)
    if end == "total":
        d.say(SHOP_END_TEXT[end])
        return cost
    if end in ("split", "trips"):
        k = d.divisor(cost) if end == "split" else d.n(2, 9)
        d.say(SHOP_END_TEXT[end], k=k)
        return d.div("each", cost, k) if end == "split" else d.mul("all", cost, k)
    steps = [step for step in (10, 20, 50, 100, 200, 500, 1000, 2000) if step > cost][:2]
    if end == "left":
        steps.append(cost + 1 + int(d.rng.random() * 99))
    paid = d.given(d.pick(steps))
    d.say(SHOP_END_TEXT[end], t=paid)
    if end == "left":
        d.text[purse_at] = d.pick(("{N} has ${t}.", "{N} takes ${t} to the shop.")).format(
            t=paid, **d.words
        )
    return d.sub("change" if end == "change" else "left", paid, cost)


def _purchase(d: Draw, kind: str, index: int) -> int:
    buys = ("{N} buys", "{He} buys", "{He} also buys", "Then {he} buys") if index else ("{N} buys",)
    verb = d.pick(buys)
    if kind == "s":
        price = d.n(2, min(d.high, 300))
        thing = d.pick(lexicon.SINGLE_GOODS)
        d.say((verb + " a {thing} for ${p}.", verb + " a {thing} that costs ${p}."),
              thing=thing, p=price)  # fmt: skip
        return price
    a, price = d.n(2, 12), d.n(2, 20 if d.high < 100 else 60)
    d.say((verb + " {a} {x} at ${p} each.", verb + " {a} {x} for ${p} each.",
           verb + " {a} {x}. Each costs ${p}."), a=a, x=d.pick(lexicon.GOODS), p=price)  # fmt: skip
    return d.mul("cost", a, price)


def _price_change(d: Draw, change: str, cost: int) -> int:
    if change == "percent":
        rate = d.rate(cost)
        d.say(("There is a discount of {p}%.", "The shop takes {p}% off the price."), p=rate)
        return d.sub("price", cost, d.percent(f"{rate}%", rate, cost))
    a = d.n(2, min(40, cost - 1))
    if change == "fee":
        d.say(("Delivery costs ${a} more.", "There is a fee of ${a} for delivery."), a=a)
        return d.add("price", cost, a)
    d.say(("{He} has a coupon for ${a} off.", "A coupon takes ${a} off the price."), a=a)
    return d.sub("price", cost, a)


# -- travel: legs, perhaps the way back, then an ending ------------------------------------

LEGS = ("r", "d", "dr", "rd", "rr", "dd", "ddr", "rdd", "rrd", "rrr")
TRIP_ENDS = ("total", "left", "fuel", "hours", "days", "longer")
TRIP_END_TEXT = {
    "total": ("How many kilometers is that in all?", "How far does {N} travel in all?",
              "What is the whole distance in kilometers?"),
    "left": ("The whole trip is {t} km. How many kilometers are left?",
             "How much farther is it if the whole trip is {t} km?"),
    "fuel": ("The {v} needs one liter of fuel for every {k} km. How many liters does it use?",
             "One liter of fuel lasts for {k} km. How many liters are needed?"),
    "hours": ("How many hours would the same distance take at {k} km per hour?",
              "{F} goes the same distance at {k} km per hour. How many hours does {F} need?"),
    "days": ("{N} makes this trip on {k} days. How many kilometers is that in all?",
             "{He} does this {k} times. How far does {he} travel in all?"),
    "longer": ("{F} travels {t} km. How many more kilometers does {N} travel than {F}?",
               "How many kilometers more is that than the {t} km that {F} travels?"),
}  # fmt: skip


def _trip(legs: str, back: bool, end: str, d: Draw) -> int:
    d.people("N", "F")
    d.words["v"] = d.pick(lexicon.VEHICLES)
    way = d.total("distance", [_leg(d, kind, i) for i, kind in enumerate(legs)])
    if back:
        d.say(("Then {he} goes back the same way.", "{He} returns by the same way."))
        way = d.mul("both ways", way, 2)
    sentences = TRIP_END_TEXT[end]
    if end == "total":
        d.say(sentences)
        return way
    if end == "left":
        whole = d.given(way + 1 + int(d.rng.random() * 300))
        d.say(sentences, t=whole)
        return d.sub("left", whole, way)
    if end == "longer":
        other = d.n(2, way - 1)
        d.say(sentences, t=other)
        return d.sub("more", way, other)
    if end == "days":
        k = d.n(2, 9)
        d.say(sentences, k=k)
        return d.mul("all", way, k)
    k = d.divisor(way)
    d.say(sentences, k=k)
    return d.div("liters" if end == "fuel" else "hours", way, k)


def _leg(d: Draw, kind: str, index: int) -> int:
    start = d.pick(("Then {he}", "After that {he}")) if index else "{N}"
    moves = d.pick(("drives", "travels", "goes by {v}"))
    if kind == "d":
        a = d.n(5, min(d.high, 400))
        d.say((start + " " + moves + " {a} km.",), a=a)
        return a
    speed, hours = d.n(3, 20 if d.high < 100 else 95), d.n(2, 9)
    d.say((start + " " + moves + " for {h} hours at {s} km per hour.",
           start + " " + moves + " at {s} km per hour for {h} hours."),
          h=hours, s=speed)  # fmt: skip
    return d.mul("km", speed, hours)


# -- work rates: rates, extra pieces, spoiled pieces, then an ending -----------------------

JOBS: dict[str, tuple[str, Sequence[str], str]] = {
    # name: (verb, things, unit of time)
    "read": ("reads", ("pages",), "day"),
    "sew": ("sews", ("shirts", "bags", "dresses", "curtains"), "day"),
    "build": ("builds", ("chairs", "toys", "shelves", "kites"), "week"),
    "paint": ("paints", ("plates", "signs", "cups", "fences"), "hour"),
    "plant": ("plants", ("trees", "flowers", "bushes"), "hour"),
    "write": ("writes", ("letters", "poems", "pages"), "week"),
    "fold": ("folds", ("boxes", "stars", "hats", "cranes"), "minute"),
    "wash": ("washes", ("cars", "windows", "plates"), "hour"),
    "solve": ("solves", ("puzzles", "problems"), "day"),
    "carve": ("carves", ("spoons", "bowls", "rings"), "day"),  # held-out split alone
}
NEVER_TRAINED = frozenset({"carve"})
WORK_PARTS = ("r", "rr", "rc", "cr", "rrc", "ro", "rco")
WORK_ENDS = ("total", "goal", "boxes", "pay", "more", "days")
WORK_END_TEXT = {
    "total": ("How many {x} is that in all?", "How many {x} are there in all?"),
    "goal": ("The goal is {t} {x}. How many more are needed?",
             "How many {x} are missing to have {t} {x}?"),
    "boxes": ("The {x} are divided into groups of {k}. How many groups are there?",
              "{k} {x} go into one group. How many groups are there?"),
    "pay": ("{N} gets ${k} for each. How many dollars is that in all?",
            "Each of the {x} brings ${k}. How much money is that in all?"),
    "more": ("How many more is that than the {t} {x} of {G}?",
             "{G} has {t} {x}. How many fewer {x} is that?"),
    "days": ("How many {u}s would {G} need for this at {k} {x} per {u}?",
             "{G} does {k} {x} per {u}. How many {u}s does {G} need for the same number?"),
}  # fmt: skip


def _work(job: str, parts: str, spoiled: bool, end: str, d: Draw) -> int:
    d.people("N", "F", "G")
    verb, things, unit = JOBS[job]
    d.words.update(x=d.pick(things), u=unit, verb=verb)
    done = d.total("sum", [_stint(d, kind, i) for i, kind in enumerate(parts)])
    if spoiled:
        a = d.n(2, min(done - 1, 60))
        d.say(("{a} of the {x} do not count.", "But {a} of the {x} are bad and do not count."), a=a)
        done = d.sub("good", done, a)
    sentences = WORK_END_TEXT[end]
    if end == "total":
        d.say(sentences)
        return done
    if end == "goal":
        goal = d.given(done + 1 + int(d.rng.random() * 200))
        d.say(sentences, t=goal)
        return d.sub("need", goal, done)
    if end == "more":
        other = d.n(2, done - 1)
        d.say(sentences, t=other)
        return d.sub("more", done, other)
    k = d.n(2, 12) if end == "pay" else d.divisor(done)
    d.say(sentences, k=k)
    return d.mul("money", done, k) if end == "pay" else d.div("number", done, k)


def _stint(d: Draw, kind: str, index: int) -> int:
    if kind == "c":
        a = d.n(2, min(d.high, 300))
        d.say(("{N} already has {a} {x}.", "{F} adds {a} {x}.", "There are {a} {x} from before."),
              a=a)  # fmt: skip
        return a
    who = "{F}" if kind == "o" else "{N}" if index == 0 else d.pick(("Then {he}", "After that {N}"))
    rate, span = d.n(2, 20 if d.high < 100 else 75), d.n(2, 12)
    inner = who if who.startswith("{") else who[0].lower() + who[1:]
    d.say((who + " {verb} {r} {x} per {u} for {s} {u}s.",
           who + " {verb} {r} {x} each {u} for {s} {u}s.",
           "For {s} {u}s " + inner + " {verb} {r} {x} every {u}."), r=rate, s=span)  # fmt: skip
    return d.mul("part", rate, span)


# -- time: stretches of minutes, then an ending --------------------------------------------

STRETCHES = ("mr", "rm", "hm", "mh", "rr", "hr", "mmr", "rrm", "hmr", "rmm", "hmm")
TIME_ENDS = ("total", "left", "rounds", "days", "more")
ACTIVITIES = "reads,runs,swims,plays,draws,cooks,cleans,sings,studies,practices,writes".split(",")
TIME_END_TEXT = {
    "total": ("How many minutes is that in all?", "How many minutes does {N} need in all?"),
    "left": ("{He} has {t} hours. How many minutes are left?",
             "How many minutes of {his} {t} free hours are left?"),
    "rounds": ("How many rounds of {k} minutes is that?",
               "{F} divides the same time into rounds of {k} minutes. How many rounds is that?"),
    "days": ("{He} does this on {k} days. How many minutes is that in all?",
             "How many minutes is that in {k} days?"),
    "more": ("{F} needs {t} minutes. How many minutes more does {N} need?",
             "How many minutes more is that than the {t} minutes of {F}?"),
}  # fmt: skip


def _time(stretches: str, end: str, d: Draw) -> int:
    d.people("N", "F")
    spent = d.total("minutes", [_stretch(d, kind, i) for i, kind in enumerate(stretches)])
    sentences = TIME_END_TEXT[end]
    if end == "total":
        d.say(sentences)
        return spent
    if end == "left":
        hours = d.given(spent // 60 + d.pick((1, 2, 3)))
        d.say(sentences, t=hours)
        return d.sub("left", d.mul("minutes", 60, hours), spent)
    if end == "more":
        other = d.n(2, spent - 1)
        d.say(sentences, t=other)
        return d.sub("more", spent, other)
    k = d.n(2, 9) if end == "days" else d.divisor(spent)
    d.say(sentences, k=k)
    return d.mul("all", spent, k) if end == "days" else d.div("rounds", spent, k)


def _stretch(d: Draw, kind: str, index: int) -> int:
    start = d.pick(("Then {he}", "After that {he}")) if index else "{N}"
    verb = d.pick(ACTIVITIES)
    if kind == "m":
        a = d.n(5, 90)
        d.say((start + " {verb} for {a} minutes.",), verb=verb, a=a)
        return a
    if kind == "r":
        a, b = d.n(2, 12), d.n(3, 40)
        d.say((start + " {verb} {a} times for {b} minutes.",
               start + " {verb} for {a} rounds of {b} minutes each."),
              verb=verb, a=a, b=b)  # fmt: skip
        return d.mul("rounds", a, b)
    hours, minutes = d.n(1, 4), d.n(5, 55)
    d.say((start + " {verb} for {h} {hour} and {m} minutes.",),
          verb=verb, h=hours, m=minutes, hour="hour" if hours == 1 else "hours")  # fmt: skip
    return d.add("time", d.mul("hours", 60, hours), minutes)


def templates() -> list[Template]:
    """All templates of the four families with 2 to 6 operations, in a fixed order."""
    found: list[Template] = []
    for items, changes, end in itertools.product(SHOP_ITEMS, SHOP_CHANGES, SHOP_ENDS):
        cost = items.count("m") + len(items) - 1 + len(changes) + (end != "total")
        cost += "percent" in changes
        name = f"buy/{items}/{'-'.join(changes) or 'plain'}/{end}"
        found.append(Template(name, cost, partial(_shop, items, changes, end)))
    for legs, back, end in itertools.product(LEGS, (False, True), TRIP_ENDS):
        cost = legs.count("r") + len(legs) - 1 + back + (end != "total")
        name = f"trip/{legs}/{'back' if back else 'once'}/{end}"
        found.append(Template(name, cost, partial(_trip, legs, back, end)))
    for job, parts, bad, end in itertools.product(JOBS, WORK_PARTS, (False, True), WORK_ENDS):
        cost = len(parts) - parts.count("c") + len(parts) - 1 + bad + (end != "total")
        name = f"{job}/{parts}/{'spoiled' if bad else 'good'}/{end}"
        found.append(Template(name, cost, partial(_work, job, parts, bad, end)))
    for stretches, end in itertools.product(STRETCHES, TIME_ENDS):
        cost = stretches.count("r") + 2 * stretches.count("h") + len(stretches) - 1
        cost += {"total": 0, "left": 2}.get(end, 1)
        found.append(Template(f"time/{stretches}/{end}", cost, partial(_time, stretches, end)))
    return [template for template in found if 2 <= template.operations <= 6]
