"""What the generated code calls: arithmetic, memory, warp instructions, barriers, over lanes."""
