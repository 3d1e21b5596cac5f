"""Requests of roles/engine_torch.py on small random models: admission, ends, aborts, news."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from roles import native
from roles.engine import Request
from roles.pieces import joined_piece
from roles.sampling import completion_seed
from roles.types import Completion, Piece, Sampling
from tests.roles.engines import build, collect, drain, engine_of, forced_logprobs, prompt_of, request


@pytest.fixture(params=["native", "torch"], autouse=True)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds with our C++ and without."""
    if request.param == "torch":
        monkeypatch.setattr("roles.native.library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd_re3() -> None:
    alone = engine_of(build())
    alone.submit(request(3, prompt_of(3, 7), n=4, max_tokens=80, top_p=0.9))
    expected = drain(alone)
    crowd = engine_of(build(), max_running=64)
    for number in range(40):  # newcomers at every place of the numbers that are drawn ahead
        n, top_p = (4, 0.9) if number == 3 else (1, 1.0)
        crowd.submit(request(number, prompt_of(number, 7), n=n, max_tokens=80, top_p=top_p))
        crowd.step()
    found = drain(crowd)
    for sample in range(4):
        assert found[3, sample].token_ids.tolist() == expected[3, sample].token_ids.tolist()
        np.testing.assert_allclose(found[3, sample].logprobs, expected[3, sample].logprobs, atol=1e-5)
    assert len({tuple(found[3, i].token_ids.tolist()) for i in range(4)}) == 4  # siblings differ
    for number in (0, 30, 31, 32, 39):
        alone.submit(request(number, prompt_of(number, 7), max_tokens=80))
        assert found[number, 0].token_ids.tolist() == drain(alone)[number, 0].token_ids.tolist()


def test_a_prompt_is_computed_once_for_its_group_en2() -> None:
    engine = engine_of(build())
    lengths: list[list[int]] = []
    prefill = engine._decoder.prefill

    def counted(prompts: Sequence[Sequence[int]], *rest: Any) -> torch.Tensor:
        lengths.append([len(prompt) for prompt in prompts])
        return prefill(prompts, *rest)

    engine._decoder.prefill = counted  # type: ignore[method-assign, assignment]
    engine.submit(request(0, prompt_of(0, 5), n=8, max_tokens=3))
    engine.submit(request(1, prompt_of(1, 9), n=8, max_tokens=3))
    drain(engine)
    assert lengths == [[5, 9]]


def test_requests_are_admitted_whole_and_in_order_en2() -> None:
    engine = engine_of(build(), max_running=4)
    engine.submit(request(0, prompt_of(0, 5), n=3, max_tokens=6))
    engine.submit(request(1, prompt_of(1, 5), n=2, max_tokens=6))
    engine.submit(request(2, prompt_of(2, 5), n=1, max_tokens=6))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (3, 3)  # 1 doesn't fit, 2 would but waits its turn
    found = drain(engine)
    assert list(found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


def test_no_step_computes_a_row_that_has_ended_en3() -> None:
    engine = engine_of(build(), max_running=8)
    computed: list[int] = []
    decode = engine._decoder.decode

    def counted(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(token_ids))
        return decode(token_ids, *rest)

    engine._decoder.decode = counted  # type: ignore[method-assign, assignment]
    for number, limit in enumerate((1, 2, 4, 7)):
        engine.submit(request(number, prompt_of(number, 4), max_tokens=limit))
    found = drain(engine)
    assert computed == [3, 2, 2, 1, 1, 1]  # the first tokens come from prefill
    assert engine.num_tokens == sum(len(c.token_ids) for c in found.values()) == 14


def test_a_stop_token_ends_a_completion_and_is_part_of_it() -> None:
    model = build()
    free = engine_of(model)
    free.submit(request(0, prompt_of(0, 5), n=4, max_tokens=40))
    unbounded = drain(free)
    stops = (7, int(unbounded[0, 0].token_ids[5]))
    engine = engine_of(model, stop_token_ids=(int(unbounded[0, 1].token_ids[9]),))
    engine.submit(request(0, prompt_of(0, 5), n=4, max_tokens=40, stop_token_ids=stops))
    for key, completion in drain(engine).items():
        tokens = unbounded[key].token_ids.tolist()
        end = min((tokens.index(stop) + 1 for stop in stops if stop in tokens), default=40)
        assert completion.token_ids.tolist() == tokens[:end]
        assert completion.finish_reason == ("stop" if tokens[end - 1] in stops else "length")


def test_the_models_end_token_stops_where_a_request_names_none() -> None:
    model = build()
    free = engine_of(model)
    free.submit(request(0, prompt_of(0, 5), max_tokens=20))
    tokens = drain(free)[0, 0].token_ids.tolist()
    engine = engine_of(model, stop_token_ids=(tokens[8],))
    engine.submit(request(0, prompt_of(0, 5), max_tokens=20))
    completion = drain(engine)[0, 0]
    assert completion.token_ids.tolist() == tokens[: tokens.index(tokens[8]) + 1]
    assert completion.finish_reason == "stop"


def test_abort_is_legal_in_any_state_and_each_sample_leaves_once_en5() -> None:
    engine = engine_of(build(), max_running=4)
    engine.submit(request(0, prompt_of(0, 5), n=2, max_tokens=20))
    engine.submit(request(1, prompt_of(1, 5), n=2, max_tokens=20))
    engine.submit(request(2, prompt_of(2, 5), n=2, max_tokens=20))
    for _ in range(3):
        engine.step()
    running, waiting = engine.abort(0), engine.abort(2)
    assert [(f.request_id, f.sample, f.completion.finish_reason) for f in running + waiting] == [
        (0, 0, "abort"),
        (0, 1, "abort"),
        (2, 0, "abort"),
        (2, 1, "abort"),
    ]
    assert [len(f.completion.token_ids) for f in running + waiting] == [4, 4, 0, 0]
    assert engine.abort(0) == engine.abort(99) == []
    found = drain(engine)
    assert set(found) == {(1, 0), (1, 1)}
    assert engine.abort(1) == []
    again = engine_of(build())
    again.submit(request(1, prompt_of(1, 5), n=2, max_tokens=20))
    for key, completion in drain(again).items():
        assert completion.token_ids.tolist() == found[key].token_ids.tolist()


def test_one_sample_of_a_request_can_be_aborted_alone_in_any_state() -> None:
    engine = engine_of(build(), max_running=4)
    engine.submit(request(1, prompt_of(1, 4), n=3, max_tokens=30))
    engine.submit(request(2, prompt_of(2, 4), n=2, max_tokens=6))  # waits: it does not fit beside the first
    assert engine.step() == []
    (ended,) = engine.abort(1, 1)
    assert (ended.request_id, ended.sample, len(ended.completion.token_ids)) == (1, 1, 2)
    assert engine.abort(1, 1) == engine.abort(1, 7) == engine.abort(2, 0) == []
    found = drain(engine)
    assert {key: c.finish_reason for key, c in found.items()} == {
        (1, 0): "length",
        (1, 2): "length",
        (2, 0): "abort",
        (2, 1): "length",
    }
    assert len(found[2, 0].token_ids) <= 2
    assert engine.abort(2, 1) == []


def test_an_abort_while_a_request_waited_is_over_with_it_en5() -> None:
    """Its samples ended by themselves with their first token, or there was none of that number."""
    engine = engine_of(build())
    engine.submit(request(1, prompt_of(1, 4), n=2, max_tokens=1))
    assert engine.abort(1, 0) == engine.abort(1, 2) == []
    assert {c.finish_reason for c in drain(engine).values()} == {"length"}
    engine.submit(request(1, prompt_of(2, 4), n=3, max_tokens=6))  # the number is free again
    assert [c.finish_reason for c in drain(engine).values()] == ["length"] * 3


def test_news_are_the_tokens_of_completions_piece_by_piece_re6() -> None:
    engine = engine_of(build(), max_running=8)
    told: dict[tuple[int, int], list[Piece]] = {}
    found: dict[tuple[int, int], Completion] = {}
    engine.submit(request(0, prompt_of(0, 5), n=2, max_tokens=9))  # nobody reads along
    engine.submit(request(1, prompt_of(1, 5), n=3, max_tokens=20, stop_token_ids=tuple(range(8))), told=True)
    engine.submit(request(2, prompt_of(2, 3), n=1, max_tokens=15, top_logprobs=2), told=True)
    for number in range(40):
        collect(found, engine.step())
        if number == 6:
            collect(found, engine.abort(1, 2))
        if number % 2:  # sometimes after two steps
            for one in engine.news():
                told.setdefault((one.request_id, one.sample), []).append(one.piece)
    assert told.keys() == {(1, 0), (1, 1), (1, 2), (2, 0)}
    for key, pieces in told.items():
        whole = joined_piece(pieces)
        for name in ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(found[key], name))
    assert max(len(piece.token_ids) for piece in told[2, 0]) == 3  # prefill, and two steps
    assert engine.news() == []


def test_rows_that_move_into_holes_go_on_unchanged() -> None:
    model = build()
    engine = engine_of(model, max_running=32)
    rng = np.random.default_rng(0)
    prompts: dict[int, list[int]] = {}
    found: dict[tuple[int, int], Completion] = {}
    for number in range(40):
        prompts[number] = prompt_of(number, int(rng.integers(1, 20)))
        engine.submit(request(number, prompts[number], n=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 60))))
        collect(found, engine.step())
        if number % 7 == 3:
            collect(found, engine.abort(number - 1))
    found |= drain(engine)
    for (number, _), completion in found.items():
        if len(completion.token_ids):
            expected = forced_logprobs(model, prompts[number], completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_requests_that_could_not_run_to_their_end_are_refused_en6() -> None:
    engine = engine_of(build(), max_running=4, max_len=32)
    with pytest.raises(ValueError, match=r"within max_len = 32 tokens, got 20 \+ 13 .*raise max_len"):
        engine.submit(request(0, prompt_of(0, 20), max_tokens=13))
    with pytest.raises(ValueError, match=r"expected 1 to 4 samples .* got 5; raise max_running"):
        engine.submit(request(0, prompt_of(0, 2), n=5, max_tokens=3))
    with pytest.raises(ValueError, match=r"expected 1 to 4 samples .* got 0"):
        engine.submit(request(0, prompt_of(0, 2), n=0, max_tokens=3))
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(request(0, [], max_tokens=3))
    with pytest.raises(ValueError, match=r"stop tokens in 0..60, got 3 to 61"):
        engine.submit(request(0, [5], max_tokens=3, stop_token_ids=(3, 61)))
    with pytest.raises(ValueError, match=r"sampling.stop: expected at most 16 strings, none of them empty"):
        engine.submit(request(0, [5], max_tokens=3, stop=("",)))
    with pytest.raises(ValueError, match=r"prompt tokens in 0..60, got 5 to 61"):
        engine.submit(request(0, [5, 61], max_tokens=3))
    with pytest.raises(ValueError, match="temperature"):
        engine.submit(request(0, [5], max_tokens=3, temperature=-1.0))
    engine.submit(request(0, [5], max_tokens=3))
    with pytest.raises(ValueError, match="request id 0 is in use"):
        engine.submit(request(0, [5], max_tokens=3))
    assert set(drain(engine)) == {(0, 0)}
    with pytest.raises(ValueError, match=r"max_len: expected at most the model's 256 positions, got 300"):
        engine_of(build(), max_len=300)


def test_step_without_work_returns_at_once() -> None:
    assert engine_of(build()).step() == []


def test_a_completion_that_goes_on_draws_the_numbers_it_would_have_drawn() -> None:
    whole, parts = engine_of(build()), engine_of(build())
    whole.submit(request(1, prompt_of(1, 5), max_tokens=20))
    expected = drain(whole)[1, 0].token_ids.tolist()
    parts.submit(request(1, prompt_of(1, 5), max_tokens=8))
    begun = drain(parts)[1, 0].token_ids.tolist()
    rest = Request(
        id=2,
        prompt_ids=(*prompt_of(1, 5), *begun),
        seeds=(completion_seed(5, 1, 0),),
        sampling=Sampling(max_tokens=12),
        first=8,
    )
    parts.submit(rest)
    assert begun + drain(parts)[2, 0].token_ids.tolist() == expected
