"""New weights in a Llama that vLLM quantises as it loads, beside one that it has loaded with them; a program of its
own, as layouts.py. Prints a line of JSON for each case: `python -m tests.engines.quantised`."""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.config.quantization import _ONLINE_SHORTHANDS
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.online import base, fp8
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from roles.vllm_copies import as_bytes
from roles.vllm_reload import Reloader
from sync.layout import Entry
from sync.layouts.model import ModelShape
from tests.engines.layouts import BASE, MODELS, built, parallel

CONFIG = BASE | MODELS["llama"] | {"model_type": "llama"}
ENTRIES = [Entry.whole(w.name, w.shape, "bfloat16") for w in ModelShape.of(CONFIG).weights()]
CHANNELS = fp8.Fp8PtpcOnlineLinearMethod


def is_done(layer: Any) -> bool:
    """vLLM asks again for all layers when all are loaded."""
    return getattr(layer, "_already_called_process_weights_after_loading", False)


class KnowsItsLayer(fp8.Fp8PtpcOnlineLinearMethod):  # type: ignore[misc]  # vLLM has no types for us
    """Does otherwise where it is given another."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self.layer: Any = weakref.ref(layer)
        super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not is_done(layer) and layer is self.layer():
            layer.weight.data.mul_(2)
        super().process_weights_after_loading(layer)


class KeepsAFloat(fp8.Fp8PtpcOnlineLinearMethod):  # type: ignore[misc]  # vLLM has no types for us
    """A scale that a kernel takes by value."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if not is_done(layer):
            layer.most = float(layer.weight.abs().max())
        super().process_weights_after_loading(layer)


CASES: dict[str, tuple[str, Any]] = {
    "fp8_per_channel": ("fp8_per_channel", CHANNELS),
    "fp8_per_block": ("fp8_per_block", CHANNELS),
    "knows its layer": ("fp8_per_channel", KnowsItsLayer),
    "keeps a float": ("fp8_per_channel", KeepsAFloat),
}


def main() -> int:
    for name, (kind, method) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            engine = EngineArgs(model=folder, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)
            config = engine.create_engine_config()
        config.quant_config = base.OnlineQuantizationConfig(_ONLINE_SHORTHANDS[kind])
        with set_current_vllm_config(config), parallel(), methods(method):
            print(json.dumps({"case": name, **case(config)}), flush=True)
    return 0


def case(config: Any) -> dict[str, Any]:
    """Three versions, each beside a model that vLLM has loaded with the same numbers."""
    model = started(config, 0)
    reloader = Reloader(model, config, torch.device("cpu"), ENTRIES)
    reloader.prove()
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    facts: dict[str, Any] = {"differs": [], "touched": [], "loads": 0}
    load = model.load_weights

    def counted(weights: Any) -> Any:
        facts["loads"] += 1
        return load(weights)

    for seed in (1, 2, 1):
        weights, before = numbers(seed), tensors(model)
        model.load_weights = counted
        while not reloader.process(weights):
            pass
        model.load_weights = load
        facts["touched"] += unlike(tensors(model), before)
        reloader.swap(weights)
        expected = started(config, seed)
        facts["differs"].append(unlike(tensors(model), tensors(expected)))
        facts["floats"], facts["expected_floats"] = floats(model), floats(expected)
    facts["moved"] = [name for name, p in model.named_parameters() if p.data_ptr() != addresses[name]]
    facts["quantised"] = sum(p.dtype == torch.float8_e4m3fn for p in model.parameters())
    return facts | reloader.facts()


def started(config: Any, seed: int) -> Any:
    """A model after vLLM's start with these numbers."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = built(config)
        model.load_weights(numbers(seed).items())
        finalize_layerwise_processing(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def numbers(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {e.name: torch.randn(e.shape, generator=generator).to(torch.bfloat16) for e in ENTRIES}


def tensors(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unlike(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [n for n, t in a.items() if t.shape != b[n].shape or not torch.equal(as_bytes(t), as_bytes(b[n]))]


def floats(model: Any) -> dict[str, float]:
    return {name: layer.most for name, layer in model.named_modules() if hasattr(layer, "most")}


@contextmanager
def methods(of_channels: Any) -> Iterator[None]:
    """vLLM's own, but for the one of channels, and without the kernel."""
    kernel = SimpleNamespace(process_weights_after_loading=lambda _: None, input_quant_key=lambda: None)
    table = base._ONLINE_LINEAR_METHODS
    before = fp8.init_fp8_linear_kernel, dict(table)
    fp8.init_fp8_linear_kernel = lambda *_, **__: kernel
    table.update({key: of_channels for key, one in table.items() if one is CHANNELS})
    try:
        yield
    finally:
        fp8.init_fp8_linear_kernel = before[0]
        table.update(before[1])


if __name__ == "__main__":
    sys.exit(main())
