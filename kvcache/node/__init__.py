"""One host pool for all engines of a machine: an owner process, and a client in each engine.

Read `protocol` (frames, the folder), `ledger` (the state that outlives an owner), `leases` (the effect of a message on
the manager), `owner` (sockets and processes), and `client` (a scheduler's calls, also without an owner).

Three rules ensure that every loaded block is right. A slot that an engine reads or writes stays reserved until the
engine returns it, or all of its processes have ended. The owner changes the ledger before it answers. It applies all
messages in one order, and an engine reports a store after its copy.
"""
