"""The commands, one file each; their machinery lies in the rooms below."""
