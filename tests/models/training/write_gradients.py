"""Write adapters of tiny models as PEFT saves them, with what torch makes of their gradients.

    PYTHONPATH=tests python tests/models/training/write_gradients.py

needs torch, transformers and peft (these were written by torch 2.15.0, transformers 5.23.0 and peft
0.21.2 on a CPU, 2026-11-23). The models are those of tests/models/checkpoints.zip. A folder of
adapters.zip has PEFT's own two files. For each model expected.npz has token ids, the loss of each
sequence, and by PEFT's names the gradients of every adapter, computed in float64 (norms and rotary
tables in float32).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support.archives import pack, unpacked

HERE = Path(__file__).parent
ADAPTERS: dict[str, dict[str, Any]] = {
    "gpt2": {"r": 2, "lora_alpha": 5, "target_modules": "all-linear", "fan_in_fan_out": True},
    "llama3": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "llama_older": {
        "r": 2, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True,
        "rank_pattern": {"k_proj": 1, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"gate_proj": 5},
    },
    "mistral_older": {"r": 3, "lora_alpha": 6, "target_modules": r".*\.1\..*(k_proj|gate_proj)"},
    "qwen2": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "lora_dropout": 0.25},
    "phi": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "dense", "fc1", "fc2"]},
}  # fmt: skip


def write(
    name: str, options: dict[str, Any], checkpoints: Path, kept: Path
) -> dict[str, np.ndarray]:
    """Write the folder `kept` of adapters, and return what is expected of them."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sum(name.encode()))
    base = AutoModelForCausalLM.from_pretrained(
        checkpoints / name, dtype=torch.float64, attn_implementation="eager"
    )
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    adapters = {key: array for key, array in model.named_parameters() if array.requires_grad}
    with torch.no_grad():
        for array in adapters.values():  # what is kept is float32
            array.copy_(0.3 * torch.randn(array.shape).double())
    generator = np.random.default_rng(0)
    ids = generator.integers(0, base.config.vocab_size, (2, 11)).astype(np.int32)
    tokens = torch.from_numpy(ids).long()
    losses = [model(each[None], labels=each[None]).loss for each in tokens]
    loss = torch.stack(losses).mean()
    loss.backward()
    model.peft_config["default"].base_model_name_or_path = name
    model.float().save_pretrained(kept)
    (kept / "README.md").unlink()
    (kept / "adapter_model.safetensors").chmod(0o644)
    path = kept / "adapter_config.json"
    written = json.loads(path.read_text())
    if isinstance(written["target_modules"], list):
        written["target_modules"].sort()
    path.write_text(json.dumps(written, indent=2) + "\n")
    gradients = {
        key.replace(".default.", "."): array.grad.float().numpy() for key, array in adapters.items()
    }
    found = {"ids": ids, "losses": torch.stack(losses).detach().numpy(), **gradients}
    return {f"{name}/{key}": array for key, array in found.items()}


if __name__ == "__main__":
    found: dict[str, np.ndarray] = {}
    checkpoints = unpacked(HERE.parent / "checkpoints.zip")
    with tempfile.TemporaryDirectory() as temporary:
        for name, options in ADAPTERS.items():
            found |= write(name, options, checkpoints, Path(temporary, name))
        pack(Path(temporary), HERE / "adapters.zip")
    np.savez_compressed(HERE / "expected.npz", **found)
