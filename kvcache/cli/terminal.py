"""Text of others on the user's terminal.

A server may answer anything, and a terminal obeys what it is sent.
"""


def printable(text: str) -> str:
    """Return text in which every character that a terminal would obey, or cannot show, is written out."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
