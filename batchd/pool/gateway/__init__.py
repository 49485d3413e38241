"""The gateway: worker hosts register here, and their rows go into slots. GATEWAY process."""
