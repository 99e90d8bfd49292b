"""What a sweep found: its table, its pictures, and one page that holds them."""
