"""The configuration: its schema, its checks and the YAML groups."""
