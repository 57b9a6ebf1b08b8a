"""Follows a shell script without running it: its variables, its branches as far as they are known, and the
commands that it comes to."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from foretrain.files import read_text
from foretrain.launchers.expressions import edited, evaluated, tested
from foretrain.launchers.lexer import JOINED, Statement, balanced, quoted, statements


class Word(NamedTuple):
    """A word of a command, and the line that it is written on."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Command:
    """The words of a command after all expansions, and the variables that are set when it is come to."""

    words: list[Word]
    variables: dict[str, Word]


_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_BRACES = re.compile(rf"(#?)({_NAME}|[\d@*#?])(\[[^\]]*\])?(.*)", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_OPENING = ("then", "do", "{", "!", "time", "exec", "nohup", "else")
"""Words in front of a statement."""


def commands_of(path: Path, variables: dict[str, Word] | None = None) -> list[Command]:
    """The commands of a script, in their order; of branches whose test is not known, the first."""
    shell = Shell(path.parent, variables)
    shell.run(statements(read_text(path)))
    return shell.commands


class Shell:
    """Holds what is known while a script is followed; a value that is not stays as written, with its
    ``$``."""

    def __init__(self, folder: Path, variables: dict[str, Word] | None = None) -> None:
        self.folder = folder
        self.values: dict[str, Word | list[Word]] = dict(variables or {})
        self.commands: list[Command] = []
        self.branches: list[tuple[str, bool, bool]] = []
        """Of the branches that are open: the word that is compared in a ``case``, whether this part runs, and
        whether one before it did."""
        self.alternatives: list[str] = []
        """The patterns of the part of a ``case`` that comes next."""
        self.depth = 0

    def run(self, statements: list[Statement]) -> None:
        skip, last = False, None
        for statement in statements:
            if not skip:
                last = self.statement(statement)
            skip = (statement.end == "&&" and last is False) or (statement.end == "||" and last is not False)

    @property
    def running(self) -> bool:
        return all(active for _, active, _ in self.branches)

    def statement(self, statement: Statement) -> bool | None:
        """Follow one; the answer of a test, None where it is not known, true for any other command."""
        words = statement.words
        while words and words[0][0] in _OPENING:
            if words[0][0] == "else":
                self.otherwise(True)
            words = words[1:]
        waiting = bool(self.branches) and self.branches[-1][0] != "" and not self.branches[-1][1]
        if waiting and len(words) == 1 and statement.end in ("|", ")"):
            self.alternatives.append(words[0][0])
            if statement.end == ")":
                self.pattern()
            return True
        first = words[0][0] if words else ""
        if statement.end == ";;" and self.branches and first != "esac":
            self.statement(Statement(words))
            subject, active, taken = self.branches[-1]
            self.branches[-1] = subject, False, taken or active
            return True
        if first == "if":
            known = self.test(words[1:]) if self.running else False
            self.branches.append(("", known is not False, known is not False))
        elif first == "elif":
            self.otherwise(self.test(words[1:]) is not False)
        elif first == "case":
            subject = " ".join(word.text for word in self.expand(*words[1])) if len(words) > 1 else ""
            self.branches.append((subject or " ", False, False))
            if len(words) > 3 and statement.end == ")":
                self.alternatives = [words[-1][0]]
                self.pattern()
        elif first in ("fi", "esac"):
            if self.branches:
                self.branches.pop()
        elif first in ("for", "done", "while", "until", "function", "}", "in", "") or not self.running:
            if first == "for" and len(words) > 3 and self.running:
                self.values[words[1][0]] = (self.expand(*words[3]) or [Word("", words[1][1])])[0]
        elif first in ("[", "[[", "test"):
            return self.test(words)
        else:
            self.command(words)
        return True

    def otherwise(self, holds: bool) -> None:
        if self.branches:
            subject, _, taken = self.branches[-1]
            self.branches[-1] = subject, not taken and holds, taken or holds

    def pattern(self) -> None:
        """The next part of a ``case``."""
        subject, _, taken = self.branches[-1]
        holds = any(fnmatch.fnmatchcase(subject, one.strip("\"'(")) for one in self.alternatives)
        self.alternatives = []
        self.branches[-1] = subject, holds and not taken, taken

    def command(self, words: list[tuple[str, int]]) -> None:
        before = dict(self.values)
        while words and (assignment := _ASSIGNMENT.fullmatch(words[0][0])):
            self.assign(assignment, words[0][1])
            words = words[1:]
        if not words:
            return
        first = words[0][0]
        if first in _DECLARING:
            for raw, line in words[1:]:
                if assignment := _ASSIGNMENT.fullmatch(raw):
                    self.assign(assignment, line)
            return
        expanded = [word for raw, line in words for word in self.expand(raw, line)]
        known = {name: value for name, value in self.values.items() if isinstance(value, Word)}
        self.values = {**before, **{n: v for n, v in self.values.items() if n not in before}}
        if first in ("source", ".") and len(expanded) > 1:
            self.source(expanded[1].text)
        elif inner := _inner(expanded):
            self.run(statements(inner.text, inner.line))
        elif script := self.script(expanded):
            self.source(script)
        elif expanded:
            self.commands.append(Command(expanded, known))

    def script(self, words: list[Word]) -> str:
        """The script beside this one that ``bash`` runs, wherever it lies when it does."""
        for number, word in enumerate(words[:-1]):
            following = Path(words[number + 1].text)
            if word.text in ("bash", "sh") and following.suffix in (".sh", ".bash"):
                return following.name if (self.folder / following.name).is_file() else ""
        return ""

    def source(self, name: str) -> None:
        """Follow another script for what it sets."""
        path = self.folder / Path(name).name if "$" in name else self.folder / name
        if path.is_file() and self.depth < 5:
            self.depth += 1
            self.run(statements(read_text(path)))

    def assign(self, assignment: re.Match[str], line: int) -> None:
        name, more, raw = assignment.groups()
        value: Word | list[Word]
        if raw.startswith("("):
            inner = statements(raw[1:-1], line)
            value = [word for one in inner for text, at in one.words for word in self.expand(text, at)]
        else:
            value = Word(" ".join(word.text for word in self.expand(raw, line, whole=True)), line)
        if more:
            earlier = self.values.get(name, Word("", line))
            if isinstance(value, list):
                value = (earlier if isinstance(earlier, list) else [earlier]) + value
            elif isinstance(earlier, Word):
                value = Word(earlier.text + value.text, earlier.line)
        self.values[name] = value

    # Words

    def expand(self, raw: str, line: int, *, whole: bool = False) -> list[Word]:
        """The words that a raw one becomes; one in all where it is ``whole``, as in an assignment."""
        fields: list[Word] = []
        held: Word | None = None

        def add(text: str, at: int) -> None:
            nonlocal held
            held = Word(text, at) if held is None else Word(held.text + text, held.line)

        position = 0
        while position < len(raw):
            char = raw[position]
            if char == "'":
                end = quoted(raw, position)
                add(raw[position + 1 : end - 1], line)
            elif char == '"':
                end = quoted(raw, position)
                inside = raw[position + 1 : end - 1]
                if (name := _elements(inside)) and not whole:
                    values = self.array(name)
                    for value in values:
                        add(*value)
                        fields.append(held or value)
                        held = None
                else:
                    add(self.inside(inside, line), line + raw.count("\n", 0, position))
            elif char == "\\":
                end = position + 2
                add(raw[position + 1 : end], line)
            elif char in "$`":
                end = _end_of_expansion(raw, position)
                pieces = self.expansion(raw[position:end], line)
                for number, piece in enumerate(pieces):
                    if number and not whole and held is not None:
                        fields.append(held)
                        held = None
                    add((" " if number and whole else "") + piece.text, piece.line)
            else:
                end = position + 1
                add(char, line)
            position = end
        return fields if held is None else [*fields, held]

    def inside(self, text: str, line: int) -> str:
        """Expand the text in double quotes, with its variables; lines that go on stay apart."""
        result, position = "", 0
        while position < len(text):
            if text[position] == "\\":
                following = text[position + 1 : position + 2]
                plain = JOINED if following == "\n" else following
                result += plain if following in '"$`\\\n' else "\\" + following
                position += 2
            elif text[position] in "$`":
                end = _end_of_expansion(text, position)
                result += " ".join(
                    word.text for word in self.expansion(text[position:end], line, split=False)
                )
                position = end
            else:
                result += text[position]
                position += 1
        return result

    def expansion(self, raw: str, line: int, *, split: bool = True) -> list[Word]:
        """``$NAME``, ``${NAME...}``, ``$((...))`` or a command in another."""
        if raw.startswith("$(("):
            answer = self.arithmetic(raw[3:-2])
            return [Word(raw if answer is None else str(answer), line)]
        if raw.startswith(("$(", "`")) or len(raw) < 2:
            return [Word("$(...)" if len(raw) > 1 else raw, line)]
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        matched = _BRACES.fullmatch(inner)
        if matched is None:
            return [Word(raw, line)]
        count, name, index, rest = matched.groups()
        value = self.values.get(name)
        if isinstance(value, list):
            if count:
                return [Word(str(len(value)), line)]
            if index in ("[@]", "[*]") or index is None:
                return [part for word in value for part in _split(word)] if split else value
            number = self.arithmetic(index[1:-1])
            return [value[number]] if number is not None and number < len(value) else []
        if index in ("[@]", "[*]") or name in "@*":
            return [] if value is None else _split(value)
        text = self.with_operator(name, value, rest, line)
        if text is None:
            return [Word(raw, line)]
        expanded = Word(text, line if value is None else value.line)
        return _split(expanded) if split else [expanded]

    def array(self, name: str) -> list[Word]:
        value = self.values.get(name, [])
        return value if isinstance(value, list) else [value]

    def with_operator(self, name: str, value: Word | None, rest: str, line: int) -> str | None:
        """A value as ``${NAME:-default}`` and the like have it; None where it is not known."""
        given = None if value is None else value.text
        operation = re.match(r":?[-=+?]|%%?|##?|//?|\^\^?|,,?|:", rest)
        if operation is None:
            return given
        word = rest[operation.end() :]
        kind = operation[0]
        if kind.lstrip(":") in ("-", "="):
            if given or (given is not None and not kind.startswith(":")):
                return given
            default = " ".join(one.text for one in self.expand(word, line, whole=True))
            if kind.endswith("="):
                self.values[name] = Word(default, line)
            return default
        if kind.lstrip(":") == "+":
            return self.inside(word, line) if given else ""
        return None if given is None else edited(given, kind, self.inside(word, line))

    def arithmetic(self, text: str) -> int | None:
        """A whole number; None where something in it is not known."""

        def known(matched: re.Match[str]) -> str:
            words = self.expansion("$" + matched[0].lstrip("$"), 0)
            return words[0].text if words else "0"

        plain = re.sub(rf"\$\{{[^}}]*\}}|\$?{_NAME}|\$\d", known, text)
        return evaluated(plain.replace("/", "//"))

    def test(self, words: list[tuple[str, int]]) -> bool | None:
        """The answer of ``[ ... ]``; None where it is not known."""
        operands = [
            self.operand(raw, line) for raw, line in words if raw not in ("[", "[[", "]", "]]", "test")
        ]
        if not words or words[0][0] not in ("[", "[[", "test", "!"):
            return None
        for joint, both in (("||", any), ("&&", all)):
            if joint in operands:
                at = operands.index(joint)
                parts = [tested(operands[:at]), tested(operands[at + 1 :])]
                return None if None in parts else both(parts)
        return tested(operands)

    def operand(self, raw: str, line: int) -> str:
        """A word of a test, in which what is not set is empty."""
        text = " ".join(word.text for word in self.expand(raw, line, whole=True))
        return "" if re.fullmatch(r"\$\{?\w+\}?|\$[@*#]", text) else text


def _inner(words: list[Word]) -> Word | None:
    """The text that ``bash -c`` runs."""
    for number, word in enumerate(words[:-1]):
        if word.text in ("-c", "-lc") and Path(words[number - 1].text).name in ("bash", "sh"):
            return words[number + 1]
    return None


def _elements(text: str) -> str:
    """The array whose elements are meant."""
    matched = re.fullmatch(rf"\$\{{({_NAME})\[@\]\}}|\$(@)|\$\{{(@)\}}", text)
    return "" if matched is None else matched[1] or "@"


def _end_of_expansion(text: str, start: int) -> int:
    if text[start] == "`":
        closing = text.find("`", start + 1)
        return closing + 1 if closing > 0 else len(text)
    if text[start + 1 : start + 2] in ("(", "{"):
        return balanced(text, start + 1)
    matched = re.compile(rf"\$({_NAME}|[\d@*#?$!])").match(text, start)
    return matched.end() if matched else start + 1


def _split(word: Word) -> list[Word]:
    """At blanks; each part on its own line."""
    return [
        Word(part[0], word.line + len(re.findall(rf"[\n{JOINED}]", word.text[: part.start()])))
        for part in re.finditer(r"\S+", word.text)
    ]
