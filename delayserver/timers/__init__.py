"""Timers on their own: four designs behind one interface, and two drivers.

======================  ====================================  ==========  =========  ===============
design                  how                                   add         cancel     empty time
======================  ====================================  ==========  =========  ===============
``SimpleWheelTimer``    array of lists, overflow list         O(1)        O(1)       a step per tick
``HashedWheelTimer``    one wheel, rounds, pending queue      O(1)        O(1)       a step per tick
``HierarchicalTimer``   wheels of wheels, queue of buckets    O(levels)   O(1)       nothing
``HeapTimer``           heap with index, repeating timers     O(log n)    O(log n)   nothing
======================  ====================================  ==========  =========  ===============

When in doubt take ``HierarchicalTimer``. In reading order:

interface           the contract of each timer, and the one loop that fires them
chain               a linked list: the buckets of all wheels
wheel               ticks, the life of a handle: the common part of the three wheels
simple_wheel        an array of lists
hashed_wheel        one wheel, with rounds
hierarchical        wheels of growing ticks
indexed_heap        a heap whose elements know where they stand
heap                a priority queue, with timers that repeat
locked              a lock around any timer
asyncio_driver      one ``call_later`` for all timers together
thread_driver       a pool of threads: leader and followers
scheduled_executor  heap and pool together
timeouts            the timeouts of the event loop
purgatory           operations that wait for an event, but not for ever
rates               a token bucket
due_table           due times under names

    >>> timer = HierarchicalTimer(start_ms=0)
    >>> handle = timer.add(lambda: print("too late"), delay_ms=30_000)
    >>> timer.cancel(handle), timer.cancel(handle)
    (True, False)
    >>> _ = timer.add(lambda: print("due"), delay_ms=30_000)
    >>> timer.advance_clock(29_999)
    0
    >>> timer.advance_clock(30_000)
    due
    1
"""

from delayserver.timers.asyncio_driver import AsyncioDriver
from delayserver.timers.hashed_wheel import HashedWheelTimer
from delayserver.timers.heap import HeapTimer
from delayserver.timers.hierarchical import HierarchicalTimer
from delayserver.timers.interface import Handle, Scheduler, Timer, TimerShutdownError
from delayserver.timers.locked import LockedTimer
from delayserver.timers.scheduled_executor import ScheduledExecutor
from delayserver.timers.simple_wheel import SimpleWheelTimer
from delayserver.timers.thread_driver import ThreadDriver

__all__ = [
    "AsyncioDriver",
    "Handle",
    "HashedWheelTimer",
    "HeapTimer",
    "HierarchicalTimer",
    "LockedTimer",
    "ScheduledExecutor",
    "Scheduler",
    "SimpleWheelTimer",
    "ThreadDriver",
    "Timer",
    "TimerShutdownError",
]
