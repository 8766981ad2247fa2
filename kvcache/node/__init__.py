"""One host pool for all engines of a machine: an owner process, and a client in each engine.

Read `protocol` (frames, the folder), `ledger` (the state that outlives an owner), `leases` (what a message does to the
manager), `owner` (sockets and processes), and `client` (a scheduler's calls, and how it goes on without an owner).

Three rules make every loaded block right. A slot that an engine reads or writes stays its own until the engine returns
it, or all of its processes have ended. The owner changes the ledger before it answers. It applies all messages in one
order, and an engine reports a store after its copy.
"""
