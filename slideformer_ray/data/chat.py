"""A row to token ids and the mask of its supervised tokens.

A chat is rendered by the tokenizer's own template and tokenised ONCE, whole, so that training sees the ids that
inference sees. Which part of the rendering is the assistant's is found by comparison: the chat is rendered again with
one assistant turn's message replaced by a sentinel character that occurs nowhere else. What stands before and after the
sentinel is the template's; what stands between the same two texts in the real rendering is the assistant's. This needs
no generation markers (trl #4879: stock templates have none, and the mask came out all zero). The whole chat is
rendered, not the messages up to the turn, because templates render a turn by what follows it: Qwen3 drops the thoughts
of earlier turns, Mistral moves the system text to the last user turn.

Imports neither torch nor ray. Tested by tests/data/test_chat.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from slideformer_ray.data.rows import DataError, RawRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters: no template, and hardly a row, has one.
SENTINELS = [chr(code) for code in range(0xE000, 0xF900)]


@dataclass(frozen=True, eq=False, slots=True)
class EncodedRow:
    ids: np.ndarray  # int32[n]
    supervised: np.ndarray  # bool[n]: the model learns to emit token i. Never token 0: nothing predicts it
    row_id: int  # RawRow.row_id

    @property
    def num_supervised(self) -> int:
        return int(self.supervised.sum())

    def truncated(self, num_tokens: int) -> EncodedRow:
        """The first `num_tokens` tokens; what is kept stays supervised."""
        return EncodedRow(self.ids[:num_tokens].copy(), self.supervised[:num_tokens].copy(), self.row_id)


def encode_row(tokenizer: PreTrainedTokenizerBase, raw: RawRow) -> EncodedRow:
    """One row. For many, keep a RowEncoder."""
    return RowEncoder(tokenizer).encode(raw)


class RowEncoder:
    """Encodes rows with one tokenizer: a fast one (tokenizer.json), since only those give character offsets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise DataError(f"{self.name}: needs a fast tokenizer, found a slow one; add a tokenizer.json")
        special_ids = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special_ids = np.array(special_ids, np.int32)

    def encode(self, raw: RawRow) -> EncodedRow:
        """Raises DataError: no chat template, or one that refuses the row or ends a turn with no special token."""
        ids, supervised = self._encode_chat(raw) if raw.text is None else self._encode_text(raw, raw.text)
        supervised[:1] = False
        return EncodedRow(ids, supervised, raw.row_id)

    def _encode_text(self, raw: RawRow, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Everything is supervised, an EOS at the end included."""
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError(f"{raw.where}: {self.name} has no eos_token to end text; set it in tokenizer_config.json")
        has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]  # no second BOS
        if ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return np.array(ids, np.int32), np.ones(len(ids), np.bool_)

    def _encode_chat(self, raw: RawRow) -> tuple[np.ndarray, np.ndarray]:
        """Assistant turns are supervised, each with its stop token (trl #5988: without it the model never stops)."""
        text = self._render(raw, raw.messages)
        # No special tokens are added: the template has written the BOS, if the model wants one.
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoding["input_ids"], np.int32)
        starts, ends = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2).T
        is_special = np.isin(ids, self.special_ids)
        supervised = np.zeros(len(ids), np.bool_)
        for turn, message in enumerate(raw.messages):
            if message["role"] != "assistant":
                continue
            start, stop = self._turn_span(raw, text, turn)
            # The stop token is the first special one after the turn's text; some templates put a space before it.
            after = np.flatnonzero(is_special & (ends > stop))
            if not len(after) or text[stop : starts[after[0]]].strip():
                raise DataError(
                    f"{raw.where}: the chat template puts no special token after messages[{turn}] (found "
                    f"{text[stop : stop + 20]!r}), so the model would never learn to stop; end assistant turns with "
                    "{{ eos_token }} in chat_template.jinja"
                )
            # By where tokens end: some tokenizers trim spaces off the start, so a token of spaces may have no width.
            first = np.searchsorted(ends, start, side="right")
            supervised[first : after[0] + 1] = True
        return ids, supervised

    def _turn_span(self, raw: RawRow, text: str, turn: int) -> tuple[int, int]:
        """Characters [start, stop) of `text`: what the assistant wrote in turn `turn`, thoughts and tool calls too."""
        sentinel = next(char for char in SENTINELS if char not in text)
        stand_in = {"role": "assistant", "content": sentinel}
        probe = self._render(raw, [*raw.messages[:turn], stand_in, *raw.messages[turn + 1 :]])
        before, found, after = probe.partition(sentinel)
        if found and not text.startswith(before):
            # The turn has thoughts of its own, where the template put empty ones before the sentinel. Then the model
            # writes all that follows the generation prompt, think tags too unless the prompt gives them.
            before = self._render(raw, raw.messages[:turn], add_generation_prompt=True)
        start, stop = len(before), len(text) - len(after)
        if not (found and sentinel not in after and text.startswith(before) and text.endswith(after) and start <= stop):
            raise DataError(
                f"{raw.where}: cannot tell which text of messages[{turn}] is the assistant's: the chat template leaves "
                "the turn out, repeats it, or renders other turns differently because of it; give the model directory "
                "a simpler chat_template.jinja, or give the row as text"
            )
        return start, stop

    def _render(self, raw: RawRow, messages: list[dict], add_generation_prompt: bool = False) -> str:
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise DataError(
                f"{raw.where}: a messages row, but {self.name} has no chat template; put a chat_template.jinja beside "
                "its tokenizer.json, or give rows as text"
            )
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=raw.tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{raw.where}: the chat template refuses the row: {error}") from None
        assert isinstance(text, str)
        return text
