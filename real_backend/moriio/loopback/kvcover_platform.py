"""A platform plugin of vLLM's: the connector tier runs on the same platform whatever devices the machine has.

vLLM looks for GPUs by their drivers, and takes a platform whose kernels a source tree doesn't have. What a machine without
any gets is a platform without a device; its results are the ones that were measured. vLLM's CPU platform is none: it wants
kernels too, and changes what it is given (an MLA cache gets blocks of 16 tokens). Processes that vLLM starts by itself find
this as the others do, by their path.
"""


def platform() -> str:
    """Return the class that vLLM uses where it finds no device."""
    return "vllm.platforms.interface.UnspecifiedPlatform"
