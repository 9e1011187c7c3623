"""What a choice says of its tokens: whole and in chunks alike, in characters of the text."""

from __future__ import annotations

from ridgeline.llm.engine.options import Event
from ridgeline.llm.load import byte_tokenizer
from ridgeline.llm.sampling import TokenLogprob
from ridgeline.llm.server.answers import CompletionStyle, Outcome

TEXT = "aé日!"


def test_text_offsets_count_characters_of_the_text() -> None:
    """A token is a byte here: those of one character begin where it does."""
    entries = [TokenLogprob(byte, -1.0, ()) for byte in TEXT.encode()]
    style = CompletionStyle("m", byte_tokenizer(), logprobs=True)
    whole = style.whole([Outcome(TEXT, len(entries), entries, "length")], {})["choices"][0]["logprobs"]["text_offset"]
    assert whole == [0, 1, 1, 2, 2, 2, 3] and TEXT[whole[-1]] == "!"
    found: dict[int, list[int]] = {0: [], 1: []}
    for entry in entries:
        for choice in found:  # the choices of a stream come in turn, and each has its own text
            table = style.piece(choice, Event("r", [entry.token], "", [entry]))["logprobs"]
            found[choice] += table["text_offset"]
    assert found == {0: whole, 1: whole}
