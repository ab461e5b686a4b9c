"""What models of each family write when they call tools well, oddly and badly, and what that should be read as."""
