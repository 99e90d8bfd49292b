"""What several callbacks share."""
