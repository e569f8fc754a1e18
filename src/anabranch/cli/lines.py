"""Lines of text files that users bring, with their numbers.

Owns encoding and line ends: UTF-8 with or without a byte-order mark; a line ends with LF or CRLF
and with nothing else, as JSON may hold the rest.
"""

from pathlib import Path


def lines_of(file: Path) -> list[tuple[int, str]]:
    """(number from 1, line) of the lines that are not blank. ValueError names a line not in
    UTF-8."""
    found = []
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}:{number}: not UTF-8 ({error.reason})") from None
        if text.strip():
            found.append((number, text))
    return found
