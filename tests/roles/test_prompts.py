"""The prompt stream: PR-1 order, PR-2 resume, PR-3 held-out questions, PR-4 the thread; QU-3 files."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roles import gym, prompts
from roles.prompts import DataConfig, FamilyConfig, PromptEncoder, PromptSource, check_data, held_out, question_key
from roles.questions import GymQuestions
from roles.types import Prompt
from roles.verify import by_task

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single characters: ids are code points below 128, others are 0."""
    vocabulary = {"[UNK]": 0, **{chr(code): code for code in range(1, 128)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


MIX = DataConfig(
    families=[
        FamilyConfig(name="chain_sum", weight=3.0, params={"max_terms": 2}),
        FamilyConfig(name="spell_backward", params={"max_word_len": 4}),
    ],
    seed=5,
)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder(folder, MIX)


def texts(taken: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in taken]


def take(source: PromptSource, count: int) -> list[Prompt]:
    return [source.take() for _ in range(count)]


def write_rows(path: Path, count: int, **extra: object) -> str:
    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n, **extra} for n in range(count)]
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return str(path)


def test_a_prompt_depends_only_on_the_seed_and_its_position(encoder):  # PR-1
    first, second = take(PromptSource(MIX, encoder), 40), take(PromptSource(MIX, encoder), 40)
    assert first == second
    assert [prompt.position for prompt in first] == list(range(40))
    other = take(PromptSource(msgspec.structs.replace(MIX, seed=6), encoder), 40)
    assert len(set(texts(first)) & set(texts(other))) < 10


def test_looking_at_a_position_issues_nothing(encoder):  # PR-1
    source = PromptSource(MIX, encoder)
    later = source.at(7)
    assert [prompt.position for prompt in take(source, 7)] == list(range(7))
    assert source.take() == later


def test_families_are_mixed_by_weight(encoder):
    tasks = [prompt.task for prompt in take(PromptSource(MIX, encoder), 400)]
    assert 260 <= tasks.count("chain_sum") <= 340  # 300 expected, standard deviation 8.7


def test_ids_are_those_of_the_tokenizer(encoder):
    prompt = PromptSource(MIX, encoder).take()
    assert prompt.token_ids == tuple(map(ord, prompt.text))
    assert prompt.text == prompt.entry["question"]


def test_a_chat_template_opens_the_turn_of_the_assistant(chat_folder):
    config = msgspec.structs.replace(MIX, template="Solve: {question}", system="Be {brief}.")
    prompt = PromptSource(config, PromptEncoder(chat_folder, config)).take()
    assert prompt.text == f"Solve: {prompt.entry['question']}"
    assert "".join(map(chr, prompt.token_ids)) == f"<system>Be {{brief}}.<user>{prompt.text}<assistant>"


def test_a_system_turn_without_a_chat_template_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no chat template.*Remove system"):
        PromptEncoder(folder, msgspec.structs.replace(MIX, system="Be brief."))
    with pytest.raises(ValueError, match="expected a folder"):
        PromptEncoder(tmp_path / "nowhere", MIX)


def test_a_prompt_is_had_again_by_its_position(encoder):  # PR-1
    source = PromptSource(MIX, encoder)
    taken = take(source, 6)
    assert [source.at(position) for position in (4, 1)] == [taken[4], taken[1]]
    assert source.take().position == 6


def test_a_resumed_stream_goes_on_where_it_stood(encoder):  # PR-2
    uninterrupted = take(PromptSource(MIX, encoder), 20)
    source = PromptSource(MIX, encoder)
    take(source, 10)
    state = msgspec.json.decode(msgspec.json.encode(source.state()))
    resumed = PromptSource(MIX, encoder)
    resumed.restore(state)
    assert take(resumed, 10) == uninterrupted[10:]
    assert resumed.state() == {**state, "next": 20}


def test_a_state_of_another_stream_is_refused(encoder, tmp_path):
    state = PromptSource(MIX, encoder).state()
    for other in (
        PromptSource(msgspec.structs.replace(MIX, seed=6), encoder),
        PromptSource(MIX, encoder, held_out(MIX, 4, 0, encoder)),
    ):
        with pytest.raises(ValueError, match="another prompt stream"):
            other.restore(state)
    PromptSource(msgspec.structs.replace(MIX, prefetch=0), encoder).restore(state)


def test_held_out_prompts_are_distinct_and_keep_the_shares(encoder):
    held = held_out(MIX, 40, seed=0, encoder=encoder)
    assert len({question_key(prompt.entry["question"]) for prompt in held}) == 40
    assert [prompt.task for prompt in held].count("chain_sum") == 30
    assert held == held_out(MIX, 40, seed=0, encoder=encoder)
    assert min(prompt.position for prompt in held) == prompts.HELD_OUT_START


def test_training_never_asks_a_held_out_question_even_when_they_are_few(encoder):  # PR-3
    # One digit, two terms, two operators: 200 questions in all, of which 150 are held out.
    config = DataConfig(
        families=[FamilyConfig(name="chain_sum", params={"min_terms": 2, "max_terms": 2, "max_digits": 1})]
    )
    held = held_out(config, 150, seed=0, encoder=encoder)
    trained = {prompt.text for prompt in take(PromptSource(config, encoder, held), 1000)}
    assert not trained & set(texts(held))
    assert len(trained) == 50


def test_seeds_of_held_out_questions_can_never_be_training_seeds():  # PR-3, QU-2
    # White box. Entry k of base b is drawn from seed b + k, with b and k below SPAN for training: below 2 SPAN in all.
    train, held = (GymQuestions(MIX, 0, held_out=flag) for flag in (False, True))
    for source, low in ((train, 0), (held, 2 * gym.SPAN)):
        for family in source._families:
            assert low <= family._base < low + gym.SPAN
    assert 4 * gym.SPAN <= 2**32  # the limit of numpy seeds


def test_too_few_questions_are_an_error_that_says_what_to_widen(encoder):
    config = DataConfig(
        families=[FamilyConfig(name="chain_sum", params={"min_terms": 1, "max_terms": 1, "max_digits": 1})]
    )
    with pytest.raises(ValueError, match=r"families\[0\]: 11 held-out .* only 10 different .*Widen"):
        held_out(config, 11, seed=0, encoder=encoder)
    source = PromptSource(config, encoder, held_out(config, 10, seed=0, encoder=encoder))
    with pytest.raises(ValueError, match="no question found for position 0"):
        source.take()


def test_prompts_that_are_too_long_are_replaced(folder):
    config = msgspec.structs.replace(MIX, max_prompt_tokens=68)
    taken = take(PromptSource(config, PromptEncoder(folder, config)), 50)
    assert max(len(prompt.token_ids) for prompt in taken) <= 68
    assert [prompt.position for prompt in taken] == list(range(50))


def test_slow_families_are_made_ahead_in_a_thread_with_the_same_result(encoder, monkeypatch):  # PR-4
    plain_run = take(PromptSource(MIX, encoder), 40)
    monkeypatch.setattr(prompts, "SLOW_SECONDS", 0.0)
    source = PromptSource(MIX, encoder)
    assert take(source, 40) == plain_run
    assert any(thread.name.startswith("prompts") for thread in threading.enumerate())
    source.restore({**source.state(), "next": 3})
    assert take(source, 20) == plain_run[3:23]
    source.close()
    assert not any(thread.name.startswith("prompts") for thread in threading.enumerate())
    assert source.take() == plain_run[23]
    source.close()


def test_each_epoch_of_a_file_holds_every_row_once_in_a_new_order(encoder, tmp_path):  # QU-3
    config = DataConfig(file=write_rows(tmp_path / "sums.jsonl", 10), verifier="math")
    taken = take(PromptSource(config, encoder), 30)
    epochs = [texts(taken[start : start + 10]) for start in (0, 10, 20)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert taken[0].task == "sums"
    assert taken[0].entry["verifier"] == "math"
    assert taken == take(PromptSource(config, encoder), 30)


def test_a_file_resumes_across_an_epoch(encoder, tmp_path):  # PR-2, QU-3
    config = DataConfig(file=write_rows(tmp_path / "sums.jsonl", 4))
    uninterrupted = take(PromptSource(config, encoder), 12)
    source = PromptSource(config, encoder)
    take(source, 6)
    resumed = PromptSource(config, encoder)
    resumed.restore(source.state())
    assert take(resumed, 6) == uninterrupted[6:]


def test_a_part_of_a_file_is_held_out_and_left_out_of_training(encoder, tmp_path):  # PR-3
    config = DataConfig(file=write_rows(tmp_path / "sums.jsonl", 10, task="sum"))
    held = held_out(config, 4, seed=1, encoder=encoder)
    source = PromptSource(config, encoder, held)
    trained = take(source, 12)
    assert source.num_left_out == 4
    assert len(set(texts(trained))) == 6
    assert not set(texts(trained)) & set(texts(held))
    with pytest.raises(ValueError, match=r"11 held-out questions wanted.*only 10"):
        held_out(config, 11, seed=1, encoder=encoder)
    with pytest.raises(ValueError, match=r"none of the 10 rows.*10 are held out"):
        PromptSource(config, encoder, held_out(config, 10, seed=1, encoder=encoder))


def test_a_held_out_file_takes_its_questions_out_of_the_training_file(encoder, tmp_path):
    train, test = write_rows(tmp_path / "train.jsonl", 10), write_rows(tmp_path / "test.jsonl", 3)
    config = DataConfig(file=train, held_out_file=test)
    source = PromptSource(config, encoder, held_out(config, 3, seed=0, encoder=encoder))
    assert source.num_left_out == 3


def test_a_row_reaches_the_verifier_whole(encoder, tmp_path):
    """With "code" rows have tests and no answer; what else stands in a row is kept, for verifiers of the user."""
    rows = [
        {"question": "Print the double.", "tests": [{"input": "2", "output": "4"}], "level": 3},
        {"question": "Define f.", "test_code": "assert f(1) == 2", "answer": 7},
    ]
    file = tmp_path / "programs.jsonl"
    file.write_text("".join(msgspec.json.encode(row).decode() + "\n" for row in rows))
    config = DataConfig(file=str(file), verifier="code")
    check_data(config)
    source = PromptSource(config, encoder)
    prompts = {prompt.entry["question"]: prompt for prompt in (source.take(), source.take())}
    double, define = prompts["Print the double."], prompts["Define f."]
    assert (double.entry["level"], define.entry["answer"]) == (3, "7")
    assert by_task(double, "```python\nprint(2 * int(input()))\n```") == 1.0
    assert by_task(double, "```python\nprint(3)\n```") == 0.0
    assert by_task(define, "```python\ndef f(x): return x + 1\n```") == 1.0


@pytest.mark.parametrize("row", [{}, {"tests": []}, {"tests": [{"input": 1}]}, {"tests": "x"}, {"test_code": 3}])
def test_a_row_of_programs_without_tests_is_named(tmp_path, row):
    (tmp_path / "x.jsonl").write_text(msgspec.json.encode({"question": "q", "answer": "a", **row}).decode())
    with pytest.raises(ValueError, match="line 1: expected 'tests', a list of objects with 'input' and 'output', or"):
        check_data(DataConfig(file=str(tmp_path / "x.jsonl"), verifier="code"))


def test_a_mark_at_the_begin_of_a_file_is_no_part_of_it(tmp_path):
    file = tmp_path / "marked.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "a"}\r\n{"question": "r", "answer": "b"}\r\n')
    check_data(DataConfig(file=str(file)))


def test_a_changed_file_does_not_resume_a_moved_one_does(encoder, tmp_path):
    config = DataConfig(file=write_rows(tmp_path / "a.jsonl", 5, task="t"))
    state = PromptSource(config, encoder).state()
    PromptSource(DataConfig(file=write_rows(tmp_path / "b.jsonl", 5, task="t")), encoder).restore(state)
    with pytest.raises(ValueError, match="content of its file"):
        PromptSource(DataConfig(file=write_rows(tmp_path / "a.jsonl", 6, task="t")), encoder).restore(state)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected an object with 'question' and 'answer', got list"),
        (
            '{"prompt": "q", "answer": "a"}',
            r"line 2: expected a text in 'question'; the object has \['answer', 'prompt'\]",
        ),
        ('{"question": "q"}', "line 2: expected a text or number in 'answer'"),
        ('{"question": "q", "answer": true}', "line 2: expected a text or number in 'answer'"),
        ('{"question": "q", "answer": "a", "task": 3}', "line 2: expected a text in 'task', got 3"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, line: str, message: str):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n' + line)
    with pytest.raises(ValueError, match=message):
        check_data(DataConfig(file=str(path)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "got neither.*Write"),
        (msgspec.structs.replace(MIX, file="x.jsonl"), "got both"),
        (msgspec.structs.replace(MIX, held_out_file="x.jsonl"), "only used with file"),
        (msgspec.structs.replace(MIX, template="{q}"), "expected a text with {question}"),
        (DataConfig(file="nowhere.jsonl"), "nowhere.jsonl can't be read"),
        (DataConfig(families=[FamilyConfig(name="gcd"), FamilyConfig(name="gcd")]), "'gcd' is listed twice"),
        (DataConfig(families=[FamilyConfig(name="gdc")]), "nearest: 'gcd'"),
    ],
)
def test_data_that_cannot_work_is_refused_before_the_run(config: DataConfig, message: str):
    with pytest.raises(ValueError, match=message):
        check_data(config)
    check_data(MIX)
