"""Operations over lanes for the generated code: arithmetic, memory, warp instructions, barriers."""
