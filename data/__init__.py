"""What is trained on. YAML names these; `regimen.data.loading` turns them into batches."""
