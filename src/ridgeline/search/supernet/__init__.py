"""Supernets: every op of every edge at once, as few kernels as the policy allows.

space ──make_supernet(policy=all | top_k | sample | partial)──> Supernet ──SearchStep──> architecture weights ──derive──> Point
"""
