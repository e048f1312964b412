"""PTX text -> functions: lists of instructions with their registers, variables and labels."""
