"""Control of a run over several processes: who is where, whether all do the same, and for how long.

Nothing here moves data. The fast path costs each call one small exchange on a gloo group of its
own, overlapped with the body up to its first collective; the store is used only by a thread.
"""
