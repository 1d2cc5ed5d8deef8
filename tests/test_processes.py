"""Processes are ended by what they are, never because they happen to be children of this one."""

import multiprocessing
import os
import time

from pilotage.processes import KillablePool, identify, wait_until_gone


def test_a_killed_pool_ends_while_it_works_and_other_children_go_on() -> None:
    context = multiprocessing.get_context("spawn")
    with KillablePool(1, mp_context=context) as other:
        before = other.submit(os.getpid).result()
        with KillablePool(1, mp_context=context) as pool:
            worker = identify(pool.submit(os.getpid).result())
            assert worker is not None
            pool.submit(time.sleep, 100)
            pool.kill_workers()
        assert wait_until_gone([worker], timeout_s=10) == []
        assert other.submit(os.getpid).result() == before
