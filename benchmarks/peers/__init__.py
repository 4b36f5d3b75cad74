"""This project beside other trainers: the same model, data, rewards and card, alternating; `python -m benchmarks.peers`."""
