"""Sources that are the user's own Python: objects, generators and plugins."""
