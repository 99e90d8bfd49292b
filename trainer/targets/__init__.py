"""From a `_target_` to what it names: what may be named, with which arguments."""
