"""Reading rows: what is accepted, and one clear message, with file and line, for what is not."""

import json

import pytest

from slideformer_ray.data.rows import DataError, load_rows

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
GOOD = json.dumps(CHAT)


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_rows_keep_their_place_and_source(tmp_path):
    """row_id counts over all files; file and line say where a row stands; other keys are ignored."""
    a = write(tmp_path / "a.jsonl", GOOD, '{"text": "é🦙", "id": 7}')
    b = write(tmp_path / "b.jsonl", json.dumps({**CHAT, "tools": [{"type": "function"}]}), "")
    rows = load_rows([a, str(b)])
    assert [(row.row_id, row.where) for row in rows] == [(0, f"{a}:1"), (1, f"{a}:2"), (2, f"{b}:1")]
    assert rows[0].messages == CHAT["messages"] and rows[0].text is None and rows[0].tools is None
    assert rows[1].messages == [] and rows[1].text == "é🦙"
    assert rows[2].tools == [{"type": "function"}]


def test_files_of_other_systems_are_read(tmp_path):
    """A byte order mark, CRLF and blank lines at the end are no mistakes."""
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + GOOD.encode() + b"\r", GOOD + "\r", "", " ", "")
    assert [row.line for row in load_rows([path])] == [1, 2]


def test_an_assistant_may_only_call_tools(tmp_path):
    """content may be null where tool_calls says something."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": [{"role": "user", "content": "hi"}, call]}))
    assert load_rows([path])[0].messages[1] == call


def messages(*turns):
    return json.dumps({"messages": list(turns)})


BAD_ROWS = {
    "not JSON": ('{"text": "a}', "not valid JSON: Unterminated string starting at (column 10)"),
    "nested too deeply": ("[" * 100_000, "JSON nested too deeply"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "not UTF-8 (0xe9 is byte 13 of the line); save the file as UTF-8"),
    "half a surrogate pair": (r'{"text": "\ud83d"}', r"a \ud800-\udfff escape without its other half"),
    "a JSON array file": ('[{"text": "a"}]', "expected an object, found a list; a row is one JSON object a line"),
    "a number": ("3", "expected an object, found a number"),
    "an empty object": ("{}", "expected one of the keys messages and text, found neither (keys: none)"),
    "another layout": ('{"prompt": "a", "completion": "b"}', "found neither (keys: prompt, completion)"),
    "both layouts": ('{"text": "a", "messages": []}', "found both"),
    "text of a wrong type": ('{"text": ["a"]}', "text: expected a string that is not empty, found a list"),
    "empty text": ('{"text": ""}', "text: expected a string that is not empty, found an empty string"),
    "no messages": ('{"messages": []}', "messages: expected a list that is not empty, found an empty list"),
    "messages of a wrong type": ('{"messages": "hi"}', "messages: expected a list that is not empty, found a string"),
    "a message of a wrong type": (messages("hi"), "messages[0]: expected an object with role and content, found a st"),
    "no role": (
        messages({"content": "a"}),
        "messages[0].role: expected a name such as user or assistant, found nothin",
    ),
    "ShareGPT names": (messages({"from": "human", "value": "a"}), "rename from and value to role and content"),
    "no content": (messages({"role": "user"}), "messages[0].content: expected a string, found nothing"),
    "content parts": (
        messages({"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}),
        "messages[1].content: expected a string, found a list",
    ),
    "tools of a wrong type": (
        json.dumps({**CHAT, "tools": {}}),
        "tools: expected a list of tool definitions, found an ",
    ),
}


@pytest.mark.parametrize("bad, message", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, message):
    """One line: where, what was found, what is expected."""
    path = write(tmp_path / "rows.jsonl", GOOD, GOOD, bad, GOOD)
    with pytest.raises(DataError) as error:
        load_rows([path])
    assert str(error.value).startswith(f"{path}:3: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_blank_line_between_rows_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, "", GOOD)
    with pytest.raises(DataError, match=r"rows.jsonl:2: empty line between rows"):
        load_rows([path])


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    """Also when another file has rows: an empty file in a list is a mistake."""
    good, empty = write(tmp_path / "good.jsonl", GOOD), tmp_path / "empty.jsonl"
    empty.write_bytes(content)
    with pytest.raises(DataError, match=r"empty.jsonl: the file holds no row; a row is"):
        load_rows([good, empty])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.jsonl: cannot be read: No such file or directory"):
        load_rows([tmp_path / "absent.jsonl"])
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        load_rows([tmp_path])
