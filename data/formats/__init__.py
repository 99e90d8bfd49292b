"""Data in others' formats: token files, tables, tar shards, Hugging Face data sets."""
