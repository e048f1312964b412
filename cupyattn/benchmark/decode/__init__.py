"""A step of decoding over paged and dense keys and values, at the memory's speed."""
