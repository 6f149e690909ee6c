"""Characters that a terminal would obey, and how they are printed."""

# What a terminal would obey, or turn the text by: names in files are printed without, by translate.
_CONTROL = *range(9), *range(10, 32), *range(127, 160), *range(8232, 8239), *range(8294, 8298)
ESCAPED = {i: ascii(chr(i))[1:-1] for i in _CONTROL}
IN_LINES = ESCAPED | {10: "\n"}  # for stderr; results, as the text of a model, are as they are
