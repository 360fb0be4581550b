"""The engine: what happens to a message between its broker and its target.

Read these six files in this order:

1. `consumer`: receives from one queue, asks for less when pools are full, reconnects.
2. `dispatch`: turns a received batch into jobs and places them in pools.
3. `registry`: the only book-keeper: what is held, and how it ended.
4. `pool`: order within groups, concurrency, rate limit, workers.
5. `delivery`: tries, circuit breaker, request, judgement.
6. `settle`: ACK, NACK or dead letter.

`queue_manager` owns consumers and pools. `broker_guard` bounds and counts every call to a broker.
What to do is decided in `router.core`; the engine does it. Four verbs end things: `stop` takes no
more, `drain` finishes or returns, `abort` cuts open work, `close` releases resources.
"""
