"""Lists what reports use of this folder; each is loaded on first use."""

from .numerics import StepNumerics as StepNumerics, load_numerics as load_numerics
