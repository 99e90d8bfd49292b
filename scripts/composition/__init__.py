"""From overrides and YAML files to one checked configuration: the door to Hydra."""
