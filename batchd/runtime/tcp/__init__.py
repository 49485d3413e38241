"""A ROUTER socket for peers that nobody trusts: connections, their guard, what they were sent."""
