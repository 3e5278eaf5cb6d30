"""The processes of a run: their device, how they meet, agree and fail together, and what the system tells them."""
