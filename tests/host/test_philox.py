import numpy as np
import pytest

from cupyattn.reference import attention_keep, philox4x32_10

# Random123's published known answers for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = (
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert tuple(int(word) for word in philox4x32_10(counter, key)) == words


def test_counters_broadcast():
    i, j = np.arange(3)[:, None], np.arange(5)
    words = philox4x32_10((j, i, 7, 9), (1, 2))
    assert all(word.shape == (3, 5) and word.dtype == np.uint32 for word in words)
    alone = philox4x32_10((4, 2, 7, 9), (1, 2))
    assert [int(word[2, 4]) for word in words] == [int(word) for word in alone]


def test_eight_scores_share_a_counter():
    """Keys 2c, 2c+1 of each eight of 32 keys hold the eight fields of counter c, low half first."""
    seed, b, h, i = 0x123456789ABCDEF0, 1, 2, 3
    c = 2
    words = philox4x32_10((4 * 1 + c, i, h, b), (0x9ABCDEF0, 0x12345678))
    fields = [int(half) for word in words for half in (word & 0xFFFF, word >> 16)]
    keys = [32 + 8 * eight + 2 * c + low for eight in range(4) for low in range(2)]
    for p in (0.25, 0.5, 0.9):
        keep = attention_keep(seed, p, b, h, [i], keys)
        assert keep.tolist() == [[field >= round(65536 * p) for field in fields]]


def test_keep_does_not_depend_on_which_scores_are_asked_for():
    whole = attention_keep(5, 0.3, 0, 1, np.arange(20), np.arange(100))
    part = attention_keep(5, 0.3, 0, 1, np.arange(7, 20), np.arange(33, 90))
    np.testing.assert_array_equal(part, whole[7:, 33:90])
    assert attention_keep(5, 0.3, 0, 1, np.arange(0), np.arange(9)).shape == (0, 9)
    assert attention_keep(5, 0.3, 0, 1, np.arange(9), np.arange(0)).shape == (9, 0)


def test_keep_is_random():
    """The kept share is 1 - p within six standard deviations, and seed, b, h, i, j all matter."""
    n, p = 256, 0.2
    index = np.arange(n)
    keep = attention_keep(2**64 - 1, p, 0, 0, index, index)
    assert abs(keep.mean() - (1 - p)) < 6 * np.sqrt(p * (1 - p)) / n
    others = [
        attention_keep(2**64 - 2, p, 0, 0, index, index),
        attention_keep(2**32 - 1, p, 0, 0, index, index),
        attention_keep(2**64 - 1, p, 1, 0, index, index),
        attention_keep(2**64 - 1, p, 0, 1, index, index),
        attention_keep(2**64 - 1, p, 0, 0, index + 1, index),
        attention_keep(2**64 - 1, p, 0, 0, index, index + 1),
    ]
    same_by_chance = p**2 + (1 - p) ** 2
    for other in others:
        assert abs((keep == other).mean() - same_by_chance) < 0.02
    assert attention_keep(0, 0.0, 0, 0, index, index).all()
