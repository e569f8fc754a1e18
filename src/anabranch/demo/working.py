"""Written-out arithmetic: every carry, borrow, partial product and division step as text.

Owns the notation of worked steps. Knows nothing of stories, templates or models.

    347+285 [7+5=12,4+8+1=13,3+2+1=6]=632        columns from the right, carry as +1
    523-178 [13-8=5,12-1-7=4,5-1-1=3]=345        13 borrows, -1 repays
    347*6 [7*6=42,4*6+4=28,3*6+2=20]=2082        carry added to the next product
    34*27; 34*7 [..]=238; 34*20 [..]=680; 238+680 [..]=918
    344/8 [34/8=4r2,24/8=3r0]=43                 long division, leading zeros left out
"""

from __future__ import annotations

LARGEST = 9999
"""Largest value a step may take; answers so have at most four digits."""


class Unfit(Exception):
    """The numbers do not suit the template (negative, too large, not divisible): draw again."""


def plus(a: int, b: int) -> tuple[str, int]:
    """Text and value of a + b, both >= 0."""
    total = _bounded(a + b)
    if a < 10 and b < 10:
        return f"{a}+{b}={total}", total
    x, y, carry = str(a)[::-1], str(b)[::-1], 0
    steps: list[str] = []
    for i in range(max(len(x), len(y))):
        digits = [s[i] for s in (x, y) if i < len(s)]
        terms = digits + (["1"] if carry else [])
        if len(terms) == 1:
            terms.append("0")
        column = sum(map(int, terms))
        steps.append(f"{'+'.join(terms)}={column}")
        carry = column // 10
    return f"{a}+{b} [{','.join(steps)}]={total}", total


def minus(a: int, b: int) -> tuple[str, int]:
    """Text and value of a - b, which must not be negative."""
    if b > a:
        raise Unfit
    if b < 10 and a < 20 and (a < 10 or a - b < 10):
        return f"{a}-{b}={a - b}", a - b
    x, y, borrow = str(a)[::-1], str(b)[::-1], 0
    steps: list[str] = []
    for i, digit in enumerate(x):
        low = int(y[i]) if i < len(y) else 0
        top = int(digit)
        short = top - borrow - low < 0
        terms = f"{top + 10 * short}{'-1' * borrow}"
        if i < len(y) or not borrow:
            terms += f"-{low}"
        steps.append(f"{terms}={top + 10 * short - borrow - low}")
        borrow = int(short)
    return f"{a}-{b} [{','.join(steps)}]={a - b}", a - b


def times(a: int, b: int) -> tuple[str, int]:
    """Text and value of a * b; the multiplier is the shorter factor, of equal ones a round one."""
    if len(str(b)) > len(str(a)) or (len(str(b)) == len(str(a)) and a % 10 == 0):
        a, b = b, a
    product = _bounded(a * b)
    if a < 10 or b in (10, 100, 1000):
        return f"{a}*{b}={product}", product
    if len(str(b).rstrip("0")) <= 1:
        return f"{a}*{b} [{_columns(a, int(str(b)[0]))}]={product}", product
    parts, total = [f"{a}*{b}"], 0
    for power, digit in enumerate(reversed(str(b))):
        if digit == "0":
            continue
        by, partial = int(digit) * 10**power, a * int(digit) * 10**power
        parts.append(f"{a}*{by} [{_columns(a, int(digit))}]={partial}")
        if total:
            parts.append(plus(total, partial)[0])
        total += partial
    return "; ".join(parts), product


def over(a: int, b: int) -> tuple[str, int]:
    """Text and value of a / b, which must be whole; b up to 12 or a power of ten."""
    if b < 2 or a % b or a < b:
        raise Unfit
    quotient = a // b
    if b in (10, 100, 1000) or quotient < 10:
        return f"{a}/{b}={quotient}", quotient
    if b > 12:
        raise Unfit
    steps: list[str] = []
    rest = 0
    for digit in str(a):
        rest = rest * 10 + int(digit)
        if rest < b and not steps:
            continue
        steps.append(f"{rest}/{b}={rest // b}r{rest % b}")
        rest %= b
    return f"{a}/{b} [{','.join(steps)}]={quotient}", quotient


def _columns(a: int, digit: int) -> str:
    """Column products of a by one digit, from the right, the carry added to the next."""
    steps: list[str] = []
    carry = 0
    for top in reversed(str(a)):
        column = int(top) * digit + carry
        steps.append(f"{top}*{digit}{f'+{carry}' if carry else ''}={column}")
        carry = column // 10
    return ",".join(steps)


def _bounded(value: int) -> int:
    if value > LARGEST:
        raise Unfit
    return value
