"""Operations on a paged KV cache: append, copy blocks, gather."""
