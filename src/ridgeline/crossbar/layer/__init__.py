"""Modules whose products run on arrays, in the place of torch's.

convert.py            to_crossbar: a model in, a model on a chip out (folding.py: batch norms first)
product.py            one product: plan, cells, engine, draw, from call to call
layers.py             linear and convolution; recurrent.py, attention.py the others
calibrate.py          ADC ranges from data; bound.py: weights without outliers; settle.py: norms that follow a chip
straight_through.py   gradients; observe.py: looking in while it runs
"""
