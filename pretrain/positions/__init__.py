"""Position methods: how the model knows the order of tokens. One file a method, over `base`.

A file here is all that the other rooms know of a method: they ask `config.position`, which is an
instance of the class that position.method names, and compare no names. A method of your own is one
subclass of PositionMethod; once its module is imported, every command knows it.

Nothing here imports torch before a model is built: the launcher reads configs too.
"""

# RunConfig needs PositionMethod, which is a section of a config. Whichever of the two packages is
# imported first, this line makes pretrain.config the outer one.
import pretrain.config  # noqa: F401  # isort: skip

# The first ones have colours of their own in figures: ALiBi and what it is compared with most.
from pretrain.positions import alibi, learned, none, rotary, sinusoidal, t5  # noqa: F401

# isort: split
from pretrain.positions import (  # noqa: F401
    cope,
    fire,
    hybrid,
    kerple,
    multiplied,
    sandwich,
    shaw,
    tisa,
    transformer_xl,
    windowed,
    xpos,
)
