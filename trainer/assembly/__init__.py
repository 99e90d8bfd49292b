"""From a configuration to objects, in reading order; only this room sees `conf` and `data`."""
