"""From a ``.cu`` file to a launched kernel.

``spec`` says what a kernel is and ``registry`` lists them; ``configs`` chooses tile sizes;
``source`` finds the CUDA text, ``compile`` turns it into machine code behind the disk ``cache``;
``device`` loads and allocates; ``launch`` checks arguments and starts it. Only this package knows
RawModule.
"""
