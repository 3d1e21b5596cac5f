"""Promises of roles/text_stream.py, with a tokenizer of bytes: characters of several tokens, stop strings across."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.text_stream import TextStream, Until, before


def decode(ids: list[int]) -> str:
    """A token is a byte; 256 is a special token without text."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def streamed(
    ids: list[int], stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stop, stop_ids)
    return [stream.push(token) for token in ids] + [stream.finish()], stream


def test_a_character_is_given_with_its_last_byte_tx1() -> None:
    given, _ = streamed(list("a€b😀".encode()))
    assert given == ["a", "", "", "€", "b", "", "", "", "😀", ""]


def test_bytes_that_are_no_character_come_when_that_is_certain_tx1() -> None:
    given, _ = streamed([0x61, 0xE2, 0x82, 0x61])
    assert given == ["a", "", "", "\ufffda", ""]
    assert streamed([0xE2, 0x82])[0][-1] == "\ufffd"


@given(st.lists(st.integers(0, 256), max_size=30))
def test_all_that_is_given_is_the_text_of_all_tokens_tx1(ids: list[int]) -> None:
    given, _ = streamed(ids)
    assert "".join(given) == decode(ids)


@given(st.text(max_size=200))
def test_long_texts_stay_exact_although_few_tokens_are_decoded_again_tx1_tx3(text: str) -> None:
    lengths: list[int] = []

    def noted(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    stream = TextStream(noted)
    given = "".join(stream.push(token) for token in text.encode()) + stream.finish()
    assert given == text
    assert max(lengths, default=0) <= 32 + 4


def test_endless_broken_bytes_are_given_in_time_tx3() -> None:
    stream = TextStream(decode)
    given = "".join(stream.push(0x80) for _ in range(1000)) + stream.finish()
    assert set(given) == {"\ufffd"}


@pytest.mark.parametrize(
    ("text", "stop", "expected", "tokens"),
    [
        ("one STOP two", ("STOP",), "one ", 8),
        ("one STOP two", ("two", "STOP"), "one ", 8),
        ("aab", ("ab",), "a", 3),
        ("ababac", ("abac",), "ab", 6),
        ("x€€y", ("€€",), "x", 7),
        ("never", ("nevermore",), "never", 5),
    ],
)
def test_a_text_ends_before_the_first_stop_string_tx2(
    text: str, stop: tuple[str, ...], expected: str, tokens: int
) -> None:
    given, stream = streamed(list(text.encode()), stop)
    assert "".join(given) == expected == before(text, stop)
    assert stream.num_tokens == tokens
    assert stream.stopped == (expected != text)


def test_a_token_can_end_a_text_and_what_it_would_have_said_is_nothing_tx2() -> None:
    given, stream = streamed([0x61, 256, 0x62], stop_ids=(256,))
    assert (given, stream.stopped, stream.num_tokens) == (["a", "", "", ""], True, 2)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_given_never_runs_into_a_stop_string_however_it_is_cut_tx2(text: str, stops: list[str]) -> None:
    until = Until(stops)
    given = "".join(until.push(character) for character in text) + until.finish()
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert given == text
        return
    first = text[: ends[0]]
    assert given == min((first[: first.find(stop)] for stop in stops if stop in first), key=len)
