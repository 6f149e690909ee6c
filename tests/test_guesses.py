"""What a student may type as a guess, how it is understood, and which points it earns."""

import math
import re

import pytest
from test_predict import forms, predict

BYTES = forms.Asked("sent", "bytes")
SHARE, SPEED = forms.Asked("share", "%", 0.02), forms.Asked("speed", "Gbit/s", "logarithm")
CALLS, FACTOR = forms.Asked("calls", "calls"), forms.Asked("growth", "factor", 0.1)
ORDER = forms.Asked("order", "order", "pairs")


@pytest.mark.parametrize(
    "text, asked, value",
    [
        ("12.5 MB", BYTES, 12.5e6),
        ("3e6", BYTES, 3e6),
        ("1,234", BYTES, 1234),
        ("1,234,567 bytes", BYTES, 1234567),
        (".5 GiB", BYTES, 2**29),
        ("12", CALLS, 12),
        ("12.5 %", SHARE, 12.5),
        ("12.5", SHARE, 12.5),
        ("1/8", SHARE, 12.5),
        ("3/2", FACTOR, 1.5),
        ("2x", FACTOR, 2),
        ("50", SPEED, 50),
        ("8000 mbit", SPEED, 8),
        ("8 Gb/s", SPEED, 8),  # a small b is a bit
        ("1 GB/s", SPEED, 8),
        ("C, a, d; b e", ORDER, "c a d b e"),
        ("c>a>d>b>e", ORDER, "c a d b e"),
    ],
)
def test_what_is_understood(text, asked, value):
    assert predict.parse(text, asked).value == pytest.approx(value)


@pytest.mark.parametrize(
    "text, asked, says",
    [
        ("", BYTES, "'' is not understood: type a number of bytes, such as 12.5 MB"),
        ("12 apples", BYTES, "'12 apples' is not understood"),
        ("12,5 MB", BYTES, "'12,5 MB' is not understood"),
        ("-3", CALLS, "such as 12"),
        ("2.5", CALLS, "type a whole number"),
        ("1/0", FACTOR, "such as 1.5 or 3/2"),
        ("5 MB", CALLS, "not understood"),
        ("9" * 400, CALLS, "not understood"),
        ("a b c d", ORDER, "each of the letters a to e once"),
        ("a b c d d", ORDER, "each of the letters a to e once"),
        ("nan", SPEED, "not understood"),
    ],
)
def test_what_is_not_understood(text, asked, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        predict.parse(text, asked)


@pytest.mark.parametrize(
    "asked, typed, counted, points",
    [
        (BYTES, "2595328", 2595328, 1),
        (BYTES, "2595327", 2595328, 0),
        (BYTES, "2.6 MB", 2595328, 1),  # rounded
        (BYTES, "2.59 MB", 2595328, 0),
        (BYTES, "3 MB", 2595328, 0),  # too coarse
        (CALLS, "13", 14, 0),
        (FACTOR, "1.9", 2, 1),
        (FACTOR, "1.7", 2, 0),
        (SPEED, "120", 100, 1),
        (SPEED, "200", 100, math.log(2) / math.log(4 / 1.25)),
        (SPEED, "50", 100, math.log(2) / math.log(4 / 1.25)),
        (SPEED, "400", 100, 0),
        (SPEED, "0", 100, 0),
    ],
)
def test_points(asked, typed, counted, points):
    row = predict.Row(asked, predict.parse(typed, asked), forms.Found(counted))
    assert row.points == pytest.approx(points, abs=1e-9)


def test_pairs_that_are_close_do_not_count():
    found = forms.Found("a b c d e", seconds=dict(a=1, b=1.1, c=2, d=2.1, e=4))
    points = {typed: predict.Row(ORDER, predict.parse(typed, ORDER), found).points
              for typed in ("abcde", "badce", "cabde", "edcba")}  # fmt: skip
    assert points == pytest.approx({"abcde": 1, "badce": 1, "cabde": 6 / 8, "edcba": 0})


@pytest.mark.parametrize(
    "typed, says", [("7", "line 1"), ("10", "line 2 or line 3"), ("4", "lines 1 and 2"), ("1", "")]
)
def test_all_lines_that_explain_a_guess_are_named(typed, says):
    terms = tuple(forms.Term(value, "") for value in (6, 3, 3, 1))
    row = predict.Row(CALLS, predict.parse(typed, CALLS), forms.Found(13, terms))
    assert row.left_out == says
