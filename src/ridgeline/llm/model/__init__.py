"""The decoder of Llama, Mistral, Qwen2, Qwen3 and GPT-2 over a paged cache.

config.py   ModelConfig from a Hugging Face dict or a name       weights.py  tensors of a file ──> Decoder
decoder.py  Batch, Decoder                                       linear.py   dense, int8 and int4 products; quantise_decoder_
rope.py     angles of the rotary positions                       attend.py   attention over pages: decode rows and prefill parts
"""
