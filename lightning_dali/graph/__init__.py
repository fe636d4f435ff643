"""In the rank process: what is done to a lane of a batch, by DALI (head) and by torch (tail)."""
