"""The report of a sweep: its table, its pictures, and one page with all of it."""
