"""From a configuration to objects, in reading order: the one room that sees `conf` and `data`."""
