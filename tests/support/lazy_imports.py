"""Libraries that nothing imports before it needs them."""

CUPY = {"cupy", "cupy_backends", "cupyx"}
LAZY = {*CUPY, "cuda", "rich", "ml_dtypes", "torch", "matplotlib"}
LAZY |= {"safetensors", "tokenizers", "gguf", "jinja2", "regex", "mpi4py", "nccl"}
