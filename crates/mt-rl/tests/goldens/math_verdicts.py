"""Writes math_verdicts.json: pairs of answers, and whether `math-verify` calls them equal.

Needs math-verify 0.8 or later. Pairs are drawn from templates: one value in two notations, or two values that differ slightly.
Each line is [expected, given, verdict].
"""

import json
import pathlib
import random
from fractions import Fraction

from math_verify import parse, verify

random.seed(11)


def fraction(n, d):
    return random.choice([rf"\frac{{{n}}}{{{d}}}", rf"\dfrac{{{n}}}{{{d}}}", f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}"])


def integer(n):
    ways = [str(n), f"{n}.0", f"x={n}", f"{n} "]
    if abs(n) >= 1000:
        ways.append(f"{n:,}")
    return random.choice(ways)


def rational(value):
    ways = [fraction(value.numerator, value.denominator)]
    factor = random.randint(2, 5)
    ways.append(fraction(value.numerator * factor, value.denominator * factor))
    if value.denominator in (1, 2, 4, 5, 8, 10, 20):
        ways.append(str(float(value)))
    return random.choice(ways)


def root(n, k):
    return random.choice([rf"{n}\sqrt{{{k}}}", rf"\sqrt{{{n * n * k}}}", rf"{n} \sqrt{{{k}}}"])


def interval(a, b, brackets):
    left, right = brackets
    body = random.choice([f"{left}{a},{b}{right}", f"{left}{a}, {b}{right}", rf"\left{left}{a}, {b}\right{right}"])
    return body


def listed(values):
    values = random.sample(values, len(values))
    return r"\{" + ", ".join(map(str, values)) + r"\}"


def polynomial(a, b, c):
    return random.choice([
        f"{a}x^2+{b}x+{c}", f"{c}+{b}x+{a}x^2", rf"{a}x^{{2}} + {b}x + {c}", f"x({a}x+{b})+{c}",
    ])


def pairs():
    for _ in range(300):
        n = random.choice([random.randint(-20, 20), random.randint(1000, 3_000_000)])
        yield integer(n), integer(n)
        yield integer(n), integer(n + random.choice([-1, 1, 10]))
    for _ in range(300):
        value = Fraction(random.randint(-30, 30), random.randint(1, 20))
        other = Fraction(random.randint(-30, 30), random.randint(1, 20))
        yield rational(value), rational(value)
        yield rational(value), rational(other)
    for _ in range(120):
        n, k = random.randint(2, 9), random.choice([2, 3, 5, 7])
        yield root(n, k), root(n, k)
        yield root(n, k), root(n + 1, k)
    for _ in range(120):
        a = random.randint(-9, 5)
        b = random.choice([a + random.randint(1, 9), r"\infty"])
        right = ")" if b == r"\infty" else random.choice([")", "]"])
        left = random.choice(["(", "["])
        yield interval(a, b, left + right), interval(a, b, left + right)
        yield interval(a, b, left + right), interval(a - 1, b, left + right)
    for _ in range(120):
        values = random.sample(range(-9, 20), random.randint(2, 4))
        yield listed(values), listed(values)
        yield listed(values), listed(values[:-1] + [values[-1] + 40])
    for _ in range(120):
        a, b, c = (random.randint(2, 9) for _ in range(3))
        yield polynomial(a, b, c), polynomial(a, b, c)
        yield polynomial(a, b, c), polynomial(a, b + 1, c)


lines = []
for expected, given in pairs():
    verdict = verify(parse(f"${expected}$"), parse(f"${given}$"))
    lines.append(json.dumps([expected, given, bool(verdict)]))
pathlib.Path(__file__).with_suffix(".json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
print(len(lines), "pairs,", sum(line.endswith("true]") for line in lines), "equal")
