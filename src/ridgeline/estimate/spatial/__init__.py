"""What a network costs on an array of processing elements: exact word counts, energy and cycles of a mapping, and the best mapping.

Workload ──layer──> Layer (eight loops) ─┐
SpatialArraySpec ────────────────────────┼──mapper──> Mapping ──counts──> words ──cost──> energy, cycles
                                         │                └──lowering──> loop nest, C      └──schedule──> timeline
                                         └──codesign──> which array to build
"""
