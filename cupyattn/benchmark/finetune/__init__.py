"""``python -m cupyattn.benchmark finetune``: a step of LoRA, beside its budget and PEFT's."""
