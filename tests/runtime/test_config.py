"""`runtime.config` and `runtime.config_text`: CF-1 to CF-5, CT-1 and CT-2 by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import ConfigError, load, loads, parse_override, render

Rate = Annotated[float, msgspec.Meta(gt=0)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: float = 1.0
    max_tokens: int = 64
    stop: tuple[int, ...] = ()


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    weight: float = 1.0
    options: dict[str, Any] = {}


class Shm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shm", tag_field="kind"):
    slots: int = 2


class Gloo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gloo", tag_field="kind"):
    port: int = 0


class Trainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    learning_rate: Rate = 1e-3
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip: float | None = 1.0
    warmup: int | None = None

    def __post_init__(self) -> None:
        if self.warmup is not None and self.clip is None:
            raise ValueError("warmup without clip: set clip, or leave warmup out")


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "default"
    seed: int = 0
    folder: Path = Path("runs")
    trainer: Trainer = Trainer()
    sampling: Sampling = Sampling(temperature=0.7, max_tokens=16)
    families: list[Family] = msgspec.field(default_factory=lambda: [Family(name="sums"), Family(name="chains")])
    transport: Shm | Gloo = Shm()
    limits: dict[str, float] = {}


def problems(text: str, *overrides: str, config_type: type[msgspec.Struct] = Job, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text, config_type, overrides, source="job.toml", **options)
    assert str(caught.value).startswith("job.toml: ")
    return caught.value.problems


def test_no_file_gives_the_defaults():
    assert load(None, Job) == Job()


def test_a_toml_and_a_yaml_file_of_one_meaning_give_one_tree(tmp_path: Path):
    (tmp_path / "job.toml").write_text('name = "x"\n[trainer]\nlearning_rate = 1e-4\noptimizer = "sgd"\n')
    (tmp_path / "job.yaml").write_text("name: x\ntrainer:\n  learning_rate: 1e-4\n  optimizer: sgd\n")
    expected = Job(name="x", trainer=Trainer(learning_rate=1e-4, optimizer="sgd"))
    assert load(tmp_path / "job.toml", Job) == load(str(tmp_path / "job.yaml"), Job) == expected


def test_unknown_key_names_its_path_the_nearest_key_and_the_keys_of_the_table():  # CF-1
    (problem,) = problems("[trainer]\nlerning_rate = 1.0")
    assert problem == (
        "trainer.lerning_rate: unknown key; did you mean 'learning_rate'? "
        "Keys of [trainer]: clip, learning_rate, optimizer, warmup"
    )


def test_a_key_written_in_the_wrong_table_is_sent_to_the_right_one():  # CF-1
    (problem,) = problems("max_tokens = 3")
    assert "max_tokens: unknown key; it is known as 'sampling.max_tokens'." in problem


def test_unknown_keys_are_found_inside_lists_and_without_the_types_consent():  # CF-1
    class Loose(msgspec.Struct):
        families: list[Family] = []

    (problem,) = problems('[[families]]\nname = "a"\n[[families]]\nname = "b"\nwieght = 2', config_type=Loose)
    assert problem.startswith("families[1].wieght: unknown key; did you mean 'weight'?")
    (problem,) = problems("familys = []", config_type=Loose)
    assert problem.startswith("familys: unknown key; did you mean 'families'?")


def test_all_problems_are_reported_together():  # CF-4
    found = problems(
        'sede = 1\n[trainer]\nlearning_rate = "fast"\n[[families]]\nweight = "heavy"', "sampling.max_tokens=x"
    )
    assert [line.partition(":")[0] for line in found] == [
        "sede",
        "trainer.learning_rate",
        "sampling.max_tokens",
        "families[0].name",
        "families[0].weight",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('seed = "one"', 'seed: expected int, got "one"'),
        ("seed = 1.5", "seed: expected int, got 1.5"),
        ("trainer = 3", "trainer: expected a table, got 3"),
        ("families = 3", "families: expected list, got 3"),
        ("families = [3]", "families[0]: expected a table, got 3"),
        ("[trainer]\nlearning_rate = -1.0", "trainer.learning_rate: expected float > 0.0, got -1.0"),
        ("[sampling]\nstop = [1, 'a']", 'sampling.stop[1]: expected int, got "a"'),
        ("[limits]\na = 'b'", "limits[...]: expected float, got str"),
        ("[[families]]\nweight = 1.0", "families[0].name: missing; expected str"),
        ('transport = {kind = "tcp"}', 'transport.kind: expected one of "shm", "gloo", got "tcp"'),
        ("transport = {}", 'transport.kind: expected one of "shm", "gloo", got nothing'),
        ("folder = 3", "folder: expected a path as text, got 3"),
    ],
)
def test_a_wrong_value_is_told_with_path_expected_and_got(text: str, expected: str):  # CF-4
    assert problems(text) == [expected]


def test_a_choice_lists_what_may_be_chosen():
    assert problems('[trainer]\noptimizer = "adam"') == [
        'trainer.optimizer: expected one of "adamw", "sgd", got "adam"; did you mean \'adamw\'?'
    ]


def test_what_a_struct_demands_of_its_fields_together_is_told_with_its_path():
    assert problems('[trainer]\nwarmup = 3\nclip = "none"') == [
        "trainer: warmup without clip: set clip, or leave warmup out"
    ]


def test_a_table_written_in_part_keeps_the_other_defaults_of_its_field():  # CF-2
    assert loads("[sampling]\nmax_tokens = 8", Job).sampling == Sampling(temperature=0.7, max_tokens=8)


def test_a_member_of_a_union_is_chosen_by_its_tag():
    assert loads('transport = {kind = "gloo", port = 7}', Job).transport == Gloo(port=7)


def test_overrides_do_what_the_file_would_do():  # CF-3
    job = loads(
        "[trainer]\nlearning_rate = 0.5",
        Job,
        [
            "name=123",
            "trainer.learning_rate=1e-4",
            "trainer.clip=none",
            "families[1].weight=2",
            'families[0].options={"a b" = [1, 2]}',
            "sampling.stop=[1, 2]",
            'limits."a.b"=3',
            "folder=/data/runs",
        ],
    )
    assert job.name == "123"
    assert job.trainer == Trainer(learning_rate=1e-4, clip=None)
    assert job.families == [Family(name="sums", options={"a b": [1, 2]}), Family(name="chains", weight=2)]
    assert job.sampling == Sampling(temperature=0.7, max_tokens=16, stop=(1, 2))
    assert job.limits == {"a.b": 3.0}
    assert job.folder == Path("/data/runs")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.lr", "override 'trainer.lr': expected key=value, such as trainer.learning_rate=1e-3"),
        ("a..b=1", "override 'a..b=1': can't read the key 'a..b'; expected something like a.b or a.list[0].b"),
        ("=1", "override '=1': the key before '=' is empty"),
        ("families[7].weight=1", "families has 2 items, so [7] does not exist; the last is [1]"),
        ("seed[0]=1", "seed is not a list, so it has no item [0]"),
        ("sampling.stop=[1, 2", "override 'sampling.stop=[1, 2': the value is not valid TOML"),
        ("trainer.clip.x=1", "trainer.clip: expected"),
        ("trainer.lerning_rate=1", "did you mean 'learning_rate'?"),
        ("seed=x", "seed: expected int, got \"x\" (from the override 'seed=x')"),
    ],
)
def test_an_override_that_does_not_fit_says_which_and_why(override: str, expected: str):  # CF-4
    (problem,) = problems("seed = 3" if override.startswith("seed[") else "", override)
    assert expected in problem


def test_an_override_may_hold_an_equals_sign_and_line_breaks():
    assert parse_override("name=a=b\nseed=3") == (("name",), "a=b\nseed=3")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("job.toml", "a = ", "not valid TOML"),
        ("job.yaml", "a: [", "not valid YAML"),
        ("job.yaml", "- 1", "expected a table of settings at the top, got a list of 1"),
        ("job.yml", "seed: 1\nseed: 2", "the key 'seed' is written twice"),  # CT-1
        ("job.json", "{}", "no job file, whose name would end in .toml, .yaml or .yml, and no override"),
        ("job.toml", None, "can't be read: No such file or directory"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, name: str, content: str | None, expected: str):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name) as caught:
        load(tmp_path / name, Job)
    assert expected in str(caught.value)


def test_a_mark_at_the_begin_of_a_file_is_no_part_of_it(tmp_path: Path):
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbfname = 'marked'\n")
    assert load(tmp_path / "job.toml", Job).name == "marked"


def test_yaml_has_no_surprises():  # CT-1
    class Plain(msgspec.Struct):
        a: str
        b: float
        c: bool
        d: str | None = "set"

    assert loads("a: on\nb: 1e-3\nc: true\nd: null", Plain, language="yaml") == Plain("on", 1e-3, True, None)
    assert loads("", Job, language="yaml") == Job()


def test_a_rendered_tree_tells_where_values_come_from():
    text = render(
        Job(seed=3),
        overrides=["seed=3"],
        derived={"trainer.clip": "from the batch size", "sampling.slots": "64 = (S + 1) * 32"},
    )
    assert "seed = 3  # from the command line" in text
    assert "clip = 1.0  # derived: from the batch size" in text
    assert "# warmup is unset" in text
    assert "# slots: 64 = (S + 1) * 32" in text.partition("[sampling]")[2].partition("[[")[0]


def test_a_value_that_toml_can_not_hold_is_an_error_naming_it():  # CT-2
    with pytest.raises(ValueError, match=r"families\[0\]\.options\.a.*no null"):
        render(Job(families=[Family(name="x", options={"a": None})]))


texts = st.text(max_size=12).filter(lambda text: text != "none")
numbers = st.floats(allow_nan=False)
anything = st.recursive(
    st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
jobs = st.builds(
    Job,
    name=texts,
    seed=st.integers(-(2**63), 2**63 - 1),
    folder=st.sampled_from([Path("runs"), Path("/a/b c")]),
    trainer=st.builds(
        Trainer,
        learning_rate=st.floats(min_value=1e-30, max_value=1e30),
        optimizer=st.sampled_from(["adamw", "sgd"]),
        clip=st.floats(0, 10) | st.none(),
    ),
    sampling=st.builds(Sampling, temperature=numbers, stop=st.lists(st.integers(0, 99), max_size=60).map(tuple)),
    families=st.lists(
        st.builds(Family, name=texts, weight=numbers, options=st.dictionaries(texts, anything, max_size=3)), max_size=3
    ),
    transport=st.builds(Shm, slots=st.integers(0, 9)) | st.builds(Gloo, port=st.integers(0, 9)),
    limits=st.dictionaries(texts, numbers, max_size=3),
)


@given(jobs)
def test_what_is_rendered_loads_equal(job: Job):  # CF-5, CT-2
    assert loads(render(job), Job) == job
