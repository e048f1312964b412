"""Who waits for whom among ranks that are threads."""

from __future__ import annotations

import threading
import time

import numpy as np

from cupyattn.distributed.communicators.mailbox import Parcel, PostOffice


def test_who_has_got_what_it_waited_for_does_not_miss_a_rank_that_left():
    """It has not woken up yet. Who waits for it was told that the other one never came."""
    office, parcel = PostOffice(20.0), Parcel(np.zeros(1), None)
    waiting = threading.Thread(target=office.wait_until_taken, args=(parcel, 1, 2))
    waiting.start()
    while 1 not in office._waits_for:
        time.sleep(0.001)
    with office.failures.changed:
        assert office._who_is_missing(1) == 2
        office.confirm(parcel)
        office.failures.leave(2)
        assert office._who_is_missing(1) == 1
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert office.failures.first() is None
