"""Text of others on the user's terminal.

A server may send any text, and a terminal obeys control characters in it.
"""


def printable(text: str) -> str:
    """Return text in which every character that a terminal would obey, or cannot show, is written out."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
