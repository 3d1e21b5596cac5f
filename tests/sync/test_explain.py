"""EX-1, EX-2: what a job would move, without starting it; the simulator on the reference job."""

from __future__ import annotations

import json

import pytest

from sync.bounds import Links, lower_bounds, simulate
from sync.explain import main
from sync.layouts import megatron
from sync.layouts.megatron import MegatronParallel
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.plan import make_plan
from tests.sync.models import DENSE, SPARSE, TIED


@pytest.fixture
def job(tmp_path):
    """A job file beside its model; the tables are those that a run reads."""

    def write(tables: str, model: dict[str, object]) -> str:
        (tmp_path / "policy").mkdir(exist_ok=True)
        (tmp_path / "policy" / "config.json").write_text(json.dumps(model))
        (tmp_path / "job.toml").write_text(f'name = "x"\n[model]\npath = "policy"\n{tables}')
        return str(tmp_path / "job.toml")

    return write


def test_job_is_explained_without_being_started(job, capsys):
    path = job("[trainer]\nranks = 3\n[rollout]\nranks = 2\n[sync]\nbucket_bytes = 1024\n", TIED)
    assert main([path]) == 0
    told = capsys.readouterr().out
    # 37 x 16 embedding in float32, as engines have it by default, and a head derived from it, on two replicas
    assert "3 trainer ranks send" in told
    assert "2 rollout ranks read" in told
    assert f"derived: 2 tensors, {2 * 37 * 16 * 4 / 1000:.2f} kB" in told
    assert "at least" in told
    assert "simulated" in told


def test_megatron_sizes_come_from_the_job_and_quantisation_from_the_command_line(job, capsys):
    tables = (
        '[trainer]\nbackend = "megatron"\nranks = 4\ntensor_parallel = 2\npipeline_parallel = 2\n'
        'expert_parallel = 2\n[rollout]\nranks = 2\ndtype = "bfloat16"\n'
    )
    model = SPARSE | {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 128}
    assert main([job(tables, model), "--quantise"]) == 0
    told = capsys.readouterr().out
    assert "4 trainer ranks send" in told
    assert "scales: " in told


def test_sizes_on_the_command_line_override_the_job(job, capsys):
    path = job("[trainer]\nranks = 1\n", DENSE)
    assert main([path, "--trainer", "4", "--megatron", "tp=2,pp=2", "--engine", "tp=4", "--replicas", "3"]) == 0
    told = capsys.readouterr().out
    assert "4 trainer ranks send" in told
    assert "12 rollout ranks read" in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--engine", "tp=3"], "axis 0 has 8 parts of 4, which 3 tensor-parallel ranks can't share evenly"),
        (["--megatron", "xp=3"], "'xp=3': expected name=number with a name of tp, pp"),
        (["--megatron", "tp=2", "--trainer", "3"], "3 ranks don't divide by pp = 1 times tp = 2"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error_of_one_line(job, capsys, arguments, text):
    assert main([job("", DENSE), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_reference_job_on_24_gpus_is_near_its_bound_when_simulated():
    """16 trainer GPUs with TP4, PP4, EP4 to one engine of TP8, in DeepSeek-V3's names; a sixteenth of the experts, so
    that the test is quick: bytes per link keep their proportions."""
    model = ModelShape.of(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 43,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "intermediate_size": 8192,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "q_lora_rank": 1024,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
        }
    )
    parallel = MegatronParallel(tp=4, pp=4, ep=4, etp=1, layers=(11, 11, 11, 10))
    sources = [megatron.held(model, parallel, parallel.rank(rank, 16)).layout for rank in range(16)]
    sinks = [served(model, Serving(tp=8), rank) for rank in range(8)]
    plan = make_plan(sources, sinks, bucket_bytes=64 << 20, spread=True)
    run = simulate(plan, Links())
    bounds = lower_bounds(plan, Links())
    assert bounds.receive > bounds.send  # 8 GPUs read what 16 send
    assert run.efficiency > 0.7
    assert max(b.index for b in plan.buckets) == len(plan.buckets) - 1
