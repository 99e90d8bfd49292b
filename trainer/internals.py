"""What torch keeps private and this project needs, in one place, each with its reason."""

from torch import (
    _foreach_clamp_max_,
    _foreach_clamp_min_,
    _foreach_copy_,
    _foreach_div_,
    _foreach_lerp_,
    _foreach_mul_,
    _foreach_norm,
)
from torch.nn import GroupNorm, LayerNorm, Module, RMSNorm
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

# Kernels over lists of tensors: one launch where a loop in Python has one for each tensor.
foreach_clamp_max_ = _foreach_clamp_max_
foreach_clamp_min_ = _foreach_clamp_min_
foreach_copy_ = _foreach_copy_
foreach_div_ = _foreach_div_
foreach_lerp_ = _foreach_lerp_
foreach_mul_ = _foreach_mul_
foreach_norm = _foreach_norm

# The bases of classes that torch offers one by one, subclasses of users included.
BATCH_NORMS: tuple[type[Module], ...] = (_BatchNorm,)
NORMS: tuple[type[Module], ...] = (_NormBase, LayerNorm, GroupNorm, RMSNorm)
CONVOLUTIONS: tuple[type[Module], ...] = (_ConvNd,)
