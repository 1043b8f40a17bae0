"""Control of a run over several processes: agreement on what runs, deadlines, flight recorder.

Nothing here moves data. The fast path costs each call one small exchange over sockets of its own,
which on up to four ranks overlaps with the body up to its first collective; only a thread uses the
store.
"""
