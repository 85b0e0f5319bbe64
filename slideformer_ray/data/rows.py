"""JSONL files to checked rows. A mistake in a file is found here, by file and line, before any model is loaded.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}`, with an optional `"tools"` list, or `{"text": "..."}`.
Other keys are ignored. Reads the files it is given and touches nothing else. Tested by tests/data/test_rows.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYOUTS = 'a row is one JSON object a line, {"messages": [{"role": ..., "content": ...}, ...]} or {"text": "..."}'


class DataError(ValueError):
    """The user's data is wrong. The message is complete: file and line, what was found, what is needed."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in the file: `messages`, or `text`."""

    row_id: int  # place among all rows of one `load_rows` call, from 0
    file: Path
    line: int  # from 1
    messages: list[dict[str, Any]] = field(default_factory=list)  # empty if the row is text
    tools: list[Any] | None = None  # tool definitions, handed to the chat template
    text: str | None = None  # None if the row is messages

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def load_rows(paths: Iterable[Path | str]) -> list[RawRow]:
    """All rows of `paths`, in file order.

    Raises DataError: the first bad row, a file without rows, a file that cannot be read.
    """
    rows: list[RawRow] = []
    for path in map(Path, paths):
        num_before = len(rows)
        for line, text in _lines(path):
            rows.append(_parse(text, len(rows), path, line))
        if len(rows) == num_before:
            raise DataError(f"{path}: the file holds no row; {LAYOUTS}")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of each row. Blank lines may end the file but not stand between rows."""
    blank = None
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                if line == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of Windows editors
                if not raw.strip():
                    blank = blank or line
                    continue
                if blank:
                    raise DataError(f"{path}:{blank}: empty line between rows; remove it")
                try:
                    yield line, raw.rstrip(b"\r\n").decode()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}:{line}: not UTF-8 (0x{raw[error.start]:02x} is byte {error.start} of the line); "
                        "save the file as UTF-8"
                    ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(text: str, row_id: int, file: Path, line: int) -> RawRow:
    where = f"{file}:{line}"
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno}); {LAYOUTS}") from None
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply; {LAYOUTS}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object, found {_kind(row)}; {LAYOUTS}")
    if ("messages" in row) == ("text" in row):
        found = "both" if "messages" in row else f"neither (keys: {', '.join(row) or 'none'})"
        raise DataError(f"{where}: expected one of the keys messages and text, found {found}; {LAYOUTS}")
    if not _is_utf8(row):
        raise DataError(f"{where}: a \\ud800-\\udfff escape without its other half, which is not text; remove it")
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise DataError(f"{where}: text: expected a string that is not empty, found {_kind(row['text'])}")
        return RawRow(row_id, file, line, text=row["text"])
    _check_messages(row["messages"], where)
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools: expected a list of tool definitions, found {_kind(tools)}")
    return RawRow(row_id, file, line, messages=row["messages"], tools=tools)


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages: expected a list that is not empty, found {_kind(messages)}")
    for index, message in enumerate(messages):
        name = f"{where}: messages[{index}]"
        if not isinstance(message, dict):
            raise DataError(f"{name}: expected an object with role and content, found {_kind(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            hint = "; rename from and value to role and content" if "from" in message else ""
            raise DataError(f"{name}.role: expected a name such as user or assistant, found {_kind(role)}{hint}")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            raise DataError(f"{name}.content: expected a string, found {_kind(content)}")


def _is_utf8(row: dict[str, Any]) -> bool:
    """JSON escapes can spell half of a surrogate pair: a Python str holds it, no tokenizer takes it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    """A JSON value in words, short enough for a message."""
    if value is None:
        return "nothing"
    if value in ("", [], {}):
        return {"str": "an empty string", "list": "an empty list", "dict": "an empty object"}[type(value).__name__]
    kinds = {"str": "a string", "list": "a list", "dict": "an object", "bool": "true or false"}
    return kinds.get(type(value).__name__, "a number")
