"""The boundary of a call: global arguments become shards, and shards become global results."""
