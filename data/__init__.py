"""What is trained on. YAML names these; `data.loading` turns them into batches."""
