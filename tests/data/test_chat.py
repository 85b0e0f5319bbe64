"""Ids and masks of rows, for several kinds of chat template. Ground truth: what the supervised ids decode to."""

import itertools
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from slideformer_ray.data.chat import RowEncoder, encode_row
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.data.rows import DataError, RawRow

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # Llama 3: BOS in the template, content trimmed
    "{{ bos_token }}"
    "{% for m in messages %}<|head|>{{ m.role }}<|head_end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|head_end|>\n\n{% endif %}"
)
INST = (  # Mistral: no generation prompt, a space before the answer, the system text in the LAST user turn
    "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if system is not none and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{ system }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
THINK = (  # Qwen3: empty thoughts before the last answer, its own if it has some; earlier turns lose theirs
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thoughts = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% if '</think>' not in m.content %}{% set thoughts = '' %}{% endif %}"
    "{% if loop.last %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = (  # generation markers are transformers' own; they are not needed and must not disturb
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "think": THINK, "markers": MARKERS, "lines": None}
STOPS = {
    "chatml": "<|im_end|>",
    "headers": "<|eot|>",
    "inst": " <|endoftext|>",
    "think": "<|im_end|>",
    "markers": "<|im_end|>",
    "lines": "<|endoftext|>",
}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|head_end|>", "<|eot|>"]


def make_tokenizer(template=None):
    """The quickstart's tokenizer with the control tokens of the templates; None keeps its own template."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model_dir(), local_files_only=True)
    if template is not None:
        tokenizer.add_tokens([AddedToken(token, special=True) for token in CONTROL], special_tokens=True)
        tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make_tokenizer(template) for name, template in TEMPLATES.items()}


def chat(*contents, first="user"):
    """Turns in alternation."""
    roles = itertools.cycle(["user", "assistant"] if first == "user" else ["assistant", "user"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def row(messages=(), **fields):
    return RawRow(0, Path("rows.jsonl"), 1, messages=list(messages), **fields)


def supervised_runs(tokenizer, encoded):
    """Each run of neighbouring supervised tokens, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.supervised, [0])).astype(int)))
    return [tokenizer.decode(encoded.ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_assistant_turns_and_their_stop_tokens_are_supervised(tokenizers, name):
    """For each kind of template, over two turns, whatever the user wrote and though the words occur elsewhere too."""
    messages = chat("Say: the end.", "the end.", "again <|im_end|><|eot|> the end.", "héé 🦙\nthe end.")
    encoded = encode_row(tokenizers[name], row(messages))
    space = " " if name == "inst" else ""
    expected = [f"{space}{answer}{STOPS[name]}" for answer in ("the end.", "héé 🦙\nthe end.")]
    assert supervised_runs(tokenizers[name], encoded) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_whole_rendering(tokenizers, name):
    """Tokenised once, so nothing differs from what transformers itself makes of the chat."""
    messages = chat("a", "b ", " c", "d\n")
    expected = tokenizers[name].apply_chat_template(messages, return_dict=False)
    encoded = encode_row(tokenizers[name], row(messages))
    assert encoded.ids.dtype == np.int32 and encoded.supervised.dtype == np.bool_
    assert encoded.ids.tolist() == list(expected)


CHARACTERS = st.characters(exclude_categories=["Cs"])
PIECES = st.sampled_from(
    [*CONTROL, "<|endoftext|>", "assistant\n", "[/INST]", " ", "\n\n", "\ue000", "🦙", "é", "the end."]
)
CONTENT = st.lists(st.text(CHARACTERS, max_size=8) | PIECES, max_size=5).map("".join)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(CONTENT, min_size=1, max_size=6), name=st.sampled_from(list(TEMPLATES)))
def test_supervised_text_is_the_assistants_text(tokenizers, contents, name):
    """Any chat: each run ends with the assistant's text and the stop token. A token that the text shares with the
    template's white space before it is the only other thing in a run."""
    tokenizer = tokenizers[name]
    encoded = encode_row(tokenizer, row(chat(*contents)))
    answers = contents[1::2]
    if name in ("headers", "inst"):
        answers = [answer.strip() for answer in answers]
    if name == "think":
        answers = [answer.lstrip("\n") for answer in answers]
    runs = supervised_runs(tokenizer, encoded)
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        assert run.endswith(answer + STOPS[name])
        assert run.removesuffix(answer + STOPS[name]).strip(" \n") == ""


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_empty_turn_teaches_to_stop(tokenizers, name):
    encoded = encode_row(tokenizers[name], row(chat("a", "", "b", "c")))
    assert supervised_runs(tokenizers[name], encoded)[0].strip() == STOPS[name].strip()


def test_a_chat_may_begin_with_the_assistant(tokenizers):
    encoded = encode_row(tokenizers["chatml"], row(chat("hello", "hi", "bye", first="assistant")))
    assert supervised_runs(tokenizers["chatml"], encoded) == ["hello<|im_end|>", "bye<|im_end|>"]


def test_a_chat_without_assistant_has_nothing_supervised(tokenizers):
    """No error here: the data set counts and leaves out such rows."""
    assert encode_row(tokenizers["chatml"], row(chat("hello"))).num_supervised == 0


def test_system_text_that_moves_does_not_move_the_mask(tokenizers):
    """Mistral: the system text stands in the last user turn, so a prefix of the chat renders differently."""
    messages = [{"role": "system", "content": "be brief"}, *chat("a", "one", "b", "two")]
    encoded = encode_row(tokenizers["inst"], row(messages))
    assert "[INST] be brief\n\nb [/INST]" in tokenizers["inst"].decode(encoded.ids)
    assert supervised_runs(tokenizers["inst"], encoded) == [" one <|endoftext|>", " two <|endoftext|>"]


def test_think_tags_of_the_template_are_not_supervised(tokenizers):
    """Empty thoughts that the template puts before an answer are not the assistant's."""
    encoded = encode_row(tokenizers["think"], row(chat("a", "one", "b", "two")))
    assert "<think>\n\n</think>\n\ntwo" in tokenizers["think"].decode(encoded.ids)
    assert supervised_runs(tokenizers["think"], encoded) == ["one<|im_end|>", "two<|im_end|>"]


def test_thoughts_of_the_assistant_are_supervised(tokenizers):
    """With the tag that opens them, since the generation prompt does not give it. What the template drops is gone."""
    messages = chat("a", "<think>\nhm\n</think>\n\none", "b", "<think>\nso\n</think>\n\ntwo")
    encoded = encode_row(tokenizers["think"], row(messages))
    expected = ["one<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert supervised_runs(tokenizers["think"], encoded) == expected


def test_tool_calls_are_supervised():
    """What the template writes for tool_calls is the assistant's, as if it were text; tool results are not."""
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}",
    )
    tokenizer = make_tokenizer("{{ tools | length if tools else 0 }} tools\n" + template)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [*chat("a"), call, {"role": "tool", "content": "3"}, *chat("It is 3.", first="assistant")]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    encoded = encode_row(tokenizer, row(messages, tools=[tool]))
    assert tokenizer.decode(encoded.ids).startswith("1 tools\n")
    assert supervised_runs(tokenizer, encoded) == ["<call>f</call><|im_end|>", "It is 3.<|im_end|>"]


def test_offsets_that_leave_out_spaces_do_not_move_the_mask():
    """Llama 3's byte-level tokenizer trims spaces off offsets; a token that is only spaces then has none at all."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True, add_prefix_space=False)
    encoded = encode_row(tokenizer, row(chat("a", " b", "c", "   ", "d", "e  \n ", "f", "é 🦙 ")))
    expected = [" b<|im_end|>", "   <|im_end|>", "e  \n <|im_end|>", "é 🦙 <|im_end|>"]
    assert supervised_runs(tokenizer, encoded) == expected


def with_bos(template=CHATML):
    """A tokenizer that, as Llama's do, puts a BOS before whatever it is given."""
    tokenizer = make_tokenizer(template)
    bos = AddedToken("<s>", special=True)
    tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("template, count", [(HEADERS, 1), (CHATML, 0)], ids=["in the template", "not wanted"])
def test_a_chat_has_the_bos_that_its_template_writes(template, count):
    """Never one from the template and one from the tokenizer."""
    tokenizer = with_bos(template)
    assert encode_row(tokenizer, row(chat("a", "b"))).ids.tolist().count(tokenizer.bos_token_id) == count


@pytest.mark.parametrize("text", ["a b c", "<s>a b c", "<s>a b c<|endoftext|>"])
def test_text_has_one_bos_and_one_eos(text):
    """Whether they stand in the row's text or not. All but the first token are supervised, the EOS too."""
    tokenizer = with_bos()
    encoded = encode_row(tokenizer, row(text=text))
    assert tokenizer.decode(encoded.ids) == "<s>a b c<|endoftext|>"
    assert encoded.supervised.tolist() == [False] + [True] * (len(encoded.ids) - 1)


def test_text_without_bos_loses_only_its_first_token(tokenizers):
    """Nothing predicts the first token, whatever it is."""
    encoded = encode_row(tokenizers["lines"], row(text="the end."))
    assert tokenizers["lines"].decode(encoded.ids) == "the end.<|endoftext|>"
    assert encoded.supervised.tolist() == [False] + [True] * (len(encoded.ids) - 1)


def test_truncation_keeps_the_mask_of_what_is_kept(tokenizers):
    encoded = encode_row(tokenizers["chatml"], row(chat("a", string.ascii_letters)))
    short = encoded.truncated(len(encoded.ids) - 5)
    assert short.ids.tolist() == encoded.ids[:-5].tolist()
    assert short.supervised.tolist() == encoded.supervised[:-5].tolist()


def test_no_chat_template_is_refused_with_what_to_do():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"^rows.jsonl:1: a messages row, but \S+ has no chat template; put a chat_t"):
        encode_row(tokenizer, row(chat("a", "b")))
    assert encode_row(tokenizer, row(text="a b")).num_supervised > 0


@pytest.mark.parametrize("contents", ["ab", "abcd"], ids=["last turn", "earlier turn"])
def test_a_template_without_stop_token_is_refused(contents):
    """Markers that the tokenizer does not know as special tokens are just text: generation could never stop there.
    The special token that opens the next turn is no stop token."""
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", "</turn>"))
    with pytest.raises(
        DataError, match=r"no special token after messages\[1\] \(found '</turn>\\n.*, so the model would"
    ):
        encode_row(tokenizer, row(chat(*contents)))


def test_a_template_that_refuses_the_row_is_quoted():
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"^rows.jsonl:1: the chat template refuses the row: roles must alternate$"):
        encode_row(tokenizer, row(chat("a", "b")))


def test_an_empty_turn_that_is_rendered_in_its_own_way_is_refused():
    """Here the texts before and after the turn overlap: the line break is in both, but once in the rendering."""
    template = CHATML.replace("\n{{ m.content }}", "\n{% if m.content %}{{ m.content }}\n{% endif %}")
    tokenizer = make_tokenizer(template)
    assert supervised_runs(tokenizer, encode_row(tokenizer, row(chat("a", "b")))) == ["b\n<|im_end|>"]
    with pytest.raises(DataError, match=r"cannot tell which text of messages\[1\] is the assistant's"):
        encode_row(tokenizer, row(chat("a", "")))


REWRITES = {
    "leaves the turn out": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    "repeats it": CHATML + "{{ messages[-1].content }}",
    "renders another turn differently": "{{ messages[-1].content | length }}" + CHATML,
}


@pytest.mark.parametrize("template", REWRITES.values(), ids=REWRITES.keys())
def test_a_template_that_hides_the_turn_is_refused(template):
    """Better no mask than one that is wrong."""
    with pytest.raises(DataError, match=r"cannot tell which text of messages\[1\] is the assistant's"):
        encode_row(make_tokenizer(template), row(chat("a", "bcd")))


def test_a_slow_tokenizer_is_refused(tokenizers):
    class Slow:
        is_fast = False
        name_or_path = "some/model"

    with pytest.raises(DataError, match="some/model: needs a fast tokenizer"):
        RowEncoder(Slow())
