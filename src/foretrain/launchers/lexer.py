"""Cuts the text of a shell script into statements of raw words, with the lines that they begin on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

JOINED = "\v"
"""Stands for a line that goes on inside of quotes: a blank that lines can be counted by."""
_CLOSING = {"(": ")", "{": "}"}


@dataclass(slots=True)
class Statement:
    """Words as they are written, quotes and all, and what ends them."""

    words: list[tuple[str, int]] = field(default_factory=list)
    end: str = "\n"


def statements(text: str, line: int = 1) -> list[Statement]:
    """The statements of a script whose first line has this number; here-documents are left out."""
    return _Lexer(text, line).run()


def balanced(text: str, start: int) -> int:
    """Find where the bracket that opens at ``start`` has closed, or the end of the text."""
    opened = text[start]
    depth, at = 0, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"":
            at = quoted(text, at) - 1
        elif char == opened:
            depth += 1
        elif char == _CLOSING[opened]:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


def quoted(text: str, start: int) -> int:
    """Find where the quotes that open at ``start`` have closed."""
    quote, at = text[start], start + 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "\\":
            at += 1
        elif quote == '"' and text[at] == "$" and text[at + 1 : at + 2] in _CLOSING and text[at + 1 : at + 2]:
            at = balanced(text, at + 1) - 1
        at += 1
    return min(at + 1, len(text))


class _Lexer:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.word, self.word_line = "", line
        self.statement = Statement()
        self.found: list[Statement] = []
        self.documents: list[str] = []
        """What ends the here-documents that begin on the next line."""
        self.redirected = False
        """The next word is where output goes to."""

    def run(self) -> list[Statement]:
        while self.at < len(self.text):
            self.step(self.text[self.at])
        self.end("\n")
        return self.found

    def take(self, end: int) -> None:
        """Add the text up to ``end`` to the word."""
        if not self.word:
            self.word_line = self.line
        piece = self.text[self.at : end]
        self.word += piece
        self.line += piece.count("\n")
        self.at = end

    def close(self) -> None:
        """End the word."""
        if self.word and not self.redirected:
            self.statement.words.append((self.word, self.word_line))
        if self.word:
            self.redirected = False
        self.word = ""

    def end(self, how: str) -> None:
        """End the statement."""
        self.close()
        if self.statement.words or how in (";;", ")"):
            self.statement.end = how
            self.found.append(self.statement)
        elif self.found and how in ("&&", "||"):
            self.found[-1].end = how
        self.statement = Statement()

    @property
    def testing(self) -> bool:
        words = [*(word for word, _ in self.statement.words), self.word]
        return "[[" in words and "]]" not in words

    def step(self, char: str) -> None:
        text, at = self.text, self.at
        after = text[at + 1 : at + 2]
        if char == "\\" and after == "\n":
            self.at, self.line = at + 2, self.line + 1
        elif char == "\\":
            self.take(at + 2)
        elif char in "'\"":
            self.take(quoted(text, at))
        elif char == "$" and after and after in "({":
            self.take(balanced(text, at + 1))
        elif char == "`":
            closing = text.find("`", at + 1)
            self.take(closing + 1 if closing > 0 else len(text))
        elif char == "#" and not self.word:
            self.at = _or_end(text.find("\n", at), text)
        elif char == "\n":
            self.newline()
        elif char.isspace():
            self.close()
            self.at, self.line = self.at + 1, self.line + (char == JOINED)
        elif char == "(" and self.word.endswith("="):
            self.take(balanced(text, at))
        elif text.startswith("((", at) and not self.word:
            self.at = balanced(text, at)
        elif char in "<>":
            self.redirect()
        elif char in ";&|()":
            self.separate(char)
        else:
            self.take(at + 1)

    def newline(self) -> None:
        self.end("\n")
        self.at, self.line = self.at + 1, self.line + 1
        for ending in self.documents:
            closing = re.compile(rf"^\t*{re.escape(ending)}$", re.MULTILINE).search(self.text, self.at)
            stop = _or_end(-1 if closing is None else closing.end(), self.text)
            self.line += self.text.count("\n", self.at, stop)
            self.at = stop
        self.documents = []

    def redirect(self) -> None:
        if self.word.isdigit() or self.word == "&":
            self.word = ""
        self.close()
        if document := re.compile(r"<<-?\s*([\"']?)(\w+)\1").match(self.text, self.at):
            self.documents.append(document[2])
            self.at = document.end()
            return
        self.at += len(str(re.compile(r"[<>&|]+").match(self.text, self.at)[0]))  # type: ignore[index]
        self.redirected = True
        if self.text[self.at : self.at + 1] == "(":
            self.at, self.redirected = balanced(self.text, self.at), False

    def separate(self, char: str) -> None:
        doubled = self.text[self.at : self.at + 2]
        if char == "&" and self.text[self.at + 1 : self.at + 2] == ">":
            self.at += 1
        elif self.testing and doubled in ("&&", "||"):
            self.close()
            self.statement.words.append((doubled, self.line))
            self.at += 2
        elif doubled in (";;", "&&", "||"):
            self.end(doubled)
            self.at += 2
        elif doubled == "()":
            self.at += 2
        elif self.testing:
            self.take(self.at + 1)
        else:
            self.end(char)
            self.at += 1


def _or_end(place: int, text: str) -> int:
    return place if place >= 0 else len(text)
