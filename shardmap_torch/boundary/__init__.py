"""The boundary of a call: how global arguments become shards, and shards become results."""
