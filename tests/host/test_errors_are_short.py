"""Messages of errors are short, whatever was passed."""

from __future__ import annotations

import inspect

import pytest
from support.bad_input.call import backward, forward, softmax

import cupyattn
from cupyattn import emulator

NOTHING = emulator.load(
    ".version 7.5\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n"
)


LONG = {
    "list": [0.5] * 100_000,
    "text": "x" * 1_000_000,
    "bytes": bytes(1_000_000),
    "tuple": tuple(range(100_000)),
    "nested": [[[0.5] * 1000] * 100] * 10,
    "texts": ["x" * 1_000_000] * 100,
    "integer": 10**5000,  # Python refuses to write it
    "pair": (10**5000, -1),
    "type": type("x" * 1_000_000, (), {})(),
}


@pytest.mark.parametrize("make", [forward, backward, softmax])
@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_a_message_is_short_however_long_the_value(make, value):
    parameters = inspect.signature(make().function).parameters.values()
    for name in (p.name for p in parameters if p.kind is p.KEYWORD_ONLY):
        call = make()
        call.change({name: value})
        assert len(str(call.refused())) < 1000, name
    call = make()
    first = next(iter(call.arrays))
    call.arrays[first] = value
    assert len(str(call.refused())) < 1000


@pytest.mark.parametrize("value", [v for v in LONG.values() if isinstance(v, str | bytes | list)])
def test_names_of_backends_are_short_in_messages(value):
    with pytest.raises(ValueError, match="; ") as failure, cupyattn.backend(value):
        pass
    assert len(str(failure.value)) < 1000


@pytest.mark.parametrize("value", [LONG["list"], LONG["text"], LONG["bytes"]])
def test_messages_of_the_emulator_are_short_too(value):
    for use in (
        lambda: emulator.Checks(max_steps=value),
        lambda: emulator.Checks(races=value),
        lambda: emulator.launch(NOTHING, "nothing", value, 32, []),
        lambda: emulator.launch(NOTHING, str(value), 1, 32, []),
        lambda: NOTHING.symbol(str(value)),
    ):
        with pytest.raises(emulator.LaunchError) as failure:
            use()
        assert len(str(failure.value)) < 300
