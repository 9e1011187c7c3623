"""Stop strings over token borders, against a search in the whole text."""

from __future__ import annotations

import random

from ridgeline.llm.engine.text import TextOutput
from ridgeline.llm.load import StreamDecoder, byte_tokenizer
from tests.support import full_or_tenth


def streamed(text: bytes, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    output = TextOutput(StreamDecoder(byte_tokenizer()), stops)
    pieces = []
    for byte in text:
        pieces.append(output.push(byte))
        if output.stopped:
            break
    return [*pieces, output.finish()], output.stopped


def test_text_ends_before_the_first_stop_string() -> None:
    generator = random.Random(4)
    for _ in range(full_or_tenth(3000)):
        text = "".join(generator.choice("abé") for _ in range(generator.randrange(25)))
        stops = tuple("".join(generator.choice("abé") for _ in range(generator.randrange(1, 5))) for _ in range(generator.randrange(4)))
        pieces, stopped = streamed(text.encode(), stops)
        # the request ends with the character that completes the first stop string; the text with what came before that string
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        end = min(ends)[0] if ends else None
        expected = text if end is None else text[: min(start for stop_end, start in ends if stop_end == end)]
        assert "".join(pieces) == expected
        assert stopped == bool(ends)


def test_nothing_of_a_stop_string_goes_out_early() -> None:
    pieces, stopped = streamed(b"one\nUse\nUser: x", ("\nUser:",))
    assert stopped and "".join(pieces) == "one\nUse"
    assert pieces[:4] == ["o", "n", "e", ""]
    assert pieces[4:8] == ["", "", "", "\nUse"]  # the second line break shows that the first began no stop string


def test_half_a_character_waits_and_is_marked_at_the_end() -> None:
    pieces, _ = streamed("é".encode()[:1], ())
    assert pieces == ["", "\N{REPLACEMENT CHARACTER}"]
