"""What a kernel can do wrong; the machine stops at the first of these."""


class Fault(Exception):
    """Something that the PTX ISA forbids or leaves undefined."""


class Deadlock(Fault):
    """No warp can go on and nothing is on its way."""


class Trap(Fault):
    """The kernel itself says that something is wrong."""


class OutOfBounds(Fault):
    """An access outside every registered tensor, shared memory or a parameter."""


class Misaligned(Fault):
    """An address that is no multiple of the access's size."""


class TooManyArrivals(Fault):
    """More arrivals at an mbarrier than its phase expects."""


class NoBarrier(Fault):
    """An operation on shared memory that holds no mbarrier."""


class NotConverged(Fault):
    """An instruction of a whole warp, executed by a part of it."""


class NotOneThread(Fault):
    """An instruction of one thread, executed by several."""


class NotFreed(Fault):
    """Tensor memory that is still allocated when its block ends."""


class BeyondAllocation(Fault):
    """An access to tensor memory that is not allocated."""


class WrongQuarter(Fault):
    """A warp's access to lanes of tensor memory that belong to other warps."""


class TooEarly(Fault):
    """A register that an asynchronous instruction still reads or writes."""


class RegisterBudget(Fault):
    """setmaxnreg asks for registers that the block does not have."""


class EndedBlock(Fault):
    """An access to the shared memory of a block that has ended."""


class MissingFence(Fault):
    """Shared memory that the asynchronous proxy reads without a fence after its generic writes."""


class BadDescriptor(Fault):
    """A descriptor of shared memory, an instruction or a tensor that says something impossible."""


class Unsupported(Fault):
    """An instruction or a form of one that the machine does not know."""
