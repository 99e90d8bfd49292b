"""From a data set and its order to micro-batches on their device."""
