"""The same step by transformers and PEFT, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from cupyattn import models
from cupyattn.benchmark.finetune.steps import Plan, samples_of, timed
from cupyattn.benchmark.finetune.work import Size
from cupyattn.benchmark.generate.peers import missing_peer, transformers_config
from cupyattn.errors import error

PEERS = ("peft", "peft-nf4")
"""In float16; and with bitsandbytes' weights of four bits, for models in folders."""
_SCALE = 2.0**10


def peer(name: str, plan: Plan, size: Size) -> dict[str, Any]:
    """Time a peer's steps: gradient checkpointing, LoRA on all linear layers, fused AdamW.

    Raises
    ------
    RuntimeError
        If it is not installed, or cannot train this model.
    """
    try:
        torch = import_module("torch")
        transformers, peft = import_module("transformers"), import_module("peft")
    except ImportError as failure:
        raise missing_peer(name, failure) from failure
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    model = _adapted(name, plan, torch, transformers, peft)
    step = _step(model, samples_of(model.config.vocab_size, size), torch)
    seconds = timed(step, plan)
    held = torch.cuda.max_memory_reserved() - before
    del model, step
    torch.cuda.empty_cache()
    return {
        "seconds": seconds,
        "held_bytes": held,
    }


def _adapted(name: str, plan: Plan, torch: Any, transformers: Any, peft: Any) -> Any:
    random = plan.model in models.PRESETS
    if name == "peft-nf4":
        if random:
            raise error(
                RuntimeError, "weights of four bits and random weights",
                "bitsandbytes quantises models as they are read from files",
                "pass --model with a folder",
            )  # fmt: skip
        bits = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plan.model, quantization_config=bits, dtype=torch.float16
        )
    elif random:
        config = transformers_config(transformers, models.PRESETS[plan.model])
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float16)
    model = model.to("cuda")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = peft.LoraConfig(
        r=plan.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, lora).train()


def _step(model: Any, samples: list[Any], torch: Any) -> Callable[[], float]:
    ids = torch.tensor([sample.ids.tolist() for sample in samples], device="cuda")
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-4, fused=True)

    def step() -> float:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        (loss * _SCALE).backward()
        for each in learnt:
            each.grad.div_(_SCALE)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
