"""What the module flavours share: argument rules, and how a score gets its first parameters.

Nothing here knows Flax. A flavour asks for the initialisers, stores what they return as its own
kind of parameter, and hands the values back to build the score.
"""
