"""Hogwild as a strategy of one's own: processes train one model in shared memory, without locks."""
