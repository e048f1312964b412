"""Functions -> Python source: control flow, and one lowering per family of instructions."""
