"""Code that several callbacks share."""
