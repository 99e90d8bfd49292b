"""nanoGPT's recipe for characters, as a project of one's own."""
