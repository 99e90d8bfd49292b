"""What the recorders share: TensorBoard, CSV files and trackers record a run by one interface."""
