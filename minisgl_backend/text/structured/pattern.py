"""A client's regular expression → the same one in the few forms that mean the same everywhere.

Where it stands in the flow: `schema.py` and `spec.py` pass every pattern through `plain_pattern` before the grammar
library sees it. JSON Schema means ECMAScript, validators in Python mean `re`, xgrammar reads a subset of both and drops
some of what it does not know (an anchor in the middle) with a warning. What comes out matches no string that the two
would not match; what would be dropped is refused.
"""

from __future__ import annotations

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.values import shown

MAX_PATTERN_CHARS = 4096
MAX_REPEATS = 20_000
"""Characters that a pattern stands for with its bounded repeats written out."""

_MAX_GROUPS = 64  # within each other
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_PLAIN = set("^$\\.*+?()[]{}|/-\"'`~!@#%&=:;<>, _")
_DIGITS, _WORD = [("0", "9")], [("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z")]
_WHITE = [("\t", "\r"), ("\x1c", " "), ("\x85", "\x85"), ("\xa0", "\xa0"), ("\u1680", "\u1680"), ("\u2000", "\u200a")]
_WHITE += [("\u2028", "\u2029"), ("\u202f", "\u202f"), ("\u205f", "\u205f"), ("\u3000", "\u3000"), ("\ufeff", "\ufeff")]
_COMMON_WHITE = [("\t", "\r"), (" ", " ")]
_LINE_ENDS = [("\n", "\n"), ("\r", "\r"), ("\u2028", "\u2029")]

_NEEDS_ESCAPE = [("\0", "\x1f"), ('"', '"'), ("\\", "\\")]

_Ranges = list[tuple[str, str]]


def plain_pattern(field: str, pattern: str, in_json: bool = False) -> str:
    """What a whole text must match. Raises InvalidRequest or UnsupportedFeature, naming the field and the place.

    in_json: it stands within a JSON string, where some characters need an escape; the library's patterns know no
    escapes, so those characters are left out.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(field, f"must hold at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    reader = _Reader(field, pattern, in_json)
    text, weight = reader.alternatives(0)
    if reader.at < len(pattern):
        raise reader.wrong("has a ) that closes nothing")
    if weight > MAX_REPEATS:
        raise InvalidRequest(field, f"repeats to {weight} characters; at most {MAX_REPEATS} are taken")
    return text


class _Reader:
    """Recursive descent. A weight is how many characters a part stands for, its repeats written out."""

    def __init__(self, field: str, pattern: str, in_json: bool) -> None:
        self.field = field
        self.hidden: _Ranges = _NEEDS_ESCAPE if in_json else []
        self.pattern = pattern
        self.at = 0

    def wrong(self, problem: str) -> InvalidRequest:
        return InvalidRequest(self.field, f"{problem}, at character {self.at}")

    def unsupported(self, what: str) -> UnsupportedFeature:
        return UnsupportedFeature(self.field, f"{what} is not supported, at character {self.at}")

    def alternatives(self, depth: int) -> tuple[str, int]:
        if depth > _MAX_GROUPS:
            raise self.wrong(f"has more than {_MAX_GROUPS} groups within each other")
        texts, weight = [], 0
        while True:
            text, own = self._sequence(depth)
            texts.append(text)
            weight += own
            if not self._skip("|"):
                return "|".join(texts), weight

    def _sequence(self, depth: int) -> tuple[str, int]:
        texts, weight = [], 0
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            text, own = self._repeated(depth)
            texts.append(text)
            weight += own
        return "".join(texts), weight

    def _repeated(self, depth: int) -> tuple[str, int]:
        if self._is_outer_anchor():
            self.at += 1
            return "", 0
        text, weight = self._atom(depth)
        quantifier, times = self._quantifier()
        if quantifier:
            self._skip("?")  # lazy: the same language
            if self.at < len(self.pattern) and self.pattern[self.at] in "*+?{":
                raise self.wrong("has two quantifiers in a row")
        return text + quantifier, weight * times

    def _is_outer_anchor(self) -> bool:
        character = self.pattern[self.at]
        if character not in "^$":
            return False
        if self.at != (0 if character == "^" else len(self.pattern) - 1):
            raise self.unsupported(f"{character} elsewhere than at the {'start' if character == '^' else 'end'}")
        return True

    def _atom(self, depth: int) -> tuple[str, int]:
        character = self.pattern[self.at]
        self.at += 1
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._class(), 1
        if character == ".":
            return self._set(_LINE_ENDS, negated=True), 1
        if character == "\\":
            return self._escape(), 1
        if character in "*+?{}]":
            self.at -= 1
            raise self.wrong(f"has a {character} with nothing to stand for; write \\{character} for the character")
        return self._literal(character), 1

    def _group(self, depth: int) -> tuple[str, int]:
        if self._skip("?"):
            if self._skip("P<") or (self._peek() == "<" and self._peek(1) not in "=!" and self._skip("<")):
                end = self.pattern.find(">", self.at)
                if end < 0:
                    raise self.wrong("has a group whose name does not end")
                self.at = end + 1
            elif not self._skip(":"):
                raise self.unsupported("a group that begins with (?" + self._peek())
        text, weight = self.alternatives(depth + 1)
        if not self._skip(")"):
            raise self.wrong("has a ( that is not closed")
        return f"({text})", weight

    def _quantifier(self) -> tuple[str, int]:
        character = self._peek()
        if character in ("*", "+", "?"):
            self.at += 1
            return character, 1
        if character != "{":
            return "", 1
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : max(end, self.at + 1)].partition(",")
        digits = low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))
        if end < 0 or not digits or len(low) > 9 or len(high) > 9:
            raise self.wrong("has a { that begins no repeat; write \\{ for the character")
        if high and int(high) < int(low):
            raise self.wrong("has a repeat whose bounds are the wrong way round")
        self.at = end + 1
        times = max(int(high or low), 1)
        return f"{{{int(low)}{',' if comma else ''}{int(high) if high else ''}}}", times

    def _escape(self) -> str:
        character = self._next()
        if character in "dws":
            ranges = {"d": _DIGITS, "w": _WORD, "s": _COMMON_WHITE}[character]
            return self._set(ranges, negated=False)
        if character == "S":
            return self._set(_WHITE, negated=True)
        return self._literal(self._character_of(character))

    def _character_of(self, character: str) -> str:
        """The one character that an escape stands for."""
        if character in _ESCAPED:
            return _ESCAPED[character]
        if character in "xu":
            length = 2 if character == "x" else 4
            digits = self.pattern[self.at : self.at + length]
            if len(digits) < length or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise self.wrong(f"has a \\{character} without {length} hexadecimal digits")
            self.at += length
            if 0xD800 <= int(digits, 16) < 0xE000:
                raise self.unsupported("half of a surrogate pair")
            return chr(int(digits, 16))
        if character in _PLAIN:
            return character
        raise self.unsupported(f"\\{shown(character)[1:-1]}")

    def _class(self) -> str:
        negated = self._skip("^")
        ranges: _Ranges = []
        while not self._skip("]"):
            ranges += self._class_part(negated)
        if not ranges:
            raise self.wrong("has an empty set of characters")
        return self._set(ranges, negated)

    def _class_part(self, negated: bool) -> _Ranges:
        low = self._class_character()
        if isinstance(low, list):
            if negated and low is not _COMMON_WHITE:
                raise self.unsupported(
                    "\\d or \\w in a negated set, which means different things to different readers,"
                )
            return _WHITE if negated else low
        if self._peek() != "-" or self._peek(1) in ("", "]"):
            return [(low, low)]
        self.at += 1
        high = self._class_character()
        if isinstance(high, list) or high < low:
            raise self.wrong("has a range of characters that is none")
        return [(low, high)]

    def _class_character(self) -> str | _Ranges:
        character = self._next()
        if character == "[":
            raise self.unsupported("a [ within a set (write \\[)")
        if character != "\\":
            return character
        character = self._next()
        if character in "dws":
            return {"d": _DIGITS, "w": _WORD, "s": _COMMON_WHITE}[character]
        return self._character_of(character)

    def _literal(self, character: str) -> str:
        if any(low <= character <= high for low, high in self.hidden):
            raise self.unsupported(f"{shown(character)}, which stands in JSON with an escape,")
        return _literal(character)

    def _set(self, ranges: _Ranges, negated: bool) -> str:
        if negated:
            return _class_text([*ranges, *self.hidden], negated)
        left = _without(ranges, self.hidden)
        if not left:
            raise self.unsupported("a set of nothing but characters that stand in JSON with an escape")
        return _class_text(left, negated)

    def _peek(self, ahead: int = 0) -> str:
        return self.pattern[self.at + ahead : self.at + ahead + 1]

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.wrong("ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _skip(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False


def _literal(character: str) -> str:
    if character in "\n\r\t\f\v":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\v": "\\v"}[character]
    return "\\" + character if character in "^$\\.*+?()[]{}|/" else character


def _without(ranges: _Ranges, hidden: _Ranges) -> _Ranges:
    for first, last in hidden:
        left: _Ranges = []
        for low, high in ranges:
            if high < first or low > last:
                left.append((low, high))
                continue
            if low < first:
                left.append((low, chr(ord(first) - 1)))
            if high > last:
                left.append((chr(ord(last) + 1), high))
        ranges = left
    return ranges


def _class_text(ranges: _Ranges, negated: bool) -> str:
    parts = (_class_literal(low) + (f"-{_class_literal(high)}" if high != low else "") for low, high in ranges)
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _class_literal(character: str) -> str:
    if ord(character) < 0x20 or ord(character) == 0x7F:
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in "^\\[]-" else character
