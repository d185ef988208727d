"""Position methods: how the model knows the order of tokens. One file per method, over `base`.

All knowledge about a method is in its file. Other packages ask `config.position`, an instance of
the class that position.method names, and never compare names. To add a method, write a subclass of
PositionMethod; every command knows it once its module is imported.

Nothing here imports torch before a model is built: the launcher reads configs too.
"""

# RunConfig needs PositionMethod, which is a section of a config. Whichever of the two packages is
# imported first, this line makes pretrain.config the outer one.
import pretrain.config  # noqa: F401  # isort: skip

# Registered first, because figures give the first methods colors of their own: ALiBi, and those it
# is compared with most.
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
