"""Operators by base name whose cost needs no formula of its own.

operator name ──which set──> view | copy | create | nothing | pointwise          (formulas.cost_of)
"""

from __future__ import annotations

# No data moves.
VIEWS = frozenset(
    """
    view view_as unflatten transpose t permute squeeze unsqueeze expand expand_as slice select split split_with_sizes chunk unbind
    narrow detach alias as_strided movedim moveaxis swapaxes swapdims unfold diagonal real imag view_as_real view_as_complex numpy_T
    mT mH adjoint lift_fresh lift_fresh_ tensor_split hsplit vsplit dsplit getitem broadcast_to broadcast_tensors meshgrid detach_
    unsqueeze_ squeeze_ transpose_ t_ sym_size sym_numel atleast_1d atleast_2d requires_grad_
    """.split()
)

# A view where the layout allows it, a copy elsewhere.
MAY_COPY = frozenset(
    """
    reshape reshape_as flatten ravel contiguous to type_as _unsafe_view
    """.split()
)

# Data moves, nothing is computed.
COPIES = frozenset(
    """
    cat stack concat hstack vstack clone copy _to_copy histc bincount repeat repeat_interleave tile pad constant_pad_nd reflection_pad2d
    reflection_pad1d replication_pad2d roll flip index_copy index_put scatter slice_scatter select_scatter index_fill masked_fill_
    upsample_nearest2d upsample_nearest1d tril triu pixel_shuffle pixel_unshuffle channel_shuffle sort topk argsort masked_select
    nonzero unique _reshape_copy im2col unfold_copy one_hot multinomial bucketize searchsorted scatter_add index_add zeros_like_copy
    meshgrid_copy quantize_per_tensor dequantize split_with_sizes_copy block_diag _local_scalar_dense item lift_fresh_copy
    """.split()
)

# Written from nothing.
CREATES = frozenset(
    """
    arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty eye linspace
    scalar_tensor rand randn randint rand_like randn_like randperm fill_ zero_ bernoulli_ normal_ uniform_ tril_indices triu_indices
    new_empty_strided empty_strided empty_permuted
    """.split()
)

# Bookkeeping that no device sees.
IGNORED = frozenset(
    """
    _assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range sym_constrain_range_for_size is_nonzero _guards_fn equal
    _set_grad_enabled is_same_size sym_storage_offset sym_stride set_ resize_ record_stream
    """.split()
)

# Nothing in inference, pointwise in training.
IDENTITIES = frozenset(
    """
    dropout alpha_dropout feature_dropout identity native_dropout dropout_ feature_alpha_dropout rrelu_eval
    """.split()
)

# Element by element, though torch does not tag them so.
POINTWISE_EXTRA = frozenset(
    """
    glu prelu addcmul addcdiv lerp where masked_fill clamp clamp_min clamp_max hardtanh hardtanh_ relu6 relu6_ hardswish hardsigmoid
    selu celu mish softplus leaky_relu gelu silu relu relu_ silu_ gelu_ elu threshold rsub add_ mul_ sub_ div_ log_sigmoid logit
    cosine_similarity fake_quantize_per_tensor_affine bernoulli polar complex feature_map floor_divide rrelu isclose softshrink
    hardshrink tanhshrink normalize xlogy sinc __and__ __or__ __xor__ and_ or_ xor
    """.split()
)
