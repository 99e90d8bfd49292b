"""Data sets, their splits, orders and transforms; `regimen.data.loading` makes batches of them."""
