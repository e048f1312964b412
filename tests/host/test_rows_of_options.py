"""Which row of its table the forward on tensor cores has with options."""

from __future__ import annotations

from cupyattn.kernels.configs.attention.modifiers import BLOCK_LISTS, Modifier, Modifiers
from cupyattn.kernels.configs.attention.options import PLAIN, FlashOptions
from cupyattn.kernels.configs.attention.tensor_core import forward_rows


def test_the_kind_of_options_decides_the_row_of_the_forward():
    expression = Modifier("score", None, ())
    options_of = {
        "dropout": FlashOptions(dropout=True, slopes="float32"),
        "block mask": FlashOptions(modified=Modifiers(None, expression, BLOCK_LISTS), softcap=True),
        "float32 bias by 4": FlashOptions(bias="float32", bias_vec=4),
        "bias or mask one by one": FlashOptions(bias="float16", bias_vec=4, mask=True, mask_vec=1),
        "score_mod": FlashOptions(modified=Modifiers(expression, expression)),
        "mask_mod": FlashOptions(modified=Modifiers(None, expression)),
        "softcap": FlashOptions(softcap=True, bias="float16", bias_vec=2),
        "slopes": FlashOptions(slopes="float16"),
    }
    assert set(options_of) == set(forward_rows.FLASH_WITH)
    for kind, options in options_of.items():
        for head_dim in forward_rows.FLASH[75]:
            usual = forward_rows.FLASH[75][head_dim]
            expected = forward_rows.FLASH_WITH[kind][75].get(head_dim, usual)
            assert forward_rows.flash_row(75, head_dim, 1, options) is expected, kind
    for options in (PLAIN, FlashOptions(sinks="float32"), FlashOptions(mask=True, mask_vec=2)):
        assert forward_rows.flash_row(75, 64, 64, options) is forward_rows.FLASH[75][64]
