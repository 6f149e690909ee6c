"""Characters that a terminal would obey, and how they are printed."""

# Control characters, Unicode's ends of lines, and what turns the direction of text. ESCAPED is for
# str.translate.
CONTROL = [range(9), range(10, 32), range(127, 160), range(8232, 8239), range(8294, 8298)]
ESCAPED = {}
for codes in CONTROL:
    for code in codes:
        ESCAPED[code] = ascii(chr(code))[1:-1]
IN_LINES = ESCAPED | {10: "\n"}  # for stderr; results, as the text of a model, are as they are
