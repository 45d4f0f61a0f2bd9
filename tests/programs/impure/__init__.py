"""Generated training programs whose models reach more than their tensors, composed of small pieces of source.

    effects      what is reached, and how its use is visible in the end
    places       where the object lives that the effect uses
    accesses     by which local names code gets at it
    routes       how the forward of a block gets to that code
    positions    which block of the model it is, and in which calls it counts
    trainings    how the model is trained

Each is a table of texts; `compose` combines them.
"""
