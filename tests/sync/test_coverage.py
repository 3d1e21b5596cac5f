"""CO-1 to CO-4: a plan that would leave a byte of the rollout old is never made (W2)."""

from __future__ import annotations

import pytest

from sync.layout import Entry, Layout, LayoutError
from sync.plan import make_plan

EMBED = Entry.whole("model.embed_tokens.weight", (8, 4), "float32")
NORM = Entry.whole("model.norm.weight", (4,), "float32")
HEAD = Entry.whole("lm_head.weight", (8, 4), "float32")
ROTARY = Entry.whole("rotary.inv_freq", (2,), "float32")


def plan(sources: list[Layout], sink: Layout):
    return make_plan(sources, [sink], bucket_bytes=1024)


def test_sent_derived_and_constant_tensors_cover_a_sink():
    sink = Layout((EMBED, NORM, HEAD, ROTARY), derived={"lm_head.weight": EMBED.name}, constant=("rotary.inv_freq",))
    made = plan([Layout((EMBED, NORM))], sink)
    assert [s.name for b in made.buckets for s in b.segments] == [EMBED.name, NORM.name]


def test_derived_name_needs_no_entry():
    assert plan([Layout((EMBED,))], Layout((EMBED,), derived={"lm_head.weight": EMBED.name})).payload_bytes == 128


def test_every_uncovered_name_is_in_the_error():
    with pytest.raises(LayoutError) as caught:
        plan([Layout((EMBED,))], Layout((EMBED, NORM, HEAD)))
    assert "model.norm.weight: rollout rank 0 needs it and no trainer rank has it" in str(caught.value)
    assert "lm_head.weight: rollout rank 0 needs it" in str(caught.value)


def test_missing_rows_are_named():
    # 8 rows in shards of 3: the third rank, with rows 6:8, is missing
    shards = [Layout((Entry.rows("w", (8, 4), "float32", a, a + 3),)) for a in (0, 3)]
    with pytest.raises(LayoutError, match=r"w: rollout rank 0 needs \[0:8, 0:4\], no trainer rank holds \[6:8, 0:4\]"):
        plan(shards, Layout((Entry.whole("w", (8, 4), "float32"),)))


def test_other_shape_is_named_with_both_sides():
    with pytest.raises(LayoutError, match=r"w: trainer rank 0 has shape \[8\], rollout rank 0 wants \[9\]"):
        plan([Layout((Entry.whole("w", (8,), "float32"),))], Layout((Entry.whole("w", (9,), "float32"),)))


def test_empty_share_of_a_sink_is_covered_but_its_name_must_exist():
    source = Layout((Entry.whole("w", (8,), "float32"), NORM))
    assert plan([source], Layout((Entry.rows("w", (8,), "float32", 8, 8), NORM))).payload_bytes == 16
    with pytest.raises(LayoutError, match="v: rollout rank 0 needs it"):
        plan([source], Layout((Entry.rows("v", (8,), "float32", 8, 8), NORM)))


def test_trainer_ranks_that_disagree_are_refused():
    with pytest.raises(LayoutError, match=r"w: trainer rank 0 declares float32 .* trainer rank 1 declares bfloat16"):
        plan(
            [Layout((Entry.whole("w", (8,), d),)) for d in ("float32", "bfloat16")],
            Layout((Entry.whole("w", (8,), "float32"),)),
        )


@pytest.mark.parametrize(
    ("derived", "text"),
    [
        ({"lm_head.weight": "nowhere"}, "derives it from nowhere, which is not among the tensors sent to it"),
        ({"lm_head.weight": NORM.name}, "but wants float32 .* of \\[8, 4\\] and its origin is"),
    ],
    ids=["unknown origin", "other shape"],
)
def test_derivations_that_can_not_hold_are_refused(derived, text):
    with pytest.raises(LayoutError, match=text):
        plan([Layout((EMBED, NORM))], Layout((EMBED, NORM, HEAD), derived=derived))


def test_a_head_that_one_side_alone_ties_is_refused():
    tied = Layout((EMBED, HEAD), derived={HEAD.name: EMBED.name})
    with pytest.raises(LayoutError, match=r"lm_head\.weight: .* trainer rank 0 holds it by itself; tie it on both"):
        plan([Layout((EMBED, HEAD))], tied)
    with pytest.raises(LayoutError, match="rollout rank 0 needs it and no trainer rank has it"):
        plan([Layout((EMBED,))], Layout((EMBED, HEAD)))


@pytest.mark.parametrize(
    ("held", "wanted"), [("float32", "float8_e4m3fn"), ("int64", "float32"), ("bfloat16", "uint8")]
)
def test_casts_that_change_the_meaning_are_refused(held, wanted):
    with pytest.raises(LayoutError, match=rf"w: trainer rank 0 holds {held} .*, rollout rank 0 wants {wanted} "):
        plan([Layout((Entry.whole("w", (8,), held),))], Layout((Entry.whole("w", (8,), wanted),)))
