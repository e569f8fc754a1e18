"""Words of the stories: people and things. Data only."""
# ruff: noqa: SIM905 - word lists read better as one string

from __future__ import annotations

WOMEN = (
    "Ada Alma Anna Bella Clara Dina Ella Emma Fay Gina Hana Ida Ines Iris Jana Julia Kira Lea Lena "
    "Lily Luna Maya Mia Mila Nina Nora Olga Petra Rita Rosa Sara Sofia Tara Uma Vera Zoe"
).split()
MEN = (
    "Adam Alan Amir Ben Boris Carl Dan David Emil Eric Felix Finn Hugo Ivan Jack Jan Jonas Karim "
    "Leo Liam Luis Marco Max Nils Noah Omar Oscar Paul Peter Ravi Sam Simon Theo Tim Tom Victor"
).split()

THINGS = (
    "apples balls beads books buttons cards coins cookies cups dolls eggs flowers grapes hats keys "
    "lemons marbles mugs nuts oranges pears pebbles pencils pens photos pins plates plums "
    "postcards puzzles ribbons rings rocks seeds shells spoons stamps stars stickers stones "
    "toys tickets"
).split()
GOODS = (
    "apples balls bottles bowls brushes cakes candles cups erasers folders forks hats jars kites "
    "lamps magnets mugs notebooks pans pears pencils pens pies pizzas plates posters rulers "
    "scarves shirts socks spoons tickets towels toys"
).split()
SINGLE_GOODS = (
    "bag belt blanket book box chair clock coat drum fan game globe guitar helmet jacket kettle "
    "ladder map mirror pillow puzzle radio rug tent umbrella vase watch"
).split()
VEHICLES = "bus car ferry motorcycle train truck van taxi".split()
PACKS = "bags boxes packs baskets crates jars sets".split()
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}
GROWS = {2: "doubles", 3: "triples"}
