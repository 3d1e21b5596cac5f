"""The job tree: what is derived, what is refused, and that every recipe resolves. Cites JO-rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from algorithms.describe import describe, headline
from algorithms.job import Job, Resolved, advantage_of, resolve
from roles import vllm_compat
from runtime.config import ConfigError, load, loads, render

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def resolved(*overrides: str, gpus: int = 0, cores: int = 2) -> Resolved:
    path = next(path for path in RECIPES if path.stem == "default")
    job = load(path, Job, overrides)
    return resolve(job, folder=path.parent, source="job.toml", gpus=gpus, cores=cores)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves_and_resolves_to_itself_jo3(path, tmp_path):
    # The models of some recipes are made by a script; in their place, the one that ships.
    made = (path.parent / load(path, Job).model.path).exists()
    job = load(path, Job, [] if made else ["model.path=start_policy"])
    first = resolve(job, folder=path.parent, source=str(path), gpus=0, cores=2)
    again = loads(render(first.job, derived=first.derived), Job)
    second = resolve(again, folder=tmp_path, source="again", gpus=8, cores=64)
    assert second.job == first.job
    assert second.derived.keys() <= {"data.seed", "trainer.seed"}  # 0 is the seed of the job, which is 0


def test_batch_is_the_reference_on_gpus_and_scaled_down_on_cpu_jo1():
    assert resolved(gpus=2).job.grpo.prompts_per_step == 32
    on_cpu = resolved(gpus=0)
    assert on_cpu.job.grpo.prompts_per_step == 16
    assert on_cpu.derived["grpo.prompts_per_step"] == "32 scaled down for 2 CPU cores"
    assert "grpo.prompts_per_step" not in resolved("grpo.prompts_per_step=4").derived


def test_cores_are_shared_when_both_sides_run_at_once_and_not_when_they_take_turns():
    # 8 cores, 2 trainer and 2 rollout ranks: 8 / (2 + 2) at once, 8 / 2 in turn
    ranks = ("trainer.ranks=2", "rollout.ranks=2")
    at_once = resolved(*ranks, "staleness=1", cores=8).job
    in_turn = resolved(*ranks, "staleness=0", cores=8).job
    assert (at_once.trainer.threads, at_once.rollout.threads) == (2, 2)
    assert (in_turn.trainer.threads, in_turn.rollout.threads) == (4, 4)


def test_one_seed_moves_prompts_and_trainer_but_not_the_held_out_set():
    job = resolved("seed=7").job
    assert (job.seed, job.data.seed, job.trainer.seed) == (7, 7, 7)
    assert job.evaluation.seed == resolved().job.evaluation.seed


def test_slots_and_worst_age_follow_from_the_staleness():
    # P = 16: S = 0.5 gives floor(1.5 * 16) = 24 slots and ceil(24 / 16) - 1 = 1 version
    half = resolved("staleness=0.5")
    assert (half.slots, half.max_age) == (24, 1)
    assert (resolved("staleness=0").slots, resolved("staleness=0").max_age) == (16, 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("name=a/b", "name = 'a/b': expected a plain name, of a folder in run_dir = 'runs'"),
        ("sampling.temperature=0", "sampling.temperature = 0.0"),
        ("sampling.top_k=5", "use top_p = 1 and top_k = 0"),
        ("grpo.samples_per_prompt=1", "expected at least 2"),
        ("trainer.token_budget=20", "trainer.token_budget = 20: the longest sequence must fit in a micro-batch"),
        ("trainer.backend=megatron", "computes on GPUs alone, and torch sees none; use 'fsdp'"),
        ("trainer={backend='megatron', ranks=3, pipeline_parallel=3}", "layers don't divide by pp = 3"),
        ("grpo.prompts_per_step=-1", "grpo.prompts_per_step = -1"),
        ("data.max_prompt_tokens=250", "the model has 256"),
        ("rollout.max_len=20", "raise it, or leave it out"),
        ("rollout.max_running=4", "raise max_running"),
        ("grpo.advantage=grp", "did you mean 'grpo'"),
        ("grpo.loss_options={ clip_lo = 0.1 }", "did you mean 'clip_low'"),
        ("data.families[0].name=chain_sun", "chain_sum"),
        ("reward.verifier=exct", "exact"),
        ("evaluation.part=right", "expected one of [reward.parts], which has none"),
        ("grpo.advantage=gdpo", "looks at the parts of a reward, and [reward.parts] has none"),
        ("evaluation={ ranks = 1, prompts = 0 }", "evaluation.prompts = 0 asks for no evaluation"),
        ("model.path=nowhere", "has no config.json"),
        ("trainer.device=cuda", "trainer.device = 'cuda', and torch sees no GPU (--doctor says more); use 'auto'"),
        ("rollout.device=cuda", "rollout.device = 'cuda', and torch sees no GPU"),
        ("sampling.max_tokens=256", "sampling.max_tokens = 256 leaves no room for a prompt: the model has 256"),
        ("evaluation.max_tokens=300", "evaluation.max_tokens = 300 leaves no room for a prompt"),
        ("reward={ model = { path = 'nowhere' } }", "nowhere has no config.json; give the folder of a Hugging Face"),
        ("reward={ verifier = 'code' }", "timeout_s = 2 is not above the 2 seconds that [reward] verifier 'code'"),
        ("debug.groups=nowhere", "nowhere has no kept groups; make some with debug.keep_groups=true"),
    ],
)
def test_contradictions_name_the_key_and_the_way_out_jo2(override, words):
    with pytest.raises(ConfigError) as caught:
        resolved(override)
    assert words in str(caught.value)


def transferring(way: str, *overrides: str, gpus: int = 0) -> Resolved:
    return resolved("rollout.engine=vllm", f"rollout.vllm.weight_transfer={way}", *overrides, gpus=gpus)


@pytest.mark.parametrize(
    ("way", "gpus", "overrides", "words"),
    [
        ("nccl", 0, ["rollout.engine=torch"], "weight_transfer = 'nccl' is of rollout.engine = 'vllm'"),
        ("nccl", 0, [], "weight_transfer = 'nccl' moves weights between GPUs, and trainer or rollout are on the CPU"),
        ("nccl", 2, ["trainer.device=cpu"], "moves weights between GPUs, and trainer or rollout are on the CPU"),
        ("nccl", 1, [], "'nccl': trainer and engines share GPUs [0], which NCCL refuses; use 'ipc' or 'sync'"),
        ("ipc", 2, [], "'ipc': the engines are on GPUs [1], the trainer on [0], and this way is for one GPU"),
        ("ipc", 2, ["trainer.ranks=2"], "one trainer rank whose GPU the engines share, got trainer.ranks = 2"),
        ("nccl", 2, ["sync.quorum=1"], "sync.quorum = 1 with rollout.vllm.weight_transfer = 'nccl': one broadcast"),
        ("nccl", 2, ["rollout.stuck_seconds=60"], "answers nothing for up to sync.deadline_s = 60; raise the one"),
        ("nccl", 2, ["sync.differences=true"], "sync.differences = True with"),
        (
            "nccl",
            2,
            ["rollout.vllm.quantization=fp8"],
            "'fp8': it was tried with weight_transfer = 'sync' only, got 'nccl'",
        ),
        ("nccl", 2, ["rollout.vllm.draft=ngram"], "'ngram': it was tried with weight_transfer = 'sync' only, got"),
        ("nccl", 2, ["trainer={ lora_rank = 4, lora_send = 'adapter' }"], "set trainer.lora_send = 'merged'"),
    ],
)
def test_what_vllms_own_transfer_can_not_keep_is_refused_by_name(monkeypatch, way, gpus, overrides, words):
    monkeypatch.setattr(vllm_compat, "version", {"vllm": "0.25.1"}.__getitem__)
    with pytest.raises(ConfigError) as caught:
        transferring(way, *overrides, gpus=gpus)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("way", "gpus"), [("nccl", 2), ("ipc", 1)])
def test_vllms_own_transfer_is_taken_where_it_can_work(monkeypatch, way, gpus):
    monkeypatch.setattr(vllm_compat, "version", {"vllm": "0.25.1"}.__getitem__)
    assert transferring(way, gpus=gpus).job.rollout.vllm.weight_transfer == way


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_answer_without_tokens_is_refused_by_its_key_jo2(tokens):
    with pytest.raises(ConfigError, match=r"sampling.*max_tokens"):
        resolved(f"sampling.max_tokens={tokens}")


def test_an_answer_that_is_too_long_is_one_problem_not_three_jc1():
    with pytest.raises(ConfigError) as caught:
        resolved("sampling.max_tokens=100000")
    assert len(caught.value.problems) == 1


def test_prompts_get_what_evaluation_and_training_both_leave_them_jo1():
    # 256 positions - 200 tokens of an evaluation = 56; a budget of 100 - 48 sampled tokens = 52
    assert resolved("evaluation.max_tokens=200").job.data.max_prompt_tokens == 56
    short = resolved("evaluation.max_tokens=200", "trainer.token_budget=100")
    assert short.job.data.max_prompt_tokens == 52
    assert short.derived["data.max_prompt_tokens"] == "100 (trainer.token_budget) - sampling.max_tokens"


def test_a_file_of_programs_needs_time_for_them_jc1(tmp_path):
    (tmp_path / "programs.jsonl").write_text('{"question": "q", "test_code": "assert f()"}\n' * 2)
    job = loads("name='x'\ndata={file='programs.jsonl', verifier='code'}\n[model]\npath=''", Job)
    policy = str(Path(__file__).parents[2] / "recipes" / "start_policy")
    job = replace(job, model=replace(job.model, path=policy))
    with pytest.raises(ConfigError, match=r"timeout_s = 2 is not above the 2 seconds that \[data\] verifier 'code'"):
        resolve(job, folder=tmp_path, source="job.toml", gpus=0, cores=2)
    job = replace(job, reward=replace(job.reward, timeout_s=10.0))
    assert resolve(job, folder=tmp_path, source="job.toml", gpus=0, cores=2).job.data.verifier == "code"


def test_all_problems_are_told_at_once_jo2():
    with pytest.raises(ConfigError) as caught:
        resolved("sampling.top_p=0.5", "grpo.samples_per_prompt=1", "grpo.loss=nothing")
    assert len(caught.value.problems) == 3


def test_an_advantage_of_parts_gets_the_weights_of_the_sum_in_the_order_of_names():
    parts = "reward.parts={ right = { verifier = 'task' }, long = { verifier = 'exact', weight = -0.5 } }"
    how = advantage_of(resolved("grpo.advantage=gdpo", parts).job)
    one = how.group(np.array([[1.0, 0.0], [0.0, 0.0]]))  # "long" is before "right": the first is only longer
    np.testing.assert_allclose(one, [-0.5 * 0.5**0.5, 0.5 * 0.5**0.5], atol=1e-5)


def test_description_is_a_job_file_again_with_its_sizes():
    one = resolved()
    text = describe(one, cores=2, gpus=0)
    assert loads(text, Job) == one.job
    assert "16 prompts x 8 = 128" in text
    assert "32 = floor((staleness + 1) * 16)" in text
    assert "1.1M" in headline(one)


def test_the_memory_estimate_follows_the_measured_runs():
    """Peak resident sizes of the trainer of the embedded job, in MiB, by token_budget: state and activations above the
    base. Measured on Linux, x86-64, float32; the estimate is within a tenth of each."""
    from algorithms.describe import ACTIVATIONS, BASE_BYTES, OPTIMIZER_BYTES

    model = resolved().model
    for budget, measured in ((512, 385), (1024, 426), (2048, 461), (4096, 562)):
        per_token = 4 * (ACTIVATIONS * model.layers * model.hidden_size + 2 * model.vocabulary)
        estimate = (BASE_BYTES + OPTIMIZER_BYTES * model.parameters + budget * per_token) / 2**20
        assert estimate == pytest.approx(measured, rel=0.1)
