"""What a chip does to a network.

chips.py      many chips of a kind: accuracy of each, mean, spread, worst
diagnose.py   every layer's error and ADC use, and which layer loses the accuracy
sweep.py      variants of a chip: accuracy, speed, memory, energy (precision.py: number types against the reference)
subject.py    the network and its data; journal.py: results on disk before the next is begun
"""
