"""From a ``.cu`` file to a launched kernel.

``spec`` says what a kernel is, ``registry`` lists them, ``structs`` has what they take by value;
``configs`` chooses tile sizes; ``source`` reads the CUDA text and what it ``includes``, ``compile``
turns it into machine code behind the disk ``cache``; ``device`` loads and allocates; ``launch``
checks arguments and starts it. Only this package loads modules.
"""
